"""A process stays below its budget, and comes near what the plan says it will need."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import pytest

import paddle_reshard
from benchmarks.generate import Llama, write_single_card
from benchmarks.many import many, write_many
from paddle_reshard.clusters.inline import InlineEngine
from paddle_reshard.pipeline.core.errors import MemoryBudgetError
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES, Plan
from paddle_reshard.pipeline.planning.work import GROUPS_AT_A_TIME
from tests.conftest import REPO
from tests.memory.watch import private_bytes, run_watched
from tests.sampling import exhaustive
from tests.storage.contents import fill_bucket
from tests.storage.servers import running_store

MIB = 1 << 20
RULES = REPO / "pipeline/model/rules/llama.paddleformers.json"
LARGEST_TENSOR_BYTES = 48 * MIB
SECONDS_BETWEEN_SEARCHES = 0.2
SMALLEST_BUDGET_MIB = FOOTPRINT_BYTES // MIB + 47
"""Too small for all of the largest tensor."""


@dataclass(frozen=True)
class Wide(Llama):
    """Few and large tensors, all columns of which are split by tp."""

    @property
    def intermediate(self) -> int:
        return LARGEST_TENSOR_BYTES // 4 // self.hidden


@pytest.fixture(scope="module")
def single_card(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("memory") / "single"
    write_single_card(Wide(hidden=512, layers=1, vocab=2_000), folder)
    assert sum(file.stat().st_size for file in folder.iterdir()) > 500 * MIB
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def sharded(single_card: Path) -> Iterator[Path]:
    """The same for four ranks; the bf16 parameters are left out, to be made of their master weights."""
    folder = single_card.with_name("sharded")
    paddle_reshard.convert(single_card, folder, to="tp=2,sharding=2", sharding_strategy="stage1v2")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "made"
    shutil.rmtree(tmp_path / "made", ignore_errors=True)


@pytest.mark.parametrize("budget_mib", [SMALLEST_BUDGET_MIB, exhaustive(256), exhaustive(1024)])
@pytest.mark.parametrize("work", ["copies", "casts"])
def test_a_conversion_stays_below_its_budget(
    budget_mib: int, work: str, request: pytest.FixtureRequest, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = request.getfixturevalue("single_card" if work == "copies" else "sharded")
    options = {"to": "tp=4" if work == "copies" else "tp=1", "memory": f"{budget_mib}MiB"}
    monkeypatch.setattr("paddle_reshard.pipeline.core.units.SMALLEST_BUDGET_BYTES", 0)
    plan = paddle_reshard.plan(source, target, **options).plan
    arguments = ["convert", source, target, "--to", options["to"], "--memory", options["memory"], "--quiet"]
    (most,) = run_watched(arguments).values()
    assert most <= budget_mib * MIB
    if (
        budget_mib > 256
    ):  # up to there, half of the projection is a footprint that allows for every store's driver
        assert most >= projected_bytes(plan, InlineEngine().groups_at_a_time) / 2


def test_a_comparison_stays_below_its_budget(single_card: Path, sharded: Path) -> None:
    """Local files are compared a little at a time, whatever the budget."""
    (most,) = run_watched(["verify", single_card, sharded, "--memory", "256MiB", "--quiet"]).values()
    assert 20 * MIB < most <= 128 * MIB


@pytest.mark.parametrize("dtype", ["bfloat16", exhaustive("float32")])
def test_an_average_stays_below_its_budget(
    dtype: str, single_card: Path, sharded: Path, target: Path
) -> None:
    """In bfloat16 it is made in float32 beside the parts that it goes into."""
    how = ["--decay", "0.5", "--format", "huggingface", "--dtype", dtype]
    (most,) = run_watched(
        ["ema", single_card, sharded, target, *how, "--memory", "256MiB", "--quiet"]
    ).values()
    assert 100 * MIB < most <= 256 * MIB


def write_model(folder: Path, model: Llama, first: int) -> int:
    """An export whose bytes are zero but for the ``first``; its number of tensors."""
    header: dict[str, object] = {}
    at = 0
    for key, shape in model.shapes.items():
        whole = shape[::-1] if "proj" in key else shape
        header[key] = {"dtype": "BF16", "shape": whole, "data_offsets": [at, at + 2 * prod(shape)]}
        at += 2 * prod(shape)
    text = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + bytes([first]))
        file.truncate(8 + len(text) + at)
    return len(header)


@pytest.mark.cluster
def test_workers_of_a_cluster_stay_below_their_budget(sharded: Path, target: Path) -> None:
    most = run_watched(
        [
            "convert",
            sharded,
            target,
            "--to",
            "tp=1",
            "--cluster",
            "ray",
            "--workers",
            "2",
            "--memory",
            "256MiB",
        ],
        _Workers(),
    )
    assert len(most) == 2
    for found in most.values():
        assert 70 * MIB < found <= 256 * MIB


@pytest.mark.cluster
def test_a_worker_that_reads_and_writes_s3_stays_below_what_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests in flight, and what speaks S3, are in the footprint."""
    write_single_card(Llama(hidden=512, layers=1, vocab=2_000), tmp_path / "single")
    with running_store() as store:
        store.client.create_bucket(Bucket="checkpoints")
        fill_bucket(store, "checkpoints", "source/", tmp_path / "single")
        shutil.rmtree(tmp_path / "single")
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", store.key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", store.secret)
        places = ["s3://checkpoints/source", "s3://checkpoints/target"]
        # Of a store that only the environment names, fsspec keeps what an earlier test used in this process.
        plan = paddle_reshard.plan(*places, to="tp=4", memory="256MiB", storage_options=store.options).plan
        how = ["--to", "tp=4", "--memory", "256MiB", "--cluster", "ray", "--workers", "1"]
        (most,) = run_watched(["convert", *places, *how], _Workers()).values()
    assert 100 * MIB < most <= projected_bytes(plan, GROUPS_AT_A_TIME) <= 256 * MIB


