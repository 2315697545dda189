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
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from paddle_reshard.pipeline.checkpoint import integers
from paddle_reshard.pipeline.checkpoint.stored_tensors import (
    Integers,
    Packed,
    Scales,
    Scheme,
    ServedTensor,
    StoredTensors,
)
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
BLOCK: Final = 128
"""Rows and columns of an FP8 weight that share a scale; blocks at the edges are smaller."""
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


def quantisation_of(config: Mapping[str, Any]) -> Scheme | None:
    """How the weights are quantised according to ``config.json``; ``None``: they are not.

    Paddle's own ``quantization_config`` has no ``quant_method``, or ``null``: it says how a job trains, not what is
    stored. An ``UnsupportedError`` names the entry by which weights are quantised in another way.
    """
    entries = config.get(QUANTIZATION)
    method = entries.get(_METHOD) if isinstance(entries, Mapping) else None
    if not isinstance(entries, Mapping) or method is None:
        return None
    if method == MXFP4:
        return _MXFP4_SCHEME
    if method == INTEGERS:
        return integers.integer_scheme(entries)
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
    return _FP8_SCHEME


def dequantised(
    tensors: StoredTensors, index: Index | None, config: Mapping[str, Any], scheme: Scheme
) -> Dequantised | None:
    """Lay out the files with dequantised weights; ``None`` if there are neither quantised weights nor scales.

    ``index`` is ``model.safetensors.index.json``, if there is one; ``scheme`` the result of :func:`quantisation_of`. A
    ``CheckpointError`` if a weight lacks its scales, scales lack their weight, two files hold either, or shapes or
    dtypes do not match; an ``UnsupportedError`` if the model is meant to be used in another dtype than that of the
    values, or a weight is not a matrix.
    """
    if scheme.method == INTEGERS:
        integers.refuse_further_tensors(tensors.held)
    named = {
        key: key.removesuffix(scheme.stored) + scheme.served
        for key in tensors.held
        if key.endswith(scheme.stored) and scheme.tag in (None, tensors.tag(key))
    }
    companions = {
        key: key.removesuffix(ending) + scheme.stored
        for key in tensors.held
        for ending in scheme.companions
        if key.endswith(ending)
    }
    if not named and not companions:
        return None
    tensors.check_once()
    _check_companions(companions, named, tensors, scheme)
    weights = {stored: scheme.weight(stored, key, tensors) for stored, key in named.items()}
    for stored, weight in weights.items():
        if weight.key != stored and weight.key in tensors.held:
            raise CoverageError(weight.key, "stored both packed and as it is", (tensors.held[weight.key],))
    for weight in weights.values():
        _check_dtype(weight, config, scheme)
    changed = {*weights, *companions}
    files = {
        path: _served(payload, weights, companions)
        for path, payload in tensors.payloads.items()
        if not changed.isdisjoint(payload.tensors)
    }
    unquantised = {key: value for key, value in config.items() if key != QUANTIZATION}
    made = {CONFIG: json.dumps(unquantised, ensure_ascii=False, indent=2).encode()}
    if index is not None:
        made[WEIGHT_INDEX] = format_index(_index_as_served(index, tensors, companions, weights, files))
    dtypes = " and ".join(sorted({_DTYPES[weight.tag] for weight in weights.values()}))
    summary = f"{len(weights)} {scheme.kind} weights, to {dtypes}, with a scale for each {scheme.scaled}"
    return Dequantised(files, made, summary)


def _check_dtype(weight: ServedTensor, config: Mapping[str, Any], scheme: Scheme) -> None:
    """Raise ``UnsupportedError`` if the model is meant to be used in another dtype than that of a weight as served."""
    for entry in ("torch_dtype", "dtype"):
        if (dtype := config.get(entry)) in (None, _DTYPES[weight.tag]):
            continue
        if scheme.method == INTEGERS:
            why = f"{weight.key} has scales in {_DTYPES[weight.tag]}, in which the reference multiplies"
        else:
            why = f"{scheme.kind} weights are dequantised to bfloat16 only, as by the reference"
        raise UnsupportedError(
            f"{CONFIG}: {entry} is {dtype!r}, but {why}. Dequantise the model with its publisher's tool first"
        )


