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
from functools import partial
from typing import Any, Final

from paddle_reshard.pipeline.checkpoint.stored_tensors import Integers, Scheme, ServedTensor, StoredTensors
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


def integer_scheme(entries: Mapping[str, Any]) -> Scheme:
    """How weights are stored, given ``quantization_config`` of a compressed-tensors checkpoint.

    An ``UnsupportedError`` names the entry by which they are stored in another way.
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
    ((bits, group),) = kinds
    return Scheme(
        METHOD,
        f"INT{bits}",
        "row" if group is None else f"{group} elements of a row",
        stored=PACKED if packed else WEIGHT,
        served=WEIGHT,
        companions=(SCALE, SHAPE) if packed else (SCALE,),
        tag=None if packed else "I8",
        weight=partial(_weight, bits, group, packed),
    )


def _unsupported(given: str, supported: str) -> UnsupportedError:
    return UnsupportedError(
        f"{CONFIG}: quantization_config of {METHOD} has {given}; supported: {supported}. Convert the unquantised model"
    )


def _scheme(group: object, packed: bool) -> tuple[int, int | None]:
    """Bits of an integer, 4 or 8, and the columns that share a scale; ``None``: all of a row."""
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
        return entries["num_bits"], None
    if type(size) is not int or size < 1:
        raise _unsupported(f"group_size {size!r}", "a positive number")
    return entries["num_bits"], size


def refuse_further_tensors(held: Mapping[str, str]) -> None:
    """Raise ``UnsupportedError`` for tensors without which integers cannot be dequantised, ``held`` key → path."""
    for key in sorted(held):
        for ending, words in _REFUSED.items():
            if key.endswith(ending):
                raise UnsupportedError(
                    f"{key} in {held[key]}: {words} of {METHOD} are not supported. Convert the unquantised model"
                )


def shape_keys(payloads: Mapping[str, SafetensorsPayload]) -> dict[str, str]:
    """Key → path of every tensor that holds the shape of a packed weight, which must be two integers."""
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


def _weight(
    bits: int, group: int | None, packed: bool, stored: str, key: str, tensors: StoredTensors
) -> ServedTensor:
    """A weight of integers, as :func:`integer_scheme` tells how it is stored."""
    path, array, tag = tensors.held[stored], tensors.array(stored), tensors.tag(stored)
    if len(array.shape) != 2:
        raise UnsupportedError(
            f"{stored}: quantised weights of shape {array.shape} in {path}; only matrices are supported"
        )
    name = key.removesuffix(WEIGHT)
    rows, width = shape = _packed_shape(stored, name + SHAPE, tensors) if packed else array.shape[:2]
    expected = ("I32", (rows, -(-width * bits // 32))) if packed else ("I8", shape)
    if (tag, array.shape) != expected:
        raise CoverageError(
            stored,
            f"{tag} of shape {array.shape}, but {bits}-bit integers of a weight of shape {shape} are "
            f"{expected[0]} of shape {expected[1]}",
            (path,),
        )
    columns, rest = (1, 0) if group is None else divmod(width, group)
    if rest:
        raise CoverageError(stored, f"{width} columns cannot be divided into groups of {group}", (path,))
    scales = tensors.scales(name + SCALE, stored, shape, (rows, columns), _CODES)
    row_bytes = array.shape[1] * (4 if packed else 1)
    integers = Integers(*scales, columns, width, group or max(1, width), bits, row_bytes, packed)
    return ServedTensor(key, shape, tensors.tag(name + SCALE), integers)


def _packed_shape(stored: str, key: str, tensors: StoredTensors) -> tuple[int, int]:
    """The shape that a packed weight is served with, from the tensor ``key``."""
    if key not in tensors.held:
        raise CoverageError(key, f"no file holds the shape of {stored}", (tensors.held[stored],))
    if min(tensors.shapes[key]) < 0:
        raise CoverageError(key, f"the shape {tensors.shapes[key]} of {stored}", (tensors.held[key],))
    return tensors.shapes[key]
