"""Weights of compressed-tensors checkpoints that are stored as integers, with a scale for each group of columns.

llm-compressor and vLLM write this format, and Kimi-K2-Thinking's experts are published in it: 4-bit integers, eight in
an int32, the first in its lowest bits; rows are filled up to whole int32s::

    model.layers.1.mlp.experts.0.up_proj.weight_packed   I32   [2048, 896]     bfloat16: up_proj.weight [2048, 7168]
    model.layers.1.mlp.experts.0.up_proj.weight_scale    BF16  [2048, 224]     one for each 32 columns
    model.layers.1.mlp.experts.0.up_proj.weight_shape    I32   [2]             2048, 7168

The format ``pack-quantized`` adds 8 to integers of 4 bits and 128 to those of 8 before it packs them. ``int-quantized``
stores 8 bits as they are, as ``weight``, without ``weight_shape``. Both are as in compressed-tensors 0.20.0
(``compressors/pack_quantized``, ``compressors/naive_quantized``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from paddle_reshard.pipeline.checkpoint.stored_tensors import StoredTensors
from paddle_reshard.pipeline.core.errors import CoverageError, UnsupportedError
from paddle_reshard.pipeline.core.file_names import CONFIG
from paddle_reshard.storage.files.safetensors import SafetensorsPayload

METHOD: Final = "compressed-tensors"
"""Value of ``quant_method``."""
PACKED, SCALE, SHAPE, WEIGHT = ".weight_packed", ".weight_scale", ".weight_shape", ".weight"
"""Ends of keys: packed integers, their scales and shape; integers as they are, and the weight as it is served."""
PACK_QUANTIZED, INT_QUANTIZED = "pack-quantized", "int-quantized"
"""Values of ``format``."""
_REFUSED: Final = {
    ".weight_zero_point": "zero points",
    ".weight_g_idx": "columns that GPTQ has grouped by activation",
}
"""End of a key → what is not supported, in words."""
_SUPPORTED: Final[Mapping[str, tuple[object, ...]]] = {
    "type": ("int",),
    "symmetric": (True,),
    "num_bits": (4, 8),
    "strategy": ("group", "channel"),
    "dynamic": (False, None),
    "actorder": (None, False, "weight", "static"),
}
"""Entry of ``weights`` → the values with which integers are what is described above."""
_CODES: Final[Mapping[str, str]] = {"BF16": "<u2", "F16": "<f2"}
"""Tag of scales, in whose dtype compressed-tensors multiplies, and which a weight then has → NumPy's code."""


@dataclass(frozen=True, slots=True)
class IntegerScheme:
    """How the weights of a checkpoint are stored."""

    bits: int
    """4 or 8."""
    group: int | None
    """Columns that share a scale; ``None``: all of a row."""
    packed: bool

    @property
    def stored(self) -> str:
        """What the key of a weight ends with."""
        return PACKED if self.packed else WEIGHT

    @property
    def group_in_words(self) -> str:
        """What has a scale of its own."""
        return "row" if self.group is None else f"{self.group} elements of a row"


class Integers(NamedTuple):
    """The scales of a weight of integers, and how both are stored, in C order."""

    path: str
    """File of the scales."""
    byte_offset: int
    """Where the scales begin."""
    code: str
    """NumPy's code of the stored scales and of the values as they are served: float16, or bfloat16 as bit patterns."""
    columns: int
    """Scales of a row."""
    width: int
    """Columns of the weight."""
    group: int
    """Columns that share a scale."""
    bits: int
    row_bytes: int
    """Stored bytes of a row of integers."""
    packed: bool
    """Whether half their range was added to the integers."""

    def byte_of(self, element: int) -> int:
        """Offset of the stored byte that holds an element, numbered in C order."""
        row, column = divmod(element, self.width)
        return row * self.row_bytes + column * self.bits // 8


class IntegerWeight(NamedTuple):
    """A weight of integers as it is served."""

    shape: tuple[int, int]
    tag: str
    """The dtype of its scales, with which the weight is served."""
    integers: Integers


def integer_scheme(entries: Mapping[str, Any]) -> IntegerScheme:
    """How weights are stored, given ``quantization_config`` of a compressed-tensors checkpoint.

    Raises
    ------
    UnsupportedError
        If they are stored in another way, naming the entry.
    """
    groups = entries.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    formats = {entries.get("format")} | {
        entry.get("format") for entry in schemes if isinstance(entry, Mapping) and entry.get("format")
    }
    if len(formats) != 1 or not formats <= {PACK_QUANTIZED, INT_QUANTIZED}:
        shown = ", ".join(sorted(map(repr, formats)))
        raise _unsupported(f"the format {shown}", f"{PACK_QUANTIZED} or {INT_QUANTIZED}")
    if (status := entries.get("quantization_status", "compressed")) != "compressed":
        raise _unsupported(f"quantization_status {status!r}", "'compressed'")
    sparsity = entries.get("sparsity_config") or {}
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        raise _unsupported("a sparsity_config", "none")
    packed = formats == {PACK_QUANTIZED}
    kinds = {_scheme(entry, packed) for entry in schemes}
    if len(kinds) != 1:
        raise _unsupported(f"{len(kinds)} kinds of weights in config_groups", "one")
    return kinds.pop()


