"""A plan run on Ray makes the same bytes as inline, whatever happens to the workers."""

import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.cluster_utils import Cluster

from paddle_reshard.clusters.engine import Batches, Engine
from paddle_reshard.clusters.inline import InlineEngine
from paddle_reshard.clusters.ray import calls, dealing
from paddle_reshard.clusters.ray.backlog import ATTEMPTS
from paddle_reshard.clusters.ray.engine import RayEngine
from paddle_reshard.pipeline.convert.run import run_conversion
from paddle_reshard.pipeline.core.errors import (
    ClusterError,
    DriftError,
    GroupFailedError,
    MasterDriftError,
    MemoryBudgetError,
    TargetError,
    UnsupportedError,
    UsageError,
)
from paddle_reshard.pipeline.core.events import WorkerAssigned, ignore_events
from paddle_reshard.pipeline.planning.ops import COMPARE
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from paddle_reshard.pipeline.planning.work import GroupWork, RemainingGroups
from paddle_reshard.storage.local.target import LocalTarget
from paddle_reshard.storage.outputs import Outputs
from paddle_reshard.storage.store import Identity, ReadRange, WritePart
from tests.cluster.conftest import CASE, Conversion, Plan, anywhere, is_running
from tests.cluster.faults import (
    FailsOnce,
    KilledOnceReading,
    KilledOnceWriting,
    KillsItsReader,
    OneByteOff,
    ReadsTwoAtATime,
    StaleOnce,
    TakesNoMore,
    Through,
    Unreachable,
    Watched,
)
from tests.conftest import REPO, case_directory
from tests.ema.scaled import scale_master_weights
from tests.golden.fp8 import store_as_fp8
from tests.golden.wide import write_wide
from tests.sampling import on_cluster
from tests.sized import in_groups
from tests.storage.contents import in_folder

BUDGET_BYTES = 256 << 20
pytestmark = pytest.mark.usefixtures("cluster")


def engine(**settings: object) -> RayEngine:
    return RayEngine(**{"workers": 2, "memory_bytes": BUDGET_BYTES, "exchange": "never", **settings})


