"""Which files are named because they were written long before or after the others of their kind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.indexing.detect import far_apart
from tests.conftest import case_directory

S = 10**9


def optimizers(*seconds: float) -> dict[str, int]:
    return {f"optimizer.shard{rank:02d}.pdopt": int(at * S) for rank, at in enumerate(seconds)}


def told(times: dict[str, int], size_bytes: int = 1000) -> str:
    return far_apart(times, times, dict.fromkeys(times, size_bytes))


@pytest.mark.parametrize(
    ("seconds", "named"),
    [
        ((7200, 7201, 3600, 7202), "optimizer.shard02.pdopt and the others of the kind are of one save: last written "
         "3,600 s before the others"),
        ((0, 1, 3600), "optimizer.shard02.pdopt and the others of the kind are of one save: last written 3,599 s a"),
        ((0, 3600), "optimizer.shard01.pdopt and the other of the kind are of one save: last written 3,600 s af"),
        ((0, 5, 3600, 3601, 3), "optimizer.shard02.pdopt … optimizer.shard03.pdopt (2 files) and the others"),
    ],
)  # fmt: skip
def test_files_far_from_the_others_are_named(seconds: tuple[float, ...], named: str) -> None:
    assert named in told(optimizers(*seconds))


@pytest.mark.parametrize(
    ("times", "size_bytes"),
    [
        *[
            (optimizers(*seconds), 100_000_000)
            for seconds in (
                (0,),
                (0, 0),
                (0, 20, 41, 55),  # saved side by side
                (0, 61),  # ranks of different speed; a moment longer than a minute, with the copy
                (0, 600, 1200, 1800),  # copied one after the other
                (0, 100, 300, 900),
            )
        ],
        (optimizers(0, 3600), 100_000_000_000),  # a large file takes long to copy
        # kinds are saved at different times
        (optimizers(0, 1, 2) | {f"ema.shard{n:02d}.pdopt": (3600 + n) * S for n in range(3)}, 1000),
    ],
)
def test_what_one_save_or_a_copy_of_it_looks_like_is_not(times: dict[str, int], size_bytes: int) -> None:
    assert not told(times, size_bytes)


def test_unknown_times_tell_nothing() -> None:
    paths = optimizers(0, 3600)
    assert not far_apart(paths, {}, dict.fromkeys(paths, 1))


def test_a_checkpoint_with_a_file_of_another_time_is_read_and_the_file_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(case_directory("dense/sh2_s1v2_meta") / "checkpoint-3", source)
    assert not paddle_reshard.inspect(source).unproven
    file = source / "optimizer.shard01.pdopt"
    before = file.stat().st_mtime_ns - 86_400 * S
    os.utime(file, ns=(before, before))
    found = paddle_reshard.inspect(source).unproven
    assert found.startswith("that optimizer.shard00.pdopt and the other of the kind are of one save")
    assert dict(paddle_reshard.plan(source, to="tp=1").facts())["not proven"] == found