def projected_bytes(plan: Plan, groups_at_a_time: int) -> int:
    """Peak memory of a worker that runs the largest groups of a plan at a time."""
    largest = sorted(plan.group_peaks)[-groups_at_a_time:]
    return min(FOOTPRINT_BYTES + int(sum(largest)), plan.budget_bytes)


class _Workers:
    """Private bytes of the Ray workers that descend from a process; new ones are looked for now and then."""

    def __init__(self) -> None:
        self.known: list[int] = []
        self.look_again = 0.0

    def __call__(self, driver: int) -> dict[int, int]:
        if time.monotonic() >= self.look_again:
            self.known = _ray_workers(driver)
            self.look_again = time.monotonic() + SECONDS_BETWEEN_SEARCHES
        return {pid: private_bytes(pid) for pid in self.known}


def _ray_workers(driver: int) -> list[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, _, rest = (folder / "stat").read_text().rpartition(")")
            parents[int(folder.name)] = (int(rest.split()[1]), "ray::Reshard" in name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return [pid for pid, (_, is_worker) in parents.items() if is_worker and _descends(pid, driver, parents)]


def _descends(pid: int, ancestor: int, parents: dict[int, tuple[int, bool]]) -> bool:
    while pid in parents and pid != ancestor:
        pid = parents[pid][0]
    return pid == ancestor


@pytest.mark.parametrize("layers", [2, exhaustive(20)], ids="{} layers of 3,100 tensors".format)
def test_metadata_are_part_of_the_budget(
    layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion of tensors that hold hardly a value needs no more than is worked out for them.

    On disks the footprint has room for so many; where a driver of an object store needs that, they are refused.
    """
    monkeypatch.setattr("paddle_reshard.pipeline.core.units.SMALLEST_BUDGET_BYTES", 0)
    monkeypatch.setattr("paddle_reshard.pipeline.planning.metadata.DRIVER_BYTES", 0)
    monkeypatch.setattr("paddle_reshard.pipeline.planning.metadata.FREE_BYTES", 0)
    source, target = tmp_path / "source", tmp_path / "target"
    write_many(many(layers), source)
    with pytest.raises(MemoryBudgetError, match=r"metadata of \d+ tensors.*: needs .* use --memory \d+MiB"):
        paddle_reshard.convert(source, target, to="tp=2", memory=f"{FOOTPRINT_BYTES // MIB + 4}MiB")
    assert not list(tmp_path.glob("*target*"))
    budget_mib = FOOTPRINT_BYTES // MIB + 3 * layers + 4  # beside its metadata it holds a group
    how = ["--memory", f"{budget_mib}MiB", "--quiet"]
    (most,) = run_watched(["convert", source, target, "--to", "tp=2", *how]).values()
    assert most <= budget_mib * MIB
    (most,) = run_watched(["verify", source, target, *how]).values()
    assert most <= budget_mib * MIB
