"""The layout of a rank's average in memory, and the contents of its files. Pure.

The average of a rank is one array of float32; each tensor begins at a multiple of 64 bytes::

    linear_0.w_0, 3 × 4        elements 0 to 11
    linear_0.b_0, 4            elements 16 to 19
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from paddle_reshard.pipeline.core.errors import CheckpointError, UsageError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.model.optimizer_keys import MASTER_WEIGHTS
from paddle_reshard.pipeline.training.flex import Entry, FlexRank, entries_of
from paddle_reshard.storage.files.paddle_pickle import STRUCTURED_NAMES, ArrayRef, SplitArray
from paddle_reshard.storage.files.paddle_pickle_writer import ArraySlot

ALIGNED_ELEMENTS = 16
"""Tensors begin at multiples of 64 bytes in shared memory."""


@dataclass(frozen=True)
class Weights:
    """The tensors of a rank to average: float32 arrays or Paddle tensors."""

    master_weights: Mapping[str, Any]
    """Parameter name → master weight, or this rank's slice of it."""
    params: Mapping[str, Any] = field(default_factory=dict)
    """Structured key → float32 parameter."""

    def entries(self) -> dict[Entry, Any]:
        """Every tensor, in their order in memory."""
        return entries_of(self.master_weights, self.params)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where a tensor lies in the average: a range of elements."""

    tensor_name: str = field(compare=False)
    """The framework's name, which changes every time for a temporary tensor."""
    start: int
    shape: Shape

    @property
    def stop(self) -> int:
        """Index after its last element."""
        return self.start + prod(self.shape)


Stretches = Mapping[Entry, Stretch]


def stretches_of(weights: Weights) -> dict[Entry, Stretch]:
    """The range of every tensor, one after the other; a ``UsageError`` if one is not float32."""
    stretches: dict[Entry, Stretch] = {}
    start = 0
    for (group, key), tensor in weights.entries().items():
        if str(tensor.dtype).rpartition(".")[2] != "float32":
            raise UsageError(f"{key}: is {tensor.dtype}, only float32 can be averaged")
        stretch = Stretch(str(getattr(tensor, "name", key)), start, tuple(int(e) for e in tensor.shape))
        stretches[group, key] = stretch
        start = _aligned(stretch.stop)
    return stretches


def count_elements(stretches: Stretches) -> int:
    """Number of elements of the whole array, with alignment."""
    return max((_aligned(stretch.stop) for stretch in stretches.values()), default=0)


def _aligned(element: int) -> int:
    return -(-element // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


def check_same(stretches: Stretches, before: Stretches) -> None:
    """Refuse a set of tensors that has changed since the last update."""
    if stretches == before:
        return
    differing = next(entry for entry in (*stretches, *before) if stretches.get(entry) != before.get(entry))
    raise UsageError(
        f"{differing[1]}: is {_shape(stretches, differing)} now and was {_shape(before, differing)} at the last "
        "update; the set of tensors changed"
    )


def _shape(stretches: Stretches, entry: Entry) -> str:
    return str(stretches[entry].shape) if entry in stretches else "not there"


# ------------------------------------------------------------------------------------------------ writing

FileContent = tuple[dict[str, object], list[tuple[int, int]]]
"""The root of a pickle, and the range of elements of the average for each :class:`ArraySlot` in it."""


def rank_file(stretches: Stretches) -> FileContent:
    """Contents of a rank's file as the trainers write it."""
    masters: dict[str, object] = {}
    root: dict[str, object] = {}
    for slot, ((group, key), stretch) in enumerate(stretches.items()):
        (masters if group else root)[key] = ArraySlot(slot, "f4", stretch.shape, stretch.tensor_name)
    root[MASTER_WEIGHTS] = masters
    return root, [(stretch.start, stretch.stop) for stretch in stretches.values()]


def flex_file(stretches: Stretches, rank: FlexRank) -> FileContent:
    """Contents of a rank's file in a FlexCheckpoint; a ``UsageError`` if the boxes do not fit the tensors."""
    _check_boxes(stretches, rank)
    root: dict[str, object] = {}
    names: dict[str, str] = {}
    written = []
    for entry, box in rank.written().items():
        stretch = stretches[entry]
        root[box.key] = ArraySlot(len(root), "f4", box.shape, None)
        names[box.key] = stretch.tensor_name
        written.append((stretch.start, stretch.start + box.elements))
    return {**root, STRUCTURED_NAMES: names}, written


def _check_boxes(stretches: Stretches, rank: FlexRank) -> None:
    held = rank.boxes[rank.number].entries()
    for entry, stretch in stretches.items():
        box, elements = held.pop(entry, None), prod(stretch.shape)
        if box is None and not elements:
            continue
        whole = box is not None and box.flattened_range is None
        if box is None or box.elements > elements or (whole and box.elements < elements):
            raise UsageError(f"{entry[1]}: is {stretch.shape} in this rank, but described as {box}")
    if held:
        raise UsageError(f"{next(iter(held))[1]}: is not a tensor of this rank")


# ------------------------------------------------------------------------------------------------ reading


def find_arrays(
    stretches: Stretches, root: Mapping[str, Any], file_name: str
) -> dict[Entry, tuple[ArrayRef, ...]]:
    """The array of every tensor in a file of the same rank of the same job, which holds exactly these tensors.

    An array is the pieces that it was stored in, one after the other.
    """
    params = {key: value for key, value in root.items() if key not in (MASTER_WEIGHTS, STRUCTURED_NAMES)}
    arrays = entries_of(root.get(MASTER_WEIGHTS, {}), params)
    for entry in (*stretches, *arrays):
        array, stretch = arrays.get(entry), stretches.get(entry)
        if (
            array is None
            or stretch is None
            or array.shape != stretch.shape
            or array.dtype != "f4"
            or any(piece.axes is not None for piece in pieces_of(array))
        ):
            raise CheckpointError(
                f"{file_name}: {entry[1]} is {getattr(array, 'shape', 'not there')} in the file and "
                f"{stretch.shape if stretch else 'not there'} in this rank"
            )
    return {entry: pieces_of(array) for entry, array in arrays.items()}


def pieces_of(array: ArrayRef | SplitArray) -> tuple[ArrayRef, ...]:
    """The pieces of an array, in order: several if ``paddle.save`` cut it."""
    return array.parts if isinstance(array, SplitArray) else (array,)
