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
from typing import NamedTuple, TypeVar

import numpy as np

from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.sorting import distinct
from paddle_reshard.pipeline.core.tensors import DTYPES, DType, dtype_number

Count = TypeVar("Count", int, Ints)

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

    def cuts(self, elements: int) -> bool:
        """Whether stage 3 cuts a parameter with so many elements."""
        return elements > self.segment_elements


def partition_parameters(
    strategy: str, parameters: Sequence[Parameter], degree: int, options: ShardingOptions
) -> Shares:
    """The slice of every parameter that each rank of a sharding group stores."""
    if strategy == "stage1v2":
        slices = stage1_v2_slices(parameters, degree, options.buffer_bytes, options.comm_overlap)
        return {key: dict(ranks) for key, ranks in slices.items()}
    if strategy == "stage3":
        return {p.key: _stage3_share(p, degree, options) for p in parameters}
    if strategy == "stage1v1":
        owners = stage1_v1_owners(parameters, degree, options.sort_parameters)
    elif strategy == "stage2":
        ranks = hand_out([p.elements for p in parameters], degree)
        owners = {p.key: rank for p, rank in zip(parameters, ranks, strict=True)}
    else:
        owners = {p.key: 0 for p in parameters}
    return {key: {rank: None} for key, rank in owners.items()}


def stage1_v1_owners(parameters: Sequence[Parameter], degree: int, sort: bool = True) -> dict[str, int]:
    """Key → rank that stores the whole parameter, in the trainer's order.

    ``sort`` mirrors the environment variable ``FLAGS_sharding_sort_parameters``, on by default.
    """
    ranks = hand_out([p.elements for p in parameters], degree, largest_first=sort)
    owner = {p: rank for p, rank in zip(parameters, ranks, strict=True)}
    in_turn = sorted(owner, key=lambda p: (owner[p], -p.elements if sort else 0))
    return {p.key: owner[p] for p in in_turn}


def hand_out(elements: Sequence[int], degree: int, largest_first: bool = False) -> list[int]:
    """The rank of each of several parameters, which go in turn to the first rank with the fewest elements so far.

    >>> hand_out([1, 6, 4, 3], 2), hand_out([1, 6, 4, 3], 2, largest_first=True)
    ([0, 1, 0, 0], [0, 0, 1, 1])
    """
    order = range(len(elements))
    loads = [(0, rank) for rank in range(degree)]
    owners = [0] * len(elements)
    for number in sorted(order, key=elements.__getitem__, reverse=True) if largest_first else order:
        load, owners[number] = loads[0]
        heapreplace(loads, (load + elements[number], owners[number]))
    return owners


def _stage3_share(parameter: Parameter, degree: int, options: ShardingOptions) -> dict[int, FlatSlice | None]:
    if not options.cuts(parameter.elements):
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
    sizes = np.array([p.elements * p.dtype.itemsize for p in parameters], dtype=np.int64)
    dtypes = np.array([dtype_number(p.dtype) for p in parameters], dtype=np.int64)
    chunks = np.array([p.chunk if comm_overlap else 0 for p in parameters], dtype=np.int64)
    for buffer in buffers_of(sizes, dtypes, chunks, buffer_bytes):
        slices.update(cut_buffer([parameters[number] for number in buffer.tolist()], degree))
    return slices


def buffers_of(sizes: Ints, dtypes: Ints, chunks: Ints, limit_bytes: int) -> list[Ints]:
    """The parameters of each communication buffer of stage 1 v2, given by bytes, number of the dtype and chunk.

    A chunk has a buffer for each dtype. It is closed after the parameter that reaches the limit, and another is opened.
    """
    buffers: list[Ints] = []
    apart = chunks * len(DTYPES) + dtypes
    for one in distinct(apart).tolist():
        alike = np.flatnonzero(apart == one)
        filled, first, before = np.cumsum(sizes[alike]), 0, 0
        while first < len(alike):
            last = max(first, int(np.searchsorted(filled, before + limit_bytes)))
            buffers.append(alike[first : last + 1])
            first, before = last + 1, int(filled[min(last, len(alike) - 1)])
    return sorted(buffers, key=lambda buffer: (chunks[buffer[0]], buffer[0]))


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


def cut_buffer(buffer: Sequence[Parameter], degree: int) -> dict[str, dict[int, FlatSlice]]:
    """Key → rank → slice of a parameter in one communication buffer, of which every rank stores an equal part."""
    padded = np.array([padded_elements(p.elements, p.dtype, degree) for p in buffer], dtype=np.int64)
    slices: list[dict[int, FlatSlice]] = [{} for _ in buffer]
    for number, rank, start, stop in np.stack(pieces_of_buffer(padded, degree), axis=1).tolist():
        slices[number][rank] = FlatSlice(start, stop)
    return {
        p.key: of_ranks for p, of_ranks in zip(buffer, slices, strict=True)
    }  # of one listed twice, the last


def pieces_of_buffer(padded: Ints, degree: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Number of the parameter, rank, and ``[start, stop)`` of it, of every piece of a buffer; rank by rank.

    Two ranks, and two parameters of 256 and 768 elements: rank 0 stores all of the first and 256 elements of the other.

    >>> [column.tolist() for column in pieces_of_buffer(np.array([256, 768]), 2)]
    [[0, 1, 1], [0, 0, 1], [0, 0, 256], [256, 256, 768]]
    """
    stops = np.cumsum(padded)
    starts, part = stops - padded, max(1, int(padded.sum()) // degree)
    first = starts // part
    counts = -(-stops // part) - first
    number = np.repeat(np.arange(len(padded)), counts)
    rank = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    begin = np.maximum(starts[number], rank * part) - starts[number]
    return number, rank, begin, np.minimum(stops[number], (rank + 1) * part) - starts[number]


def stage3_slice_elements(elements: int, dtype: DType, degree: int) -> int:
    """Elements of every rank's slice of a parameter that stage 3 cuts, padding included."""
    return -(-padded_elements(elements, dtype, 1) // degree)


def padded_elements(elements: Count, dtype: DType, degree: int) -> Count:
    """Elements that a parameter, or each of several, occupies in a v2 buffer, padding included."""
    unit = ALIGNMENT_BYTES // dtype.itemsize * degree
    return -(-elements // unit) * unit
