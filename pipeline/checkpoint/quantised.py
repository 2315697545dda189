"""Hugging Face checkpoints with quantised weights: the files that the same model would have in bfloat16.

DeepSeek-V3 and many models since then store the weights of linear layers as 8-bit floats (e4m3), with a scale for each
block of 128 × 128 elements::

    model.layers.0.mlp.up_proj.weight              F8_E4M3  [300, 200]
    model.layers.0.mlp.up_proj.weight_scale_inv    F32      [3, 2]

gpt-oss stores the experts of a layer as MXFP4: 4-bit floats (e2m1), two in a byte, with a scale (a power of two, e8m0)
for each 32 of them along a row, and the rows are the columns of the tensor that ``transformers`` has::

    model.layers.0.mlp.experts.down_proj_blocks    U8  [32, 2880, 90, 16]    bfloat16: down_proj [32, 2880, 2880]
    model.layers.0.mlp.experts.down_proj_scales    U8  [32, 2880, 90]

Integers with scales, as compressed-tensors stores them, are described in :mod:`.integers`.

Here such files are laid out again, with these weights in bfloat16 (or float16, if the scales of integers are) and
without scales. Nothing is computed: ``tasks/dequantise.py`` serves these files, a range at a time.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from paddle_reshard.pipeline.checkpoint import integers
from paddle_reshard.pipeline.checkpoint.integers import Integers, IntegerScheme
from paddle_reshard.pipeline.checkpoint.quantising import BLOCK
from paddle_reshard.pipeline.core.errors import CoverageError, UnsupportedError
from paddle_reshard.pipeline.core.file_names import CONFIG, WEIGHT_INDEX
from paddle_reshard.storage.files.safetensors import (
    FP8_TAG,
    Index,
    SafetensorsPayload,
    TensorSlot,
    encode_safetensors,
    format_index,
)

SCALES: Final = "_scale_inv"
"""What a tensor of scales has behind the key of its weight."""
QUANTIZATION: Final = "quantization_config"
"""Entry of ``config.json``."""
_METHOD: Final = "quant_method"
FP8, MXFP4, INTEGERS = "fp8", "mxfp4", integers.METHOD
"""Values of ``quant_method``."""
PACKED, PACKED_SCALES = "_blocks", "_scales"
"""What MXFP4 values and their scales have behind the key of their tensor."""
GROUP: Final = 32
"""MXFP4 values that share a scale."""
GROUP_BYTES: Final = GROUP // 2
_BYTE: Final = "U8"
_SUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "weight_block_size": ([BLOCK, BLOCK],),
    "fmt": (None, "e4m3"),
    "activation_scheme": (None, "dynamic"),
}
"""Entry of ``quantization_config`` → the values with which weights are what is described above."""
_SCALE_CODES: Final[Mapping[str, str]] = {"F32": "<f4", "BF16": "<u2"}
_BFLOAT16: Final = "BF16"
_DTYPES: Final[Mapping[str, str]] = {"BF16": "bfloat16", "F16": "float16"}
"""Tag of a weight as it is served → dtype in ``config.json``."""


def fp8_config(not_converted: Sequence[str]) -> dict[str, Any]:
    """``quantization_config`` of a model with FP8 weights, with the names of modules whose weights keep their dtype.

    The entries are DeepSeek-V3's, and ``modules_to_not_convert``, which ``transformers`` and vLLM read.
    """
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": list(not_converted),
        _METHOD: "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }


class Scales(NamedTuple):
    """The scales of a weight: a matrix in C order, one row for each 128 rows of the weight."""

    path: str
    byte_offset: int
    code: str
    """NumPy's code of the stored bytes: float32, or bfloat16 as bit patterns."""
    columns: int
    width: int
    """Columns of the weight."""


class Packed(NamedTuple):
    """The scales of MXFP4 experts, and how those are stored: ``[experts, columns, groups, 16]``, all in bytes."""

    path: str
    """File of the scales, ``[experts, columns, groups]``."""
    byte_offset: int
    columns: int
    """Columns of an expert as it is served."""
    groups: int
    """Groups of 32 rows of an expert as it is served."""


class Section(NamedTuple):
    """The payload of a tensor in a file as it is served."""

    start: int
    """Byte offset in the file as it is served."""
    stop: int
    byte_offset: int
    """Where the stored bytes begin; fewer than are served, if they are quantised."""
    scales: Scales | Packed | Integers | None
    """``None``: the bytes are served as they are stored."""


