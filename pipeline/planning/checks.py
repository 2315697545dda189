"""Plan the comparison of stored parameters with their master weights: which, and how much of each.

If a source stores both, a parameter must be its master weight, rounded to nearest even. Otherwise parameters and
optimizer states are of different steps, or files were swapped. If both are loaded anyway, every element is compared. If
the storage copies one of them, or the target takes only one, a few runs of every array are read for the comparison. A
process that loads pieces of tensors compares the elements that it loads of both.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.catalog import ITEMSIZES, Catalog, Fragments, volumes
from paddle_reshard.pipeline.core.columns import Flags
from paddle_reshard.pipeline.core.geometry import MAX_DIMS, Intervals, meeting_intervals
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import MASTER_WEIGHT, PARAM, Tensor
from paddle_reshard.pipeline.planning.match import match, source_side
from paddle_reshard.pipeline.planning.ops import CHECK, HOLD, MOVE, PROBE, Ops, hull, set_lengths
from paddle_reshard.pipeline.planning.parts import MADE, Parts, part_sizes

RUNS = 4
"""Runs sampled of a box: the first elements, the last, and pseudo-random ones in between."""
RUN_ELEMENTS = 512
"""All runs of a box take 4 KiB of a bfloat16 parameter and 8 KiB of its master weight."""


@dataclass(frozen=True)
class MasterChecks:
    """Comparisons of parameters with their master weights, for a source that stores both."""

    tensors: Tensors
    """Tensors of the catalog that is moved, followed by those that are only compared."""
    boxes: Ops
    """``HOLD`` of every element; ``tensor`` is the parameter, ``source_tensor`` the master weight."""
    seeds: Ints
    """Seed of each tensor's pseudo-random runs: a hash of its key."""

    def up_to(self, most_bytes: int) -> MasterChecks:
        """The same checks, but only samples if parameter and master weight have more than ``most_bytes`` together."""
        sizes = volumes(self.boxes) * (
            ITEMSIZES[self.boxes["source_dtype"]] + ITEMSIZES[self.boxes["target_dtype"]]
        )
        total = np.bincount(self.boxes["tensor"], weights=sizes, minlength=len(self.tensors))
        large = total[self.boxes["tensor"]] > most_bytes
        samples = _samples(self.boxes[large], self.seeds)
        samples["kind"] = PROBE
        return replace(self, boxes=Ops.joined([self.boxes[~large], samples]))


def master_checks(whole: Catalog, moved: Catalog) -> MasterChecks | None:
    """Checks of all parameters that ``whole`` stores with their master weights; ``None`` if there are none.

    Tensors are numbered as in ``moved``; those that it lacks follow. Mixed tensors are excluded: they are not casts.
    """
    pairs = _stored_pairs(whole)
    if not pairs:
        return None
    numbers = np.arange(len(whole.tensors), dtype=np.int32)
    tensors = moved.tensors
    if moved is not whole:
        index = moved.index()
        added: list[Tensor] = []
        for number in (*pairs, *pairs.values()):
            known = index.get(whole.tensors.identity(number))
            numbers[number] = len(tensors) + len(added) if known is None else known
            if known is None:
                added.append(whole.tensors[number])
        if added:
            tensors = Tensors((*tensors, *added))
    primary = whole.fragments[whole.fragments["replica"] == 0]
    boxes = match(primary, _of(primary, pairs), pairs, kind=HOLD)
    boxes["tensor"], boxes["source_tensor"] = numbers[boxes["tensor"]], numbers[boxes["source_tensor"]]
    seeds = np.zeros(len(tensors), dtype=np.int64)
    for number in pairs:
        seeds[numbers[number]] = _seed(whole.tensors[number])
    return MasterChecks(tensors, boxes, seeds)


def master_checks_of_loaded(whole: Catalog, loaded: Fragments) -> MasterChecks | None:
    """Checks for a process that loads only the boxes ``loaded`` of the ``whole`` source's tensors.

    A process that loads parameters and master weights compares the elements that it loads of both; under sharding,
    further processes load the rest of the master weights. A process that loads only one of the two reads one run from
    every array that it loads from, and the same elements of the array that it does not load.
    """
    wanted = set(np.unique(loaded["tensor"]).tolist())
    both = {PARAM, MASTER_WEIGHT} <= {whole.tensors[number].state for number in wanted}
    needed = all if both else any
    pairs = {
        param: master
        for param, master in _stored_pairs(whole).items()
        if needed(number in wanted for number in (param, master))
    }
    if not pairs:
        return None
    primary = whole.fragments[whole.fragments["replica"] == 0]
    params, masters = (
        _reached(_of(primary, numbers), _of(loaded, numbers)) for numbers in (pairs.keys(), pairs.values())
    )
    seeds = np.zeros(len(whole.tensors), dtype=np.int64)
    for number in pairs:
        seeds[number] = _seed(whole.tensors[number])
    boxes = match(masters, params, pairs, kind=HOLD)
    if not both:
        boxes = _samples(_largest_of_arrays(boxes), seeds, runs=(1,))
        boxes["kind"] = PROBE
    return MasterChecks(whole.tensors, boxes, seeds)


def _reached(fragments: Fragments, boxes: Fragments) -> Fragments:
    """The ``fragments`` cut to the boxes; fragments of tensors without a box stay whole."""
    inside = source_side(match(fragments, boxes, {}))
    untouched = fragments[~np.isin(fragments["tensor"], boxes["tensor"])]
    return Fragments.joined([inside, untouched])


