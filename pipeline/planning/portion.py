"""What of a source a portion of a target is made of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paddle_reshard.pipeline.core.catalog import Catalog, Fragments
from paddle_reshard.pipeline.core.errors import UnsupportedError
from paddle_reshard.pipeline.planning.match import match, source_side, source_tensors


def source_of(catalog: Catalog, boxes: Fragments) -> Catalog:
    """The catalog with what ``boxes`` of a target are made of; copies only where they hold the same elements.

    Tensors keep their numbers. A catalog with tensors that are computed from several others is refused.
    """
    if catalog.mixtures:
        raise UnsupportedError(
            "--ranks: tensors are computed from several others (averages, merged adapters); make these first, then "
            "convert the result for the ranks"
        )
    needed = source_tensors(boxes["tensor"], catalog.implied)
    fragments = catalog.fragments[np.isin(catalog.fragments["tensor"], np.unique(needed))]
    first = fragments["replica"] == 0
    if first.all():
        return replace(catalog, fragments=fragments)
    wanted = boxes.copy()
    wanted["tensor"] = needed
    copies = source_side(match(fragments[~first], _distinct(wanted), {}))
    copies["replica"] = 1
    return replace(catalog, fragments=Fragments.joined([fragments[first], copies]))


def _distinct(boxes: Fragments) -> Fragments:
    """Each box of a tensor once."""
    columns = [boxes[column].reshape(len(boxes), -1) for column in ("tensor", "offset", "extents")]
    _, first = np.unique(np.concatenate(columns, axis=1), axis=0, return_index=True)
    return boxes[np.sort(first)]
