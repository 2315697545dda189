from pathlib import Path

import pytest

import paddle_reshard
from tests.jobs.command import GOLDEN, snapshot
from tests.jobs.training import Run


@pytest.fixture
def training(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture(scope="module")
def one_card(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    target = tmp_path_factory.mktemp("expected") / "target"
    paddle_reshard.convert(GOLDEN, target, to="tp=1")
    return snapshot(target)
