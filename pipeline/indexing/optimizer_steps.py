"""After how many steps were the optimizer's states saved? What the powers of its betas tell, and whether they agree.

Adam, AdamW and Lamb store ``beta1_pow_acc`` and ``beta2_pow_acc`` for every parameter: beta at first, and multiplied by
beta in float32 at every step that the parameter takes part in (Paddle 3.3 ``phi/kernels/cpu/adam_kernel.cc``). So both
are powers of one exponent, steps + 1. A parameter takes part from its first gradient on: an expert that got no tokens
at first, or the image tower of a model that was first trained on texts, is rightly behind all others by whole steps.

No file says the betas. They are found: two values that are, bit for bit, the same power of decimals of at most four
places are no accident, nor is a single one of three. Where none are found nothing is said, nor where the powers have
become too small to tell steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.errors import CoverageError
from paddle_reshard.pipeline.core.tensors import DTYPES
from paddle_reshard.pipeline.indexing.small_files import SCALER
from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint
from paddle_reshard.storage.store import Read, ReadRange, Source

BETA1, BETA2 = "beta1_pow_acc", "beta2_pow_acc"
MOST_STEPS = 100_000
SMALLEST_POWER = 1e-30
"""A power below this is near where float32 ends, and soon the same after every step."""
_DECIMALS_OF_TWO, _DECIMALS_OF_ONE = 4, 3
"""Places of the decimals that betas are looked for among, where two values or only one of them tell."""
MOST_SCALARS = 4096
"""How many are read; of more, evenly spread ones."""
_WIDTH = 4
GAP_BYTES, SPAN_BYTES, SPANS_AT_A_TIME = 64 << 10, 256 << 10, 64
"""Values that lie so close are read together, no more than so many bytes at once: 16 MiB at a time."""


@dataclass(frozen=True, slots=True)
class Powers:
    """The stored powers of one parameter, and their location."""

    key: str
    path: str
    beta1: np.float32
    beta2: np.float32

    @property
    def values(self) -> tuple[bytes, bytes]:
        """Both, by their bits."""
        return self.beta1.tobytes(), self.beta2.tobytes()


@dataclass(frozen=True, slots=True)
class Steps:
    """The betas that were found, and the step of the most parameters."""

    beta1: float | None
    """``None`` where its power has become too small to tell."""
    beta2: float
    step: int

    def __str__(self) -> str:
        return f"{self.beta2:g}" if self.beta1 is None else f"{self.beta1:g} and {self.beta2:g}"


def check_optimizer_steps(source: ReadRange, catalog: Catalog, scheduled: int | None) -> None:
    """Refuse optimizer states of different steps, or of another one than the learning-rate schedule's.

    ``scheduled`` is the schedule's step, ``None`` where it is not known or need not be the optimizer's.

    Raises
    ------
    CoverageError
        Naming the tensor, both values and the file.
    """
    check_powers(read_powers(source, catalog), scheduled)


def check_powers(powers: list[Powers], scheduled: int | None) -> None:
    """The same, of what has been read."""
    counts = Counter(p.values for p in powers)
    first = {p.values: p for p in reversed(powers)}
    known = None
    for values, _ in counts.most_common():
        if known := find_steps(first[values].beta1, first[values].beta2, scheduled):
            break
    if known is None:
        return
    steps = {values: _step_of(one, known) for values, one in first.items()}
    for values, step in steps.items():
        if step is None:
            _refuse_pair(first[values], known)
    _refuse_files({p: steps[p.values] for p in powers})
    latest = max(first, key=lambda values: steps[values] or 0)
    if scheduled is not None and not _fits(first[latest].beta1, first[latest].beta2, known, scheduled):
        raise CoverageError(
            f"{first[latest].key} ({BETA1}, {BETA2})",
            f"{first[latest].beta1!s} and {first[latest].beta2!s} are the powers of {known} after "
            f"{steps[latest]} steps, the learning-rate schedule is at step {scheduled}: the two are not of one "
            "checkpoint",
            (first[latest].path,),
        )


def read_powers(source: ReadRange, catalog: Catalog) -> list[Powers]:
    """Both powers of every parameter that has both as float32, from their first copies."""
    place = {
        (key, state): i for state in (BETA1, BETA2) for key, i in catalog.tensors.of_state(state).items()
    }
    keys = sorted({key for key, _ in place})
    keys = keys[:: -(-len(keys) // (MOST_SCALARS // 2)) or 1]
    wanted = {
        place[key, state]: (key, state) for key in keys for state in (BETA1, BETA2) if (key, state) in place
    }
    rows = catalog.fragments[np.isin(catalog.fragments["tensor"], list(wanted))]
    rows = rows[(rows["replica"] == 0) & (rows["dtype"] == _float32())]
    rows = rows[np.lexsort((rows["byte_base"], rows["file"]))]
    files = [catalog.files[number].path for number in rows["file"]]
    found = _read_scalars(source, files, rows["byte_base"].tolist())
    values = {
        wanted[int(row["tensor"])]: (value, path) for row, value, path in zip(rows, found, files, strict=True)
    }
    return [
        Powers(key, values[key, BETA1][1], values[key, BETA1][0], values[key, BETA2][0])
        for key in keys
        if (key, BETA1) in values and (key, BETA2) in values
    ]


def _read_scalars(source: ReadRange, files: Sequence[str], starts: Sequence[int]) -> list[np.float32]:
    """A float32 of each file and byte offset, in ascending order; what lies close together is read at once."""
    spans: list[list[int]] = []  # indices into files and starts
    for i, (path, start) in enumerate(zip(files, starts, strict=True)):
        joins = (
            i > 0
            and path == files[i - 1]
            and start - starts[i - 1] <= GAP_BYTES
            and start - starts[spans[-1][0]] < SPAN_BYTES
        )
        spans[-1].append(i) if joins else spans.append([i])
    found: list[np.float32] = []
    for first in range(0, len(spans), SPANS_AT_A_TIME):
        batch = spans[first : first + SPANS_AT_A_TIME]
        buffers = [bytearray(starts[span[-1]] + _WIDTH - starts[span[0]]) for span in batch]
        source.read_many(
            [
                Read(files[span[0]], starts[span[0]], memoryview(buffer))
                for span, buffer in zip(batch, buffers, strict=True)
            ]
        )
        for span, buffer in zip(batch, buffers, strict=True):
            found += [np.frombuffer(buffer, "<f4", 1, starts[i] - starts[span[0]])[0] for i in span]
    return found


def _float32() -> int:
    return next(number for number, dtype in enumerate(DTYPES) if dtype.name == "float32")


def find_steps(beta1: np.float32, beta2: np.float32, expected: int | None) -> Steps | None:
    """Betas of which the two values are one power; ``expected`` is the step that is tried first.

    >>> find_steps(np.float32(0.6560999), np.float32(0.81450623), None)
    Steps(beta1=0.9, beta2=0.95, step=3)
    """
    if not SMALLEST_POWER < beta2 < 1 or not 0 <= beta1 < 1:
        return None
    powers = [float(value) for value in (beta1, beta2) if value > SMALLEST_POWER]
    for step in _candidates(powers, expected):
        places = _DECIMALS_OF_TWO if len(powers) > 1 else _DECIMALS_OF_ONE
        betas = [round(value ** (1 / (step + 1)), places) for value in powers]
        known = Steps(betas[0] if len(powers) > 1 else None, betas[-1], step)
        if all(0 < beta < 1 for beta in betas) and _fits(beta1, beta2, known, step):
            return known
    return None


def _candidates(powers: Sequence[float], expected: int | None) -> Iterator[int]:
    """Steps after which the values may be powers of decimals, the expected one first."""
    if expected is not None and 0 <= expected < MOST_STEPS:
        yield expected
    exponents = np.arange(1, MOST_STEPS + 1)
    near = np.ones(len(exponents), dtype=bool)
    for value in powers:
        roots = np.round(value ** (1 / exponents), _DECIMALS_OF_TWO if len(powers) > 1 else _DECIMALS_OF_ONE)
        with np.errstate(under="ignore"):
            near &= np.abs(roots**exponents / value - 1) < exponents * 2.0**-23
    yield from np.flatnonzero(near).tolist()


def _powers(beta: float, step: int) -> npt.NDArray[np.float32]:
    """The value after every step up to ``step``: multiplied in float32, one by one."""
    with np.errstate(under="ignore"):
        return np.multiply.accumulate(np.full(step + 1, beta, dtype=np.float32))


def _fits(beta1: np.float32, beta2: np.float32, known: Steps, step: int) -> bool:
    """Whether the values are those after this number of steps."""
    if not 0 <= step < MOST_STEPS:
        return False
    first = known.beta1 is None or _powers(known.beta1, step)[step] == beta1
    return bool(first and _powers(known.beta2, step)[step] == beta2)


def _step_of(one: Powers, known: Steps) -> int | None:
    """After how many steps both powers of a parameter are what they are; ``None``: after none."""
    same = _powers(known.beta2, MOST_STEPS - 1) == one.beta2
    if known.beta1 is not None:
        same &= _powers(known.beta1, MOST_STEPS - 1) == one.beta1
    found = np.flatnonzero(same)
    return int(found[0]) if len(found) else None


def _refuse_pair(one: Powers, known: Steps) -> None:
    raise CoverageError(
        f"{one.key} ({BETA1}, {BETA2})",
        f"{one.beta1!s} and {one.beta2!s} are not the powers of {known} after one number of steps, as those "
        "of other parameters are",
        (one.path,),
    )


def _refuse_files(steps: Mapping[Powers, int | None]) -> None:
    """Refuse files each of which is of one step, and not all of the same one.

    A parameter that has begun late lies beside others that have not; but for experts, of which a file may hold one.
    """
    of_file: dict[str, set[int | None]] = {}
    for one, step in steps.items():
        if ".experts." not in one.key:
            of_file.setdefault(one.path, set()).add(step)
    if any(len(found) > 1 for found in of_file.values()):
        return
    told = sorted((path, next(iter(found))) for path, found in of_file.items())
    odd = next(((path, step) for path, step in told if step != told[0][1]), None)
    if odd is not None:
        raise CoverageError(
            f"{BETA1}, {BETA2}",
            f"all of {told[0][0]} are those after {told[0][1]} steps, all of {odd[0]} those after {odd[1]}: the files "
            "are not of one checkpoint",
            (told[0][0], odd[0]),
        )


def check_optimizer(store: Source, checkpoint: Checkpoint) -> None:
    """Refuse optimizer states of another step than the schedule's, or of several: by the powers of their betas.

    Beside a scaler of gradients, of which some overflow, the schedule's step need not be the optimizer's.

    Raises
    ------
    CoverageError
        Naming the tensor, both values and the file.
    """
    schedule = checkpoint.lr_scheduler
    step = schedule.get("last_epoch") if isinstance(schedule, dict) else None
    known = type(step) is int and SCALER not in store.sizes()
    check_optimizer_steps(store, checkpoint.catalog, step if known else None)
