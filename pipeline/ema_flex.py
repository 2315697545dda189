"""The average in the files of a FlexCheckpoint: ``ema_state/<rank>_0.distcp`` and one ``0.metadata`` for all.

What several ranks hold is written by the first of them; slices are written without their padding. Which rank writes
what, and what the metadata say, follows from the boxes of all ranks, which every rank has to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import numpy as np

from paddle_reshard.pipeline.geometry import Shape
from paddle_reshard.pipeline.layouts.flex.names import EMA_STATE, METADATA
from paddle_reshard.storage.formats.dist_metadata import (
    PIECE_COLUMNS,
    PLACE_COLUMNS,
    DistMetadata,
    encode_dist_metadata,
)

_T = TypeVar("_T", bound=Any)
METADATA_PATH = f"{EMA_STATE}/0{METADATA}"


@dataclass(frozen=True, slots=True)
class Box:
    """Where the values of a tensor lie in a logical one, in the words of FlexCheckpoint."""

    key: str
    """``model.norm.weight.w_0`` for a master weight, ``model.norm.weight`` for a parameter."""
    global_shape: Shape
    global_offset: Shape
    local_shape: Shape
    flattened_range: tuple[int, int] | None = None
    """``[start, stop)`` of the flattened local tensor, without padding; ``None``: all of it, in its own shape."""

    @property
    def shape(self) -> Shape:
        """In the file."""
        return self.local_shape if self.flattened_range is None else (self.elements,)

    @property
    def elements(self) -> int:
        """How many values there are."""
        if self.flattened_range is None:
            return prod(self.local_shape)
        return self.flattened_range[1] - self.flattened_range[0]


@dataclass(frozen=True)
class RankBoxes:
    """What a rank holds."""

    master_weights: Mapping[str, Box] = field(default_factory=dict)
    """By the name of the parameter."""
    params: Mapping[str, Box] = field(default_factory=dict)
    """By structured key."""

    def entries(self) -> Iterator[tuple[bool, str, Box]]:
        """``(master weight?, name, box)`` of all that has values, in order."""
        for master, boxes in ((True, self.master_weights), (False, self.params)):
            yield from ((master, name, box) for name, box in boxes.items() if box.elements)


@dataclass(frozen=True)
class FlexRank:
    """A rank among all that save together."""

    number: int
    boxes: tuple[RankBoxes, ...]
    """Of every rank."""

    @property
    def path(self) -> str:
        """Of this rank's file in the checkpoint."""
        return f"{EMA_STATE}/{_file_name(self.number)}"

    def written(self) -> list[tuple[bool, str, Box]]:
        """What this rank writes: what no rank before it holds."""
        others = {box for rank in self.boxes[: self.number] for _, _, box in rank.entries()}
        return [entry for entry in self.boxes[self.number].entries() if entry[2] not in others]

    def metadata(self) -> bytes:
        """The file that says where everything lies; the same on every rank."""
        first: dict[Box, int] = {}
        for number, rank in enumerate(self.boxes):
            for _, _, box in rank.entries():
                first.setdefault(box, number)
        return encode_dist_metadata(_metadata(first))


def _file_name(rank: int) -> str:
    return f"{rank}_0.distcp"


def _metadata(first: Mapping[Box, int]) -> DistMetadata:
    """``first`` is the rank that writes each box."""
    in_order = sorted(first, key=lambda box: (box.key, box.global_offset, box.flattened_range or ()))
    keys = _numbers(box.key for box in in_order)
    files = _numbers(_file_name(rank) for rank in first.values())
    shapes = _numbers(shape for box in in_order for shape in _shapes(box))
    pieces = [
        (
            keys[box.key],
            0,
            shapes[box.global_offset],
            shapes[box.local_shape],
            shapes[box.global_shape],
            -1 if box.flattened_range is None else shapes[box.flattened_range],
        )
        for box in in_order
    ]
    places = [(piece, files[_file_name(first[box])], -1) for piece, box in enumerate(in_order)]
    return DistMetadata(
        tuple(keys),
        ("float32",),
        tuple(shapes),
        tuple(files),
        np.array(pieces, dtype=PIECE_COLUMNS),
        np.array(places, dtype=PLACE_COLUMNS),
        {key: (key,) for key in keys},
    )


def _shapes(box: Box) -> Iterator[Shape]:
    yield from (box.global_offset, box.local_shape, box.global_shape)
    if box.flattened_range is not None:
        yield box.flattened_range


def _numbers(values: Iterable[_T]) -> dict[_T, int]:
    """Each distinct value, ascending, and its number."""
    return {value: number for number, value in enumerate(sorted(set(values)))}
