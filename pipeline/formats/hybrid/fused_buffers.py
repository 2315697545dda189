"""Locate parameters in the buffers into which stage 1 v1 fuses those of a rank (``stage1_tensor_fusion``).

The optimizer then sees buffers instead of parameters: its states have one dim and an automatic name
(``generated_tensor_68``), and no file lists the parameters in a buffer. They follow from how Paddle builds buffers
(3.3.1 ``dygraph_sharding_optimizer.py``, ``tensor_fusion_helper.py``): in the order in which v1 assigns parameters to a
rank, those with weight decay form its first buffer and the others its second. Each parameter is padded to 256 bytes of
its own dtype. Beta powers belong to the buffer.

The length of every buffer is checked. The order is proven by the conversion itself, which compares the parameters,
stored in full next to the buffers, with their master weights.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensors import DType, is_per_parameter
from paddle_reshard.pipeline.formats.hybrid.entries import FileEntries
from paddle_reshard.pipeline.formats.sharding import Parameter, padded_elements, stage1_v1_owners
from paddle_reshard.pipeline.model.optimizer_keys import (
    MASTER_WEIGHTS,
    accumulator_key,
    split_accumulator_key,
)
from paddle_reshard.storage.files.paddle_pickle import ITEM_BYTES, ArrayRef

BUFFER = "generated_tensor_"
_WITHOUT_DECAY = ("bias", "norm")
"""Substrings of structured keys that mark parameters without weight decay."""


@dataclass(frozen=True, slots=True)
class FusedParameter:
    """A parameter of a cell, in the order of the model."""

    key: str
    name: str
    shape: Shape
    dtype: DType


def holds_buffers(masters: Iterable[str], names: Container[str]) -> bool:
    """Whether master weights with these names belong to buffers; ``names`` are the parameters of the cell."""
    return any(name.startswith(BUFFER) and name not in names for name in masters)


def unfuse(
    root: FileEntries, parameters: Sequence[FusedParameter], rank: int, degree: int, path: str
) -> FileEntries:
    """Replace the entries of buffers in an optimizer file by entries of parameters, which must fill them exactly."""
    masters = dict(root.get(MASTER_WEIGHTS).items())
    groups = _groups(parameters, rank, degree)
    if len(groups) != len(masters):
        raise CheckpointError(
            f"{path}: master weights of {len(masters)} fused buffers; {len(groups)} are expected, for the rank's "
            "parameters with and without weight decay"
        )
    of_buffer = dict(zip(masters, groups, strict=True))
    unfused: dict[str, Any] = {MASTER_WEIGHTS: {}}
    for name, buffer in masters.items():
        for parameter, array in _pieces(name, buffer, of_buffer[name], path):
            unfused[MASTER_WEIGHTS][parameter.name] = array
    for entry, value in root.drained([MASTER_WEIGHTS]).items():
        parts = split_accumulator_key(entry, of_buffer)
        if parts is None:
            unfused[entry] = value
            continue
        name, state, master = parts
        for parameter, array in (
            [(parameter, value) for parameter in of_buffer[name]]
            if is_per_parameter(state)
            else _pieces(entry, value, of_buffer[name], path)
        ):
            unfused[accumulator_key(parameter.name, state, master)] = array
    return FileEntries(unfused)


def _groups(parameters: Sequence[FusedParameter], rank: int, degree: int) -> list[list[FusedParameter]]:
    """The parameters in each buffer of a rank."""
    by_key = {parameter.key: parameter for parameter in parameters}
    owners = stage1_v1_owners([Parameter(p.key, prod(p.shape), p.dtype) for p in parameters], degree)
    held = [by_key[key] for key, owner in owners.items() if owner == rank]
    plain = [p for p in held if any(piece in p.key for piece in _WITHOUT_DECAY)]
    decayed = [p for p in held if p not in plain]
    return [group for group in (decayed, plain) if group]


def _pieces(
    entry: str, buffer: object, group: Sequence[FusedParameter], path: str
) -> list[tuple[FusedParameter, ArrayRef]]:
    """The range of each parameter in a buffer.

    Two bfloat16 parameters with 100 and 200 elements are padded to 128 and 256: they start at elements 0 and 128 of a
    buffer of 384.
    """
    padded = [padded_elements(prod(p.shape), p.dtype, 1) for p in group]
    if not isinstance(buffer, ArrayRef) or buffer.shape != (sum(padded),):
        raise CheckpointError(
            f"{path}: {entry} has shape {getattr(buffer, 'shape', None)}; {(sum(padded),)} is expected for "
            f"{group[0].key} … {group[-1].key} ({len(group)} parameters)"
        )
    pieces, first = [], 0
    for parameter, elements in zip(group, padded, strict=True):
        byte_offset = buffer.byte_offset + first * ITEM_BYTES[buffer.dtype]
        pieces.append((parameter, ArrayRef(byte_offset, buffer.dtype, parameter.shape, None, None)))
        first += elements
    return pieces
