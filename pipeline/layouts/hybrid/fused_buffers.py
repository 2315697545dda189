"""What lies where in the buffers into which stage 1 v1 fuses the parameters of a rank (``stage1_tensor_fusion``)?

The optimizer then sees buffers and not parameters: its states have one dim and are named after a tensor that nobody
named (``generated_tensor_68``), and no file says which parameters are in it. It follows from the rule by which they are
made (Paddle 3.3.1 ``dygraph_sharding_optimizer.py``, ``tensor_fusion_helper.py``): of the parameters that v1 gives to a
rank, in the order in which it hands them out, those with weight decay are in the first buffer and those without in the
second; each is padded to 256 bytes of its own dtype. The beta powers are the buffer's.

Every buffer has to be as long as this makes it. That the order is right is proven when a conversion compares the
parameters, which lie beside in full, with their master weights.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensors import DType, is_per_parameter
from paddle_reshard.pipeline.layouts.optimizer_keys import (
    MASTER_WEIGHTS,
    accumulator_key,
    split_accumulator_key,
)
from paddle_reshard.pipeline.layouts.padding import padded_elements
from paddle_reshard.storage.formats.paddle_pickle import ITEM_BYTES, ArrayRef

BUFFER = "generated_tensor_"
_WITHOUT_DECAY = ("bias", "norm")
"""Pieces of structured keys of parameters without weight decay."""


@dataclass(frozen=True, slots=True)
class FusedParameter:
    """A parameter of a cell, in the order of the model."""

    key: str
    name: str
    shape: Shape
    dtype: DType


def holds_buffers(masters: Iterable[str], names: Container[str]) -> bool:
    """Whether master weights of these names are those of buffers; ``names`` are the parameters of the cell."""
    return any(name.startswith(BUFFER) and name not in names for name in masters)


def unfuse(
    root: Mapping[str, Any], parameters: Sequence[FusedParameter], rank: int, degree: int, path: str
) -> dict[str, Any]:
    """The same entries of an optimizer file, by parameter.

    Raises
    ------
    CheckpointError
        If a buffer is not as long as its parameters, or an entry is no state of a buffer.
    """
    masters = root[MASTER_WEIGHTS]
    groups = _groups(parameters, rank, degree)
    if len(groups) != len(masters):
        raise CheckpointError(
            f"{path}: master weights of {len(masters)} fused buffers; {len(groups)} are expected, of the parameters "
            "with and without weight decay that the rank has"
        )
    of_buffer = dict(zip(masters, groups, strict=True))
    unfused: dict[str, Any] = {MASTER_WEIGHTS: {}}
    for name, buffer in masters.items():
        for parameter, array in _pieces(name, buffer, of_buffer[name], path):
            unfused[MASTER_WEIGHTS][parameter.name] = array
    for entry, value in root.items():
        parts = split_accumulator_key(entry, of_buffer)
        if entry == MASTER_WEIGHTS:
            continue
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
    return unfused


def _groups(parameters: Sequence[FusedParameter], rank: int, degree: int) -> list[list[FusedParameter]]:
    """The parameters in each buffer of a rank."""
    by_key = {parameter.key: parameter for parameter in parameters}
    # Only such sources need the rules of sharding to be read.
    from paddle_reshard.pipeline.layouts.hybrid.sharding import Parameter, stage1_v1_owners

    owners = stage1_v1_owners([Parameter(p.key, prod(p.shape), p.dtype) for p in parameters], degree)
    held = [by_key[key] for key, owner in owners.items() if owner == rank]
    plain = [p for p in held if any(piece in p.key for piece in _WITHOUT_DECAY)]
    decayed = [p for p in held if p not in plain]
    return [group for group in (decayed, plain) if group]


def _pieces(
    entry: str, buffer: object, group: Sequence[FusedParameter], path: str
) -> list[tuple[FusedParameter, ArrayRef]]:
    """What of a buffer is each parameter's."""
    rooms = [padded_elements(prod(p.shape), p.dtype, 1) for p in group]
    if not isinstance(buffer, ArrayRef) or buffer.shape != (sum(rooms),):
        raise CheckpointError(
            f"{path}: {entry} has shape {getattr(buffer, 'shape', None)}; fused of {group[0].key} … {group[-1].key} "
            f"({len(group)} parameters) it would be {(sum(rooms),)}"
        )
    pieces, first = [], 0
    for parameter, room in zip(group, rooms, strict=True):
        byte_offset = buffer.byte_offset + first * ITEM_BYTES[buffer.dtype]
        pieces.append((parameter, ArrayRef(byte_offset, buffer.dtype, parameter.shape, None, None)))
        first += room
    return pieces
