"""Recognise the arrays that are whole tensors, class by class, so that they become tensors of a catalog as columns.

Very many tensors differ only in the numbers of their layer and expert. Whether an array of one may be where it is, and
what it becomes, follows from what all of these share: how the job cuts the tensor, the state, and dtype and shape of
the array. Nothing is refused here: what does not fit is left to be added one by one, as are slices, further copies and
tensors that are one with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from math import prod
from typing import NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.columns import Flags
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.geometry import MAX_DIMS, Shape
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.sorting import distinct
from paddle_reshard.pipeline.core.tensor_columns import Numbered
from paddle_reshard.pipeline.core.tensors import PARAM, dtype_number, dtype_of_code, is_per_parameter
from paddle_reshard.pipeline.formats.hybrid.arrays import Lone
from paddle_reshard.pipeline.formats.hybrid.positions import RankFiles, shown_alike, shown_in_file
from paddle_reshard.pipeline.formats.hybrid.ranks import StoredCell
from paddle_reshard.pipeline.formats.hybrid.sharding_group import ShardingGroup, whole_in_model_state
from paddle_reshard.pipeline.formats.reading import Alike, TensorCollector
from paddle_reshard.pipeline.formats.writing import UNCUT
from paddle_reshard.pipeline.model.model import ModelTensor
from paddle_reshard.pipeline.model.placement import ArrayKind, TensorCut

_NONE = -1
_NO_FACTS = (0, 0, 0, 0, 0)


class _Class(NamedTuple):
    """What the tensors of a row of the rule table have in common."""

    local_shape: Shape
    global_shape: Shape
    cut: TensorCut


class WholeArrays:
    """The arrays of a cell, compared with what the tensors of each class must be."""

    def __init__(
        self,
        cell: StoredCell,
        group: ShardingGroup,
        tensors: Mapping[str, ModelTensor],
        cut_of: Callable[[ModelTensor], TensorCut],
        collector: TensorCollector,
    ) -> None:
        """``tensors`` are those that are not one with another, by key; their keys become those of ``collector``."""
        self._tp, self._collector = cell.tp, collector
        keys, self._states = cell.arrays.names()
        self._key, self._state = collector.tensors.numbers_of_names(keys, self._states)
        self._classes: Numbered[_Class] = Numbered()
        self._class = _numbers(
            self._classes.number(_Class(cell.shapes[key], tensors[key].global_shape, cut_of(tensors[key])))
            if key in tensors and not tensors[key].rule.shared_out
            else _NONE
            for key in keys
        )
        self._is_number = self._of_states(is_per_parameter)
        self._in_weights = self._of_states(whole_in_model_state)
        self._is_param = self._of_states(PARAM.__eq__)
        self._uncut = np.array(
            [group.strategy != "stage3" and key not in group.slices for key in keys], np.bool_
        )
        self._owner = _numbers(cell.owners.get(key, _NONE) for key in keys) if cell.owners else None
        self._hashes = _numbers(map(hash, keys)), _numbers(map(hash, self._states))
        shown = {
            alike: _numbers(
                hash(shown_in_file(cell, tensors[key], alike)) if key in tensors else 0 for key in keys
            )
            for alike in set(map(shown_alike, self._states))
        }
        self._shown = np.stack([shown[shown_alike(state)] for state in self._states])
        """Hash of what files show of each key, in each state."""

    def _of_states(self, holds: Callable[[str], bool]) -> Flags:
        return np.array([holds(state) for state in self._states], np.bool_)

    def among(self, lone: Lone) -> tuple[Flags, Alike]:
        """Which of some tensors of the cell fit, and the columns of all; those of others say nothing."""
        of_class, kinds = self._class[lone.key], len(lone.kinds)
        fit = (lone.kind >= 0) & (of_class >= 0) & self._may_be_there(lone)
        alike = (of_class * len(self._states) + lone.state) * kinds + lone.kind
        ones = distinct(alike[fit])
        facts = [_NO_FACTS]
        for one in ones.tolist():
            number, state = divmod(one // kinds, len(self._states))
            facts.append(
                self._facts(self._classes.values[number], self._states[state], *lone.kinds[one % kinds])
            )
        row = np.where(fit, np.searchsorted(ones, alike) + 1, 0)
        fits, dtype, shape, kind, rank = np.array(facts, dtype=np.int64)[row].T
        file = _numbers(self._collector.file(path) for _, _, path in lone.places)[lone.place]
        return fits.astype(np.bool_), Alike(dtype, shape, kind, rank, file, lone.byte_offset)

    def add(self, lone: Lone, arrays: Alike, files: RankFiles) -> bool:
        """Add tensors that fit to the collector; whether they were."""
        if not self._collector.place_alike(self._key[lone.key], self._state[lone.state], arrays):
            return False
        keys, states = self._hashes
        rows = np.flatnonzero(~self._is_number[lone.state])
        key, state = lone.key[rows], lone.state[rows]
        files.add_whole(
            arrays.file[rows], states[state], self._shown[state, key], keys[key], arrays.rank[rows]
        )
        return True

    def _facts(
        self, of_class: _Class, state: str, code: str, shape: Shape, axes: Shape | None
    ) -> tuple[int, int, int, int, int]:
        """Whether an array fits its tensor: 1, the numbers of its dtype, shape and kind, and its rank; or zeros."""
        with suppress(CheckpointError):  # of a dtype that is not supported
            dtype = dtype_of_code(code, "")
            local_shape, global_shape, cut = of_class
            kind = ArrayKind(local_shape, cut, dtype.itemsize, None, axes)
            fits = shape == local_shape and len(global_shape) <= MAX_DIMS
            if is_per_parameter(state):
                global_shape, kind, fits = (1,), ArrayKind((1,), UNCUT, dtype.itemsize), prod(shape) == 1
            if fits:
                number = self._collector.tensors.shape_number(global_shape)
                rank = 0 if kind.cut.dim is None else self._tp
                return 1, dtype_number(dtype), number, self._collector.placements.kind(kind), rank
        return _NO_FACTS

    def _may_be_there(self, lone: Lone) -> Flags:
        """Whether one rank may hold a tensor whole and alone, and is the one that ``model_meta.json`` names."""
        may = self._uncut[lone.key] | self._in_weights[lone.state]
        if self._owner is not None:
            shard = _numbers(shard for _, shard, _ in lone.places)[lone.place]
            may &= self._is_param[lone.state] | (self._owner[lone.key] == shard)
        return may | self._is_number[lone.state]


def _numbers(values: Iterable[int]) -> Ints:
    return np.array(list(values), dtype=np.int64)
