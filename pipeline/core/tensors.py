"""Logical tensors, and the dtypes of their elements.

A logical tensor is a ``(key, state)``: ``model.norm.weight`` as parameter, as master weight, as first
moment. Dtypes are what the values mean; ``code`` is how NumPy spells the stored bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.geometry import MAX_DIMS, Shape

PARAM = "param"
MASTER_WEIGHT = "master_weight"
EMA_PARAM = "ema_param"
EMA_MASTER_WEIGHT = "ema_master_weight"
MEAN_MOMENT2 = "mean_moment2"
"""``moment2`` of AdamWMini: that of the mean of all squared gradients of a parameter, one number."""
EMA_STATES = (EMA_MASTER_WEIGHT, EMA_PARAM)
EMA = "ema"
"""The moving average, as users name it."""
MTP = "mtp"
"""The layers of multi-token prediction, as users name them."""
HEAD = "head"
"""A head that only jobs with pipeline stages train apart from the word embedding, as users name it."""
DROPPABLE: dict[str, tuple[str, ...]] = {EMA: EMA_STATES, MTP: (), HEAD: ()}
"""Name of a droppable part → its states; those of MTP and of a head are all states of some parameters. Training can go
on without it, but it is lost."""


@dataclass(frozen=True, slots=True)
class Accumulator:
    """A kind of optimizer state. ``per_parameter`` ones are a single number, copied to every rank."""

    name: str
    per_parameter: bool
    of_elements: bool = True
    """Whether a piece of a parameter has a state of its own: elements, or a number that they make."""
    written: str = ""
    """What files call it, where that is not its name."""


# Paddle 3.3 optimizer/{adam,adamw,lamb,momentum}.py: the ones whose pieces follow the parameter's own cut.
ACCUMULATORS = {
    accumulator.name: accumulator
    for accumulator in (
        Accumulator("moment1", False),
        Accumulator("moment2", False),
        Accumulator("moment2_max", False),
        Accumulator("velocity", False),
        Accumulator(MEAN_MOMENT2, True, written="moment2"),
        Accumulator("beta1_pow_acc", True, of_elements=False),
        Accumulator("beta2_pow_acc", True, of_elements=False),
    )
}
_PER_PARAMETER = frozenset(name for name, accumulator in ACCUMULATORS.items() if accumulator.per_parameter)
WRITTEN_NAMES = tuple(dict.fromkeys(a.written or a.name for a in ACCUMULATORS.values()))
"""What files call optimizer states."""


def in_words(states: Iterable[str]) -> str:
    """States as a list for people, whose optimizer states other than master weights are moments.

    >>> in_words(("param", "moment1", "moment2", "beta1_pow_acc", "ema_master_weight"))
    'param moments EMA'
    """
    words = {PARAM: PARAM, MASTER_WEIGHT: "master", **dict.fromkeys(EMA_STATES, "EMA")}
    held = {words.get(state, "moments") for state in states}
    return " ".join(word for word in (PARAM, "master", "moments", "EMA") if word in held)


def is_per_parameter(state: str) -> bool:
    """Whether a state is one number for each parameter.

    >>> is_per_parameter("beta1_pow_acc"), is_per_parameter("moment1")
    (True, False)
    """
    return state in _PER_PARAMETER


def written_name(state: str) -> str:
    """The name of a state in files.

    >>> written_name("moment1"), written_name("mean_moment2")
    ('moment1', 'moment2')
    """
    return ACCUMULATORS[state].written or state


Cast = tuple[str, str]
"""Names of the dtype that values are stored as, and of the one that they become."""


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: its name, NumPy's code of the stored bytes, and its size."""

    name: str
    code: str
    itemsize: int


DTYPES: tuple[DType, ...] = (
    DType("float32", "f4", 4),
    DType("bfloat16", "u2", 2),  # Paddle stores the bit pattern as uint16
    DType("float16", "f2", 2),
    DType("float64", "f8", 8),
    DType("int64", "i8", 8),
    DType("int32", "i4", 4),
    DType("int16", "i2", 2),
    DType("int8", "i1", 1),
    DType("uint8", "u1", 1),
    DType("bool", "b1", 1),
)
_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
_BY_CODE = {dtype.code: dtype for dtype in DTYPES}
_NUMBERS = {dtype.name: number for number, dtype in enumerate(DTYPES)}

# int(tensor.dtype) as written into model_meta.json: phi codes since Paddle 3.0, VarType codes before.
# Seen by running paddlepaddle 3.3.1 and 2.6.2. The two ranges overlap only in codes of integers.
_PHI_CODES = {
    1: "bool", 2: "uint8", 3: "int8", 5: "int16", 7: "int32", 9: "int64",
    10: "float32", 11: "float64", 15: "float16", 16: "bfloat16",
}  # fmt: skip
_PHI_CODE_OF = {name: code for code, name in _PHI_CODES.items()}
_VARTYPE_CODES = {4: "float16", 6: "float64", 22: "bfloat16"}


def dtype_number(dtype: DType) -> int:
    """Index into ``DTYPES``."""
    return _NUMBERS[dtype.name]


def dtype_named(name: str) -> DType:
    """The dtype called ``name``; refuses names that no checkpoint of ours can hold."""
    if name not in _BY_NAME:
        raise CheckpointError(f"dtype {name!r} is not supported; known: {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def dtype_of_code(code: str, where: str) -> DType:
    """The dtype that a stored NumPy code stands for; ``u2`` is always bfloat16 in these files."""
    if code not in _BY_CODE:
        raise CheckpointError(f"{where}: arrays of NumPy type {code!r} are not supported")
    return _BY_CODE[code]


def dtype_of_meta(code: int, where: str) -> DType:
    """The dtype of an integer code in ``model_meta.json`` (floating dtypes of either numbering)."""
    name = _PHI_CODES.get(code) or _VARTYPE_CODES.get(code)
    if name is None or (code == 5):  # 5 is int16 (phi) or float32 (VarType): no parameter is int16
        name = "float32" if code == 5 else None
    if name is None:
        raise CheckpointError(f"{where}: dtype code {code} of model_meta.json is not known")
    return _BY_NAME[name]


def phi_code(dtype: DType) -> int:
    """The code of a dtype in the ``model_meta.json`` of Paddle 3.0 and later."""
    return _PHI_CODE_OF[dtype.name]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One logical tensor.

    ``aliases`` are other structured names of the same values (tied weights).
    """

    key: str
    state: str
    dtype: DType
    global_shape: Shape
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.global_shape) > MAX_DIMS:
            raise CheckpointError(
                f"{self.label}: {len(self.global_shape)} dims, at most {MAX_DIMS} are supported"
            )
        if any(extent < 0 for extent in self.global_shape):
            raise CheckpointError(f"{self.label}: negative extent in shape {self.global_shape}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without a dict of fields, which takes three times as long: workers are sent very many tensors."""
        return Tensor, (self.key, self.state, self.dtype, self.global_shape, self.aliases)

    @property
    def label(self) -> str:
        """How people read it: ``model.norm.weight (moment1)``."""
        return f"{self.key} ({self.state})"

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.global_shape)

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return self.elements * self.dtype.itemsize
