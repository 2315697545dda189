"""Our average beside the real trainer: the same bits as its own, and it goes on in another topology.

``python -m tests.parity.ema``. Train three steps with the trainer's own average and ours; both files must hold the
same bits, also those of a FlexCheckpoint. (Under sharding stage 3 there is ours alone: the trainer's own fails at
parameters without memory.) Convert the checkpoint to another topology and resume the real trainer there for three
steps; our average goes on from the checkpoint as it was, in its own topology. The files must be the reference average,
made with NumPy of what every rank held at every step.
"""

import json
import pickle
import re
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import paddle_reshard
from tests.conftest import case_directory
from tests.lab.job import FILES_OF_RANKS, FLEX, Job, Topology
from tests.lab.laboratory import Laboratory
from tests.parity.checks import check_all, run_trainer
from tests.parity.lab import PARITY, REPO
from tests.parity.run import TIMEOUT_SECONDS
from tests.parity.tensors import read_ema_file, read_flex_ema

DRIVER = Path(__file__).resolve().parent / "ema_driver.py"
DECAY = 0.9
PLAIN_TO_FLEX = {
    "save_checkpoint_format": "flex_checkpoint",
    "load_checkpoint_format": None,
    "load_sharded_model": False,
}


def _job(to: str, strategy: str = "unsaid", family: str = "llama", **arguments: Any) -> Job:
    return Job(family, topology=Topology.of(to), strategy=strategy, arguments=arguments)


@dataclass(frozen=True)
class Run:
    """A job, and the one in which it goes on."""

    first: Job
    second: Job
    segments: tuple[int, int] | None = None
    """In both jobs, the elements above which stage 3 cuts a parameter."""
    layout: dict[str, Any] = field(default_factory=dict)

    @property
    def flex(self) -> bool:
        """Whether the first job saves a FlexCheckpoint."""
        return _is_flex(self.first)


def _is_flex(job: Job) -> bool:
    return job.arguments.get("save_checkpoint_format") == "flex_checkpoint"


RUNS = {
    "sh2-v1-to-sh4-v2": Run(_job("sharding=2", "stage1v1"), _job("sharding=4", "stage1v2")),
    "mp2sh2-v2-to-pp2sh2-v1": Run(_job("tp=2,sharding=2", "stage1v2"), _job("pp=2,sharding=2", "stage1v1")),
    "fc-mp2sh2-v2-to-sh2-v1": Run(
        _job("tp=2,sharding=2", "stage1v2", **FLEX), _job("sharding=2", "stage1v1")
    ),
    "fc-sh2-stage3-to-sh2-stage3": Run(
        _job("sharding=2", "stage3", **FLEX),
        _job("sharding=2", "stage3", **PLAIN_TO_FLEX),
        segments=(512, 5000),
        layout={"stage3_segment_size": 5000},
    ),
    "ep2sh2-v2-to-ep2mp2": Run(
        _job("ep=2,sharding=2", "stage1v2", family="qwen3_moe"),
        _job("tp=2,ep=2", family="qwen3_moe", sequence_parallel=True, **PLAIN_TO_FLEX),
    ),
}


def main(wanted: list[str]) -> int:
    """Check the runs asked for, or all; the result is the exit status."""
    return check_all(wanted or RUNS, lambda lab, name: _check(lab, name, RUNS[name]))


def _check(lab: Laboratory, name: str, run: Run) -> tuple[str, list[str]]:
    work = PARITY / "work" / f"ema-{name}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    segments = [{"SHIM_SEGMENT": str(s)} for s in run.segments or ()] or [{}, {}]
    first = run.first if run.segments else replace(run.first, ema=True)
    _train(lab, name, work / "first", first, 3, segments[0])
    theirs, ours = work / "first" / "out" / "checkpoint-3", work / "first" / "out" / "checkpoint-3-ours"
    found = []
    if run.segments is None:
        one, other = ({"": read_flex_ema(f)} if run.flex else _files(f) for f in (ours, theirs))
        found = _differences(one, other, "the trainer's own average")
    found += _compare(ours, run.first, _reference(work / "first", (1, 2, 3), None), "the reference")
    shutil.copytree(ours, theirs, dirs_exist_ok=True)
    converted = work / "converted" / "checkpoint-3"
    config = case_directory("single") / "checkpoint-3" / "config.json"
    paddle_reshard.convert(
        theirs,
        converted,
        to=str(run.second.topology),
        sharding_strategy=None if run.second.strategy == "unsaid" else run.second.strategy,
        config=config if run.flex else None,
        layout=run.layout or None,
    )
    environment = segments[1] | {"EMA_RESUME": str(converted), "EMA_FROM": str(theirs)}
    _train(lab, name, work / "second", run.second, 6, environment)
    went_on = work / "second" / "out" / "checkpoint-6-ours"
    reference = _reference(work / "second", (4, 5, 6), converted)
    found += _compare(went_on, run.second, reference, "the reference after resuming")
    progress = json.loads((went_on / "ema.json").read_bytes())
    if (progress["updates"], progress["step"]) != (6, 6):
        found.append(
            f"ema.json counts {progress['updates']} updates up to step {progress['step']}, not 6 and 6"
        )
    return f"averages of {run.first.topology.ranks} and {run.second.topology.ranks} ranks", found


