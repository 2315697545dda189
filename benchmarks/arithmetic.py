"""A checkpoint of any size that nobody stores: its content is computed from the coordinates of each element.

Element ``i`` of a tensor has a value that follows from the tensor's name and ``i`` alone, so its bytes are known in
whichever file of whichever topology they are. A parameter is its master weight, rounded, as in a real checkpoint;
powers of betas are zeros. Literal bytes are those that the product lays out.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.synthetic import PER_PARAMETER, EmptySource, Unstored
from paddle_reshard.pipeline.checkpoint.files import TargetFiles
from paddle_reshard.pipeline.core.geometry import MAX_DIMS, row_major_strides
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import DTYPES, MASTER_WEIGHT, PARAM

FLOAT32 = [dtype.name for dtype in DTYPES].index("float32")
FINITE = np.uint32(0x7F7F)
"""Bits of a bfloat16 that may be set: without the lowest bit of the exponent no value is infinite or NaN."""
BOX = np.dtype(
    [
        ("file", np.int32),
        ("dtype", np.int8),
        ("seed", np.uint32),  # 0: zeros
        ("start", np.int64),
        ("stop", np.int64),
        ("first", np.uint32),  # number of the first element in its tensor, as all numbers modulo 2^32
        ("extents", np.int64, (MAX_DIMS,)),
        ("steps", np.uint32, (MAX_DIMS,)),  # from one element to the next, in elements of the tensor
        ("strides", np.int64, (MAX_DIMS,)),  # in bytes of the file
    ]
)


def write_boxes(folder: Path, files: TargetFiles, tensors: Tensors) -> None:
    """Save where everything is, for :class:`ArithmeticSource`."""
    folder.mkdir(parents=True)
    fragments = files.fragments
    boxes = np.zeros(len(fragments), dtype=BOX)
    for name in ("file", "dtype", "extents", "strides"):
        boxes[name] = fragments[name]
    steps, seeds = np.zeros((len(tensors), MAX_DIMS), dtype=np.int64), np.zeros(len(tensors), dtype=np.uint32)
    for number, tensor in enumerate(tensors):
        shape = tensor.global_shape
        steps[number, : len(shape)] = row_major_strides(shape, 1)
        if tensor.state not in PER_PARAMETER:
            state = PARAM if tensor.state == MASTER_WEIGHT else tensor.state
            seeds[number] = zlib.crc32(f"{tensor.key} {state}".encode()) | 1
    owner = fragments["tensor"]
    boxes["seed"], boxes["steps"] = seeds[owner], steps[owner] & 0xFFFFFFFF
    boxes["first"] = (fragments["offset"] * steps[owner]).sum(axis=1) & 0xFFFFFFFF
    itemsize = np.array([dtype.itemsize for dtype in DTYPES])[fragments["dtype"]]
    boxes["start"] = fragments["byte_base"]
    boxes["stop"] = boxes["start"] + ((boxes["extents"] - 1) * boxes["strides"]).sum(axis=1) + itemsize
    boxes = boxes[np.lexsort((boxes["start"], boxes["file"]))]
    np.save(folder / "boxes.npy", boxes)
    np.save(folder / "starts.npy", boxes["start"])
    np.save(folder / "stops.npy", boxes["stop"])
    np.save(folder / "first.npy", np.searchsorted(boxes["file"], np.arange(len(files.files) + 1)))
    (folder / "paths").write_text("\n".join(file.path for file in files.files))


class _Tables(NamedTuple):
    """What :func:`write_boxes` saved."""

    boxes: npt.NDArray[np.void]
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    """Index of the first box of each file, and the number of boxes."""
    numbers: dict[str, int]
    """Path → number of the file."""


class ArithmeticSource(Unstored):
    """The files of a layout. Sent to a worker, it knows only tensors, and reads zeros between them."""

    def __init__(self, folder: Path, literals: EmptySource | None = None) -> None:
        self.folder, self.literals = folder, literals
        self.location = f"arithmetic of {folder.name}"
        self._opened: _Tables | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ArithmeticSource, (self.folder,)

    def sizes(self) -> Mapping[str, int]:
        return {} if self.literals is None else self.literals.sizes()

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        found = np.frombuffer(buffer, dtype=np.uint8)
        if self.literals is None:
            found[:] = 0
        else:
            self.literals.read_into(path, byte_offset, buffer)
        tables = self._tables()
        number = tables.numbers.get(path)
        if number is None:
            return
        here = slice(int(tables.first[number]), int(tables.first[number + 1]))
        reached = (tables.stops[here] > byte_offset) & (tables.starts[here] < byte_offset + len(buffer))
        for box in tables.boxes[here][reached].tolist():
            _fill(found, byte_offset, box)

    def _tables(self) -> _Tables:
        if self._opened is None:
            paths = (self.folder / "paths").read_text().split("\n")
            boxes, starts, stops, first = (
                np.asarray(np.load(self.folder / f"{name}.npy", mmap_mode="r"))
                for name in ("boxes", "starts", "stops", "first")
            )
            numbers = {path: number for number, path in enumerate(paths)}
            self._opened = _Tables(boxes, starts, stops, first, numbers)
        return self._opened


class _Dim(NamedTuple):
    """A dim of a box with more than one element."""

    extent: int
    stride: int
    """In bytes of the file."""
    step: int
    """In elements of the tensor, modulo 2^32."""


def _fill(found: npt.NDArray[np.uint8], byte_offset: int, box: tuple[Any, ...]) -> None:
    """Write the part of a box, a row of ``BOX``, that lies in ``[byte_offset, byte_offset + len(found))``."""
    _, dtype_index, seed, start, stop, first, *columns = box
    dims = _joined(_Dim(*dim) for dim in zip(*(columns[i] for i in (0, 2, 1)), strict=True))
    if dims:  # only the slabs of the outermost dim that reach into the range
        extent, stride, step = dims[0]
        slab = stop - start - (extent - 1) * stride
        skipped = max(0, -((start + slab - byte_offset - 1) // stride))
        end = min(extent, -((start - byte_offset - len(found)) // stride))
        dims[0] = _Dim(end - skipped, stride, step)
        start += skipped * stride
        first = (first + skipped * step) & 0xFFFFFFFF
        stop = start + slab + (end - skipped - 1) * stride
    dtype = np.dtype("<u4" if dtype_index == FLOAT32 else "<u2")
    values = np.array(first, dtype=np.uint32)
    for extent, _, step in dims:
        values = values[..., None] + np.arange(extent, dtype=np.uint32) * np.uint32(step)
    bits = _bits(values, np.uint32(seed))
    bits = bits << np.uint32(16) if dtype_index == FLOAT32 else bits.astype(np.uint16)
    inside = start >= byte_offset and stop <= byte_offset + len(found)
    # A slab at the edge of the range is made whole, beside it, and cut.
    room = found[start - byte_offset : stop - byte_offset] if inside else np.zeros(stop - start, np.uint8)
    low, high = max(start, byte_offset), min(stop, byte_offset + len(found))
    if not inside:
        room[low - start : high - start] = found[low - byte_offset : high - byte_offset]
    np.ndarray(bits.shape, dtype, room.data, 0, tuple(dim.stride for dim in dims))[...] = bits
    if not inside:
        found[low - byte_offset : high - byte_offset] = room[low - start : high - start]


def _joined(dims: Iterable[_Dim]) -> list[_Dim]:
    """The dims with more than one element, outermost in the file first; those that form a single run are one."""
    found: list[_Dim] = []
    for dim in sorted((dim for dim in dims if dim.extent > 1), key=lambda dim: -dim.stride):
        outer = found[-1] if found else None
        whole = (dim.extent * dim.stride, dim.extent * dim.step & 0xFFFFFFFF)
        if outer is not None and (outer.stride, outer.step) == whole:
            found[-1] = _Dim(outer.extent * dim.extent, dim.stride, dim.step)
        else:
            found.append(dim)
    return found


def _bits(elements: npt.NDArray[np.uint32], seed: np.uint32) -> npt.NDArray[np.uint32]:
    """The upper 16 bits of the values of elements, given by number."""
    if not seed:
        return np.zeros_like(elements)
    mixed = (elements ^ seed) * np.uint32(0x9E3779B1)
    mixed ^= mixed >> np.uint32(15)
    return mixed & FINITE