def _unsupported(given: str, supported: str) -> UnsupportedError:
    return UnsupportedError(
        f"{CONFIG}: quantization_config of {METHOD} has {given}; supported: {supported}. Convert the unquantised model"
    )


def _scheme(group: object, packed: bool) -> IntegerScheme:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _unsupported("a config group without weights", "weights of integers")
    size = weights.get("group_size")
    entries = {"type": "int", "symmetric": True, "num_bits": 8, **weights}
    if entries.get("strategy") is None:  # as the library infers it
        entries["strategy"] = "channel" if size == -1 else "tensor" if size is None else "group"
    for entry, values in _SUPPORTED.items():
        value = entries.get(entry)
        if not any(value == known and type(value) is type(known) for known in values):
            raise _unsupported(f"{entry} {value!r}", " or ".join(repr(v) for v in values if v is not None))
    if not packed and entries["num_bits"] != 8:
        raise _unsupported(f"num_bits {entries['num_bits']!r} with {INT_QUANTIZED}", "8")
    if entries["strategy"] == "channel":
        return IntegerScheme(entries["num_bits"], None, packed)
    if type(size) is not int or size < 1:
        raise _unsupported(f"group_size {size!r}", "a positive number")
    return IntegerScheme(entries["num_bits"], size, packed)


def refuse_further_tensors(held: Mapping[str, str]) -> None:
    """Raise ``UnsupportedError`` for tensors without which integers cannot be dequantised, ``held`` key → path."""
    for key in sorted(held):
        for ending, words in _REFUSED.items():
            if key.endswith(ending):
                raise UnsupportedError(
                    f"{key} in {held[key]}: {words} of {METHOD} are not supported. Convert the unquantised model"
                )


def shape_keys(payloads: Mapping[str, SafetensorsPayload]) -> dict[str, str]:
    """Key → path of every tensor that holds the shape of a packed weight.

    Raises
    ------
    CoverageError
        If one is not two integers.
    """
    paths = {}
    for path, payload in payloads.items():
        for key, array in payload.tensors.items():
            if key.endswith(SHAPE):
                if payload.tags[key] not in ("I32", "I64") or array.shape != (2,):
                    raise CoverageError(
                        key, f"{payload.tags[key]} of shape {array.shape}, expected two integers", (path,)
                    )
                paths[key] = path
    return paths


def integer_weight(
    stored: str, scheme: IntegerScheme, tensors: StoredTensors, shapes: Mapping[str, tuple[int, int]]
) -> IntegerWeight:
    """The weight that is stored under the key ``stored``; ``shapes`` are the values that :func:`shape_keys` locates.

    Raises
    ------
    CoverageError
        If its scales or its shape are missing, or dtypes and shapes do not match.
    UnsupportedError
        If it is not a matrix.
    """
    path, array, tag = tensors.held[stored], tensors.array(stored), tensors.tag(stored)
    if len(array.shape) != 2:
        raise UnsupportedError(
            f"{stored}: quantised weights of shape {array.shape} in {path}; only matrices are supported"
        )
    name = stored.removesuffix(scheme.stored)
    shape = _packed_shape(stored, name + SHAPE, tensors, shapes) if scheme.packed else array.shape[:2]
    words = -(-shape[1] * scheme.bits // 32)
    expected = ("I32", (shape[0], words)) if scheme.packed else ("I8", shape)
    if (tag, array.shape) != expected:
        raise CoverageError(
            stored,
            f"{tag} of shape {array.shape}, but {scheme.bits}-bit integers of a weight of shape {shape} are "
            f"{expected[0]} of shape {expected[1]}",
            (path,),
        )
    group = scheme.group or max(1, shape[1])
    if shape[1] % group:
        raise CoverageError(stored, f"{shape[1]} columns cannot be divided into groups of {group}", (path,))
    columns = 1 if scheme.group is None else shape[1] // group
    scales = tensors.scales(name + SCALE, stored, shape, (shape[0], columns), _CODES)
    row_bytes = array.shape[1] * (4 if scheme.packed else 1)
    integers = Integers(*scales, columns, shape[1], group, scheme.bits, row_bytes, scheme.packed)
    return IntegerWeight((shape[0], shape[1]), tensors.tag(name + SCALE), integers)


def _packed_shape(
    stored: str, key: str, tensors: StoredTensors, shapes: Mapping[str, tuple[int, int]]
) -> tuple[int, ...]:
    """The shape that a packed weight is served with, from the tensor ``key``."""
    if key not in tensors.held:
        raise CoverageError(key, f"no file holds the shape of {stored}", (tensors.held[stored],))
    if min(shapes[key]) < 0:
        raise CoverageError(key, f"the shape {shapes[key]} of {stored}", (tensors.held[key],))
    return shapes[key]
