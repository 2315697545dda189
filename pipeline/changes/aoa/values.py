"""Describe a tensor as boxes of source tensors.

No data is moved: a slice, a concatenation or a transpose only changes the offsets of boxes. The concatenation of
``a`` (2 × 3) and ``b`` (2 × 3) along axis 1, split in two, is ``a`` and ``b`` again; split in three, the second part is
columns [2, 3) of ``a`` at offset (0, 0) and columns [0, 1) of ``b`` at offset (0, 1). What does not fit together is a
:class:`PlanError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paddle_reshard.pipeline.changes.aoa.language import Fused
from paddle_reshard.pipeline.core.errors import PlanError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensors import DType
from paddle_reshard.pipeline.model.placement import with_dim


@dataclass(frozen=True, slots=True)
class Segment:
    """A box of a source tensor, and its offset in the value."""

    source: str
    """Key of the source tensor."""
    start: Shape
    """First element of the box in the source tensor."""
    extents: Shape
    """Extents in the order of the source tensor's dims."""
    order: Shape
    """Dim ``i`` of the value is dim ``order[i]`` of the source tensor."""
    offset: Shape
    """First element of the box in the value."""


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a name."""

    shape: Shape
    dtype: DType | None
    """Dtype of the parameter; ``None`` if the checkpoint holds only further states of it."""
    segments: tuple[Segment, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """Keys of the source tensors that it is made from."""
        return tuple(dict.fromkeys(segment.source for segment in self.segments))


def source_value(key: str, shape: Shape, dtype: DType | None) -> Value:
    """An unchanged tensor of the source."""
    zeros = (0,) * len(shape)
    return Value(shape, dtype, (Segment(key, zeros, shape, tuple(range(len(shape))), zeros),))


def permuted(value: Value, order: Shape | None) -> Value:
    """The value with permuted dims; ``None`` reverses them."""
    dims = len(value.shape)
    if order is None:
        order = tuple(reversed(range(dims)))
    if len(order) != dims:
        raise PlanError(f"permute has {len(order)} dims, but the tensor has shape {value.shape}")
    segments = tuple(
        replace(s, order=_picked(s.order, order), offset=_picked(s.offset, order)) for s in value.segments
    )
    return replace(value, shape=_picked(value.shape, order), segments=segments)


def _picked(values: Shape, order: Shape) -> Shape:
    return tuple(values[dim] for dim in order)


class Span(NamedTuple):
    """``[start, stop)`` of the ``number``-th value along the axis, in units."""

    number: int
    start: int
    stop: int


def split(value: Value, axis: int, parts: int) -> list[Value]:
    """``parts`` equal parts along an axis."""
    return [assembled([value], [parts], [Span(0, part, part + 1)], axis) for part in range(parts)]


def concatenated(values: Sequence[Value], axis: int) -> Value:
    """The values, concatenated along an axis."""
    pieces = [Span(number, 0, 1) for number in range(len(values))]
    return assembled(values, [1] * len(values), pieces, axis)


def assembled(values: Sequence[Value], units: Sequence[int], pieces: Sequence[Span], axis: int) -> Value:
    """Pieces of values, concatenated along an axis.

    Parameters
    ----------
    units
        The number of equal units into which each value is divided along the axis.
    """
    first = values[0]
    lengths = []
    for value, count in zip(values, units, strict=True):
        unit = _unit(value, axis, count)
        if _without(value.shape, axis) != _without(first.shape, axis):
            raise PlanError(
                f"tensors of shapes {first.shape} and {value.shape} cannot be concatenated along axis {axis}"
            )
        if value.dtype != first.dtype:
            raise PlanError(
                f"tensors of dtypes {_dtype_name(first)} and {_dtype_name(value)} cannot be concatenated without a cast"
            )
        lengths.append(unit)
    segments: list[Segment] = []
    filled = 0
    for number, start, stop in pieces:
        unit = lengths[number]
        segments += _slice(values[number], axis, start * unit, stop * unit, filled)
        filled += (stop - start) * unit
    return Value(with_dim(first.shape, axis, filled), first.dtype, _merged(segments, axis))


def _dtype_name(value: Value) -> str:
    return "none" if value.dtype is None else value.dtype.name


def _without(values: Shape, dim: int) -> Shape:
    return (*values[:dim], *values[dim + 1 :])


def _slice(value: Value, axis: int, start: int, stop: int, filled: int) -> Iterator[Segment]:
    """The segments within ``[start, stop)`` along an axis, shifted so that ``start`` becomes ``filled``."""
    for segment in value.segments:
        dim, at = segment.order[axis], segment.offset[axis]
        low, high = max(at, start), min(at + segment.extents[dim], stop)
        if low < high:
            yield replace(
                segment,
                start=with_dim(segment.start, dim, segment.start[dim] + low - at),
                extents=with_dim(segment.extents, dim, high - low),
                offset=with_dim(segment.offset, axis, low - start + filled),
            )


def _merged(segments: Iterable[Segment], axis: int) -> tuple[Segment, ...]:
    """The same boxes, joining neighbours along the axis that are also neighbours in their source."""
    joined: dict[tuple[object, ...], Segment] = {}
    for segment in sorted(segments, key=lambda s: s.offset[axis]):
        dim = segment.order[axis]
        length, begins = segment.extents[dim], (segment.start[dim], segment.offset[axis])
        same = (
            segment.source,
            segment.order,
            _without(segment.start, dim),
            _without(segment.extents, dim),
            _without(segment.offset, axis),
        )
        before = joined.pop((same, begins), None)
        if before is not None:
            segment = replace(before, extents=with_dim(before.extents, dim, before.extents[dim] + length))
        joined[same, (begins[0] + length, begins[1] + length)] = segment
    return tuple(sorted(joined.values(), key=lambda s: (s.offset, s.source)))


def regrouped(values: Sequence[Value], fused: Fused, results: int) -> list[Value]:
    """Fuse parts into a tensor, or split a fused tensor into its parts, of which there are ``results``.

    A tensor that stays fused stays as it is.
    """
    parts = (1, 1) if fused.macro == "fused_ffn" else (fused.heads, fused.groups, fused.groups)
    blocks = fused.groups if fused.macro == "fused_qkv" else 1
    lengths = [count // blocks for count in parts]  # in units; a block has as many of each part
    if len(values) > 1:
        _check_units(values, fused.axis, parts)
        pieces = [
            Span(part, block * length, (block + 1) * length)
            for block in range(blocks)
            for part, length in enumerate(lengths)
        ]
        return [assembled(values, parts, pieces, fused.axis)]
    _unit(values[0], fused.axis, sum(parts))
    if results == 1:
        return list(values)
    of_parts = []
    for part, length in enumerate(lengths):
        starts = [block * sum(lengths) + sum(lengths[:part]) for block in range(blocks)]
        pieces = [Span(0, start, start + length) for start in starts]
        of_parts.append(assembled(values, [sum(parts)], pieces, fused.axis))
    return of_parts


def _check_units(values: Sequence[Value], axis: int, parts: Shape) -> None:
    sizes = [_unit(value, axis, count) for value, count in zip(values, parts, strict=True)]
    if len(set(sizes)) > 1:
        raise PlanError(
            f"the parts of a fused tensor must have units of equal size, found {sizes} elements along axis {axis}, as "
            "with wrong numbers of heads; where they are meant, split each part with axis=… and concatenate the pieces"
        )


def _unit(value: Value, axis: int, count: int) -> int:
    """Extent of one of ``count`` equal parts along an axis."""
    if axis >= len(value.shape):
        raise PlanError(f"axis {axis} does not exist in a tensor of shape {value.shape}")
    if value.shape[axis] == 0 or value.shape[axis] % count:
        raise PlanError(
            f"axis {axis} of a tensor of shape {value.shape} cannot be divided into {count} equal parts"
        )
    return value.shape[axis] // count
