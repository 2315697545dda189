"""Shares of a group, finished in any order from read-only bands, make what one worker makes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from paddle_reshard.clusters.ray.exchange import merge_reports, split_group
from paddle_reshard.clusters.ray.worker import ReshardWorker
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.planning.work import GroupWork, RemainingGroups
from paddle_reshard.storage.store import ReadRange, Receipt
from paddle_reshard.tasks.device import Buffer
from paddle_reshard.tasks.group import GroupReport, load_band
from paddle_reshard.tasks.run_group import finish_group, run_group
from tests.conftest import case_directory
from tests.reads import OneByOne
from tests.sized import in_groups

CASES = ("mp2pp2sh2_s1v2_meta_ema", "mp2_tied", "nlp_fused_mp2")


@dataclass
class Written:
    """All that was written, by path and byte offset."""

    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        assert (path, byte_offset) not in self.parts
        self.parts[path, byte_offset] = bytes(buffer)
        return Receipt(path, byte_offset, len(buffer))


def works(case: str, folder: Path) -> tuple[ReadRange, Iterator[GroupWork]]:
    source = case_directory(case) / "checkpoint-3"
    plan = in_groups(300_000).plan(source, folder / "T", to="tp=2,pp=2,sharding=2")
    return plan.store, RemainingGroups(plan.plan)


def read_only(source: ReadRange, work: GroupWork) -> list[Buffer]:
    bands = [
        load_band(source, work.source_paths[int(b["file"])], int(b["start"]), int(b["stop"]))
        for b in work.bands
    ]
    for band in bands:
        band.flags.writeable = False
    return bands


@pytest.mark.parametrize("case", CASES)
def test_shares_together_are_the_group(case: str, tmp_path: Path) -> None:
    source, groups = works(case, tmp_path)
    for work in groups:
        whole = Written()
        expected = run_group(work, source, whole)
        bands = read_only(source, work)
        for count in (1, 2, 3, 50):
            check_shares(work, count, bands, whole, expected)


def check_shares(
    work: GroupWork, count: int, bands: list[Buffer], whole: Written, expected: GroupReport
) -> None:
    """``bands``: all that the group reads; ``whole`` and ``expected``: what it writes and reports undivided."""
    shared = Written()
    shares = split_group(work, count)
    assert len(shares) == count
    assert sorted(band for share in shares for band in share.loads) == list(range(len(work.bands)))
    reports = [
        finish_group(share.work, [bands[band] for band in share.needs], shared) for share in reversed(shares)
    ]
    report = merge_reports(work, reports)
    assert shared.parts == whole.parts
    assert set(report.receipts) == set(expected.receipts)
    for name in ("group", "read_bytes", "written_bytes", "compared_elements", "differences"):
        assert getattr(report, name) == getattr(expected, name)


def test_bytes_are_dealt_evenly(tmp_path: Path) -> None:
    _, groups = works(CASES[0], tmp_path)
    work = max(groups, key=lambda work: work.peak_bytes)
    sizes = work.bands["stop"] - work.bands["start"]
    loads = [int(sizes[list(share.loads)].sum()) for share in split_group(work, 2)]
    assert abs(loads[0] - loads[1]) <= sizes.max()


class Broken(OneByOne):
    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        raise CheckpointError(f"{path}: vanished")


def test_a_band_that_was_refused_is_the_answer_of_whoever_needs_it() -> None:
    worker = ReshardWorker(Broken(), Written(), None, 7, 1 << 30, {})
    refused = worker.load("a.pdopt", 0, 4)
    assert isinstance(refused, CheckpointError)
    assert worker.finish(None, np.zeros(3, np.uint8), refused) is refused


def test_broken_metrics_fail_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ReshardWorker(Broken(), Written(), None, 7, 1 << 30, {})
    monkeypatch.setattr(worker.figures.metrics, "counters", {})
    worker.figures.count(read_bytes=2)
    worker.figures.count(groups=1, written_bytes=3)
    told = worker.figures.taken()
    assert (told.number, told.groups, told.read_bytes, told.written_bytes) == (7, 1, 2, 3)
    told = worker.figures.taken()
    assert (told.groups, told.read_bytes) == (0, 0)