@dataclass(frozen=True, slots=True)
class ServedFile:
    """A safetensors file as it is served: a header, then sections without gaps."""

    size_bytes: int
    header: bytes
    sections: tuple[Section, ...]


@dataclass(frozen=True, slots=True)
class Dequantised:
    """The files of a checkpoint that are served with other contents than are stored."""

    files: Mapping[str, ServedFile]
    """Path → a safetensors file with quantised weights or scales."""
    made: Mapping[str, bytes]
    """Path → content of ``config.json`` and the index."""
    summary: str
    """What is dequantised, in words."""


def quantisation_of(config: Mapping[str, Any]) -> str | None:
    """``quant_method`` of the weights according to ``config.json``, one that is supported; ``None``: not quantised.

    Paddle's own ``quantization_config`` has no ``quant_method``, or ``null``: it says how a job trains, not what is
    stored.

    Raises
    ------
    UnsupportedError
        If it announces weights quantised in another way, naming the entry.
    """
    entries = config.get(QUANTIZATION)
    method = entries.get(_METHOD) if isinstance(entries, Mapping) else None
    if not isinstance(entries, Mapping) or method is None:
        return None
    if method == MXFP4:
        return MXFP4
    if method == INTEGERS:
        integers.integer_scheme(entries)
        return INTEGERS
    if method != FP8:
        raise UnsupportedError(
            f"{CONFIG}: the weights are quantised with {_METHOD} {method!r}; supported are {FP8}, with a scale for "
            f"each block of {BLOCK} × {BLOCK} elements, {MXFP4}, and integers of {INTEGERS}. Convert the unquantised "
            "model"
        )
    for entry, values in _SUPPORTED.items():
        if (value := entries.get(entry)) not in values:
            raise UnsupportedError(
                f"{CONFIG}: {QUANTIZATION} has {entry} {value!r}; supported: {values[-1]!r}. Convert the unquantised "
                "model"
            )
    return FP8


