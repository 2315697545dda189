"""Plan the fingerprints of a checkpoint: which boxes add up to which tensor.

The first copy of every tensor is read once. A parameter that is implied by its master weight is the same bytes again,
cast.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from paddle_reshard.pipeline.core.catalog import Catalog, Fragments
from paddle_reshard.pipeline.core.geometry import Ints
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
