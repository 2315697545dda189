"""Which bytes of the source feed which bytes of the target?

Both sides are fragments of the same logical tensors. Wherever two boxes meet there is one *op*: a strided box
moved from one place to another (``MOVE``: a copy, or a cast where the dtypes differ), or two strided boxes
that must hold the same values: further copies of a tensor (``COMPARE``), and parameters that the target does
not store because they are the cast of their master weight (``CHECK``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.catalog import Catalog, Fragments, volumes
from paddle_reshard.pipeline.errors import CoverageError, PlanError, UnsupportedError
from paddle_reshard.pipeline.geometry import MAX_DIMS, Boxes, Ints, intersect, meeting_pairs, padded
from paddle_reshard.pipeline.tensors import DTYPES, Cast, Tensor

MOVE, COMPARE, CHECK = 0, 1, 2

OP = np.dtype(
    [
        ("kind", np.int8),  # MOVE, COMPARE or CHECK
        ("tensor", np.int32),  # whose values these are
        ("feed", np.int32),  # the tensor they are read from: another one where it is implied
        ("pass", np.int32),  # of its group, in which it is done
        ("source_file", np.int32),
        ("source_dtype", np.int8),
        ("target_file", np.int32),  # of all but a MOVE: a source file too
        ("target_dtype", np.int8),
        ("source_byte", np.int64),  # of the first element
        ("target_byte", np.int64),
        ("offset", np.int64, (MAX_DIMS,)),  # of the box in the tensor
        ("extents", np.int64, (MAX_DIMS,)),
        ("source_strides", np.int64, (MAX_DIMS,)),
        ("target_strides", np.int64, (MAX_DIMS,)),
    ]
)
Ops = npt.NDArray[np.void]

_CASTS = {("float32", "bfloat16")}
"""Casts by definition of a format: a bf16 parameter is its master weight, rounded to nearest even."""

_BLOCK_OPS = 1 << 16
"""Ops that are described in one go: what lies between stays in the cache."""

ITEMSIZES = np.array([dtype.itemsize for dtype in DTYPES], dtype=np.int64)


def feeds(tensor_ids: npt.NDArray[np.int32], implied: Mapping[int, int]) -> npt.NDArray[np.int32]:
    """For each tensor the one whose fragments hold its values."""
    count = 1 + max([int(tensor_ids.max(initial=-1)), *implied])
    feed = np.arange(count, dtype=np.int32)
    feed[list(implied)] = list(implied.values())
    return feed[tensor_ids]


def match(source: Fragments, target: Fragments, implied: Mapping[int, int], kind: int = MOVE) -> Ops:
    """One op for every pair of boxes of the same values that meet.

    Ops are ordered by feed, then by the order of ``source`` and of ``target``.
    """
    feed = feeds(target["tensor"], implied)
    i, j = meeting_pairs(
        Boxes(source["tensor"], source["offset"], source["extents"]),
        Boxes(feed, target["offset"], target["extents"]),
    )
    ops = np.empty(len(i), dtype=OP)
    for first in range(0, len(i), _BLOCK_OPS):
        block = slice(first, first + _BLOCK_OPS)
        _fill(ops[block], source[i[block]], target[j[block]])
        ops["feed"][block] = feed[j[block]]
    ops["kind"], ops["pass"] = kind, 0
    return ops


def _fill(ops: Ops, source: Fragments, target: Fragments) -> None:
    """Describe what each pair of fragments has in common."""
    low, extents = intersect(source["offset"], source["extents"], target["offset"], target["extents"])
    ops["tensor"], ops["offset"], ops["extents"] = target["tensor"], low, extents
    for side, fragments in (("source", source), ("target", target)):
        for column in ("file", "dtype", "strides"):
            ops[f"{side}_{column}"] = fragments[column]
        skipped = ((low - fragments["offset"]) * fragments["strides"]).sum(axis=1)
        ops[f"{side}_byte"] = fragments["byte_base"] + skipped


def op_volumes(ops: Ops) -> Ints:
    """Elements of each op."""
    return np.asarray(ops["extents"].prod(axis=1), dtype=np.int64)


def hull(ops: Ops, side: str) -> tuple[Ints, Ints]:
    """First byte and one past the last byte that each op touches on one ``side``."""
    span = ((ops["extents"] - 1) * ops[f"{side}_strides"]).sum(axis=1)
    start = ops[f"{side}_byte"]
    return start, start + span + ITEMSIZES[ops[f"{side}_dtype"]]


def plan_ops(
    source: Catalog, target: Fragments, compare_replicas: bool = True, casts: Collection[Cast] = ()
) -> Ops:
    """Everything that has to be moved or compared to make ``target`` of ``source``.

    Further copies of a tensor are compared with the one that is moved, unless ``compare_replicas`` is off.
    ``casts`` are those that were asked for, beside the ones that a format defines.

    Raises
    ------
    CoverageError
        If an element of the target would be written never or twice.
    PlanError
        If a source tensor would be dropped.
    """
    primary = source.fragments[source.fragments["replica"] == 0]
    moves = match(primary, target, source.implied)
    _check_casts(moves, source.tensors, casts)
    _check_written_once(moves, clipped(target, source.tensors), source.tensors)
    unmoved = sorted(set(np.unique(primary["tensor"])) - set(np.unique(moves["feed"])))
    implied = _implied_by_definition(source, unmoved)
    copies = source.fragments[source.fragments["replica"] > 0] if compare_replicas else primary[:0]
    left_out = primary[np.isin(primary["tensor"], list(implied))]
    return np.concatenate(
        [
            moves,
            match(primary, copies, implied, kind=COMPARE),
            match(primary, left_out, implied, kind=CHECK),
        ]
    )


def clipped(target: Fragments, tensors: Sequence[Tensor]) -> Fragments:
    """The target's boxes as far as the source's tensors reach; what lies beyond was asked for as zeros."""
    shapes = np.array([padded(t.global_shape, 1) for t in tensors], dtype=np.int64).reshape(-1, MAX_DIMS)
    inside = target.copy()
    reach = shapes[target["tensor"]] - target["offset"]
    inside["extents"] = np.clip(reach, 0, target["extents"])
    return inside


def _implied_by_definition(source: Catalog, unmoved: Sequence[int]) -> dict[int, int]:
    """Stored parameters that the target leaves out because they are the cast of their master weight."""
    index = source.index()
    implied = {}
    for tensor in unmoved:
        described = source.tensors[tensor]
        master = index.get((described.key, "master_weight"))
        if described.state != "param" or master is None:
            raise PlanError(f"{described.label}: the target has no place for it, it would be dropped")
        implied[int(tensor)] = master
    return implied


def _check_casts(moves: Ops, tensors: Sequence[Tensor], casts: Collection[Cast]) -> None:
    pairs, first = np.unique(
        moves["source_dtype"].astype(np.int64) * len(DTYPES) + moves["target_dtype"], return_index=True
    )
    for pair, row in zip(pairs.tolist(), first.tolist(), strict=True):
        one, two = (DTYPES[number] for number in divmod(pair, len(DTYPES)))
        if one != two and (one.name, two.name) not in {*_CASTS, *casts}:
            raise UnsupportedError(
                f"{tensors[moves['tensor'][row]].label}: stored as {one.name}, the target wants {two.name}; this "
                "cast is neither defined by the format nor asked for"
            )


def _check_written_once(moves: Ops, target: Fragments, tensors: Sequence[Tensor]) -> None:
    """Sources are disjoint, so equal volumes mean: every target element once."""
    written = np.bincount(moves["tensor"], weights=op_volumes(moves), minlength=len(tensors))
    wanted = np.bincount(target["tensor"], weights=volumes(target), minlength=len(tensors))
    wrong = np.flatnonzero(written != wanted)
    if len(wrong):
        tensor = int(wrong[0])
        raise CoverageError(
            tensors[tensor].label,
            f"the target has places for {int(wanted[tensor])} elements, the source fills "
            f"{int(written[tensor])}",
        )
