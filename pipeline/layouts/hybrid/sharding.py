"""Which rank of a sharding group stores what of a parameter?

The two rules of stage 1 over the parameters of one cell, in optimizer order:

* **v1** gives whole parameters to ranks, each to the one that has least so far (Paddle
  ``dygraph_sharding_optimizer.py``, ``_partition_parameters``).
* **v2** lays the parameters, each padded, one after another into communication buffers and cuts every
  buffer into equal parts; a rank stores what its part holds, padding included (Paddle
  ``DygraphShardingOptimizerV2``, ``tensor_fusion_helper.py``).

Checked against Paddle 3.3.1 by ``tests/unit/test_sharding_rules.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paddle_reshard.pipeline.tensors import DType

ALIGNMENT_BYTES = 256  # of gpu, xpu and npu alike: tensor_fusion_helper.alignment


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a cell, tensor-parallel local. ``chunk`` is its virtual pipeline chunk."""

    key: str
    elements: int
    dtype: DType
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """``[start, stop)`` of the flattened, padded parameter."""

    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Length, padding included."""
        return self.stop - self.start


def stage1_v1_owners(parameters: Sequence[Parameter], degree: int, sort: bool = True) -> dict[str, int]:
    """Key → rank that stores the whole parameter, in the order in which they are handed out.

    ``sort`` mirrors the environment variable ``FLAGS_sharding_sort_parameters``, on by default.
    """
    ordered = sorted(parameters, key=lambda p: -p.elements) if sort else list(parameters)
    load_elements = [0] * degree
    owner: dict[str, int] = {}
    for parameter in ordered:
        rank = load_elements.index(min(load_elements))
        owner[parameter.key] = rank
        load_elements[rank] += parameter.elements
    return {key: rank for r in range(degree) for key, rank in owner.items() if rank == r}


def padded_elements(elements: int, dtype: DType, degree: int) -> int:
    """Elements that a parameter occupies in a v2 buffer."""
    unit = ALIGNMENT_BYTES // dtype.itemsize * degree
    return -(-elements // unit) * unit


def stage1_v2_slices(
    parameters: Sequence[Parameter], degree: int, buffer_bytes: int, comm_overlap: bool
) -> dict[str, dict[int, FlatSlice]]:
    """Key → rank → what the rank stores. Ranks that store nothing of a parameter have no entry.

    With ``comm_overlap`` the pipeline engine builds the buffers, chunk by chunk and in parameter order;
    without, the optimizer builds them from all parameters, sorted by dtype name.
    """
    slices: dict[str, dict[int, FlatSlice]] = {}
    if comm_overlap:
        chunks = sorted({p.chunk for p in parameters})
        runs = [[p for p in parameters if p.chunk == chunk] for chunk in chunks]
    else:
        runs = [sorted(parameters, key=lambda p: p.dtype.name)]
    for run in runs:
        for buffer in _buffers(run, buffer_bytes):
            slices.update(_cut(buffer, degree))
    return slices


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


def _cut(buffer: Sequence[Parameter], degree: int) -> dict[str, dict[int, FlatSlice]]:
    padded = [padded_elements(p.elements, p.dtype, degree) for p in buffer]
    part = sum(padded) // degree
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
