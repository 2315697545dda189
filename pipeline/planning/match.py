"""Match source fragments with target fragments.

Both are boxes of the same logical tensors. Wherever two boxes overlap there is one *op*.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.catalog import Catalog, Fragments, volumes, wide_dims
from paddle_reshard.pipeline.core.columns import Flags
from paddle_reshard.pipeline.core.errors import CoverageError, PlanError, UnsupportedError
from paddle_reshard.pipeline.core.geometry import MAX_DIMS, Intervals, by_tensor, meeting_intervals
from paddle_reshard.pipeline.core.mixture import Mixture
from paddle_reshard.pipeline.core.numbers import Ints, hashed, numbered_within
from paddle_reshard.pipeline.core.sorting import order_of
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import DTYPES, Cast, Tensor
from paddle_reshard.pipeline.planning.ops import CHECK, COMPARE, MOVE, Ops, set_lengths

_CASTS = {("float32", "bfloat16")}
"""Casts that formats define: a bfloat16 parameter is its master weight, rounded to nearest even."""

_FLOAT32 = [dtype.name for dtype in DTYPES].index("float32")
_BLOCK_OPS = 1 << 16
"""Ops made at a time: intermediate arrays stay in the processor's cache."""


def source_tensors(tensor_ids: npt.NDArray[np.int32], implied: Mapping[int, int]) -> npt.NDArray[np.int32]:
    """For each tensor, the tensor whose fragments hold its values.

    >>> source_tensors(np.array([0, 1, 2], dtype=np.int32), {1: 0})
    array([0, 0, 2], dtype=int32)
    """
    count = 1 + max([int(tensor_ids.max(initial=-1)), *implied])
    source_tensor = np.arange(count, dtype=np.int32)
    source_tensor[list(implied)] = list(implied.values())
    return source_tensor[tensor_ids]


class _Pairs(NamedTuple):
    """Pairs of overlapping fragments."""

    source: Fragments
    target: Fragments
    i: Ints
    """Row of ``source`` in each pair."""
    j: Ints
    """Row of ``target`` in each pair."""
    source_tensor: npt.NDArray[np.int32]
    """Tensor that each pair is read from."""


def _meeting(source: Fragments, target: Fragments, implied: Mapping[int, int]) -> _Pairs:
    source_tensor = source_tensors(target["tensor"], implied)
    dims = _distinguishing_dims(source, target)
    count = 1 + int(max(source["tensor"].max(initial=-1), source_tensor.max(initial=-1)))
    a, b = (
        _sorted(tensor, rows, dims, count)
        for rows, tensor in ((source, source["tensor"]), (target, source_tensor))
    )
    alike = _first_alike(a, b)
    firsts = [np.flatnonzero(alike[side.tensor] == side.tensor) for side in (a, b)]
    blocks = by_tensor(*(side.tensor[rows] for side, rows in zip((a, b), firsts, strict=True)))
    chunks = []
    for in_a, in_b in zip(*blocks, strict=True):
        at_a, at_b = firsts[0][in_a], firsts[1][in_b]
        i, j = meeting_intervals(a.intervals(at_a), b.intervals(at_b))
        chunks.append((at_a[i], at_b[j]))
    i, j = (np.concatenate([pairs[side] for pairs in chunks]) for side in (0, 1))
    i, j = _for_all(i, j, a, b, alike)
    return _Pairs(source, target, a.of_rows(i), b.of_rows(j), a.tensor[i])


class _Side(NamedTuple):
    """Boxes sorted by tensor."""

    rows: Ints | None
    """Index of each box among the fragments; ``None`` if these are sorted."""
    tensor: npt.NDArray[np.int32]
    first: Ints
    """Place of the first box of each tensor, and one past the last of all."""
    along: dict[int, tuple[Ints, Ints]]
    """Dim → start and stop of every box."""

    def of_rows(self, at: Ints) -> Ints:
        """Indices of some of the boxes among the fragments."""
        return at if self.rows is None else self.rows[at]

    def intervals(self, at: Ints) -> Intervals:
        return Intervals(
            self.tensor[at], {dim: (start[at], stop[at]) for dim, (start, stop) in self.along.items()}
        )


def _sorted(tensor: npt.NDArray[np.int32], boxes: Fragments, dims: Sequence[int], count: int) -> _Side:
    first = np.r_[0, np.cumsum(np.bincount(tensor, minlength=count))]
    along = {}
    for dim in dims:
        start, stop = map(_halved, _interval(boxes, dim))
        along[dim] = start, stop
    if (tensor[1:] >= tensor[:-1]).all():
        return _Side(None, tensor, first, along)
    rows = order_of(tensor)
    for dim, (start, stop) in along.items():
        along[dim] = start[rows], stop[rows]
    return _Side(rows, tensor[rows], first, along)