def dequantised(
    payloads: Mapping[str, SafetensorsPayload],
    index: Index | None,
    config: Mapping[str, Any],
    method: str,
    shapes: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> Dequantised | None:
    """Lay out the files with dequantised weights; ``None`` if there are neither quantised weights nor scales.

    Parameters
    ----------
    payloads
        Path → header of every safetensors file.
    index
        ``model.safetensors.index.json``, if there is one.
    config
        ``config.json``.
    method
        Result of :func:`quantisation_of`.
    shapes
        Key → values of the tensors that :func:`.integers.shape_keys` finds.

    Raises
    ------
    CheckpointError
        If a weight lacks its scales, scales lack their weight, two files hold either, or shapes or dtypes do not match.
    UnsupportedError
        If the model is meant to be used in another dtype than that of the values, or a weight is not a matrix.
    """
    held = {key: path for path, payload in payloads.items() for key in payload.tensors}
    scheme = integers.integer_scheme(config[QUANTIZATION]) if method == INTEGERS else None
    named, companions = _weights_and_companions(payloads, held, method, scheme)
    if not named and not companions:
        return None
    _check_once(held, payloads)
    _check_companions(companions, named, held, payloads, method)
    weights = {
        stored: _weight(stored, key, held, payloads, method, scheme, shapes) for stored, key in named.items()
    }
    for stored, weight in weights.items():
        if weight.key != stored and weight.key in held:
            raise CoverageError(weight.key, "stored both packed and as it is", (held[weight.key],))
    for weight in weights.values():
        _check_dtype(weight, config, method)
    changed = {*weights, *companions}
    files = {
        path: _served(payload, weights, companions)
        for path, payload in payloads.items()
        if not changed.isdisjoint(payload.tensors)
    }
    unquantised = {key: value for key, value in config.items() if key != QUANTIZATION}
    made = {CONFIG: json.dumps(unquantised, ensure_ascii=False, indent=2).encode()}
    if index is not None:
        total_bytes = _tensor_bytes(payloads, files)
        made[WEIGHT_INDEX] = format_index(_index_as_served(index, held, companions, weights, total_bytes))
    dtypes = " and ".join(sorted({_DTYPES[weight.tag] for weight in weights.values()}))
    summary = f"{len(weights)} {_kind(method, scheme)} weights, to {dtypes}, with a scale for each "
    return Dequantised(files, made, summary + _scaled(method, scheme))


class _Weight(NamedTuple):
    """A quantised weight as it is served."""

    key: str
    shape: tuple[int, ...]
    scales: Scales | Packed | Integers
    tag: str = _BFLOAT16


def _kind(method: str, scheme: IntegerScheme | None) -> str:
    """What a stored value is, in words."""
    return method.upper() if scheme is None else f"INT{scheme.bits}"


def _scaled(method: str, scheme: IntegerScheme | None) -> str:
    """What has a scale of its own, in words."""
    if scheme is not None:
        return scheme.group_in_words
    return f"{BLOCK} × {BLOCK} elements" if method == FP8 else f"{GROUP} elements"


def _stored_tag(method: str) -> str:
    return "I8" if method == INTEGERS else "FP8"


def _weights_and_companions(
    payloads: Mapping[str, SafetensorsPayload],
    held: Mapping[str, str],
    method: str,
    scheme: IntegerScheme | None,
) -> tuple[dict[str, str], dict[str, str]]:
    """Keys of quantised weights as stored → as served; keys of scales and shapes → of the weight as stored."""
    if scheme is not None:
        integers.refuse_further_tensors(held)
        named = {
            key: key.removesuffix(scheme.stored) + integers.WEIGHT
            for key, path in held.items()
            if key.endswith(scheme.stored) and (scheme.packed or payloads[path].tags[key] == "I8")
        }
        endings = (integers.SCALE, integers.SHAPE) if scheme.packed else (integers.SCALE,)
        companions = {
            key: key.removesuffix(ending) + scheme.stored
            for key in held
            for ending in endings
            if key.endswith(ending)
        }
        return named, companions
    if method == FP8:
        named = {key: key for key, path in held.items() if payloads[path].tags[key] == FP8_TAG}
        return named, {key: key.removesuffix(SCALES) for key in held if key.endswith(SCALES)}
    named = {key: key.removesuffix(PACKED) for key in held if key.endswith(PACKED)}
    ending = PACKED_SCALES
    return named, {key: key.removesuffix(ending) + PACKED for key in held if key.endswith(ending)}


def _weight(
    stored: str,
    key: str,
    held: Mapping[str, str],
    payloads: Mapping[str, SafetensorsPayload],
    method: str,
    scheme: IntegerScheme | None,
    shapes: Mapping[str, tuple[int, int]],
) -> _Weight:
    if scheme is None:
        return (_scales if method == FP8 else _packed)(stored, key, held, payloads)
    shape, tag, arrays = integers.integer_weight(stored, scheme, held, payloads, shapes)
    return _Weight(key, shape, arrays, tag)


def _check_dtype(weight: _Weight, config: Mapping[str, Any], method: str) -> None:
    """Raise ``UnsupportedError`` if the model is meant to be used in another dtype than that of a weight as served."""
    for entry in ("torch_dtype", "dtype"):
        if (dtype := config.get(entry)) in (None, _DTYPES[weight.tag]):
            continue
        if method == INTEGERS:
            why = f"{weight.key} has scales in {_DTYPES[weight.tag]}, in which the reference multiplies"
        else:
            why = f"{method.upper()} weights are dequantised to bfloat16 only, as by the reference"
        raise UnsupportedError(
            f"{CONFIG}: {entry} is {dtype!r}, but {why}. Dequantise the model with its publisher's tool first"
        )


def _check_once(held: Mapping[str, str], payloads: Mapping[str, SafetensorsPayload]) -> None:
    for path, payload in payloads.items():
        for key in payload.tensors:
            if held[key] != path:
                raise CoverageError(key, "two files hold it", (path, held[key]))


def _check_companions(
    companions: Mapping[str, str],
    named: Mapping[str, str],
    held: Mapping[str, str],
    payloads: Mapping[str, SafetensorsPayload],
    method: str,
) -> None:
    """Check that the weights of all scales are stored, quantised."""
    for key, weight in sorted(companions.items()):
        if weight not in named:
            stored = f"is {payloads[held[weight]].tags[weight]}" if weight in held else "no file holds"
            not_quantised = f", not {_stored_tag(method)}" if weight in held else ""
            raise CoverageError(key, f"scales of {weight}, which {stored}{not_quantised}", (held[key],))


def _tensor_bytes(payloads: Mapping[str, SafetensorsPayload], files: Mapping[str, ServedFile]) -> int:
    """Bytes of all tensors as they are served; ``files`` are those that are not served as stored."""
    served = sum(section.stop - section.start for file in files.values() for section in file.sections)
    unchanged = (payload for path, payload in payloads.items() if path not in files)
    return served + sum(array.nbytes for payload in unchanged for array in payload.tensors.values())


def _scales(
    stored: str, key: str, held: Mapping[str, str], payloads: Mapping[str, SafetensorsPayload]
) -> _Weight:
    path = held[stored]
    shape = payloads[path].tensors[key].shape
    if len(shape) != 2:
        raise UnsupportedError(
            f"{key}: an FP8 tensor of shape {shape} in {path}; only matrices are supported"
        )
    name = key + SCALES
    if name not in held:
        raise CoverageError(name, f"no file holds the scales of {key}, which is FP8", (path,))
    payload = payloads[held[name]]
    array, tag = payload.tensors[name], payload.tags[name]
    expected = tuple(-(-extent // BLOCK) for extent in shape)
    if array.shape != expected:
        detail = f"shape {array.shape}, but a weight of shape {shape} has scales of shape {expected}"
        raise CoverageError(name, detail, (held[name],))
    if tag not in _SCALE_CODES:
        raise CoverageError(
            name, f"scales stored as {tag}; supported: {', '.join(_SCALE_CODES)}", (held[name],)
        )
    scales = Scales(held[name], array.byte_offset, _SCALE_CODES[tag], expected[1], shape[1])
    return _Weight(key, shape, scales)


def _packed(
    stored: str, key: str, held: Mapping[str, str], payloads: Mapping[str, SafetensorsPayload]
) -> _Weight:
    path, name = held[stored], key + PACKED_SCALES
    payload = payloads[path]
    shape = payload.tensors[stored].shape
    if payload.tags[stored] != _BYTE or len(shape) != 4 or shape[-1] != GROUP_BYTES:
        raise CoverageError(
            stored,
            f"{payload.tags[stored]} of shape {shape}; MXFP4 experts are {_BYTE} of shape (experts, columns, groups, "
            f"{GROUP_BYTES})",
            (path,),
        )
    if name not in held:
        raise CoverageError(name, f"no file holds the scales of {stored}", (path,))
    payload = payloads[held[name]]
    array, tag = payload.tensors[name], payload.tags[name]
    if (tag, array.shape) != (_BYTE, shape[:-1]):
        raise CoverageError(
            name, f"{tag} of shape {array.shape}, expected {_BYTE} of shape {shape[:-1]}", (held[name],)
        )
    experts, columns, groups, _ = shape
    return _Weight(
        key, (experts, groups * GROUP, columns), Packed(held[name], array.byte_offset, columns, groups)
    )


def _served(
    payload: SafetensorsPayload, weights: Mapping[str, _Weight], scales: Collection[str]
) -> ServedFile:
    """A file with the dequantised weights and without the scales, laid out as the safetensors library would."""
    kept = [key for key in payload.tensors if key not in scales]
    slots = []
    for number, key in enumerate(kept):
        served = weights.get(key)
        if served is not None:
            slots.append(TensorSlot(number, served.key, served.tag, served.shape))
        else:
            slots.append(TensorSlot(number, key, payload.tags[key], payload.tensors[key].shape))
    encoded = encode_safetensors(slots, payload.metadata)
    ((_, header),) = encoded.literals
    sections = []
    for number, start, nbytes in encoded.slots:
        key = kept[number]
        served = weights.get(key)
        of = None if served is None else served.scales
        sections.append(Section(start, start + nbytes, payload.tensors[key].byte_offset, of))
    return ServedFile(encoded.size_bytes, header, tuple(sections))


def _index_as_served(
    index: Index,
    held: Mapping[str, str],
    scales: Collection[str],
    weights: Mapping[str, _Weight],
    total_bytes: int,
) -> Index:
    """The index of the served files, whose tensors have ``total_bytes`` together.

    Raises
    ------
    CoverageError
        If it locates scales elsewhere than they are.
    """
    for key in sorted(scales):
        if (told := index.weight_map.get(key)) != held[key]:
            raise CoverageError(
                key, f"the index says that {told or 'no file'} holds it, but {held[key]} does"
            )
    weight_map = {
        weights[key].key if key in weights else key: path
        for key, path in index.weight_map.items()
        if key not in scales
    }
    return replace(index, weight_map=weight_map, metadata={**index.metadata, "total_size": total_bytes})
