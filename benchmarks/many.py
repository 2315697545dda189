"""Memory for metadata: conversions of checkpoints with very many tiny tensors.

    python -m benchmarks.many [--layers 87]

87 layers are 270,849 tensors, about as many as a training checkpoint of DeepSeek-V3 has. Each command is run with
256 MiB, or with the budget that its metadata and groups need if that is more; its private memory is sampled
continuously.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import paddle_reshard
from benchmarks.synthetic import Dims, files_of
from paddle_reshard.pipeline.core.errors import MemoryBudgetError
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.hybrid.target import HybridTarget
from paddle_reshard.pipeline.planning.metadata import needed_bytes, spare_bytes
from tests.memory.watch import run_watched

MIB = 1 << 20
GOAL_MIB = 256


def many(layers: int) -> Dims:
    """A model of 256 experts of a few numbers each; 518 parameters in a layer, six tensors of each."""
    return Dims(8, 8, layers, 2, 2, 32, experts=256)


SINGLE_CARD = HybridTarget(Topology(), "none", sharded_saving=False)


def write_many(dims: Dims, directory: Path, job: HybridTarget = SINGLE_CARD) -> None:
    """The files of a job, all values zero."""
    laid_out = files_of(dims, job)
    directory.mkdir(parents=True)
    contents = [bytearray(file.size_bytes) for file in laid_out.files]
    for number, offset, literal in laid_out.literals:
        contents[number][offset : offset + len(literal)] = literal
    for file, content in zip(laid_out.files, contents, strict=True):
        (directory / file.path).write_bytes(content)
    (directory / "config.json").write_text(json.dumps(dims.config))


def budget_mib(source: Path, target: Path, to: str) -> int:
    """The goal, or the smallest budget with which a conversion is planned."""
    budget = GOAL_MIB
    while True:
        try:
            planned = paddle_reshard.plan(source, target, to=to, memory=f"{budget}MiB")
        except MemoryBudgetError as error:  # the first error gives only a lower bound
            budget = -(-error.needed_bytes // MIB)
            continue
        plan = planned.plan
        needed = needed_bytes(len(plan.tensors), planned.pieces, plan.peak_bytes, spare_bytes(local=True))
        return max(budget, -(-needed // MIB))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=87)
    layers = parser.parse_args().layers
    print("| conversion | budget (MiB) | private (MiB) |\n| --- | ---: | ---: |")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source", Path(folder) / "target"
        write_many(many(layers), source)
        for to in ("tp=1", "tp=2"):
            budget = budget_mib(source, target / to, to)
            how = ["--memory", f"{budget}MiB", "--quiet"]
            (most,) = run_watched(["convert", source, target / to, "--to", to, *how]).values()
            print(f"| {layers} layers to {to} | {budget} | {most / MIB:,.0f} |")
            (most,) = run_watched(["verify", source, target / to, *how]).values()
            print(f"| verify | {budget} | {most / MIB:,.0f} |")


if __name__ == "__main__":
    main()
