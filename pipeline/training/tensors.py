"""Tensors of a running job: determine which piece each of them is, and write into its memory.

Paddle is imported only where its process group is needed.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod
from typing import Any, ClassVar, Protocol

import numpy as np

from paddle_reshard.pipeline.core.errors import PlanError, UnsupportedError, UsageError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensors import ACCUMULATORS, dtype_of_code
from paddle_reshard.pipeline.model.optimizer_keys import MASTER_WEIGHTS, SLICE_PREFIX, split_accumulator_key
from paddle_reshard.pipeline.training.layout import LivePiece, Path, TensorParallel
from paddle_reshard.storage.store import CopyRange, ReadRange, Receipt
from paddle_reshard.tasks.device import Buffer

LR_SCHEDULER = "LR_Scheduler"
_SHARD = re.compile(r"Shard\(dim=(?P<dim>-?\d+)(?:, shard_order=(?P<order>\d+))?\)")


class Memory(Protocol):
    """The memory of a live tensor."""

    def write(self, byte_offset: int, values: Buffer) -> None:
        """Replace the bytes starting at ``byte_offset``."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory that the processor can address."""

    owner: Any
    """Owner of the memory, which keeps it alive."""
    buffer: Buffer

    def write(self, byte_offset: int, values: Buffer) -> None:
        """Copy."""
        self.buffer[byte_offset : byte_offset + len(values)] = values


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory on a Paddle device, written in pieces. Use it only in the thread that has set the device."""

    buffer: Any
    """The tensor, as bytes."""

    def write(self, byte_offset: int, values: Buffer) -> None:
        """Copy to the device; ``values`` can be reused when this returns."""
        self.buffer._slice(byte_offset, byte_offset + len(values)).set_value(values)


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """An entry of a ``state_dict`` of which this process holds a piece."""

    piece: LivePiece
    memory: Memory

    @property
    def on_host(self) -> bool:
        """Whether any thread may write to it."""
        return isinstance(self.memory, HostMemory)


@dataclass(frozen=True)
class MemoryWriter:
    """Writes parts of "files" that are live tensors, by name."""

    memories: Mapping[str, Memory]
    copies_in_flight: ClassVar[int] = 1

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        """Write into a tensor."""
        self.memories[path].write(byte_offset, np.frombuffer(buffer, dtype=np.uint8))
        return Receipt(path, byte_offset, len(buffer))

    def copy_part(self, copy: CopyRange, source: ReadRange) -> Receipt:
        """Never called: no storage copies into memory."""
        raise UnsupportedError(f"{copy.path}: no storage copies into memory")


@dataclass(frozen=True, slots=True)
class SliceOfParameter:
    """A range of a flattened parameter, with the attributes of Paddle's ``ShardedWeight``.

    Elements of ``flattened_range`` beyond the parameter are padding.
    """

    local_tensor: Any
    local_shape: Shape
    global_shape: Shape
    global_offset: Shape
    flattened_range: slice
    parameter_name: str | None = None
    """Name in the framework, if it is the parameter itself."""
    is_flattened: ClassVar[bool] = True


# ---------------------------------------------------------------------------------------------- entries


def leaves_of(state_dict: Mapping[str, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The entries of nested dicts that are no dicts themselves, and the states of learning-rate schedules."""
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise UsageError(f"{'.'.join(above)}: the key {key!r} is not a string")
        if key == LR_SCHEDULER:
            yield (*above, key), value
        elif isinstance(value, Mapping):
            yield from leaves_of(value, (*above, key))
        elif value is not None:
            yield (*above, key), value


def empty_sections(state_dict: Mapping[str, Any], above: Path = ()) -> Iterator[Path]:
    """Nested dicts, including the outermost, that contain nothing to fill."""
    if all(path[-1] == LR_SCHEDULER for path, _ in leaves_of(state_dict)):
        yield above
        return
    for key, value in state_dict.items():
        if isinstance(value, Mapping) and key != LR_SCHEDULER:
            yield from empty_sections(value, (*above, key))


def parameter_names_of(entries: Mapping[Path, Any]) -> dict[str, str]:
    """Parameter name → key, for entries that are parameters; for tied parameters the first key."""
    names: dict[str, str] = {}
    for path, value in entries.items():
        name = getattr(value, "parameter_name", None)
        tensor = getattr(value, "local_tensor", value)
        if name is None and hasattr(tensor, "trainable"):  # which only parameters have
            name = str(tensor.name)
        if name is not None:
            names.setdefault(name, path[-1])
    return names