def _largest_of_arrays(boxes: Ops) -> Ops:
    """The largest box of each pair of arrays."""
    columns = [boxes[column] for column in ("tensor", "source_file", "target_file")]
    order = np.lexsort((volumes(boxes), *columns))
    differs = np.any([column[order[1:]] != column[order[:-1]] for column in columns], axis=0)
    return boxes[np.sort(order[np.r_[differs, True][: len(order)]])]


def _seed(param: Tensor) -> int:
    return zlib.crc32(param.key.encode())


def _stored_pairs(whole: Catalog) -> dict[int, int]:
    """Parameter → master weight, for parameters of which files hold both."""
    masters = whole.tensors.of_state(MASTER_WEIGHT)
    stored = np.bincount(whole.fragments["tensor"], minlength=len(whole.tensors)) > 0
    return {
        number: masters[key]
        for key, number in whole.tensors.of_state(PARAM).items()
        if key in masters
        and stored[number]
        and stored[masters[key]]
        and not {number, masters[key]} & whole.mixtures.keys()
    }


def _of(fragments: Fragments, tensors: Collection[int]) -> Fragments:
    return fragments[np.isin(fragments["tensor"], list(tensors))]


def add_checks(ops: Ops, copied: Parts, checks: MasterChecks) -> Ops:
    """``ops`` with the checks added; ``copied`` are the parts copied by the storage.

    Parameters that ``ops`` already compare, because the target omits them, are not compared again. ``ops`` is emptied.
    """
    known = np.zeros(len(checks.tensors), dtype=bool)
    known[ops["tensor"][ops["kind"] == CHECK]] = True
    boxes = checks.boxes[~known[checks.boxes["tensor"]]]
    if not len(boxes):
        return Ops.joined([ops, boxes])
    loaded = np.zeros(len(checks.tensors), dtype=bool)
    loaded[ops["source_tensor"][ops["kind"] == MOVE]] = True
    whole = loaded[boxes["tensor"]] & loaded[boxes["source_tensor"]] & (boxes["kind"] == HOLD)
    for side in ("source", "target"):
        whole &= ~_touches(boxes, side, copied)
    sampled = ~whole & (boxes["kind"] == HOLD)
    return Ops.joined([ops, boxes[~sampled], _samples(boxes[sampled], checks.seeds)])


def _touches(boxes: Ops, side: str, copied: Parts) -> Flags:
    """Whether the storage copies any byte of each box."""
    copied = copied[copied["source_file"] != MADE]
    begin = copied["source_start"].astype(np.int64)
    touched = np.zeros(len(boxes), dtype=bool)
    number, _ = meeting_intervals(
        Intervals(boxes[f"{side}_file"], {0: hull(boxes, side)}),
        Intervals(copied["source_file"], {0: (begin, begin + part_sizes(copied))}),
    )
    touched[number] = True
    return touched


def _samples(boxes: Ops, seeds: Ints, runs: Collection[int] = range(RUNS)) -> Ops:
    """A few runs of every box; a box that is no larger than its runs stays whole."""
    small = volumes(boxes) <= len(runs) * RUN_ELEMENTS
    large = boxes[~small]
    if not len(large):
        return boxes
    extents = _run_extents(large)
    room = large["extents"] - extents
    samples = [boxes[small]]
    for run in runs:
        sample = large.copy()
        skipped = np.zeros_like(room) if run == 0 else room
        if 0 < run < RUNS - 1:
            skipped = _scattered(large, seeds, run) % (room + 1)
        sample["kind"], sample["extents"] = PROBE, extents
        sample["offset"] = large["offset"] + skipped
        for side in ("source", "target"):
            sample[f"{side}_byte"] = large[f"{side}_byte"] + (skipped * large[f"{side}_strides"]).sum(axis=1)
        set_lengths(sample)
        samples.append(sample)
    return Ops.joined(samples)


def _run_extents(boxes: Ops) -> Ints:
    """The shape of a run of each box, of about ``RUN_ELEMENTS`` elements or the whole box.

    It is contiguous on both sides if their dims are in the same order: 1 × 512 in a 4096 × 4096 matrix. If one side is
    transposed, a run has about equal edges, 23 × 23.
    """
    extents = np.ones_like(boxes["extents"])
    rows = np.arange(len(boxes))
    orders = [np.argsort(boxes[f"{side}_strides"], axis=1, kind="stable") for side in ("source", "target")]
    longer = boxes["extents"] > 1
    fastest = [order[rows, np.take_along_axis(longer, order, axis=1).argmax(axis=1)] for order in orders]
    edge = np.where(fastest[0] == fastest[1], RUN_ELEMENTS, int(np.ceil(np.sqrt(RUN_ELEMENTS))))
    for dim in fastest:
        extents[rows, dim] = np.minimum(boxes["extents"][rows, dim], edge)
    for rank in range(MAX_DIMS):
        dim = orders[1][:, rank]
        lacking = -(-RUN_ELEMENTS // extents.prod(axis=1))
        extents[rows, dim] = np.minimum(boxes["extents"][rows, dim], extents[rows, dim] * lacking)
    return np.asarray(extents, dtype=np.int64)


def _scattered(boxes: Ops, seeds: Ints, run: int) -> npt.NDArray[np.int64]:
    """Pseudo-random numbers, one for each dim of each box, by SplitMix64 of the tensor's seed and the box's offset."""
    state = seeds[boxes["tensor"]].astype(np.uint64)
    numbers = np.empty(boxes["extents"].shape, dtype=np.int64)
    for value in (*boxes["offset"].T, np.full(len(boxes), run)):
        state = _mixed(state + np.asarray(value, dtype=np.int64).astype(np.uint64))
    for dim in range(MAX_DIMS):
        state = _mixed(state)
        numbers[:, dim] = (state >> np.uint64(1)).astype(np.int64)
    return numbers


def _mixed(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(state ^ (state >> np.uint64(31)))
