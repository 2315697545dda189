"""Our average beside the real trainer: the same bits as its own, and it goes on in another topology.

``python -m tests.parity.ema``. Train three steps with the trainer's own average and ours; both files must hold the
same bits, also those of a FlexCheckpoint. Convert the checkpoint to another topology and resume the real trainer there
for three steps; our average goes on from the checkpoint as it was, in its own topology. The file must be the reference
average, made with NumPy of what every rank held at every step.
"""

import json
import shutil
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import paddle_reshard
from tests.conftest import case_directory, corpus_root
from tests.parity.lab import PARITY, REPO, Lab, LabError, open_lab, run_trainer, say
from tests.parity.run import EMA, PP2, SHARDED_FILES, SHARDING2, TIMEOUT_SECONDS, TP2, V1, V2, alone
from tests.parity.tensors import read_ema_file, read_flex_ema

DRIVER = Path(__file__).resolve().parent / "ema_driver.py"
DECAY = 0.9
SHARDING4 = {"sharding_parallel_size": 4}
FLEX = {"save_checkpoint_format": "flex_checkpoint", "load_checkpoint_format": "flex_checkpoint"}


@dataclass(frozen=True)
class Run:
    """A job, and the one in which it goes on."""

    first: dict[str, Any]
    first_ranks: int
    to: str
    strategy: str | None
    second: dict[str, Any]
    second_ranks: int
    flex: bool = False
    """Whether the first job saves a FlexCheckpoint."""


RUNS = {
    "sh2-v1-to-sh4-v2": Run(V1 | SHARDING2, 2, "sharding=4", "stage1v2", V2 | SHARDING4, 4),
    "mp2sh2-v2-to-pp2sh2-v1": Run(
        TP2 | V2 | SHARDING2, 4, "pp=2,sharding=2", "stage1v1", PP2 | V1 | SHARDING2, 4
    ),
    "fc-mp2sh2-v2-to-sh2-v1": Run(
        TP2 | V2 | SHARDING2 | FLEX, 4, "sharding=2", "stage1v1", V1 | SHARDING2, 2, flex=True
    ),
}


def main(wanted: list[str]) -> int:
    """Check the runs asked for, or all; the result is the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if corpus_root() is None:
        say("parity: the corpus of real checkpoints is not at hand")
        return 2
    failed = 0
    try:
        with alone():
            lab = open_lab()
            for name in wanted or RUNS:
                found = _check(lab, name, RUNS[name])
                say(
                    f"{'FAILED' if found else 'passed'}  {name}"
                    + "".join(f"\n        {line}" for line in found[:8])
                )
                failed += bool(found)
    except LabError as error:
        say(f"parity: {error}")
        return 2
    say(f"{len(wanted or RUNS) - failed} passed, {failed} failed")
    return 1 if failed else 0


def _check(lab: Lab, name: str, run: Run) -> list[str]:
    work = PARITY / "work" / f"ema-{name}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    _train(lab, name, work / "first", run.first | EMA, run.first_ranks, 3)
    theirs, ours = work / "first" / "out" / "checkpoint-3", work / "first" / "out" / "checkpoint-3-ours"
    if run.flex:
        found = _differences(
            {"": read_flex_ema(ours)}, {"": read_flex_ema(theirs)}, "the trainer's own average"
        )
    else:
        found = _differences(_files(ours), _files(theirs), "the trainer's own average")
        found += _differences(
            _files(ours), _reference(work / "first", _files(ours), (1, 2, 3), None), "the reference"
        )
    shutil.copytree(ours, theirs, dirs_exist_ok=True)
    converted = work / "converted" / "checkpoint-3"
    config = case_directory("single") / "checkpoint-3" / "config.json"
    paddle_reshard.convert(
        theirs, converted, to=run.to, sharding_strategy=run.strategy, config=config if run.flex else None
    )
    _train(lab, name, work / "second", run.second, run.second_ranks, 6, converted, theirs)
    went_on = work / "second" / "out" / "checkpoint-6-ours"
    reference = _reference(work / "second", _files(went_on), (4, 5, 6), converted)
    found += _differences(_files(went_on), reference, "the reference after resuming")
    progress = json.loads((went_on / "ema.json").read_bytes())
    if (progress["updates"], progress["step"]) != (6, 6):
        found.append(
            f"ema.json counts {progress['updates']} updates up to step {progress['step']}, not 6 and 6"
        )
    return found


def _train(
    lab: Lab,
    name: str,
    work: Path,
    arguments: dict[str, Any],
    ranks: int,
    steps: int,
    resumed: Path | None = None,
    averages: Path | None = None,
) -> None:
    seen = work / "seen"
    seen.mkdir(parents=True)
    environment = {"EMA_DECAY": str(DECAY), "EMA_SEEN": str(seen), "PYTHONPATH": str(REPO / "src")}
    if resumed is not None:
        environment |= {"EMA_RESUME": str(resumed), "EMA_FROM": str(averages)}
    run_trainer(
        lab,
        name,
        work / "out",
        driver=DRIVER,
        options=["--steps", str(steps), "--truth", "0"],
        ranks=ranks,
        arguments=SHARDED_FILES | arguments,
        model=json.loads((case_directory("single") / "case.json").read_bytes())["model"] or {},
        timeout_seconds=TIMEOUT_SECONDS,
        environment=environment,
    )


def _files(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    return {path.name: read_ema_file(path) for path in sorted(folder.glob("ema*.pdopt"))}


def _reference(
    work: Path, names: Iterable[str], steps: tuple[int, ...], start: Path | None
) -> dict[str, dict[str, np.ndarray]]:
    """The average of what every rank held at ``steps``, by the name of the rank's file."""
    keep, take = np.float32(DECAY), np.float32(1 - DECAY)
    reference = {}
    for name in names:
        average = read_ema_file(start / name) if start else None
        for step in steps:
            with np.load(work / "seen" / f"step{step}_{name}.npz") as held:
                values = {key: held[key] for key in held.files}
            average = (
                values if average is None else {k: keep * average[k] + take * v for k, v in values.items()}
            )
        reference[name] = average or {}
    return reference


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
