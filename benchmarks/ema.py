"""The cost of an average for a training step: ``python -m benchmarks.ema [--elements 100000000]``.

Two ratios of medians from one run: the time of ``update`` divided by that of one copy of the same bytes, and the bytes
per second of the worker's arithmetic (average read and written, values read) divided by those of a copy.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from paddle_reshard.pipeline.training.async_ema import AsyncEma
from paddle_reshard.pipeline.training.stretches import Weights
from paddle_reshard.tasks.ema import blend

PASSES = 7


def seconds(do: Callable[[], object]) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=100_000_000)
    parser.add_argument("--tensors", type=int, default=300)
    options = parser.parse_args()
    each = options.elements // options.tensors
    random = np.random.default_rng(1)
    held = {f"linear_{i}.w_0": random.standard_normal(each, dtype=np.float32) for i in range(options.tensors)}
    copy = {key: np.zeros_like(value) for key, value in held.items()}

    def copied() -> None:
        for key, value in held.items():
            np.copyto(copy[key], value)

    average, values = (np.zeros(options.elements, np.float32) for _ in range(2))
    steps: dict[str, list[float]] = {"update": [], "copy": [], "blend": [], "copy whole": []}
    with AsyncEma(lambda: Weights(held), decay=0.999) as ema:
        ema.update(0)
        for step in range(1, PASSES + 1):
            ema.state()  # let the worker finish, so that only the step's own share is measured
            steps["update"].append(seconds(partial(ema.update, step)))
            ema.state()
            steps["copy"].append(seconds(copied))
            steps["blend"].append(seconds(lambda: blend(average, values, 0.999)))
            steps["copy whole"].append(seconds(lambda: np.copyto(average, values)))
    median = {name: statistics.median(found) for name, found in steps.items()}
    bandwidth = (3 / median["blend"]) / (2 / median["copy whole"])
    print(f"{options.tensors} tensors, {4 * options.elements / 1e6:.0f} MB, medians of {PASSES}")
    print(f"update {1e3 * median['update']:.0f} ms, a copy of the same bytes {1e3 * median['copy']:.0f} ms")
    print(f"update / copy               {median['update'] / median['copy']:.2f}   goal <= 1.2")
    print(f"arithmetic / copy bandwidth {bandwidth:.2f}   goal >= 0.5")


if __name__ == "__main__":
    main()
