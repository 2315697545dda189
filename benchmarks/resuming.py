"""How long it takes from "the old checkpoint is in the store" to "the first step is done", with the real trainer.

    PARITY_LAB=DIR python -m benchmarks.resuming [--layers 8] [--rounds 3]

Four ranks train a llama for one step with pp=2 and sharding=2 and save a FlexCheckpoint, the default of the trainer.
The job then goes on with tp=2 and sharding=2, each time from that checkpoint. Four ways take turns:

* **trainer**: it resumes from the old checkpoint and reshards it itself;
* **by size**: ``convert --format flex``, then it resumes from whole tensors and reshards them;
* **by rank**: ``convert --format flex --to …``, then every rank reads its own files;
* **by node**: two nodes with two ranks each run ``convert … --ranks`` at the same time, then the same.

All processes run on this machine: the trainer of PaddleFormers on CPUs with gloo, in the laboratory of ``tests/parity``
(its README says what is patched). Its seconds to start, which are the same for all, are left out. "load" is
``_load_flex_checkpoint`` of the slowest rank, "read" what of it ``load_state_dict`` took for all folders; the rest
builds the optimizer, from whatever files. Processor seconds are those of all ranks.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import end_cleanly, run
from tests.conftest import case_directory
from tests.lab.job import Job, Topology
from tests.lab.laboratory import Laboratory
from tests.parity.checks import run_trainer
from tests.parity.lab import PARITY, alone, say

DRIVER = Path(__file__).with_name("resuming_driver.py")
TIMEOUT_SECONDS = 1800
RANKS, NODES = 4, 2
OLD, NEW = (
    Job("llama", topology=Topology.of(to), strategy="stage1v2", format="flex").trainer_arguments()
    for to in ("pp=2,sharding=2", "tp=2,sharding=2")
)
TO = ("--format", "flex", "--to", "tp=2,sharding=2", "--sharding-strategy", "stage1v2")
TRAINER, BY_SIZE, BY_RANK, BY_NODE = "trainer", "by size", "by rank", "by node"


@dataclass(frozen=True)
class Resumed:
    """One way from the old checkpoint to the first step."""

    convert_seconds: float
    convert_cpu_seconds: float
    load_seconds: float
    load_cpu_seconds: float
    read_seconds: float
    """Within ``load_seconds``: in ``paddle.distributed.load_state_dict``."""
    step_seconds: float
    """From the end of loading to the end of the first step."""
    fast_folders: int
    """Folders that no rank resharded."""

    @property
    def seconds(self) -> float:
        """From the old checkpoint to the end of the first step, without starting the trainer."""
        return self.convert_seconds + self.load_seconds + self.step_seconds


def model_of(layers: int) -> dict[str, Any]:
    """A llama of about 11 M parameters a layer, and 17 M beside them."""
    return {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "head_dim": 256,
        "vocab_size": 8192,
        "num_hidden_layers": layers,
    }


def train(
    lab: Laboratory, folder: Path, name: str, arguments: Mapping[str, Any], layers: int, **told: str
) -> list[str]:
    """Run the trainer under the driver; return the logs of the ranks."""
    out = folder / name / "out"
    out.parent.mkdir(parents=True, exist_ok=True)
    return run_trainer(
        lab,
        name,
        out,
        driver=DRIVER,
        options=["--truth", "0", "--steps", "1" if not told else "2"],
        ranks=RANKS,
        arguments=arguments,
        model=model_of(layers),
        timeout_seconds=TIMEOUT_SECONDS,
        environment=told,
    )


def converted(source: Path, config: Path, target: Path, *options: str) -> tuple[float, float]:
    """Seconds and processor seconds of a conversion."""
    command = [sys.executable, "-m", "paddle_reshard", "convert", str(source), str(target), "--quiet"]
    measured = run([*command, "--config", str(config), *options])
    return measured.seconds, measured.cpu_seconds


def resumed(lab: Laboratory, folder: Path, way: str, layers: int) -> Resumed:
    """Go one of the ways."""
    source, config, work = folder / "old" / "out" / "checkpoint-1", folder / "config.json", folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    nodes = [work / f"node{node}" / "checkpoint-1" for node in range(NODES)]
    start, seconds, cpu = str(nodes[0]), 0.0, 0.0
    if way == TRAINER:
        start = str(source)
    elif way == BY_NODE:
        each = RANKS // NODES
        start = str(work / "node{node}" / "checkpoint-1")
        parts = [("--ranks", f"{node * each}-{(node + 1) * each - 1}") for node in range(NODES)]
        with ThreadPoolExecutor(NODES) as pool:
            took = list(
                pool.map(lambda node, part: converted(source, config, node, *TO, *part), nodes, parts)
            )
        seconds, cpu = max(one for one, _ in took), sum(one for _, one in took)
    else:
        seconds, cpu = converted(source, config, nodes[0], *(TO if way == BY_RANK else TO[:2]))
    logs = train(lab, work, "resume", NEW, layers, RESUME_FROM=start, RANKS_OF_A_NODE=str(RANKS // NODES))
    told = [json.loads(log.partition("RESUMED ")[2].splitlines()[0]) for log in logs]
    return Resumed(
        seconds,
        cpu,
        max(one["load_seconds"] for one in told),
        sum(one["load_cpu_seconds"] for one in told),
        max(one["read_seconds"] for one in told),
        max(one["step_seconds"] for one in told),
        min(log.count("resumable locally, skipping reshard") for log in logs),
    )


def table(runs: Mapping[str, Sequence[Resumed]]) -> str:
    """Medians; ratios are medians of those within one round."""

    def middle(way: str, of: Callable[[Resumed], float]) -> str:
        return f"{statistics.median(map(of, runs[way])):.1f} s"

    def faster(way: str, than: str, of: Callable[[Resumed], float]) -> str:
        rounds = zip(runs[than], runs[way], strict=True)
        return f"{statistics.median(of(other) / of(one) for other, one in rounds):.1f} ×"

    columns: dict[str, Callable[[str], str]] = {
        "way": str,
        "convert": lambda way: middle(way, lambda one: one.convert_seconds),
        "load": lambda way: middle(way, lambda one: one.load_seconds),
        "first step": lambda way: middle(way, lambda one: one.step_seconds),
        "together": lambda way: middle(way, lambda one: one.seconds),
        "processor: convert": lambda way: middle(way, lambda one: one.convert_cpu_seconds),
        "load ": lambda way: middle(way, lambda one: one.load_cpu_seconds),
        "load, by size ÷ this": lambda way: faster(way, BY_SIZE, lambda one: one.load_seconds),
        "read": lambda way: middle(way, lambda one: one.read_seconds),
        "read, by size ÷ this": lambda way: faster(way, BY_SIZE, lambda one: one.read_seconds),
        "folders without reshard": lambda way: f"{min(one.fast_folders for one in runs[way])} of 3",
    }
    rows = [[of(way) for of in columns.values()] for way in runs]
    return "\n".join(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))


def main() -> None:
    """Train, then go every way in turns, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    end_cleanly()
    PARITY.mkdir(exist_ok=True)
    with alone(), tempfile.TemporaryDirectory(dir=PARITY) as made, Laboratory() as lab:
        folder = Path(made)
        train(lab, folder, "old", OLD, asked.layers)
        source = folder / "old" / "out" / "checkpoint-1"
        like = json.loads((case_directory("single") / "checkpoint-3" / "config.json").read_bytes())
        (folder / "config.json").write_text(json.dumps(like | model_of(asked.layers)))
        nbytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
        say(f"old checkpoint: {nbytes / 1e9:.2f} GB in {source.name}, pp=2,sharding=2")
        runs: dict[str, list[Resumed]] = {way: [] for way in (TRAINER, BY_SIZE, BY_RANK, BY_NODE)}
        for number in range(asked.rounds):
            for way in runs:
                subprocess.run(["sync"], check=True)
                runs[way].append(resumed(lab, folder, way, asked.layers))
                say(f"  {number + 1}/{asked.rounds} {way}: {runs[way][-1]}")
        say(table(runs))


if __name__ == "__main__":
    main()