def _train(lab: Laboratory, name: str, work: Path, job: Job, steps: int, environment: dict[str, str]) -> None:
    seen = work / "seen"
    seen.mkdir(parents=True)
    # The companion process of the average is not one of the laboratory's.
    environment |= {"EMA_DECAY": str(DECAY), "EMA_SEEN": str(seen), "PYTHONPATH": str(REPO / "src")}
    model = json.loads((case_directory("single") / "case.json").read_bytes())["model"] or {}
    run_trainer(
        lab,
        name,
        work / "out",
        driver=DRIVER,
        options=["--steps", str(steps), "--truth", "0", "--family", job.family],
        ranks=job.topology.ranks,
        arguments=FILES_OF_RANKS | job.trainer_arguments(),
        model=model if job.family == "llama" else {},
        timeout_seconds=TIMEOUT_SECONDS,
        environment=environment,
    )


def _files(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    return {path.name: read_ema_file(path) for path in sorted(folder.glob("ema*.pdopt"))}


def _reference(work: Path, steps: tuple[int, ...], start: Path | None) -> dict[str, dict[str, np.ndarray]]:
    """The average of what every rank held at ``steps``, by the name of the rank's file."""
    keep, take = np.float32(DECAY), np.float32(1 - DECAY)
    reference = {}
    first = f"step{steps[0]}_"
    for name in sorted(path.stem.removeprefix(first) for path in (work / "seen").glob(f"{first}*")):
        average = read_ema_file(start / name) if start else None
        for step in steps:
            with np.load(work / "seen" / f"step{step}_{name}.npz") as held:
                values = {key: held[key] for key in held.files}
            average = (
                values if average is None else {k: keep * average[k] + take * v for k, v in values.items()}
            )
        reference[name] = average or {}
    return reference


def _compare(folder: Path, job: Job, reference: dict[str, dict[str, np.ndarray]], what: str) -> list[str]:
    if not _is_flex(job):
        return _differences(_files(folder), reference, what)
    found, written = [], set()
    ranks = [reference[name] for name in sorted(reference, key=_coordinate)]
    for number, rank in enumerate(ranks):
        root = pickle.loads((folder / "ema_state" / f"{number}_0.distcp").read_bytes())
        names = root.pop("StructuredToParameterName@@")
        for key, value in root.items():
            name = names[key].removesuffix("_fp32_master_0")
            (entry,) = {key, name, f"slice@{name}"} & rank.keys()
            values, padding = np.split(rank[entry].ravel(), [value.size])
            if values.tobytes() != value.tobytes() or padding.any():
                found.append(f"{what}: {folder}: {key} of rank {number} differs")
            written.add((number, entry))
    for number, rank in enumerate(ranks):
        # What several ranks hold is written by the first of them; a slice may be padding and nothing else.
        found += [
            f"{what}: {folder}: {entry} of rank {number} is not there"
            for entry, value in rank.items()
            if (number, entry) not in written
            and value.any()
            and ("@" in entry or not any((earlier, entry) in written for earlier in range(number)))
        ]
    return found if written else [f"{what}: there is nothing to compare"]


def _coordinate(name: str) -> list[str]:
    """Of the rank with a file of this name, in the order of the trainer's global ranks."""
    parts = dict(re.findall(r"(tp|pp|shard)(\d+)", name))
    return [parts.get(axis, "") for axis in ("pp", "shard", "tp")]


def _differences(
    one: dict[str, dict[str, np.ndarray]], other: dict[str, dict[str, np.ndarray]], what: str
) -> list[str]:
    found = [f"{what}: only one side has {name}" for name in sorted(one.keys() ^ other.keys())]
    found += [] if one else [f"{what}: there is nothing to compare"]
    for name in one.keys() & other.keys():
        if list(one[name]) != list(other[name]):
            found.append(f"{what}: {name} holds other tensors, or in another order")
            continue
        found += [
            f"{what}: {name}: {key} differs"
            for key, value in one[name].items()
            if value.shape != other[name][key].shape or value.tobytes() != other[name][key].tobytes()
        ]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
