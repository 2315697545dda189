"""The real trainer, filled by ``load_into`` while it runs: it then holds the truth of the source, bit for bit.

``python -m tests.parity.live [run ...]``. Nothing is converted: the trainer resumes from the checkpoint of another
topology, and where it would load, ours does.
"""

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.conftest import case_directory
from tests.lab.job import Job, Topology
from tests.lab.laboratory import Laboratory
from tests.parity.checks import check_all, run_trainer
from tests.parity.lab import PARITY
from tests.parity.run import (
    ALL_AXES,
    CHECKPOINT,
    EMA_STATES,
    STEP_IS_READ,
    TIMEOUT_SECONDS,
    differences_of_reports,
)
from tests.parity.tensors import differences, read_tensors

DRIVER = Path(__file__).resolve().parent / "live_driver.py"
LIGHT = "imported []"


@dataclass(frozen=True)
class Run:
    """A checkpoint, and the job that is filled from it."""

    source: str
    to: str
    strategy: str
    environment: dict[str, str] = field(default_factory=dict)


RUNS = {
    "8ranks-into-mp2sh2-v2": Run(ALL_AXES, "tp=2,sharding=2", "stage1v2"),
    "8ranks-into-sh2-stage3-cut": Run(ALL_AXES, "sharding=2", "stage3", {"SHIM_SEGMENT": "512"}),
    "single-into-pp2sh2-v1": Run("single", "pp=2,sharding=2", "stage1v1"),
    "stage3-into-mp2": Run("sh2_s3_seg512", "tp=2", "unsaid"),
}


def main(wanted: list[str]) -> int:
    """Check the runs asked for, or all; the result is the exit status."""
    return check_all(wanted or RUNS, lambda lab, name: _check(lab, name, RUNS[name]))


def _check(lab: Laboratory, name: str, run: Run) -> tuple[str, list[str]]:
    source, work = case_directory(run.source), PARITY / "work" / f"live-{name}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    job = Job("llama", topology=Topology.of(run.to), strategy=run.strategy)
    logs = run_trainer(
        lab,
        name,
        work / "out",
        driver=DRIVER,
        options=["--resume", str(source / CHECKPOINT)],
        ranks=job.topology.ranks,
        arguments=job.trainer_arguments() | {"load_checkpoint_format": "flex_checkpoint"},
        model=json.loads((source / "case.json").read_bytes())["model"] or {},
        timeout_seconds=TIMEOUT_SECONDS,
        environment=run.environment,
    )
    truth = read_tensors(source / "truth.safetensors")
    wanted = {key: tensor for key, tensor in truth.items() if not key.endswith(EMA_STATES)}
    found = differences(read_tensors(work / "out" / "truth.safetensors"), wanted)
    found += differences_of_reports(work / "out" / "truth_report.json", source / "truth_report.json")
    for rank, log in enumerate(logs):
        found += [
            f"the log of rank {rank} does not say {line!r}"
            for line in (STEP_IS_READ, LIGHT)
            if line not in log
        ]
    return f"{len(wanted)} tensors", found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