def read_entry(path: Path, value: Any) -> LiveTensor | None:
    """Read an entry; ``None`` if this process holds no part of its tensor.

    What is no tensor, has no memory yet, or has an unknown placement is refused.
    """
    name = ".".join(path)
    if hasattr(value, "global_offset") and hasattr(value, "local_tensor"):
        return _read_sharded(path, value)
    if not isinstance(value, np.ndarray) and not callable(getattr(value, "is_dist", None)):
        raise UsageError(
            f"{name}: a {type(value).__name__} is not a tensor and cannot be loaded; remove it from the state_dict"
        )
    if not isinstance(value, np.ndarray):
        if value.is_dist():
            return _read_dist(path, value)
        if hasattr(value, "fw_storage") and not value._is_initialized():
            raise PlanError(f"{name}: cut by sharding stage 3; pass stage3_state_dict(model) instead")
    shape = _shape(value)
    return LiveTensor(LivePiece(path, _dtype(name, value), shape, shape), _memory(name, value))


def _read_sharded(path: Path, value: Any) -> LiveTensor | None:
    """A piece that describes its position: a ``ShardedWeight`` of FlexCheckpoint, or a similar object."""
    tensor, flat, name = value.local_tensor, None, ".".join(path)
    if value.is_flattened:
        flat = (int(value.flattened_range.start), int(value.flattened_range.stop))
    piece = LivePiece(
        path,
        _dtype(name, tensor),
        _shape(tensor),
        tuple(int(n) for n in value.local_shape),
        tuple(int(n) for n in value.global_shape),
        tuple(int(n) for n in value.global_offset),
        flat,
        joined_by_rank=True,
    )
    return LiveTensor(piece, _memory(name, tensor)) if piece.nbytes else None


def _read_dist(path: Path, value: Any) -> LiveTensor | None:
    """A DistTensor of auto-parallel training: its placements say which box this process holds."""
    mesh, name = value.process_mesh, ".".join(path)
    processes = [int(process) for process in mesh.process_ids]
    rank = int(import_module("paddle.distributed").get_rank())
    if rank not in processes:
        return None
    mesh_shape = [int(n) for n in mesh.shape]
    coordinate = tuple(int(c) for c in np.unravel_index(processes.index(rank), mesh_shape))
    local_shape, offset = _box_of(name, _shape(value), list(value.placements), mesh_shape, coordinate)
    if prod(local_shape) == 0:
        return None
    local = value._local_value()
    piece = LivePiece(path, _dtype(name, local), _shape(local), local_shape, _shape(value), offset)
    return LiveTensor(piece, _memory(name, local))


