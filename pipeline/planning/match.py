"""Which bytes of the source feed which bytes of the target?

Both sides are fragments of the same logical tensors. Wherever two boxes meet there is one *op*: a strided box
moved from one place to another (``MOVE``: a copy, or a cast where the dtypes differ), or two strided boxes
that must hold the same values: further copies of a tensor (``COMPARE``), and parameters that the target does
not store because they are the cast of their master weight (``CHECK``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.catalog import Catalog, Fragments, volumes
from paddle_reshard.pipeline.errors import CoverageError, PlanError, UnsupportedError
from paddle_reshard.pipeline.geometry import MAX_DIMS, Ints, intersect, padded, pairs_within
from paddle_reshard.pipeline.tensors import DTYPES, Tensor

MOVE, COMPARE, CHECK = 0, 1, 2

OP = np.dtype(
    [
        ("kind", np.int8),  # MOVE, COMPARE or CHECK
        ("tensor", np.int32),  # whose values these are
        ("feed", np.int32),  # the tensor they are read from: another one where it is implied
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

ITEMSIZES = np.array([dtype.itemsize for dtype in DTYPES], dtype=np.int64)


def feeds(tensor_ids: npt.NDArray[np.int32], implied: Mapping[int, int]) -> npt.NDArray[np.int32]:
    """For each tensor the one whose fragments hold its values."""
    feed = np.array(tensor_ids, dtype=np.int32)
    for tensor, source in implied.items():
        feed[tensor_ids == tensor] = source
    return feed


def match(
    source: Fragments, target: Fragments, implied: Mapping[int, int], count: int, kind: int = MOVE
) -> Ops:
    """One op for every pair of boxes of the same values that meet.

    ``count`` is the number of tensors. Ops are ordered by feed, then by the order of ``source``.
    """
    feed = feeds(target["tensor"], implied)
    target = target[order := np.argsort(feed, kind="stable")]
    feed = feed[order]
    source = source[np.argsort(source["tensor"], kind="stable")]
    i, j = pairs_within(source["tensor"], feed, count)
    low, extents, meets = intersect(
        source["offset"][i], source["extents"][i], target["offset"][j], target["extents"][j]
    )
    i, j, low, extents = i[meets], j[meets], low[meets], extents[meets]
    ops = np.zeros(len(i), dtype=OP)
    ops["kind"], ops["tensor"], ops["feed"] = kind, target["tensor"][j], feed[j]
    ops["offset"], ops["extents"] = low, extents
    for side, fragments, index in (("source", source, i), ("target", target, j)):
        ops[f"{side}_file"] = fragments["file"][index]
        ops[f"{side}_dtype"] = fragments["dtype"][index]
        ops[f"{side}_strides"] = fragments["strides"][index]
        shift = ((low - fragments["offset"][index]) * fragments["strides"][index]).sum(axis=1)
        ops[f"{side}_byte"] = fragments["byte_base"][index] + shift
    return ops


def op_volumes(ops: Ops) -> Ints:
    """Elements of each op."""
    return np.asarray(ops["extents"].prod(axis=1), dtype=np.int64)


def hull(ops: Ops, side: str) -> tuple[Ints, Ints]:
    """First byte and one past the last byte that each op touches on one ``side``."""
    span = ((ops["extents"] - 1) * ops[f"{side}_strides"]).sum(axis=1)
    start = ops[f"{side}_byte"]
    return start, start + span + ITEMSIZES[ops[f"{side}_dtype"]]


def plan_ops(source: Catalog, target: Fragments, compare_replicas: bool = True) -> Ops:
    """Everything that has to be moved or compared to make ``target`` of ``source``.

    Further copies of a tensor are compared with the one that is moved, unless ``compare_replicas`` is off.

    Raises
    ------
    CoverageError
        If an element of the target would be written never or twice.
    PlanError
        If a source tensor would be dropped.
    """
    count = len(source.tensors)
    primary = source.fragments[source.fragments["replica"] == 0]
    moves = match(primary, target, source.implied, count)
    _check_casts(moves, source.tensors)
    _check_written_once(moves, clipped(target, source.tensors), source.tensors)
    unmoved = sorted(set(np.unique(primary["tensor"])) - set(np.unique(moves["feed"])))
    implied = _implied_by_definition(source, unmoved)
    copies = source.fragments[source.fragments["replica"] > 0] if compare_replicas else primary[:0]
    left_out = primary[np.isin(primary["tensor"], list(implied))]
    return np.concatenate(
        [
            moves,
            match(primary, copies, implied, count, kind=COMPARE),
            match(primary, left_out, implied, count, kind=CHECK),
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


def _check_casts(moves: Ops, tensors: Sequence[Tensor]) -> None:
    for row in moves[moves["source_dtype"] != moves["target_dtype"]]:
        pair = (DTYPES[row["source_dtype"]].name, DTYPES[row["target_dtype"]].name)
        if pair not in _CASTS:
            raise UnsupportedError(
                f"{tensors[row['tensor']].label}: stored as {pair[0]}, the target wants {pair[1]}; this "
                "cast is not defined by the format"
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
