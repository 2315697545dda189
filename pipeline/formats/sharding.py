"""Divide parameters among the ranks of a sharding group.

The rules of Paddle's sharding stages over the parameters of one cell, in optimizer order:

* **stage 1 v1** assigns whole parameters, largest first, each to the rank with the fewest elements so far
  (``dygraph_sharding_optimizer.py``, ``_partition_parameters``).
* **stage 1 v2** concatenates the padded parameters in communication buffers and cuts every buffer into equal parts; a
  rank stores the slices in its part, padding included (``DygraphShardingOptimizerV2``,
  ``tensor_fusion_helper.py``).
* **stage 2** assigns whole parameters like v1, in the order of the list
  (``group_sharded_optimizer_stage2.py``, ``_segment_params``).
* **stage 3** cuts every parameter above a size into equal slices, the last of them padded, and stores smaller
  parameters whole on every rank (``group_sharded_stage3.py``).

Checked against Paddle 3.3.1 by ``tests/unit/test_sharding_rules.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import NamedTuple

from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensors import DType

ALIGNMENT_BYTES = 256  # of gpu, xpu and npu alike: tensor_fusion_helper.alignment
DEFAULT_BUFFER_BYTES = 256 << 20
DEFAULT_SEGMENT_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor-parallel local parameter of a cell. ``chunk`` is its virtual pipeline chunk."""

    key: str
    elements: int
    dtype: DType
    chunk: int = 0