def _box_of(
    name: str, shape: Shape, placements: list[Any], mesh_shape: list[int], coordinate: Shape
) -> tuple[Shape, Shape]:
    """Shape and offset of the box that the process at ``coordinate`` of a mesh holds.

    A dim is cut into chunks of ``ceil(extent / ranks)``, except for the last (Paddle 3.3
    ``flex_checkpoint/dcp/utils.py:60``). A dim that several axes of the mesh cut is cut by one after the other.
    """
    local, offset = list(shape), [0] * len(shape)
    cuts = []
    for axis, placement in enumerate(placements):
        if placement.is_replicated():
            continue
        # Placements of two axes that cut one dim have no get_dim(), but all have a text.
        match = _SHARD.fullmatch(str(placement))
        if match is None:
            raise UnsupportedError(
                f"{name}: has placement {placement} along axis {axis} of its mesh, which is not supported; "
                f"reshard it to Shard or Replicate"
            )
        cuts.append((int(match["order"] or 0), axis, int(match["dim"]) % len(shape)))
    for _, axis, dim in sorted(cuts):
        chunk = -(-local[dim] // mesh_shape[axis])
        start = min(coordinate[axis] * chunk, local[dim])
        local[dim], offset[dim] = min(chunk, local[dim] - start), offset[dim] + start
    return tuple(local), tuple(offset)


def _shape(tensor: Any) -> Shape:
    return tuple(int(n) for n in tensor.shape)


def _dtype(name: str, tensor: Any) -> str:
    if isinstance(tensor, np.ndarray):
        return dtype_of_code(tensor.dtype.str[1:], name).name
    return str(tensor.dtype).rpartition(".")[2]


def _memory(name: str, tensor: Any) -> Memory:
    """The memory of a dense tensor or array, which must be contiguous."""
    if isinstance(tensor, np.ndarray):
        if not (tensor.flags.c_contiguous and tensor.flags.writeable):
            raise PlanError(f"{name}: the array is read-only or not in C order and cannot be filled")
        return HostMemory(tensor, tensor.reshape(-1).view(np.uint8))
    if not tensor._is_initialized():
        raise PlanError(f"{name}: has no memory in this process; initialise it before loading")
    if not tensor.is_contiguous():
        raise PlanError(f"{name}: not contiguous in memory; call contiguous() first")
    nbytes = prod(_shape(tensor)) * int(tensor.element_size())
    device = tensor.place
    if device.is_cpu_place() or device.is_cuda_pinned_place():
        # DLPack gives NumPy neither bfloat16 nor writable arrays.
        memory = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
        return HostMemory(tensor, np.frombuffer(memoryview(memory), np.uint8))
    return DeviceMemory(_as_bytes(tensor))


def _as_bytes(tensor: Any) -> Any:
    """A contiguous tensor as a tensor of bytes on the same memory."""
    return tensor.detach().view([prod(_shape(tensor))]).view("uint8")


# -------------------------------------------------------------------------------------------------- the job


def hybrid_group() -> Any:
    """The hybrid communication group of ``fleet``; ``None`` where fleet is not initialised."""
    fleet = sys.modules.get("paddle.distributed.fleet")
    return getattr(getattr(fleet, "fleet", None), "_hcg", None)  # its getter fails before fleet.init


def tensor_parallel() -> TensorParallel:
    """This process's position among the tp ranks of ``fleet``; without an initialised fleet there is one rank."""
    group = hybrid_group()
    if group is None:
        return TensorParallel()
    return TensorParallel(int(group.get_model_parallel_world_size()), int(group.get_model_parallel_rank()))


def stage3_state_dict(model: Any) -> dict[str, Any]:
    """The tensors that this rank holds of a model wrapped by ``group_sharded_parallel(level="p_g_os")``.

    Sections ``model`` and ``optimizer``: slices of the parameters that stage 3 cuts, whole tensors otherwise; likewise
    for master weights and accumulators. No parameter is gathered. The optimizer must have created its accumulators.

    Parameters
    ----------
    model
        A ``GroupShardedStage3`` (Paddle 3.3 ``group_sharded_stage3.py``).

    Raises
    ------
    UsageError, UnsupportedError
        If it is not, or keeps its slices in host memory (``offload``).
    """
    if not hasattr(model, "_param2buffer"):
        raise UsageError(f"expected a GroupShardedStage3, got a {type(model).__name__}")
    if model._offload:
        raise UnsupportedError(
            "sharding stage 3 with offload=True is not supported; wrap the model without it"
        )
    parameters = model.state_dict()
    names = {parameter.name for parameter in parameters.values()}
    shapes = {p.name: _shape(p) for p in parameters.values() if hasattr(p, "fw_storage")}

    def cut(name: str, tensor: Any, parameter_name: str | None = None) -> Any:
        if name not in shapes:
            return tensor
        shape, range_ = shapes[name], slice(*model._param2buffer[name][model._rank])
        return SliceOfParameter(tensor, shape, shape, (0,) * len(shape), range_, parameter_name)

    def cut_state(key: str, tensor: Any) -> Any:
        parts = split_accumulator_key(key.removeprefix(SLICE_PREFIX), names)
        return tensor if parts is None or ACCUMULATORS[parts[1]].per_parameter else cut(parts[0], tensor)

    states = dict(model._optim.state_dict())
    masters = states.pop(MASTER_WEIGHTS, {})
    optimizer = {
        key: value if isinstance(value, Mapping) else cut_state(key, value) for key, value in states.items()
    }
    if masters:
        optimizer[MASTER_WEIGHTS] = {
            key: cut(key.removeprefix(SLICE_PREFIX), value) for key, value in masters.items()
        }
    slices = {key: cut(p.name, getattr(p, "fw_storage", p), p.name) for key, p in parameters.items()}
    return {"model": slices, "optimizer": optimizer}
