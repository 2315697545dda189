"""Plan the comparison of two checkpoints of any topologies, by logical content.

An implied parameter counts as the cast of its master weight; padding is ignored; aliases are one tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.catalog import Catalog, File, Fragments
from paddle_reshard.pipeline.core.columns import Flags
from paddle_reshard.pipeline.core.numbers import Ints, numbered_within
from paddle_reshard.pipeline.core.shown import only_in
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import DTYPES
from paddle_reshard.pipeline.planning.checks import master_checks
from paddle_reshard.pipeline.planning.match import match, source_tensors
from paddle_reshard.pipeline.planning.ops import COMPARE, DIFFER, Ops
from paddle_reshard.pipeline.planning.plan import Plan, plan_comparisons
from paddle_reshard.pipeline.planning.settings import PlanSettings

SIDE_A, SIDE_B = "A/", "B/"
"""Prefixes of each side's file paths in the plan of a comparison."""

_BLOCK_TENSORS = 1 << 15
"""Number of tensors whose boxes are matched at a time."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which two checkpoints differ."""

    tensor: str
    detail: str


@dataclass(frozen=True)
class Comparison:
    """Differences found in the metadata, and a plan to compare the values."""

    differences: tuple[Difference, ...]
    plan: Plan
    tensors: int
    """Number of logical tensors that both sides have."""


def plan_comparison(
    a: Catalog,
    b: Catalog,
    settings: PlanSettings,
    states: Collection[str] | None = None,
    subset: bool = False,
) -> Comparison:
    """Plan the comparison of ``states`` of ``a`` and ``b``, or of all; as a ``subset``, ``b`` may lack tensors."""
    same = None if states is None else {state: state for state in states}
    common = _in_common(a.tensors, b.tensors, same, subset=subset)
    if not settings.compare_replicas:
        a, b = (replace(side, fragments=side.fragments[side.fragments["replica"] == 0]) for side in (a, b))
    return _planned(_comparisons(a, b, common), a, b, common, settings)


def plan_differences(
    a: Catalog, b: Catalog, settings: PlanSettings, states: Mapping[str, str] | None = None
) -> Comparison:
    """Plan to measure how far the tensors that ``a`` and ``b`` have in common are apart.

    ``states`` maps states of ``a`` to the states of ``b`` that they are compared with; ``None`` for all, each with the
    same. Dtypes may differ, shapes may not.
    """
    common = _in_common(a.tensors, b.tensors, states, any_dtype=True)
    chunks = [Ops.empty()]
    sides = _Side(a, common.a, 0), _Side(b, common.b, len(a.files))
    for first in range(0, len(common.a), _BLOCK_TENSORS):
        rows = np.arange(first, min(first + _BLOCK_TENSORS, len(common.a)))
        side_a, side_b = (side.rows(rows)[0] for side in sides)
        chunks.append(match(side_a, side_b, {}, kind=DIFFER))
    comparison = _planned(Ops.joined(chunks), a, b, common, settings)
    pairs = zip(a.tensors.dtypes[common.a].tolist(), b.tensors.dtypes[common.b].tolist(), strict=True)
    measured = {n: DTYPES[of_b] for n, (of_a, of_b) in enumerate(pairs) if of_a != of_b}
    return replace(comparison, plan=replace(comparison.plan, measured=measured))


class _Common(NamedTuple):
    """Tensors that two sides have in common, by key and state, and how the others differ."""

    a: Ints
    b: Ints
    """The numbers of the same tensors on the second side."""
    differences: list[Difference]


def _in_common(
    a: Tensors, b: Tensors, states: Mapping[str, str] | None, subset: bool = False, any_dtype: bool = False
) -> _Common:
    ids_a = _chosen(a, states)
    ids_b = _chosen(b, None if states is None else states.values())
    identities = map(a.identity, ids_a.tolist())
    numbers = (b.find(key, state if states is None else states[state]) for key, state in identities)
    partner = np.array([-1 if number is None else number for number in numbers], dtype=np.int64)
    lone = ids_b[~np.isin(ids_b, partner)]
    differences = [Difference(a[i].label, only_in("A")) for i in ids_a[partner < 0].tolist() if not subset]
    differences += [Difference(b[i].label, only_in("B")) for i in lone.tolist()]
    same = partner >= 0
    for i in np.flatnonzero(same).tolist():
        id_a, id_b = int(ids_a[i]), int(partner[i])
        if a.shape(id_a) != b.shape(id_b) or not (any_dtype or a.dtype(id_a) == b.dtype(id_b)):
            sides = ((a[id_a], "A"), (b[id_b], "B"))
            unlike = (f"{tensor.dtype.name} {tensor.global_shape} in {side}" for tensor, side in sides)
            differences.append(Difference(a[id_a].label, ", ".join(unlike)))
            same[i] = False
    ids_a, ids_b = ids_a[same], partner[same]
    order = a.order(ids_a)
    return _Common(ids_a[order], ids_b[order], sorted(differences, key=lambda d: d.tensor))