def _halved(column: Ints) -> Ints:
    """The same numbers in half the memory, if they fit."""
    return column.astype(np.int32) if column.max(initial=0) <= np.iinfo(np.int32).max else column


def _first_alike(a: _Side, b: _Side) -> Ints:
    """For each tensor the first that has the same boxes in the same order, on both sides.

    If tensors 1, 2 and 3 are the states of a parameter, which is tensor 0, they nearly always are 0, 1, 1, 1.
    """
    count = len(a.first) - 1
    key = np.zeros(count, dtype=np.uint64)
    words = [_packed(list(chain.from_iterable(side.along.values()))) for side in (a, b)]
    for side, columns in zip((a, b), words, strict=True):
        total = np.append(np.uint64(0), np.cumsum(hashed(columns, len(side.tensor))))[side.first]
        key = hashed((key, total[1:] - total[:-1]), count)
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    alike = first[number.ravel()]
    for side in (a, b):  # tensors with the same key are compared box by box
        lengths = np.diff(side.first)
        alike = np.where(lengths[alike] == lengths, alike, np.arange(count))
    differs = np.zeros(count, dtype=bool)
    for side, columns in zip((a, b), words, strict=True):
        other = np.arange(len(side.tensor))
        other += np.repeat(side.first[alike] - side.first[:-1], np.diff(side.first))
        for column in columns:
            differs[side.tensor[column[other] != column]] = True
    return np.where(differs, np.arange(count), alike)


def _packed(columns: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[np.uint64]]:
    """As few columns of words as hold the numbers of all these; a column of one number is left out.

    >>> [column.tolist() for column in _packed([np.array([1, 2]), np.array([7, 7]), np.array([3, 0])])]
    [[7, 8]]
    """
    words: list[npt.NDArray[np.uint64]] = []
    room = 0
    for column in columns:
        if not len(column) or column.min() == column.max():
            continue
        bits = int(column.max()).bit_length()
        if bits > room:
            words.append(column.astype(np.uint64))
            room = 64 - bits
        else:
            words[-1] <<= np.uint64(bits)
            words[-1] |= column.astype(np.uint64)
            room -= bits
    return words


def _for_all(i: Ints, j: Ints, a: _Side, b: _Side, alike: Ints) -> tuple[Ints, Ints]:
    """The pairs of all tensors, made of those of the first tensor of all that are alike; ordered by tensor."""
    lengths = np.bincount(a.tensor[i], minlength=len(alike))
    begin = (np.cumsum(lengths) - lengths)[alike]
    lengths = lengths[alike]
    pair = np.repeat(begin, lengths) + numbered_within(lengths)
    left, right = (
        at[pair] + np.repeat(side.first[:-1] - side.first[alike], lengths) for side, at in ((a, i), (b, j))
    )
    return left, right


def _distinguishing_dims(*boxes: Fragments) -> list[int]:
    """The dims along which two of these boxes may be apart, at least one."""
    dims = wide_dims(*boxes)
    return [
        dim
        for dim in range(MAX_DIMS)
        if dim in dims or any(rows.single("offset", dim) != 0 for rows in boxes)
    ] or [0]


def _interval(boxes: Fragments, dim: int) -> tuple[Ints, Ints]:
    start = boxes.along("offset", dim)
    return start, start + boxes.along("extents", dim)


def match(source: Fragments, target: Fragments, implied: Mapping[int, int], kind: int = MOVE) -> Ops:
    """One op for every pair of overlapping boxes of the same values.

    A float32 tensor ``a`` of 8 elements, stored in two files, and a target that holds its middle::

        source   file 0: a[0:4]         file 1: a[4:8]
        target            file 0: a[2:6]
        ops      a[2:4]: source file 0, byte 8 → target byte 0
                 a[4:6]: source file 1, byte 0 → target byte 8

    Ops are ordered by source tensor, then by the order of ``source`` and of ``target``.
    """
    return _described([(kind, _meeting(source, target, implied))])


def source_side(ops: Ops) -> Fragments:
    """What ops read from their source, as fragments of their tensors."""
    fragments = Fragments.empty(len(ops))
    for column in ("tensor", "offset", "extents"):
        fragments[column] = ops[column]
    fragments["byte_base"] = ops["source_byte"]
    for column in ("file", "dtype", "strides"):
        fragments[column] = ops[f"source_{column}"]
    return fragments


