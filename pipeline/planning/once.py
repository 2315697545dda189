"""Which boxes of a target count for the fingerprints of its tensors: what is moved is added up on the way, once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paddle_reshard.pipeline.checkpoint.files import TargetFiles
from paddle_reshard.pipeline.core.numbers import hashed
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import DTYPES
from paddle_reshard.pipeline.planning.match import volumes_inside


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
