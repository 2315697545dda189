"""Hugging Face checkpoints with FP8 weights: the files that the same model would have in bfloat16.

DeepSeek-V3 and many models since then store the weights of linear layers as 8-bit floats (e4m3), with a scale for each
block of 128 × 128 elements::

    model.layers.0.mlp.up_proj.weight              F8_E4M3  [300, 200]
    model.layers.0.mlp.up_proj.weight_scale_inv    F32      [3, 2]

Here such files are laid out again, with ``up_proj.weight`` in bfloat16 and without its scales. Nothing is computed:
``tasks/dequantise.py`` serves these files, a range at a time.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from paddle_reshard.pipeline.core.errors import CoverageError, UnsupportedError
from paddle_reshard.pipeline.core.file_names import CONFIG, WEIGHT_INDEX
from paddle_reshard.storage.formats.safetensors import (
    FP8_TAG,
    Index,
    SafetensorsPayload,
    TensorSlot,
    encode_safetensors,
    format_index,
)

BLOCK: Final = 128
"""Rows and columns of a weight that share a scale; blocks at the edges are smaller."""
SCALES: Final = "_scale_inv"
"""What a tensor of scales has behind the key of its weight."""
QUANTIZATION: Final = "quantization_config"
"""Entry of ``config.json``."""
_METHOD: Final = "quant_method"
_SUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "weight_block_size": ([BLOCK, BLOCK],),
    "fmt": (None, "e4m3"),
    "activation_scheme": (None, "dynamic"),
}
"""Entry of ``quantization_config`` → the values with which weights are what is described above."""
_SCALE_CODES: Final[Mapping[str, str]] = {"F32": "<f4", "BF16": "<u2"}
_BFLOAT16: Final = "BF16"


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


class Section(NamedTuple):
    """The payload of a tensor in a file as it is served."""

    start: int
    """Byte offset in the file as it is served."""
    stop: int
    byte_offset: int
    """Where the stored bytes begin; half as many, if they are FP8."""
    scales: Scales | None
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
    """Path → a safetensors file with FP8 weights or scales."""
    made: Mapping[str, bytes]
    """Path → content of ``config.json`` and the index."""
    weights: int
    """Number of FP8 weights."""


def is_quantised(config: Mapping[str, Any]) -> bool:
    """Whether ``config.json`` announces FP8 weights with scales of blocks.

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
        return False
    if method != "fp8":
        raise UnsupportedError(
            f"{CONFIG}: the weights are quantised with {_METHOD} {method!r}; only fp8 with a scale for each block of "
            f"{BLOCK} × {BLOCK} elements is supported. Convert the unquantised model"
        )
    for entry, values in _SUPPORTED.items():
        if (value := entries.get(entry)) not in values:
            raise UnsupportedError(
                f"{CONFIG}: {QUANTIZATION} has {entry} {value!r}; supported: {values[-1]!r}. Convert the unquantised "
                "model"
            )
    return True


def dequantised(
    payloads: Mapping[str, SafetensorsPayload], index: Index | None, config: Mapping[str, Any]
) -> Dequantised | None:
    """Lay out the files with bfloat16 weights; ``None`` if there are neither FP8 weights nor scales.

    Parameters
    ----------
    payloads
        Path → header of every safetensors file.
    index
        ``model.safetensors.index.json``, if there is one.
    config
        ``config.json``.

    Raises
    ------
    CheckpointError
        If a weight lacks its scales, scales lack their weight, two files hold either, or shapes or dtypes do not match.
    UnsupportedError
        If the model is meant to be used in another dtype than bfloat16, or a weight is not a matrix.
    """
    held = {key: path for path, payload in payloads.items() for key in payload.tensors}
    weights = {key: path for key, path in held.items() if payloads[path].tags[key] == FP8_TAG}
    scales = {key for key in held if key.endswith(SCALES)}
    if not weights and not scales:
        return None
    _check_dtype(config)
    _check_once(held, payloads)
    for key in sorted(scales - {weight + SCALES for weight in weights}):
        weight = key.removesuffix(SCALES)
        found = f"is {payloads[held[weight]].tags[weight]}, not FP8" if weight in held else "no file holds"
        raise CoverageError(key, f"scales of {weight}, which {found}", (held[key],))
    scales_of = {key: _scales(key, path, held, payloads) for key, path in weights.items()}
    files = {
        path: _served(payload, scales_of)
        for path, payload in payloads.items()
        if not payload.tensors.keys().isdisjoint({*weights, *scales})
    }
    unquantised = {key: value for key, value in config.items() if key != QUANTIZATION}
    made = {CONFIG: json.dumps(unquantised, ensure_ascii=False, indent=2).encode()}
    if index is not None:
        made[WEIGHT_INDEX] = format_index(_without_scales(index, held, scales, payloads))
    return Dequantised(files, made, len(weights))


def _check_dtype(config: Mapping[str, Any]) -> None:
    for entry in ("torch_dtype", "dtype"):
        if (dtype := config.get(entry)) not in (None, "bfloat16"):
            raise UnsupportedError(
                f"{CONFIG}: {entry} is {dtype!r}, but FP8 weights are dequantised to bfloat16 only, as by the "
                "reference. Dequantise the model with its publisher's tool first"
            )


def _check_once(held: Mapping[str, str], payloads: Mapping[str, SafetensorsPayload]) -> None:
    for path, payload in payloads.items():
        for key in payload.tensors:
            if held[key] != path:
                raise CoverageError(key, "two files hold it", (path, held[key]))


def _scales(
    key: str, path: str, held: Mapping[str, str], payloads: Mapping[str, SafetensorsPayload]
) -> Scales:
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
    return Scales(held[name], array.byte_offset, _SCALE_CODES[tag], expected[1], shape[1])


def _served(payload: SafetensorsPayload, scales_of: Mapping[str, Scales]) -> ServedFile:
    """A file with the bfloat16 weights and without the scales, laid out as the safetensors library would."""
    kept = [(key, array) for key, array in payload.tensors.items() if not key.endswith(SCALES)]
    slots = [
        TensorSlot(number, key, _BFLOAT16 if key in scales_of else payload.tags[key], array.shape)
        for number, (key, array) in enumerate(kept)
    ]
    encoded = encode_safetensors(slots, payload.metadata)
    ((_, header),) = encoded.literals
    sections = []
    for number, start, nbytes in encoded.slots:
        key, array = kept[number]
        sections.append(Section(start, start + nbytes, array.byte_offset, scales_of.get(key)))
    return ServedFile(encoded.size_bytes, header, tuple(sections))


def _without_scales(
    index: Index, held: Mapping[str, str], scales: Collection[str], payloads: Mapping[str, SafetensorsPayload]
) -> Index:
    """The index of the served files.

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
    weight_map = {key: path for key, path in index.weight_map.items() if key not in scales}
    total_bytes = sum(
        array.nbytes * (2 if payload.tags[key] == FP8_TAG else 1)
        for payload in payloads.values()
        for key, array in payload.tensors.items()
        if key not in scales
    )
    return replace(index, weight_map=weight_map, metadata={**index.metadata, "total_size": total_bytes})
