"""Plan the fingerprints of a checkpoint: which boxes add up to which tensor.

The first copy of every tensor is read once, and compared with the others on request. A parameter that is implied by its
master weight is the same bytes again, cast.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from paddle_reshard.pipeline.core.catalog import Catalog, Fragments
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.planning.match import in_common, match
from paddle_reshard.pipeline.planning.ops import COMPARE, SUM, Ops
from paddle_reshard.pipeline.planning.plan import Plan, plan_comparisons
from paddle_reshard.pipeline.planning.settings import PlanSettings


def plan_sums(
    catalog: Catalog, settings: PlanSettings, tensors: Collection[int] | None = None, *, copies: bool = False
) -> Plan:
    """Plan the fingerprints of all tensors, or of those with some numbers.

    With ``copies``, the copies of every tensor are also compared with the first, unless ``settings`` exclude that, and
    groups report differences instead of raising them.
    """
    chosen = range(len(catalog.tensors) - catalog.borrowed) if tensors is None else sorted(tensors)
    masters = {catalog.implied[number]: number for number in chosen if number in catalog.implied}
    stored = catalog.fragments[np.isin(catalog.fragments["tensor"], [*chosen, *masters])]
    first = stored[stored["replica"] == 0]
    own = first[np.isin(first["tensor"], list(chosen))]
    of_masters = first[np.isin(first["tensor"], list(masters))]
    implied = np.zeros(len(catalog.tensors), dtype=np.int64)
    implied[list(masters)] = list(masters.values())
    ops = [_sums(own, own["tensor"]), _sums(of_masters, implied[of_masters["tensor"]])]
    if copies and settings.compare_replicas:
        ops.append(match(first, stored[stored["replica"] != 0], {}, kind=COMPARE))
    plan = plan_comparisons(Ops.joined(ops), catalog.tensors, catalog.files, settings)
    return replace(plan, allow_replica_drift=copies)


def _sums(fragments: Fragments, tensors: Ints) -> Ops:
    """Add the bytes of each fragment to one of the ``tensors``."""
    ops = in_common(fragments, fragments)
    ops["kind"], ops["tensor"], ops["source_tensor"] = SUM, tensors, fragments["tensor"]
    return ops
