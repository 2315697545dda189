"""Groups that are sent in batches are the same groups, and so are their reports."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pytest

from paddle_reshard.clusters.ray.worker import ReshardWorker
from paddle_reshard.pipeline.convert.plan import ConversionPlan
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.planning import work as work_module
from paddle_reshard.pipeline.planning.work import RemainingGroups, WorkBatch
from paddle_reshard.storage.store import ReadRange
from paddle_reshard.tasks.run_group import run_group
from tests.cluster.test_exchange import Written
from tests.conftest import case_directory
from tests.reads import OneByOne
from tests.sized import in_groups

DONE = (0, 7, 8, 20, 1_000_000)


@pytest.fixture(scope="module")
def conversion(tmp_path_factory: pytest.TempPathFactory) -> ConversionPlan:
    source = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
    return in_groups(100_000).plan(source, tmp_path_factory.mktemp("T") / "T", to="tp=2,sharding=3")


def batches(works: RemainingGroups) -> Iterator[WorkBatch]:
    """All groups in the largest batches, as a worker receives them."""
    for stretch in works.stretches:
        groups = stretch
        while groups:
            batch = works.batch(groups)
            assert batch.groups == groups[: len(batch.groups)]
            yield pickle.loads(pickle.dumps(batch))
            groups = groups[len(batch.groups) :]


@pytest.mark.parametrize("limit", [None, "MOST_OPS", "MOST_PARTS", "MOST_LITERAL_BYTES"])
def test_a_batch_is_its_groups(
    conversion: ConversionPlan, limit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit is not None:
        monkeypatch.setattr(work_module, limit, 40)
    works = RemainingGroups(conversion.plan, DONE)
    sent = list(batches(works))
    assert [group for batch in sent for group in batch.groups] == [
        group for group in range(conversion.plan.groups) if group not in DONE
    ]
    assert len(sent) == 3 if limit is None else len(sent) > 3
    one, other = Written(), Written()
    for expected, found in zip(works, chain.from_iterable(sent), strict=True):
        assert (found.group, found.label, found.peak_bytes) == (
            expected.group,
            expected.label,
            expected.peak_bytes,
        )
        assert np.array_equal(found.ops.rows(), expected.ops.rows())
        assert list(found.literals) == list(expected.literals)
        numbers = found.ops["tensor"].tolist()
        assert [found.tensors[t] for t in numbers] == [expected.tensors[t] for t in numbers]
        assert run_group(found, conversion.store, other) == run_group(expected, conversion.store, one)
    assert other.parts == one.parts


@dataclass
class FailsAfter(OneByOne):
    """A source that raises after some groups."""

    source: ReadRange
    error: Exception
    reads: int

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        self.source.read_into(path, byte_offset, buffer)

    def read_many(self, reads: object) -> None:
        self.reads -= 1
        if self.reads < 0:
            raise self.error
        super().read_many(reads)


@pytest.mark.parametrize("error", [OSError("gone"), CheckpointError("no checkpoint")])
def test_what_was_done_before_a_failure_is_reported(conversion: ConversionPlan, error: Exception) -> None:
    works = RemainingGroups(conversion.plan)
    whole = works.batch(works.stretches[0])
    written = Written()
    worker = ReshardWorker(FailsAfter(conversion.store, error, 3), written, None, 5, 1 << 30, {})
    answer = pickle.loads(pickle.dumps(worker.run(whole)))
    reports = answer.reports
    done = len(reports)
    assert 0 < done < len(whole.groups)
    expected = [run_group(work, conversion.store, Written()) for work in works][:done]
    assert [report.receipts for report in reports] == [report.receipts for report in expected]
    assert [report.group for report in reports] == list(whole.groups[:done])
    (figures,) = chain.from_iterable(report.figures for report in reports)
    assert (figures.number, figures.groups) == (5, done)
    assert {report.worker for report in reports} == {f"worker 5 on {figures.host}"}
    seconds = [report.seconds for report in reports]
    assert 0 < min(seconds) <= sum(seconds) <= answer.seconds
    assert figures.read_bytes == sum(report.read_bytes for report in expected)
    refused = isinstance(error, CheckpointError)
    assert answer.failure == ("" if refused else "OSError: gone")
    assert str(answer.refusal) == ("no checkpoint" if refused else "None")
