"""What commands return in Python crosses processes: it equals what comes of its own pickle."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from tests.conftest import COMMITTED

SOURCE = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    target = tmp_path_factory.mktemp("results") / "one"
    return target, paddle_reshard.convert(SOURCE, target, to="tp=1")


RESULTS: dict[str, Callable[[Path], Any]] = {
    "plan": lambda target: paddle_reshard.plan(SOURCE, to="tp=1", format="hybrid"),
    "plan for cards": lambda target: paddle_reshard.plan(SOURCE, cards=4),
    "verify two": lambda target: paddle_reshard.verify(SOURCE, target),
    "verify one": lambda target: paddle_reshard.check(target),
    "inspect": lambda target: paddle_reshard.inspect(target),
    "ls": lambda target: paddle_reshard.ls(SOURCE.parent),
    "diff": lambda target: paddle_reshard.diff(SOURCE, target),
    "fingerprint": lambda target: paddle_reshard.fingerprint(target),
    "launch": lambda target: paddle_reshard.launch(target),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_equals_its_pickle(name: str, converted: tuple[Path, Any]) -> None:
    result = RESULTS[name](converted[0])
    assert pickle.loads(pickle.dumps(result)) == result


def test_a_report_equals_its_pickle_and_no_other(converted: tuple[Path, Any], tmp_path: Path) -> None:
    _, report = converted
    assert pickle.loads(pickle.dumps(report)) == report
    assert paddle_reshard.plan(SOURCE, tmp_path / "x", to="tp=2").plan != report.plan.plan
