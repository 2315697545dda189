"""Make several targets of one reading of a source, after a look at what it is and what would be done.

::

    python examples/several_targets.py checkpoint-1000 out
"""

from __future__ import annotations

import sys
from pathlib import Path

import paddle_reshard as pr


def targets_below(folder: Path, training: pr.Inspection) -> dict[pr.PathLike, pr.TargetOptions]:
    """The checkpoint for a job of one card, the model, and the averaged model where there is an average."""
    targets: dict[pr.PathLike, pr.TargetOptions] = {
        folder / "one-card": {"to": pr.Topology(tp=1)},
        folder / "model": {"format": "huggingface", "max_shard_size": "5GB"},
    }
    if training.has_ema:
        targets[folder / "averaged"] = {"format": "huggingface", "state": "ema"}
    return targets


def main(source: str, folder: str) -> None:
    """Inspect, plan, convert, check."""
    training = pr.inspect(source)
    print(training)
    for summary in training.states:
        print(f"  {summary.state}: {summary.tensors} tensors, {summary.elements:,} elements")
    targets = targets_below(Path(folder), training)
    options: pr.ConversionOptions = {"memory": "512MiB"}
    planned = pr.plan(source, targets, **options)
    for name, fact in planned.facts():
        print(f"{name:>12}  {fact}")
    pr.convert(source, targets, **options)
    for place in targets:
        if not (found := pr.check(place)):
            sys.exit(f"{place}: {found.verdict}")


if __name__ == "__main__":
    main(*sys.argv[1:])