def _described(pairs_by_kind: Sequence[tuple[int, _Pairs]]) -> Ops:
    """The ops of all pairs, kind by kind."""
    chunks = [Ops.empty()]
    for kind, (source, target, i, j, source_tensor) in pairs_by_kind:
        for first in range(0, len(i), _BLOCK_OPS):
            block = slice(first, first + _BLOCK_OPS)
            ops = in_common(source[i[block]], target[j[block]])
            ops["kind"], ops["source_tensor"] = kind, source_tensor[block]
            chunks.append(ops)
    return Ops.joined(chunks)


def in_common(source: Fragments, target: Fragments) -> Ops:
    """What the two fragments of each pair have in common, as moves of the target's tensor."""
    ops = Ops.empty(len(source))
    sides = (("source", source), ("target", target))
    ops.share("tensor", target, "tensor")
    ops.share("offset", source, "offset")
    starts = {side: fragments["byte_base"] for side, fragments in sides}
    for side, fragments in sides:
        for column in ("file", "dtype", "strides"):
            ops.share(f"{side}_{column}", fragments, column)
    for dim in wide_dims(source, target):  # along the others, both boxes are at the same element
        begins = {side: fragments.along("offset", dim) for side, fragments in sides}
        ends = [begins[side] + fragments.along("extents", dim) for side, fragments in sides]
        low = np.maximum(*begins.values())
        ops.set_along("offset", dim, low)
        ops.set_along("extents", dim, np.minimum(*ends) - low)
        for side, fragments in sides:
            starts[side] = starts[side] + (low - begins[side]) * fragments.along("strides", dim)
    for dim in set(range(MAX_DIMS)) - set(wide_dims(source, target)):
        ops.set_along("extents", dim, 1)
    for side, start in starts.items():
        ops[f"{side}_byte"] = start
    set_lengths(ops)
    return ops


def plan_ops(
    source: Catalog,
    target: Fragments,
    compared: Collection[int] | None = None,
    casts: Collection[Cast] = (),
    omitted: Collection[int] = (),
) -> Ops:
    """Everything that must be moved or compared to make ``target`` from ``source``.

    Further copies of a tensor are compared with the first; with ``compared`` only those of these tensors. ``casts`` are
    allowed in addition to those that formats define. ``omitted`` are tensors that some of several targets omit and
    others hold. Refused is a target with an element that would not be written once, and one that would drop a source
    tensor.
    """
    first = source.fragments["replica"] == 0
    primary = source.fragments if first.all() else source.fragments[first]
    steps = list(_steps(primary, target, source))
    fed = np.concatenate([pairs.source_tensor for pairs, _ in steps])
    stored, used = (np.bincount(t, minlength=len(source.tensors)) > 0 for t in (primary["tensor"], fed))
    unused = [t for t in np.flatnonzero(stored & ~used).tolist() if not _is_held_empty(t, source, target)]
    implied = _implied_by_definition(source, sorted({*unused, *omitted}))
    copies = source.fragments[~first]
    if compared is not None:
        copies = copies[np.isin(copies["tensor"], list(compared))]
    unmoved = primary[np.isin(primary["tensor"], list(implied))] if implied else primary[:0]
    ops = _described(
        [
            *((MOVE, pairs) for pairs, _ in steps),
            (COMPARE, _meeting(primary, copies, implied)),
            (CHECK, _meeting(primary, unmoved, implied)),
        ]
    )
    _check_casts(ops[: len(fed)], source.tensors, casts)
    done = 0
    for pairs, wanted in steps:
        _check_written_once(ops[done : done + len(pairs.i)], wanted, source.tensors)
        done += len(pairs.i)
    _check_steps(ops[: len(fed)], source.mixtures, source.tensors)
    return ops


def _steps(primary: Fragments, target: Fragments, source: Catalog) -> Iterator[tuple[_Pairs, Ints]]:
    """The pairs to move, and how many elements of each tensor they must fill.

    Tensors that are moved as they are come first, then mixtures, step by step.
    """
    mixtures = source.mixtures
    inside = volumes_inside(target, source.tensors)

    def wanted(rows: Flags | slice) -> Ints:
        filled = np.bincount(target["tensor"][rows], weights=inside[rows], minlength=len(source.tensors))
        return filled.astype(np.int64)

    mixed = np.isin(target["tensor"], list(mixtures))
    if mixed.any():
        yield _meeting(primary, target[~mixed], source.implied), wanted(~mixed)
    else:
        yield _meeting(primary, target, source.implied), wanted(slice(None))
    for step in range(max([0, *(len(mixture.terms) for mixture in mixtures.values())])):
        fed = {t: m.terms[step].tensor for t, m in mixtures.items() if step < len(m.terms)}
        rows = np.isin(target["tensor"], list(fed))
        yield _meeting(primary, target[rows], fed), wanted(rows)


