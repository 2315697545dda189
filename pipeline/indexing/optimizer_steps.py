"""Check that all optimizer states are of the same step, which the powers of the betas reveal.

Adam, AdamW and Lamb store ``beta1_pow_acc`` and ``beta2_pow_acc`` for every parameter. They start as beta and are
multiplied by beta in float32 at every step that updates the parameter (Paddle 3.3 ``phi/kernels/cpu/adam_kernel.cc``),
so both are powers with the exponent steps + 1: after 3 steps, 0.9⁴ = 0.6561 and 0.95⁴ = 0.8145. A parameter is updated
from its first gradient on. An expert that got no tokens at first, or the image tower of a model that was first trained
on text, is rightly some whole steps behind.

No file records the betas, so they are searched for: two values that are, bit for bit, the same power of decimals with
at most four digits cannot be a coincidence, nor can a single value with three digits. If no betas are found, or the
powers are too small to distinguish steps, nothing is checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.errors import CoverageError
from paddle_reshard.pipeline.core.tensors import DTYPES, dtype_named
from paddle_reshard.pipeline.indexing.small_files import SCALER, scheduled_step
from paddle_reshard.storage.store import Read, ReadRange, Source

BETA1, BETA2 = "beta1_pow_acc", "beta2_pow_acc"
MOST_STEPS = 100_000
SMALLEST_POWER = 1e-30
"""Powers below this are near the limit of float32 and soon stop changing."""
_DECIMALS_OF_TWO, _DECIMALS_OF_ONE = 4, 3
"""Digits of the betas to try, with both powers and with only one of them."""
MOST_SCALARS = 4096
"""Maximum number of values to read; of more, a sample at even distances."""
_WIDTH = 4
BLOCK_BYTES, BLOCKS_AT_A_TIME = 128 << 10, 128
"""Values in one block of a file are read together, and at most 16 MiB at a time."""


@dataclass(frozen=True, slots=True)
class Powers:
    """The stored powers of a parameter, and their file."""

    key: str
    path: str
    beta1: np.float32
    beta2: np.float32

    @property
    def values(self) -> tuple[bytes, bytes]:
        """The bits of both powers."""
        return self.beta1.tobytes(), self.beta2.tobytes()


@dataclass(frozen=True, slots=True)
class Steps:
    """The betas of an optimizer, and the step after which their powers are the stored ones."""

    beta1: float | None
    """``None`` if its power is too small."""
    beta2: float
    step: int

    def steps_of(self, beta1: np.float32, beta2: np.float32) -> list[int]:
        """The steps after which both betas have these powers, below :data:`MOST_STEPS`."""
        same = _powers(self.beta2) == beta2
        if self.beta1 is not None:
            same &= _powers(self.beta1) == beta1
        steps: list[int] = np.flatnonzero(same).tolist()
        return steps

    def __str__(self) -> str:
        return f"{self.beta2:g}" if self.beta1 is None else f"{self.beta1:g} and {self.beta2:g}"


def check_powers(powers: list[Powers], scheduled: int | None, skips: bool = False, ahead: int = 0) -> None:
    """Refuse powers of different steps, or of a different step than the learning-rate schedule.

    ``scheduled`` is the schedule's step, ``None`` if it is not known. With ``skips``, the schedule may have counted
    steps that the optimizer has skipped. It may be up to ``ahead`` steps ahead of the optimizer.
    """
    counts = Counter(p.values for p in powers)
    first = {p.values: p for p in reversed(powers)}
    known = None
    for values, _ in counts.most_common():
        if known := find_steps(first[values].beta1, first[values].beta2, scheduled):
            break
    if known is None:
        return
    steps = {values: known.steps_of(pair.beta1, pair.beta2) for values, pair in first.items()}
    for values, possible in steps.items():
        if not possible:
            _refuse_pair(first[values], known)
    _refuse_files({p: steps[p.values][0] for p in powers})
    latest = max(first, key=lambda values: steps[values][0])
    if scheduled is None or (skips and steps[latest][0] <= scheduled):
        return
    if not any(scheduled - ahead <= step <= scheduled for step in steps[latest]):
        raise CoverageError(
            f"{first[latest].key} ({BETA1}, {BETA2})",
            f"{first[latest].beta1!s} and {first[latest].beta2!s} are the powers of {known} after "
            f"{steps[latest][0]} steps, but the learning-rate schedule is at step {scheduled}: they are of different "
            "checkpoints",
            (first[latest].path,),
        )


def read_powers(source: ReadRange, catalog: Catalog) -> list[Powers]:
    """Both powers of every parameter that stores both as float32, from the first copy."""
    number = {
        (key, state): i for state in (BETA1, BETA2) for key, i in catalog.tensors.of_state(state).items()
    }
    keys = sorted({key for key, _ in number})
    keys = keys[:: -(-len(keys) // (MOST_SCALARS // 2)) or 1]
    wanted = {
        number[key, state]: (key, state) for key in keys for state in (BETA1, BETA2) if (key, state) in number
    }
    rows = catalog.fragments[np.isin(catalog.fragments["tensor"], list(wanted))]
    rows = rows[(rows["replica"] == 0) & (rows["dtype"] == DTYPES.index(dtype_named("float32")))]
    rows = rows[np.lexsort((rows["byte_base"], rows["file"]))]
    files = [catalog.files[number].path for number in rows["file"]]
    scalars = _read_scalars(source, files, rows["byte_base"].tolist())
    values = {
        wanted[int(row["tensor"])]: (value, path)
        for row, value, path in zip(rows, scalars, files, strict=True)
    }
    return [
        Powers(key, values[key, BETA1][1], values[key, BETA1][0], values[key, BETA2][0])
        for key in keys
        if (key, BETA1) in values and (key, BETA2) in values
    ]


def _read_scalars(source: ReadRange, files: Sequence[str], starts: Sequence[int]) -> list[np.float32]:
    """The float32 at each file and byte offset, which are sorted."""
    blocks = groupby(range(len(starts)), key=lambda i: (files[i], starts[i] // BLOCK_BYTES))
    spans = [list(of_block) for _, of_block in blocks]  # indices into files and starts
    scalars: list[np.float32] = []
    for first in range(0, len(spans), BLOCKS_AT_A_TIME):
        batch = spans[first : first + BLOCKS_AT_A_TIME]
        buffers = [bytearray(starts[span[-1]] + _WIDTH - starts[span[0]]) for span in batch]
        source.read_many(
            [
                Read(files[span[0]], starts[span[0]], memoryview(buffer))
                for span, buffer in zip(batch, buffers, strict=True)
            ]
        )
        for span, buffer in zip(batch, buffers, strict=True):
            scalars += [np.frombuffer(buffer, "<f4", 1, starts[i] - starts[span[0]])[0] for i in span]
    return scalars


def find_steps(beta1: np.float32, beta2: np.float32, expected: int | None) -> Steps | None:
    """Betas and a step that give both values; ``expected`` is the step to try first.

    >>> find_steps(np.float32(0.6560999), np.float32(0.81450623), None)
    Steps(beta1=0.9, beta2=0.95, step=3)
    """
    if not SMALLEST_POWER < beta2 < 1 or not 0 <= beta1 < 1:
        return None
    powers = [float(value) for value in (beta1, beta2) if value > SMALLEST_POWER]
    for step in _candidates(powers, expected):
        digits = _DECIMALS_OF_TWO if len(powers) > 1 else _DECIMALS_OF_ONE
        betas = [round(value ** (1 / (step + 1)), digits) for value in powers]
        known = Steps(betas[0] if len(powers) > 1 else None, betas[-1], step)
        if all(0 < beta < 1 for beta in betas) and step in known.steps_of(beta1, beta2):
            return known
    return None


def _candidates(powers: Sequence[float], expected: int | None) -> Iterator[int]:
    """Steps after which the values may be powers of decimals, the expected step first."""
    if expected is not None and 0 <= expected < MOST_STEPS:
        yield expected
    exponents = np.arange(1, MOST_STEPS + 1)
    near = np.ones(len(exponents), dtype=bool)
    for value in powers:
        roots = np.round(value ** (1 / exponents), _DECIMALS_OF_TWO if len(powers) > 1 else _DECIMALS_OF_ONE)
        with np.errstate(under="ignore"):
            near &= np.abs(roots**exponents / value - 1) < exponents * 2.0**-23
    yield from np.flatnonzero(near).tolist()


def _powers(beta: float) -> npt.NDArray[np.float32]:
    """The power after every step, multiplied in float32 one step at a time."""
    with np.errstate(under="ignore"):
        return np.multiply.accumulate(np.full(MOST_STEPS, beta, dtype=np.float32))


def _refuse_pair(powers: Powers, known: Steps) -> None:
    raise CoverageError(
        f"{powers.key} ({BETA1}, {BETA2})",
        f"{powers.beta1!s} and {powers.beta2!s} are not powers of {known} after the same number of steps, unlike those "
        "of the remaining parameters",
        (powers.path,),
    )


def _refuse_files(steps: Mapping[Powers, int]) -> None:
    """Refuse files of different steps: all parameters in each file agree, but not the files.

    A parameter that started late shares its file with parameters that did not. Experts are ignored, because a file may
    hold a single expert.
    """
    of_file: dict[str, set[int]] = {}
    for powers, step in steps.items():
        if ".experts." not in powers.key:
            of_file.setdefault(powers.path, set()).add(step)
    if any(len(steps_of_file) > 1 for steps_of_file in of_file.values()):
        return
    by_path = sorted((path, next(iter(steps_of_file))) for path, steps_of_file in of_file.items())
    if not by_path:
        return
    first, first_step = by_path[0]
    for path, step in by_path:
        if step != first_step:
            raise CoverageError(
                f"{BETA1}, {BETA2}",
                f"those in {first} are after {first_step} steps, those in {path} after {step}: the files are of "
                "different checkpoints",
                (first, path),
            )


def check_optimizer(store: Source, checkpoint: Checkpoint) -> None:
    """Refuse optimizer states of different steps, or of a different step than the schedule.

    With a gradient scaler, which skips steps that overflow, the optimizer may be behind the schedule.
    """
    # One parameter under the keys of two is updated twice a step, and one without a gradient only in some jobs.
    apart = {tensor.key for tensor in checkpoint.model.tensors if tensor.rule.states_if_sharded}
    powers = [pair for pair in read_powers(store, checkpoint.catalog) if pair.key not in apart]
    scheduled, skips = scheduled_step(checkpoint.job.lr_scheduler), SCALER in store.sizes()
    check_powers(powers, scheduled, skips, checkpoint.model.table.scheduler_ahead)