@pytest.fixture
def exchanged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many workers shared each group that was shared."""
    counts: list[int] = []
    split = calls.split_group

    def counted(work: GroupWork, count: int) -> object:
        counts.append(count)
        return split(work, count)

    monkeypatch.setattr(calls, "split_group", counted)
    return counts


@pytest.mark.cluster
@pytest.mark.parametrize("exchange", ["never", "always"])
def test_an_average_of_a_series(exchange: str, tmp_path: Path, exchanged: list[int]) -> None:
    small = in_groups(100_000, pass_bytes=10_000)
    source = case_directory(CASE) / "checkpoint-3"
    shutil.copytree(source, tmp_path / "checkpoint-1", copy_function=shutil.copyfile)
    scale_master_weights(tmp_path / "checkpoint-1", 1.7)
    series = [tmp_path / "checkpoint-1", source]
    options = {"decay": 0.7, "format": "huggingface"}
    small.average(series, tmp_path / "inline", **options)
    planned = small.plan_average(series, tmp_path / "ray", **options)
    target = Outputs([LocalTarget(tmp_path / "ray")])
    run_conversion(planned, target, engine(exchange=exchange), ignore_events)
    assert in_folder(tmp_path / "ray") == in_folder(tmp_path / "inline")
    assert bool(exchanged) == (exchange == "always")


@pytest.mark.parametrize("exchange", [on_cluster("never"), "always"])
def test_every_worker_reports_its_work(conversion: Conversion, exchange: str, exchanged: list[int]) -> None:
    events: list[object] = []
    report = conversion.run(engine(exchange=exchange, observe=events.append))
    several = sum(len(work.bands) > 1 for work in RemainingGroups(conversion.plan.plan))
    assert several > 20
    assert exchanged == ([2] * several if exchange == "always" else [])
    carried = sum(file.size_bytes for file in conversion.plan.plan.carried)
    # Unless they have to wait for each other, the first worker to be there may have done all.
    told = [worker.number for worker in report.workers]
    assert told in ([[0, 1]] if exchange == "always" else [[0], [1], [0, 1]])
    assert sum(worker.read_bytes for worker in report.workers) == report.read_bytes - carried
    assert sum(worker.written_bytes for worker in report.workers) == report.written_bytes - carried
    assert all(worker.groups and worker.busy_seconds > 0 for worker in report.workers)
    if exchange == "never":
        assert sum(worker.groups for worker in report.workers) == report.groups
    seen = [event for event in events if isinstance(event, WorkerAssigned)]
    ran = {group for event in seen for groups in event.groups or () for group in groups}
    assert ran == set(range(report.groups))
    at_last = {event.worker: event for event in seen}
    assert at_last.keys() >= {worker.name for worker in report.workers}
    assert {(event.groups, event.peak_bytes) for event in at_last.values()} == {((), 0)}
    assert 0 < max(event.peak_bytes for event in seen) <= BUDGET_BYTES - FOOTPRINT_BYTES
    assert_nothing_was_spilled()


def assert_nothing_was_spilled() -> None:
    """By the figures of all nodes, those that ``ray memory --stats-only`` prints."""
    address = ray.get_runtime_context().gcs_address
    stats = get_memory_info_reply(get_state_from_address(address)).store_stats
    assert stats.object_store_bytes_avail > 0
    assert (stats.spilled_bytes_total, stats.object_store_bytes_fallback) == (0, 0)


def test_workers_dequantise(tmp_path: Path) -> None:
    small, source = in_groups(300_000), store_as_fp8(write_wide(tmp_path / "fp8"))
    inline, made = tmp_path / "inline", tmp_path / "made"
    small.convert(source, inline, to="tp=2")
    planned = small.plan(source, made, to="tp=2")
    run_conversion(planned, Outputs([LocalTarget(made)]), engine(exchange="always"), ignore_events)
    assert in_folder(made) == in_folder(inline)


@pytest.mark.parametrize(("format", "exchange"), [on_cluster("huggingface", "never"), ("flex", "always")])
def test_states_of_another_step_are_refused(format: str, exchange: str, tmp_path: Path) -> None:
    """By the workers, and what they say arrives whole."""
    shutil.copytree(
        case_directory("small-families/qwen2_single") / "checkpoint-3",
        tmp_path / "source",
        copy_function=shutil.copyfile,
    )
    scale_master_weights(tmp_path / "source", 1.01)
    planned = in_groups(50_000).plan(tmp_path / "source", tmp_path / "made", format=format)
    with pytest.raises(
        MasterDriftError, match=r"\(param\): element .* its master weight .* is rounded to "
    ) as refused:
        run_conversion(
            planned,
            Outputs([LocalTarget(tmp_path / "made")]),
            engine(exchange=exchange),
            ignore_events,
        )
    assert type(refused.value) is MasterDriftError
    assert not (tmp_path / "made").exists()


def test_retries_of_a_worker_reach_the_report(plan: Plan, tmp_path: Path) -> None:
    conversion = plan()
    report = run_conversion(
        conversion.plan,
        Outputs([LocalTarget(tmp_path / "made")]),
        Through(
            lambda works, source, target: engine(workers=1).run(
                works, FailsOnce(source, tmp_path / "failed"), target
            )
        ),
        lambda event: None,
    )
    assert report.retries == {"ConnectionResetError": 1}
    assert [worker.retries for worker in report.workers if worker.retries] == [report.retries]
    assert in_folder(tmp_path / "made") == conversion.files


def test_workers_get_the_variables_that_are_named_and_no_others(
    conversion: Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORE_KEY", "of the driver")
    monkeypatch.setenv("ANOTHER_KEY", "of the driver")
    monkeypatch.setenv("PADDLE_RESHARD_WORKER_ENV", "STORE_KEY")
    notes = tmp_path / "notes"
    for name in ("STORE_KEY", "ANOTHER_KEY"):
        conversion.run(
            lambda works, source, target, name=name: engine(workers=1).run(
                works, Watched(source, notes / name, variable=name), target
            )
        )
        shutil.rmtree(conversion.folder / "made")
    assert {note.read_text() for note in (notes / "STORE_KEY").iterdir()} == {"of the driver"}
    assert {note.read_text() for note in (notes / "ANOTHER_KEY").iterdir()} == {"none"}
    monkeypatch.delenv("STORE_KEY")
    with pytest.raises(UsageError, match="PADDLE_RESHARD_WORKER_ENV names STORE_KEY"):
        conversion.run(engine())


@pytest.mark.cluster
def test_fewer_groups_than_workers_are_shared(
    plan: Plan, exchanged: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealing, "SHARED_BYTES", 0)
    monkeypatch.setattr(calls, "PATIENCE_SECONDS", 300.0)  # also on a busy machine all workers are waited for
    conversion = plan(group_bytes=64 << 20)
    assert conversion.inline.groups == 2  # the other one has the files without values
    conversion.run(engine(workers=3, exchange="auto"))
    assert exchanged == [2]


@pytest.mark.cluster
@pytest.mark.parametrize("late", [False, True])
def test_bands_beyond_the_object_store_are_not_exchanged(
    late: bool, conversion: Conversion, exchanged: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor if the node with the smallest store joins when the conversion has begun."""

    def nodes(store_bytes: float) -> list[object]:
        resources = {"CPU": 8.0, "memory": 1e12, "object_store_memory": store_bytes}
        return [{"Alive": True, "Resources": resources, "Labels": {}}]

    answers = iter([nodes(1e9)] if late else [])
    monkeypatch.setattr(ray, "nodes", lambda: next(answers, nodes(100.0)))
    conversion.run(engine(exchange="always"))
    assert exchanged == []


