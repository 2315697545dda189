"""Plan the fingerprints of a checkpoint: which boxes add up to which tensor.

The first copy of every tensor is read once. A parameter that is implied by its master weight is the same bytes again,
cast. In a conversion, what is moved is added up on the way.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from paddle_reshard.pipeline.core.catalog import Catalog, Fragments
from paddle_reshard.pipeline.core.geometry import Ints
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import DTYPES
from paddle_reshard.pipeline.layouts.files import TargetFiles
from paddle_reshard.pipeline.planning.match import volumes_inside
from paddle_reshard.pipeline.planning.ops import SUM, Ops, set_stops
from paddle_reshard.pipeline.planning.plan import Plan, plan_comparisons
from paddle_reshard.pipeline.planning.settings import PlanSettings


def plan_sums(catalog: Catalog, settings: PlanSettings, tensors: Collection[int] | None = None) -> Plan:
    """Plan the fingerprints of all tensors, or of those with some numbers.

    Raises
    ------
    MemoryBudgetError
        If a box that cannot be cut does not fit the budget.
    """
    chosen = range(len(catalog.tensors) - catalog.borrowed) if tensors is None else sorted(tensors)
    stored = catalog.fragments[catalog.fragments["replica"] == 0]
    masters = {catalog.implied[number]: number for number in chosen if number in catalog.implied}
    own = stored[np.isin(stored["tensor"], list(chosen))]
    of_masters = stored[np.isin(stored["tensor"], list(masters))]
    implied = np.zeros(len(catalog.tensors), dtype=np.int64)
    implied[list(masters)] = list(masters.values())
    ops = Ops.joined([_sums(own, own["tensor"]), _sums(of_masters, implied[of_masters["tensor"]])])
    return plan_comparisons(ops, catalog.tensors, catalog.files, settings)


def count_once(target: TargetFiles, tensors: Tensors) -> TargetFiles:
    """Number the copies of each box of the ``target``, so that fingerprints count the values of each tensor once.

    Counted are the boxes of the first of several targets that holds a tensor in a dtype. If its boxes overlap without
    being copies, none of them is counted.
    """
    boxes = target.fragments
    kinds = boxes["tensor"].astype(np.int64) * len(DTYPES) + boxes["dtype"]
    number = np.searchsorted(np.array(target.first_files), boxes["file"], side="right")
    first = np.full(len(tensors) * len(DTYPES), len(target.first_files) + 1)
    np.minimum.at(first, kinds, number)
    again = number != first[kinds]
    box = np.zeros(len(boxes), dtype=np.uint64)
    for column in (kinds, *boxes["offset"].T, *boxes["extents"].T):
        box = (box ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        box ^= box >> np.uint64(29)
    order = np.lexsort((again, box))
    again[order[1:]] |= box[order[1:]] == box[order[:-1]]
    counted = np.bincount(kinds[~again], weights=volumes_inside(boxes, tensors)[~again], minlength=len(first))
    again |= (counted != np.repeat(tensors.elements, len(DTYPES)))[kinds]
    numbered = boxes.copy()
    numbered["replica"] = again
    return replace(target, fragments=numbered)


def _sums(fragments: Fragments, tensors: Ints) -> Ops:
    """Add the bytes of each fragment to one of the ``tensors``."""
    ops = Ops.empty(len(fragments))
    ops["kind"], ops["tensor"], ops["source_tensor"] = SUM, tensors, fragments["tensor"]
    ops["offset"], ops["extents"] = fragments["offset"], fragments["extents"]
    for side in ("source", "target"):
        ops[f"{side}_byte"] = fragments["byte_base"]
        for column in ("file", "dtype", "strides"):
            ops[f"{side}_{column}"] = fragments[column]
    set_stops(ops)
    return ops