def _planned(ops: Ops, a: Catalog, b: Catalog, common: _Common, settings: PlanSettings) -> Comparison:
    tensors = Tensors(a.tensors[number] for number in common.a.tolist())
    sides = ((SIDE_A, a.files), (SIDE_B, b.files))
    files = tuple(File(side + file.path, file.size_bytes) for side, files in sides for file in files)
    plan = plan_comparisons(ops, tensors, files, settings)
    return Comparison(tuple(common.differences), plan, len(tensors))


def plan_self_comparison(catalog: Catalog, settings: PlanSettings) -> Comparison:
    """Plan the comparison of everything a checkpoint stores twice: copies, and parameters with master weights."""
    chunks = [Ops.empty()]
    if settings.compare_replicas:
        first = catalog.fragments["replica"] == 0
        copies = catalog.fragments[~first]
        chunks.append(match(catalog.fragments[first], copies, catalog.implied, kind=COMPARE))
    checks = master_checks(catalog, catalog)
    if checks is not None:
        chunks.append(checks.boxes)
    plan = plan_comparisons(Ops.joined(chunks), catalog.tensors, catalog.files, settings)
    return Comparison((), plan, len(catalog.tensors))


def _chosen(tensors: Tensors, states: Collection[str] | None) -> Ints:
    """The numbers of the tensors of ``states``; ``None`` for all."""
    numbers = (i for i in range(len(tensors)) if states is None or tensors.identity(i)[1] in states)
    return np.fromiter(numbers, dtype=np.int64)


def _comparisons(a: Catalog, b: Catalog, common: _Common) -> Ops:
    """Ops that compare the common tensors of ``a`` and ``b``, and the copies within each side."""
    ids_a, ids_b, _ = common
    compared = ~(_follows_from_master(a, ids_a) & _follows_from_master(b, ids_b))
    sides = _Side(a, ids_a, 0), _Side(b, ids_b, len(a.files))
    chunks: tuple[list[Ops], ...] = ([Ops.empty()], [Ops.empty()], [Ops.empty()])
    for first in range(0, len(ids_a), _BLOCK_TENSORS):
        rows = first + np.flatnonzero(compared[first : first + _BLOCK_TENSORS])
        (first_a, further_a), (first_b, further_b) = (side.rows(rows) for side in sides)
        pairs = (first_a, first_b), (first_a, further_a), (first_b, further_b)
        for chunks_of_pair, pair in zip(chunks, pairs, strict=True):
            chunks_of_pair.append(match(*pair, {}, kind=COMPARE))
    ops = Ops.joined([chunk for of_kind in chunks for chunk in of_kind])
    # Parameters that are read from their master weights join its group, so that its bytes are read once.
    master_of: dict[int, int] = {}
    for catalog, ids in ((a, ids_a), (b, ids_b)):
        number = np.full(len(catalog.tensors), -1)
        number[ids] = np.arange(len(ids))
        master_of |= {
            int(number[tensor]): int(number[master])
            for tensor, master in catalog.implied.items()
            if number[tensor] >= 0 and number[master] >= 0
        }
    ops["source_tensor"] = source_tensors(ops["tensor"], master_of)
    return ops


def _follows_from_master(catalog: Catalog, ids: Ints) -> Flags:
    """Whether each tensor is implied by a master weight that is compared too."""
    chosen = np.zeros(len(catalog.tensors), dtype=bool)
    chosen[ids] = True
    follows = np.zeros(len(catalog.tensors), dtype=bool)
    for tensor, master in catalog.implied.items():
        follows[tensor] = chosen[master]
    return np.asarray(follows[ids])


class _Side:
    """The fragments that store the chosen tensors of a side."""

    def __init__(self, catalog: Catalog, ids: Ints, first_file: int) -> None:
        self.fragments, self.first_file = catalog.fragments, first_file
        stored = np.arange(len(catalog.tensors))
        stored[list(catalog.implied)] = list(catalog.implied.values())
        self.stored = stored[ids]
        tensor = self.fragments["tensor"]
        self.order = np.argsort(tensor, kind="stable")
        self.first = np.r_[0, np.cumsum(np.bincount(tensor, minlength=len(stored)))]

    def rows(self, chosen: Ints) -> tuple[Fragments, Fragments]:
        """First copies, and further copies, of tensors given as indices into the chosen ones."""
        # Tensors with 2 and 1 fragments, sorted from rows 5 and 9 on, give the sorted rows 5, 6 and 9.
        stored = self.stored[chosen]
        lengths = self.first[stored + 1] - self.first[stored]
        within = numbered_within(lengths)
        fragments = self.fragments[self.order[np.repeat(self.first[stored], lengths) + within]]
        fragments["tensor"] = np.repeat(chosen, lengths)
        fragments["file"] = fragments["file"] + self.first_file
        first = fragments["replica"] == 0
        return fragments[first], fragments[~first]