class FlatSlice(NamedTuple):
    """``[start, stop)`` of the flattened, padded parameter."""

    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Length, padding included."""
        return self.stop - self.start


Shares = dict[str, dict[int, FlatSlice | None]]
"""Key → rank → the slice of the flattened parameter that the rank stores, ``None`` for the whole of it."""


@dataclass(frozen=True, slots=True)
class ShardingOptions:
    """Settings of sharding besides strategy and degree."""

    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    """Stage 1 v2: a communication buffer is closed once it reaches this size."""
    comm_overlap: bool = False
    """Stage 1 v2: the pipeline engine builds the buffers (``sharding_comm_overlap``)."""
    sort_parameters: bool = True
    """Stage 1 v1: ``FLAGS_sharding_sort_parameters``."""
    segment_elements: int = DEFAULT_SEGMENT_ELEMENTS
    """Stage 3: parameters with more elements are cut."""


def partition_parameters(
    strategy: str, parameters: Sequence[Parameter], degree: int, options: ShardingOptions
) -> Shares:
    """The slice of every parameter that each rank of a sharding group stores."""
    if strategy == "stage1v2":
        slices = stage1_v2_slices(parameters, degree, options.buffer_bytes, options.comm_overlap)
        return {key: dict(ranks) for key, ranks in slices.items()}
    if strategy == "stage3":
        return {p.key: _stage3_share(p, degree, options.segment_elements) for p in parameters}
    if strategy == "stage1v1":
        owners = stage1_v1_owners(parameters, degree, options.sort_parameters)
    elif strategy == "stage2":
        owners = _hand_out(parameters, degree)
    else:
        owners = {p.key: 0 for p in parameters}
    return {key: {rank: None} for key, rank in owners.items()}


def stage1_v1_owners(parameters: Sequence[Parameter], degree: int, sort: bool = True) -> dict[str, int]:
    """Key → rank that stores the whole parameter, in the trainer's order.

    ``sort`` mirrors the environment variable ``FLAGS_sharding_sort_parameters``, on by default.
    """
    owner = _hand_out(sorted(parameters, key=lambda p: -p.elements) if sort else parameters, degree)
    return {key: rank for r in range(degree) for key, rank in owner.items() if rank == r}


def _hand_out(parameters: Iterable[Parameter], degree: int) -> dict[str, int]:
    listed = list(parameters)
    return dict(zip((p.key for p in listed), hand_out([p.elements for p in listed], degree), strict=True))


def hand_out(elements: Iterable[int], degree: int) -> list[int]:
    """The rank of each of several parameters, which go in turn to the first rank with the fewest elements so far.

    >>> hand_out([6, 4, 3, 1], 2)
    [0, 1, 1, 0]
    """
    loads = [(0, rank) for rank in range(degree)]
    owners = []
    for count in elements:
        load, rank = loads[0]
        owners.append(rank)
        heapreplace(loads, (load + count, rank))
    return owners


def _stage3_share(parameter: Parameter, degree: int, segment_elements: int) -> dict[int, FlatSlice | None]:
    if parameter.elements <= segment_elements:
        return dict.fromkeys(range(degree))
    length = stage3_slice_elements(parameter.elements, parameter.dtype, degree)
    return {rank: FlatSlice(rank * length, (rank + 1) * length) for rank in range(degree)}


def stage1_v2_slices(
    parameters: Sequence[Parameter], degree: int, buffer_bytes: int, comm_overlap: bool
) -> dict[str, dict[int, FlatSlice]]:
    """Key → rank → slice that the rank stores. Ranks without any part of a parameter have no entry.

    With ``comm_overlap`` the pipeline engine builds the buffers, chunk by chunk; without, the optimizer builds
    them from all parameters. (It sorts them by dtype first, which changes nothing: a buffer has one dtype.)
    """
    slices: dict[str, dict[int, FlatSlice]] = {}
    if comm_overlap:
        chunks = sorted({p.chunk for p in parameters})
        runs = [[p for p in parameters if p.chunk == chunk] for chunk in chunks]
    else:
        runs = [list(parameters)]
    for run in runs:
        for buffer in _buffers(run, buffer_bytes):
            slices.update(cut_buffer(buffer, degree))
    return slices


def read_buffers(
    parameters: Iterable[Parameter], held: Mapping[str, Collection[int]]
) -> list[list[Parameter]]:
    """The communication buffers of stage 1 v2, as the ranks that hold each parameter tell them.

    Within a buffer ranks never descend, and every rank has a part of it: the next buffer begins where they do. With a
    on rank 0, b on 0 and 1, c on 1, d on 0 and e on 1, the buffers are a b c and d e. A parameter of which nothing is
    held lies where those around it do.
    """
    last: dict[DType, list[Parameter]] = {}
    reached: dict[DType, int] = {}
    buffers: list[list[Parameter]] = []
    for parameter in parameters:
        buffer, ranks = last.get(parameter.dtype), held.get(parameter.key, ())
        if buffer is None or (ranks and min(ranks) < reached.get(parameter.dtype, 0)):
            buffer = last[parameter.dtype] = []
            buffers.append(buffer)
        buffer.append(parameter)
        if ranks:
            reached[parameter.dtype] = max(ranks)
    return buffers


def possible_buffer_bytes(buffers: Sequence[Sequence[Parameter]]) -> tuple[int, int | None]:
    """``(low, high)``: the :attr:`ShardingOptions.buffer_bytes` of these buffers is above ``low`` and at most ``high``.

    Each buffer was open before its last parameter, and closed after it if another of its dtype follows. ``high`` is
    ``None`` if there is only one of each dtype.
    """
    last = {buffer[0].dtype: number for number, buffer in enumerate(buffers)}
    low, high = 0, None
    for number, buffer in enumerate(buffers):
        sizes = [parameter.elements * parameter.dtype.itemsize for parameter in buffer]
        low = max(low, sum(sizes[:-1]))
        if last[buffer[0].dtype] != number:
            high = sum(sizes) if high is None else min(high, sum(sizes))
    return low, high


def not_of_these_ranks(held: Mapping[int, Shape], wanted: Mapping[int, Shape]) -> str:
    """What is wrong with the slices of a tensor: the shapes that ranks hold, and those that they must hold."""
    shapes_held, shapes_wanted = (
        ", ".join(f"{list(shape)} (rank {rank})" for rank, shape in sorted(shapes.items()))
        for shapes in (held, wanted)
    )
    return (
        f"the ranks of its sharding group hold slices of {shapes_held}; given the parameters before it, they must hold "
        f"{shapes_wanted}: files of two ranks were exchanged, or belong to different jobs"
    )


def _buffers(parameters: Iterable[Parameter], limit_bytes: int) -> list[list[Parameter]]:
    """Fill one bucket per dtype; a bucket is closed after the parameter that reaches the limit."""
    open_buffers: dict[DType, tuple[list[Parameter], int]] = {}
    buffers: list[list[Parameter]] = []
    for parameter in parameters:
        if parameter.dtype not in open_buffers:
            buffers.append([])
        bucket, filled_bytes = open_buffers.pop(parameter.dtype, (buffers[-1], 0))
        bucket.append(parameter)
        filled_bytes += parameter.elements * parameter.dtype.itemsize
        if filled_bytes < limit_bytes:
            open_buffers[parameter.dtype] = (bucket, filled_bytes)
    return buffers


def cut_buffer(buffer: Sequence[Parameter], degree: int) -> dict[str, dict[int, FlatSlice]]:
    """Key → rank → slice of a parameter in one communication buffer, of which every rank stores an equal part."""
    # Two ranks, a and b padded to 256 and 768 elements: the parts are [0, 512) and [512, 1024) of the buffer. Rank 0
    # stores [0, 256) of a and [0, 256) of b, rank 1 stores [256, 768) of b.
    padded = [padded_elements(p.elements, p.dtype, degree) for p in buffer]
    part = sum(padded) // degree
    if not part:  # only parameters without elements: no rank stores any of them
        return {p.key: {} for p in buffer}
    slices: dict[str, dict[int, FlatSlice]] = {}
    first = 0
    for parameter, length in zip(buffer, padded, strict=True):
        stop = first + length
        slices[parameter.key] = {
            rank: FlatSlice(max(first, rank * part) - first, min(stop, (rank + 1) * part) - first)
            for rank in range(first // part, -(-stop // part))
        }
        first = stop
    return slices


def stage3_slice_elements(elements: int, dtype: DType, degree: int) -> int:
    """Elements of every rank's slice of a parameter that stage 3 cuts, padding included."""
    return -(-padded_elements(elements, dtype, 1) // degree)


def padded_elements(elements: int, dtype: DType, degree: int) -> int:
    """Elements that a parameter occupies in a v2 buffer, padding included."""
    unit = ALIGNMENT_BYTES // dtype.itemsize * degree
    return -(-elements // unit) * unit