def _check_steps(moves: Ops, mixtures: Mapping[int, Mixture], tensors: Sequence[Tensor]) -> None:
    """Check that mixed tensors are stored as float32, with each step in later files than the step before."""
    last = -1
    for step in range(max([0, *(len(mixture.terms) for mixture in mixtures.values())])):
        fed = {t: m.terms[step].tensor for t, m in mixtures.items() if step < len(m.terms)}
        rows = np.isin(moves["tensor"], list(fed)) & (
            moves["source_tensor"] == source_tensors(moves["tensor"], fed)
        )
        if (wrong := rows & (moves["source_dtype"] != _FLOAT32)).any():
            first = int(np.argmax(wrong))
            raise UnsupportedError(
                f"{tensors[int(moves['source_tensor'][first])].label}: stored as "
                f"{DTYPES[int(moves['source_dtype'][first])].name}; only float32 can be averaged"
            )
        files = moves["source_file"][rows]
        if len(files) and files.min() <= last:
            raise PlanError(
                f"{tensors[min(fed)].label}: its files are not in the order in which they are mixed"
            )
        last = max(last, int(files.max(initial=-1)))


def volumes_inside(target: Fragments, tensors: Tensors) -> Ints:
    """Elements of each target box that lie within the source's tensor; the rest is zeros, by request."""
    columns = [np.ascontiguousarray(extents) for extents in tensors.shapes.T]
    elements = np.ones(len(target), dtype=np.int64)
    done = 0
    for boxes in target.blocks():
        inside = elements[done : done + len(boxes)]
        for dim, extents in enumerate(columns):
            if (boxes.single("offset", dim), boxes.single("extents", dim)) != (0, 1) or not extents.all():
                reach = extents[boxes["tensor"]] - boxes.along("offset", dim)
                inside *= np.clip(reach, 0, boxes.along("extents", dim))
        done += len(boxes)
    return elements


def _is_held_empty(tensor: int, source: Catalog, target: Fragments) -> bool:
    """Whether the target has a tensor of which nothing moves because it has no elements, such as one of ``(0, 4)``."""
    return not source.tensors[tensor].elements and bool((target["tensor"] == tensor).any())


def _implied_by_definition(source: Catalog, unmoved: Sequence[int]) -> dict[int, int]:
    """Parameter → master weight, for stored parameters that the target omits because they are implied."""
    index = source.index()
    implied = {}
    for tensor in unmoved:
        described = source.tensors[tensor]
        master = index.get((described.key, "master_weight"))
        if described.state != "param" or master is None:
            raise PlanError(f"{described.label}: the target cannot hold it, so it would be dropped")
        implied[int(tensor)] = master
    return implied


def _check_casts(moves: Ops, tensors: Sequence[Tensor], casts: Collection[Cast]) -> None:
    pairs = moves["source_dtype"].astype(np.int64) * len(DTYPES) + moves["target_dtype"]
    for pair in np.flatnonzero(np.bincount(pairs)).tolist():
        stored, needed = (DTYPES[number] for number in divmod(pair, len(DTYPES)))
        if stored != needed and (stored.name, needed.name) not in {*_CASTS, *casts}:
            tensor = tensors[int(moves["tensor"][np.argmax(pairs == pair)])]
            raise UnsupportedError(
                f"{tensor.label}: stored as {stored.name}, and the target needs {needed.name}; the format does not "
                "define this cast, and no option requests it"
            )


def _check_written_once(moves: Ops, wanted: Ints, tensors: Sequence[Tensor]) -> None:
    """Source boxes are disjoint, so equal volumes mean that every target element is written once."""
    written = np.bincount(moves["tensor"], weights=volumes(moves), minlength=len(tensors))
    wrong = np.flatnonzero(written != wanted)
    if len(wrong):
        tensor = int(wrong[0])
        raise CoverageError(
            tensors[tensor].label,
            f"the target needs {int(wanted[tensor])} elements, the source provides {int(written[tensor])}",
        )
