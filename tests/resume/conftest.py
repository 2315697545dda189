"""Conversions that are killed: a driver process, and a source that is quickly converted."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.events import Event, Progress
from tests.conftest import COMMITTED, REPO
from tests.sized import in_groups

SMALL = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
LEFT_OUT = ("ema", "paddle_reshard", "scheduler", "training_args")
GROUP_BYTES = 1_500_000
"""Cuts the conversion of the source into four groups."""


SIZED = in_groups(GROUP_BYTES)


class Stop(Exception):
    """A failure that has nothing to do with the checkpoint."""


def stopping(after: int = 2, error: BaseException | type[BaseException] = Stop) -> Callable[[Event], None]:
    """An observer that fails when so many groups are done."""
    left = after

    def observe(event: Event) -> None:
        nonlocal left
        left -= isinstance(event, Progress) and event.done_bytes > 0
        if left == 0:
            raise error

    return observe


def begin(source: Path, target: Any, **options: Any) -> None:
    """A conversion that stops after two groups."""
    with pytest.raises(Stop):
        SIZED.convert(source, target, observe=stopping(), **options)


class Driver:
    """Runs conversions in processes that can be killed at an effect of their choice."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def convert(self, source: Path | str, target: Path | str, **order: Any) -> dict[str, Any]:
        """Run one conversion; what came of it. ``kill_at`` and ``after`` say when it is killed."""
        request = {"to": "tp=1", "workers": 1, **order.pop("request", {})}
        order = {
            "source": str(source),
            "target": str(target),
            "group_bytes": GROUP_BYTES,
            "request": request,
            **order,
        }
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert "crash" not in answer, answer["crash"]
        return answer


@pytest.fixture(scope="session")
def driver() -> Iterator[Driver]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.resume.driver"],
        cwd=REPO,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield Driver(process)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a few files."""
    folder = tmp_path_factory.mktemp("source") / "two"
    paddle_reshard.convert(SMALL, folder, to="tp=2")
    for path in folder.iterdir():
        if path.name.startswith(LEFT_OUT):
            path.unlink()
    return folder
