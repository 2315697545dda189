"""Which boxes of a target count for the fingerprints of its tensors: what is moved is added up on the way, once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paddle_reshard.pipeline.checkpoint.files import TargetFiles
from paddle_reshard.pipeline.core.catalog import Catalog, volumes
from paddle_reshard.pipeline.core.numbers import hashed
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import DTYPES
from paddle_reshard.pipeline.planning.match import volumes_inside
from paddle_reshard.pipeline.planning.ops import CHECK, MOVE, Ops


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
    box = hashed((kinds, *boxes["offset"].T, *boxes["extents"].T), len(boxes))
    order = np.lexsort((again, box))
    again[order[1:]] |= box[order[1:]] == box[order[:-1]]
    counted = np.bincount(kinds[~again], weights=volumes_inside(boxes, tensors)[~again], minlength=len(first))
    again |= (counted != np.repeat(tensors.elements, len(DTYPES)))[kinds]
    numbered = boxes.copy()
    numbered["replica"] = again
    return replace(target, fragments=numbered)


def count_whole(ops: Ops, tensors: Tensors) -> None:
    """Count nothing of tensors that do not pass through memory as a whole, because the storage copies from them."""
    counted = ((ops["kind"] == MOVE) | (ops["kind"] == CHECK)) & (ops["again"] == 0)
    kinds = ops["tensor"].astype(np.int64) * len(DTYPES) + ops["target_dtype"]
    summed = np.bincount(kinds[counted], weights=volumes(ops)[counted], minlength=len(tensors) * len(DTYPES))
    ops["again"] = ops["again"] | (counted & (summed < np.repeat(tensors.elements, len(DTYPES)))[kinds])


def implied_sums(source: Catalog, target: TargetFiles) -> dict[int, tuple[int, int]]:
    """Master weight → the parameter that it implies, with its dtype, for parameters that no file stores."""
    stored = np.bincount(target.fragments["tensor"], minlength=len(source.tensors)) > 0
    dtypes = source.tensors.dtypes.tolist()
    return {
        master: (tensor, dtypes[tensor]) for tensor, master in source.implied.items() if not stored[tensor]
    }