@pytest.mark.parametrize(
    ("at", "exchange"),
    [
        ("reading", "always"),
        ("writing", "never"),
        on_cluster("reading", "never"),
        on_cluster("writing", "always"),
    ],
)
def test_a_worker_that_is_killed_is_replaced(
    conversion: Conversion, at: str, exchange: str, tmp_path: Path
) -> None:
    marker = tmp_path / "killed"

    def run(works: RemainingGroups, source: ReadRange, target: WritePart) -> Batches:
        if at == "reading":
            return engine(exchange=exchange).run(works, KilledOnceReading(source, marker), target)
        return engine(exchange=exchange).run(works, source, KilledOnceWriting(target, marker))

    conversion.run(run)
    assert marker.exists()


@pytest.mark.cluster
@pytest.mark.parametrize("workers", [1, 2])
def test_a_group_that_always_kills_its_worker_is_named(
    conversion: Conversion, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    works = list(RemainingGroups(conversion.plan.plan))
    work = works[10]
    band = work.bands[0]
    path, place = work.source_paths[int(band["file"])], int(band["start"]) + 1
    readers = [
        other.group
        for other in works
        for b in other.bands
        if other.source_paths[int(b["file"])] == path and b["start"] <= place < b["stop"]
    ]
    assert readers == [10]
    with pytest.raises(GroupFailedError) as failed:
        conversion.run(
            lambda works, source, target: engine(workers=workers).run(
                works, KillsItsReader(source, path, place), target
            )
        )
    error = failed.value
    again = set(re.findall(r"group (\d+): attempt [2-9] failed", caplog.text))
    assert again == {"10"}, "another group was lost with its worker more than once"
    assert (error.group, error.attempts, ATTEMPTS) == (10, 4, 4)
    assert error.tensor == work.tensors[int(work.ops["tensor"][0])].label
    assert str(error).startswith(f"{error.tensor}: group 10 failed 4 times, at last with: ActorDiedError: ")
    assert not (conversion.folder / "made").exists()
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_store_that_cannot_be_reached_is_named_and_no_secret_is(
    conversion: Conversion, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    secret = Unreachable("open sesame")
    with pytest.raises(GroupFailedError, match=r"ConnectionError: .*: the store does not answer") as failed:
        conversion.run(lambda works, source, target: engine(workers=1).run(works, secret, target))
    assert "attempt 3 failed" in caplog.text
    assert "sesame" not in caplog.text
    assert "sesame" not in str(failed.value)


def test_what_the_disk_of_a_worker_refuses_arrives_as_a_sentence_about_the_target(
    conversion: Conversion, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(TargetError, match=r"^\S+/made: the file is larger than the limit") as failed:
        conversion.run(
            lambda works, source, target: engine(workers=1).run(works, source, TakesNoMore(target))
        )
    assert failed.value.retryable
    assert "attempt" not in caplog.text


def test_what_one_machine_cannot_read_is_tried_again(conversion: Conversion, tmp_path: Path) -> None:
    marker = tmp_path / "stale"
    conversion.run(lambda works, source, target: engine().run(works, StaleOnce(source, marker), target))
    assert marker.exists()


@pytest.mark.parametrize("exchange", [on_cluster("never"), "always"])
def test_a_refusal_arrives_whole(conversion: Conversion, exchange: str) -> None:
    ops = conversion.plan.plan.ops
    copy = ops[ops["kind"] == COMPARE].rows()[0]
    path = conversion.plan.plan.source_files[int(copy["target_file"])].path

    def on(inner: Engine) -> DriftError:
        with pytest.raises(DriftError) as refused:
            conversion.run(
                lambda works, source, target: inner.run(
                    works, OneByteOff(source, path, int(copy["target_byte"])), target
                )
            )
        assert type(refused.value) is DriftError
        return refused.value

    inline, there = on(InlineEngine()), on(engine(exchange=exchange))
    assert str(there) == str(inline)
    assert vars(there) == vars(inline)
    assert not (conversion.folder / "made").exists()


@pytest.mark.cluster
def test_drift_that_is_allowed_is_reported(plan: Plan, tmp_path: Path) -> None:
    conversion = plan(replicas="report")
    ops = conversion.plan.plan.ops
    copy = ops[ops["kind"] == COMPARE].rows()[0]
    path = conversion.plan.plan.source_files[int(copy["target_file"])].path
    reports = []
    for inner in (InlineEngine(), engine(exchange="always")):
        made = Outputs([LocalTarget(tmp_path / f"drift {len(reports)}")])
        reports.append(
            run_conversion(
                conversion.plan,
                made,
                Through(
                    lambda works, source, target, inner=inner: inner.run(
                        works, OneByteOff(source, path, int(copy["target_byte"])), target
                    )
                ),
                lambda event: None,
            )
        )
    assert len(reports[0].replica_drift) == 1
    assert anywhere(reports[0]) == anywhere(reports[1])


def test_one_worker_reads_for_a_group_while_it_has_another(conversion: Conversion) -> None:
    """Its first two reads wait for each other, or fail."""
    report = conversion.run(
        lambda works, source, target: engine(workers=1).run(works, ReadsTwoAtATime(source), target)
    )
    assert [worker.groups for worker in report.workers] == [conversion.inline.groups]


def test_closing_ends_all_workers(conversion: Conversion, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    writer = LocalTarget(tmp_path / "T")
    with writer as target:
        begun, _ = target.begin([], Identity("plan", "version", "source", {}))
        works = RemainingGroups(conversion.plan.plan)
        source = Watched(conversion.plan.store, notes, seconds=0.5)
        with pytest.raises(
            TargetError, match="none"
        ):  # nothing was begun: the first part has no file to go to
            begun.write_part("none", 0, memoryview(b""))
        for file in conversion.plan.plan.target_files:
            (target.staging.files / file.path).touch()
        reports = engine().run(works, source, begun)
        next(reports)
        reports.close()
    workers = [int(note.name) for note in notes.iterdir()]
    assert workers
    deadline = time.monotonic() + 20
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_running, workers))
    assert ray.is_initialized()


def test_a_group_beyond_the_memory_of_a_worker_is_refused(conversion: Conversion) -> None:
    with pytest.raises(MemoryBudgetError, match="the budget is 50000 bytes"):
        conversion.run(engine(memory_bytes=50_000))


@pytest.mark.cluster
def test_two_gpus_and_the_same_bytes(conversion: Conversion, tmp_path: Path, exchanged: list[int]) -> None:
    notes = tmp_path / "notes"
    conversion.run(
        lambda works, source, target: engine(device="gpu", paddle_device="cpu", exchange="always").run(
            works, Watched(source, notes), target
        )
    )
    assert sorted(note.read_text() for note in notes.iterdir()) == ["0", "1"]
    assert exchanged


def test_without_a_gpu_build_of_paddle_it_is_refused_in_one_sentence(conversion: Conversion) -> None:
    with pytest.raises(UnsupportedError, match="this build of Paddle has no device 'gpu'"):
        conversion.run(engine(device="gpu", workers=1))
    with pytest.raises(
        UnsupportedError, match="room for 2 workers with 1 CPU, 256MiB, 1 GPU each, but 3 are requested"
    ):
        conversion.run(engine(device="gpu", workers=3))


def test_no_room_for_a_worker_is_reported(conversion: Conversion) -> None:
    with pytest.raises(UsageError, match="no node of the Ray cluster has 1 CPU, 1073741824MiB for a worker"):
        conversion.run(engine(workers=None, memory_bytes=1 << 50))


@pytest.mark.cluster
def test_a_node_that_is_lost_is_survived(cluster: Cluster, conversion: Conversion, tmp_path: Path) -> None:
    node = cluster.add_node(num_cpus=1, resources={"here": 1}, object_store_memory=80_000_000)
    notes = tmp_path / "notes"

    def losing(works: RemainingGroups, source: object, target: object) -> Iterator[object]:
        removed = False
        for report in engine(workers=4).run(works, Watched(source, notes, seconds=0.2), target):
            if not removed and len(list(notes.iterdir())) == 4:
                cluster.remove_node(node, allow_graceful=False)
                removed = True
            yield report
        assert removed

    conversion.run(losing)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "0 workers: at least 1 is needed"),
        ({"exchange": "some"}, "unknown exchange 'some'; known: auto, always, never"),
        ({"device": "tpu"}, "unknown device 'tpu'; known: cpu, gpu"),
        ({"address": "ray://head:10001"}, "Ray at 'ray://head:10001': give host:port"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RayEngine(**settings)


def test_no_groups_need_no_cluster(plan: Plan) -> None:
    conversion = plan(group_bytes=64 << 20)
    works = RemainingGroups(conversion.plan.plan, range(conversion.inline.groups))
    assert list(engine().run(works, None, None)) == []


OWN_RAY = """
import sys
import paddle_reshard
from pathlib import Path
from paddle_reshard.clusters.choose import choose_engine
from paddle_reshard.pipeline.convert.run import run_conversion
from paddle_reshard.pipeline.core.events import ignore_events
from paddle_reshard.storage.local.target import LocalTarget
from paddle_reshard.storage.outputs import Outputs

engine = choose_engine("ray", 1, 256 << 20)
from tests.cluster.faults import Through, Watched

source, target, notes = map(Path, sys.argv[1:])
plan = paddle_reshard.plan(source, target, to="tp=2,sharding=3")
watched = Through(lambda works, source, writer: engine.run(works, Watched(source, notes), writer))
run_conversion(plan, Outputs([LocalTarget(target)]), watched, ignore_events)
import ray
assert not ray.is_initialized()
"""


def test_a_ray_of_our_own_ends_with_the_run(plan: Plan, tmp_path: Path) -> None:
    conversion = plan(group_bytes=64 << 20)
    made, notes = tmp_path / "made", tmp_path / "notes"
    script = tmp_path / "run.py"
    script.write_text(OWN_RAY)
    source = case_directory(CASE) / "checkpoint-3"
    subprocess.run([sys.executable, script, source, made, notes], cwd=REPO, check=True, timeout=120)
    assert in_folder(made) == conversion.files
    (worker,) = notes.iterdir()
    assert not is_running(int(worker.name))


@pytest.mark.parametrize(
    ("address", "kind", "reason"),
    [
        ("127.0.0.1:1", ClusterError, "Connection refused"),
        ("nobody", UsageError, "Invalid address format"),
    ],
)
def test_a_missing_cluster_is_reported(
    address: str, kind: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(kind, match=f"cannot join Ray at '{address}': .*{reason}"):
        next(RayEngine(address=address).run([None], None, None))


IMPORTED_BEFORE = """
import sys
import ray, paddle_reshard
paddle_reshard.convert(*sys.argv[1:], to="tp=1", cluster="ray")
"""


def test_a_ray_that_was_imported_before_is_not_taken_for_a_private_one(tmp_path: Path) -> None:
    """Ray reads its settings when it is imported: it would listen where everybody reaches it."""
    source = case_directory(CASE) / "checkpoint-3"
    command = [sys.executable, "-c", IMPORTED_BEFORE, str(source), str(tmp_path / "made")]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120, env=clean)
    assert "UsageError: this program has imported Ray before" in done.stderr
    assert not (tmp_path / "made").exists()
