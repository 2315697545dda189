"""A comparison on Ray finds what one process finds, and an interrupted comparison goes on where it was."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.events import Progress
from tests.conftest import case_directory
from tests.limited import files_up_to
from tests.sized import Sized, in_groups

CASE = "mp2pp2sh2_s1v2_meta_ema"


class Stop(Exception):
    """The comparison is interrupted."""


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Sized, Path, Path]:
    """A checkpoint, and the same on other ranks with one bit of a moment changed."""
    small = in_groups(100_000)
    source, other = case_directory(CASE) / "checkpoint-3", tmp_path / "other"
    small.convert(source, other, to="tp=2,sharding=3")
    changed = next(iter(sorted(other.glob("optimizer*.pdopt"))))
    content = bytearray(changed.read_bytes())
    content[len(content) // 2] ^= 1
    changed.write_bytes(content)
    return small, source, other


def test_workers_find_the_same_differences(pair: tuple[Sized, Path, Path], cluster: Cluster) -> None:
    small, *both = pair
    inline = small.verify(*both)
    assert len(inline.differences) == 1
    events: list[object] = []
    found = small.verify(*both, cluster=f"ray:{cluster.address}", workers=2, observe=events.append)
    assert found == inline
    progress = [event.done_bytes for event in events if isinstance(event, Progress)]
    assert len(progress) > 4
    assert sum(progress) == found.read_bytes


def test_an_interrupted_comparison_continues(pair: tuple[Sized, Path, Path], tmp_path: Path) -> None:
    small, *both = pair
    inline, progress = small.verify(*both), tmp_path / "progress"
    left = 7

    def interrupt(event: object) -> None:
        nonlocal left
        left -= isinstance(event, Progress) and not event.before
        if not left:
            raise Stop

    with pytest.raises(Stop):
        small.verify(*both, resume=progress, observe=interrupt)
    lines = progress.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 7
    with pytest.raises(UsageError, match="does not belong to this comparison"):
        small.verify(both[0], both[0], resume=progress)
    assert progress.read_bytes() == b"".join(lines)
    progress.write_bytes(b"".join(lines[:-1]) + lines[-1][:9])  # the machine was lost in the middle of a line
    events: list[object] = []
    assert small.verify(*both, resume=progress, observe=events.append) == inline
    before, *further = (event.done_bytes for event in events if isinstance(event, Progress))
    read = [group[2] for line in lines[1:-1] for group in json.loads(line)]
    assert (before, sum(further)) == (sum(read), inline.read_bytes - sum(read))
    assert not progress.exists()


def test_progress_that_does_not_fit_ends_the_comparison_and_the_next_one_continues(
    pair: tuple[Sized, Path, Path], tmp_path: Path
) -> None:
    small, *both = pair
    progress = tmp_path / "progress"
    with ExitStack() as full:

        def fill(event: object) -> None:
            if isinstance(event, Progress) and not event.before:
                full.enter_context(files_up_to(progress.stat().st_size + 9))

        with pytest.raises(UsageError, match=f"^{progress}: cannot be written: .*; give another file"):
            small.verify(*both, resume=progress, observe=fill)
    events: list[object] = []
    assert small.verify(*both, resume=progress, observe=events.append) == small.verify(*both)
    assert next(event.done_bytes for event in events if isinstance(event, Progress)) > 0
