"""Make the tensors of a target from the values of its keys.

Every state of a key is cut, moved and transposed like its parameter. Only the parameter is cast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.changes.aoa.sources import SourceTensors, is_number
from paddle_reshard.pipeline.changes.aoa.values import Value, source_value
from paddle_reshard.pipeline.core.catalog import Catalog, Fragments
from paddle_reshard.pipeline.core.errors import PlanError, UnsupportedError
from paddle_reshard.pipeline.core.geometry import MAX_DIMS, Boxes, Shape, intersect, meeting_pairs, padded
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.tensor_columns import TensorIndex, Tensors
from paddle_reshard.pipeline.core.tensors import ACCUMULATORS, EMA_PARAM, PARAM, Tensor

BOX = np.dtype(
    [
        ("source", np.int32),  # index into the tensors of the source
        ("target", np.int32),  # index into those of the target
        ("start", np.int64, (MAX_DIMS,)),  # of the box in the source tensor
        ("extents", np.int64, (MAX_DIMS,)),  # in the order of the source's dims
        ("order", np.int64, (MAX_DIMS,)),  # dim i of the target is dim order[i] of the source
        ("offset", np.int64, (MAX_DIMS,)),  # of the box in the target tensor
        ("copies", np.int64),  # number of earlier copies of the same target box
    ]
)
_BoxRow = tuple[int, int, Shape, Shape, Shape, Shape, int]


def target_catalog(source: SourceTensors, outputs: Mapping[str, Value], untied: frozenset[str]) -> Catalog:
    """The catalog of the tensors ``outputs``, in the order of the source.

    Names with the same values become a single tensor with aliases, except those in ``untied``.
    """
    grouped: dict[tuple[Value, str | None], list[str]] = {}
    for name, value in outputs.items():
        grouped.setdefault((value, name if name in untied else None), []).append(name)
    collected = _TargetTensors(source)
    for (value, _), names in grouped.items():
        key, *aliases = sorted(names, key=source.key_preference)
        collected.add(key, tuple(aliases), value)
    order = sorted(range(len(collected.tensors)), key=collected.positions.__getitem__)
    number = np.empty(len(order), dtype=np.int32)
    number[order] = np.arange(len(order))
    tensors = Tensors(collected.tensors[tensor] for tensor in order)
    index = TensorIndex(tensors)
    boxes = np.array(collected.boxes, dtype=BOX)
    boxes["target"] = number[boxes["target"]]
    implied = {index[tensor]: index[master] for tensor, master in collected.implied.items()}
    return Catalog(tensors, source.catalog.files, cut(source.catalog.fragments, boxes), implied)


def cut(fragments: Fragments, boxes: npt.NDArray[np.void]) -> Fragments:
    """The stored pieces of each box, as fragments of the target's tensors.

    A source tensor of 8 float32 values is stored as [0, 4) at byte 0 of one file and [4, 8) at byte 0 of a second. The
    box [2, 6), which is the target tensor's [0, 4), becomes two fragments: [0, 2) at byte 8 of the first file, and
    [2, 4) at byte 0 of the second.
    """
    i, j = meeting_pairs(
        Boxes(boxes["source"], boxes["start"], boxes["extents"]),
        Boxes(fragments["tensor"], fragments["offset"], fragments["extents"]),
    )
    order = np.lexsort((j, i, boxes["target"][i]))
    box, piece = boxes[i[order]], fragments[j[order]]
    low, extents = intersect(box["start"], box["extents"], piece["offset"], piece["extents"])
    made = Fragments.empty(len(box))
    made["tensor"], made["file"], made["dtype"] = box["target"], piece["file"], piece["dtype"]
    made["replica"] = piece["replica"] + box["copies"]
    made["byte_base"] = piece["byte_base"] + ((low - piece["offset"]) * piece["strides"]).sum(axis=1)
    made["offset"] = _permuted(low - box["start"], box) + box["offset"]
    made["extents"] = _permuted(extents, box)
    made["strides"] = _permuted(piece["strides"], box)
    return made


def _permuted(column: Ints, box: npt.NDArray[np.void]) -> Ints:
    return np.take_along_axis(column, box["order"], axis=1)


class _TargetTensors:
    """Collects the tensors of the target and their boxes."""

    def __init__(self, source: SourceTensors) -> None:
        self.source = source
        self.tensors: list[Tensor] = []
        self.positions: list[int] = []
        """Sort key of each tensor: the number of its first source tensor."""
        self.boxes: list[_BoxRow] = []
        self.implied: dict[tuple[str, str], tuple[str, str]] = {}
        """``(key, state)`` of a tensor → that of the tensor whose cast it is."""
        highest = np.zeros(len(source.catalog.tensors), dtype=np.int64)
        np.maximum.at(highest, source.catalog.fragments["tensor"], source.catalog.fragments["replica"])
        self.copies = (highest + 1).tolist()

    def add(self, key: str, aliases: tuple[str, ...], value: Value) -> None:
        """Add the parameter and all states of a key."""
        owners = value.sources
        states = [self.source.states[owner] for owner in owners]
        for owner, has in zip(owners, states, strict=True):
            if lacking := sorted(states[0].keys() ^ has.keys()):
                raise PlanError(
                    f"{key} is made from {owners[0]} and {owner}, of which only "
                    f"{owners[0] if lacking[0] in states[0] else owner} has the state {lacking[0]}"
                )
        for state in states[0]:
            sources = {owner: has[state] for owner, has in zip(owners, states, strict=True)}
            self._add_state(key, aliases if state in (PARAM, EMA_PARAM) else (), state, value, sources)

    def _add_state(
        self, key: str, aliases: tuple[str, ...], state: str, value: Value, sources: Mapping[str, int]
    ) -> None:
        described = [self.source.catalog.tensors[source] for source in sources.values()]
        shape, dtype = described[0].global_shape, described[0].dtype
        if state == PARAM and value.dtype is not None:
            dtype = value.dtype
        else:
            _check_dtypes(key, described)
        if value.segments == self.source.values[value.sources[0]].segments:
            value = source_value(value.sources[0], shape, dtype)  # unchanged, so its state may have any shape
        elif not is_number(state):
            shape = value.shape
            self._check_shapes(described)
        elif ACCUMULATORS[state].of_elements:
            raise PlanError(
                f"{key}: {described[0].label} is a single number computed from all elements of {described[0].key} "
                "(AdamWMini); the tensor cannot be split, concatenated or transposed"
            )
        self.positions.append(next(iter(sources.values())))
        self.tensors.append(Tensor(key, state, dtype, shape, aliases))
        if is_number(state):
            self._add_numbers(described, sources)
        elif not self._is_implied(key, state, sources):
            self._add_boxes(value, sources)

    def _check_shapes(self, described: Sequence[Tensor]) -> None:
        for tensor in described:
            shape = self.source.values[tensor.key].shape
            if tensor.global_shape != shape:
                raise PlanError(
                    f"{tensor.label} has shape {tensor.global_shape}, its parameter {shape}; they must be equal"
                )

    def _is_implied(self, key: str, state: str, sources: Mapping[str, int]) -> bool:
        """Whether the state is implied: everything that it is made from is the cast of the same further state."""
        catalog = self.source.catalog
        by = [catalog.tensors[catalog.implied[s]] for s in sources.values() if s in catalog.implied]
        states = {tensor.state for tensor in by}
        if [tensor.key for tensor in by] != list(sources) or len(states) != 1:
            return False
        self.implied[key, state] = (key, states.pop())
        return True

    def _add_numbers(self, described: Sequence[Tensor], sources: Mapping[str, int]) -> None:
        """Add the scalars of several tensors as copies of the first."""
        copies = 0
        for tensor in described:
            if tensor.elements != 1:
                raise PlanError(f"{tensor.label} has shape {tensor.global_shape}, expected a single number")
            number = source_value(tensor.key, tensor.global_shape, tensor.dtype)
            self._add_boxes(number, sources, copies)
            copies += self.copies[sources[tensor.key]]
        if copies > np.iinfo(np.int16).max:
            raise UnsupportedError(f"{described[0].label}: {copies} copies of one number are too many")

    def _add_boxes(self, value: Value, sources: Mapping[str, int], copies: int = 0) -> None:
        for segment in value.segments:
            number = sources[segment.source]
            self.boxes.append(
                (
                    self.source.catalog.implied.get(number, number),
                    len(self.tensors) - 1,
                    padded(segment.start, 0),
                    padded(segment.extents, 1),
                    (*segment.order, *range(len(segment.order), MAX_DIMS)),
                    padded(segment.offset, 0),
                    copies,
                )
            )


def _check_dtypes(key: str, described: Sequence[Tensor]) -> None:
    for tensor in described:
        if tensor.dtype != described[0].dtype:
            raise PlanError(
                f"{key} is made from {described[0].label}, dtype {described[0].dtype.name}, and "
                f"{tensor.label}, dtype {tensor.dtype.name}"
            )