def _check_companions(
    companions: Mapping[str, str], named: Mapping[str, str], tensors: StoredTensors, scheme: Scheme
) -> None:
    """Check that the weights of all scales are stored, quantised."""
    for key, weight in sorted(companions.items()):
        if weight not in named:
            expected = "FP8" if scheme.method == FP8 else scheme.tag
            there = f"is {tensors.tag(weight)}, not {expected}" if weight in tensors.held else "no file holds"
            raise CoverageError(key, f"scales of {weight}, which {there}", (tensors.held[key],))


def _fp8_weight(stored: str, key: str, tensors: StoredTensors) -> ServedTensor:
    shape = tensors.array(stored).shape
    if len(shape) != 2:
        raise UnsupportedError(
            f"{key}: an FP8 tensor of shape {shape} in {tensors.held[key]}; only matrices are supported"
        )
    expected = tuple(-(-extent // BLOCK) for extent in shape)
    scales = tensors.scales(key + SCALES, key, shape, expected, _SCALE_CODES)
    return ServedTensor(key, shape, _BFLOAT16, Scales(*scales, expected[1], shape[1]))


def _mxfp4_experts(stored: str, key: str, tensors: StoredTensors) -> ServedTensor:
    shape, name = tensors.array(stored).shape, key + PACKED_SCALES
    if tensors.tag(stored) != _BYTE or len(shape) != 4 or shape[-1] != GROUP_BYTES:
        raise CoverageError(
            stored,
            f"{tensors.tag(stored)} of shape {shape}; MXFP4 experts are {_BYTE} of shape (experts, columns, groups, "
            f"{GROUP_BYTES})",
            (tensors.held[stored],),
        )
    tensors.check_scales(name, stored)
    path, array, tag = tensors.held[name], tensors.array(name), tensors.tag(name)
    if (tag, array.shape) != (_BYTE, shape[:-1]):
        raise CoverageError(
            name, f"{tag} of shape {array.shape}, expected {_BYTE} of shape {shape[:-1]}", (path,)
        )
    experts, columns, groups, _ = shape
    scales = Packed(path, array.byte_offset, columns, groups)
    return ServedTensor(key, (experts, groups * GROUP, columns), _BFLOAT16, scales)


_FP8_SCHEME: Final = Scheme(
    FP8, "FP8", f"{BLOCK} × {BLOCK} elements", "", "", (SCALES,), tag=FP8_TAG, weight=_fp8_weight
)
_MXFP4_SCHEME: Final = Scheme(
    MXFP4, "MXFP4", f"{GROUP} elements", PACKED, "", (PACKED_SCALES,), tag=None, weight=_mxfp4_experts
)


def _served(
    payload: SafetensorsPayload, weights: Mapping[str, ServedTensor], scales: Collection[str]
) -> ServedFile:
    """A file with the dequantised weights and without the scales, laid out as the safetensors library would."""
    kept = {
        key: weights.get(key) or ServedTensor(key, array.shape, payload.tags[key], None)
        for key, array in payload.tensors.items()
        if key not in scales
    }
    slots = [TensorSlot(number, t.key, t.tag, t.shape) for number, t in enumerate(kept.values())]
    encoded = encode_safetensors(slots, payload.metadata)
    ((_, header),) = encoded.literals
    stored, sections = list(kept), []
    for number, start, nbytes in encoded.slots:
        key = stored[number]
        sections.append(Section(start, start + nbytes, payload.tensors[key].byte_offset, kept[key].scales))
    return ServedFile(encoded.size_bytes, header, tuple(sections))


def _index_as_served(
    index: Index,
    tensors: StoredTensors,
    scales: Collection[str],
    weights: Mapping[str, ServedTensor],
    files: Mapping[str, ServedFile],
) -> Index:
    """The index of the served files, of which ``files`` are not as stored; refused if it locates scales wrongly."""
    for key in sorted(scales):
        if (told := index.weight_map.get(key)) != (path := tensors.held[key]):
            raise CoverageError(key, f"the index says that {told or 'no file'} holds it, but {path} does")
    weight_map = {
        weights[key].key if key in weights else key: path
        for key, path in index.weight_map.items()
        if key not in scales
    }
    served = sum(section.stop - section.start for file in files.values() for section in file.sections)
    unchanged = (payload for path, payload in tensors.payloads.items() if path not in files)
    total_bytes = served + sum(a.nbytes for payload in unchanged for a in payload.tensors.values())
    return replace(index, weight_map=weight_map, metadata={**index.metadata, "total_size": total_bytes})
