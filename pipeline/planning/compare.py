"""Plan the comparison of two checkpoints of any topologies, by logical content.

An implied parameter counts as the cast of its master weight; padding is ignored; aliases are one tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from paddle_reshard.pipeline.core.catalog import Catalog, File, Fragments
from paddle_reshard.pipeline.core.columns import Flags
from paddle_reshard.pipeline.core.numbers import Ints, numbered_within
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import Tensor
from paddle_reshard.pipeline.planning.checks import master_checks
from paddle_reshard.pipeline.planning.match import match, source_tensors
from paddle_reshard.pipeline.planning.ops import COMPARE, DIFFER, Ops
from paddle_reshard.pipeline.planning.plan import Plan, plan_comparisons
from paddle_reshard.pipeline.planning.settings import PlanSettings

ONLY_IN_A, ONLY_IN_B = "only in A", "only in B"

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
    """Plan the comparison of ``a`` and ``b``.

    Parameters
    ----------
    states
        States to compare; ``None`` for all.
    subset
        Whether ``b`` may lack tensors that ``a`` has.
    """
    ids_a = _chosen(a.tensors, states)
    partner = _partners(a.tensors, b.tensors)[ids_a]
    ids_b = _chosen(b.tensors, states)
    lone = ids_b[~np.isin(ids_b, partner)]
    differences = [
        Difference(a.tensors[i].label, ONLY_IN_A) for i in ids_a[partner < 0].tolist() if not subset
    ]
    differences += [Difference(b.tensors[i].label, ONLY_IN_B) for i in lone.tolist()]
    same = partner >= 0
    for i in np.flatnonzero(same).tolist():
        id_a, id_b = int(ids_a[i]), int(partner[i])
        if a.tensors.dtype(id_a) != b.tensors.dtype(id_b) or a.tensors.shape(id_a) != b.tensors.shape(id_b):
            differences.append(_unlike(a.tensors[id_a], b.tensors[id_b]))
            same[i] = False
    ids_a, ids_b = ids_a[same], partner[same]
    order = a.tensors.order(ids_a)
    ids_a, ids_b = ids_a[order], ids_b[order]
    tensors = Tensors(a.tensors[tensor] for tensor in ids_a.tolist())
    if not settings.compare_replicas:
        a, b = (replace(side, fragments=side.fragments[side.fragments["replica"] == 0]) for side in (a, b))
    ops = _comparisons(a, b, ids_a, ids_b)
    files = _prefixed(SIDE_A, a.files) + _prefixed(SIDE_B, b.files)
    plan = plan_comparisons(ops, tensors, files, settings)
    return Comparison(tuple(sorted(differences, key=lambda d: d.tensor)), plan, len(tensors))


def plan_differences(
    a: Catalog, b: Catalog, settings: PlanSettings, states: Mapping[str, str] | None = None
) -> Comparison:
    """Plan to measure how far the tensors that ``a`` and ``b`` have in common are apart.

    ``states`` maps states of ``a`` to the states of ``b`` that they are compared with; ``None`` for all, each with the
    same. Dtypes may differ, shapes may not.
    """
    ids_a = _chosen(a.tensors, None if states is None else states.keys())
    partners = [_partner(a.tensors, number, b.tensors, states) for number in ids_a.tolist()]
    partner = np.array(partners, dtype=np.int64)
    ids_b = _chosen(b.tensors, None if states is None else set(states.values()))
    lone = ids_b[~np.isin(ids_b, partner)]
    differences = [Difference(a.tensors[i].label, ONLY_IN_A) for i in ids_a[partner < 0].tolist()]
    differences += [Difference(b.tensors[i].label, ONLY_IN_B) for i in lone.tolist()]
    same = partner >= 0
    for i in np.flatnonzero(same).tolist():
        tensor_a, tensor_b = a.tensors[int(ids_a[i])], b.tensors[int(partner[i])]
        if tensor_a.global_shape != tensor_b.global_shape:
            differences.append(_unlike(tensor_a, tensor_b))
            same[i] = False
    ids_a, ids_b = ids_a[same], partner[same]
    order = a.tensors.order(ids_a)
    ids_a, ids_b = ids_a[order], ids_b[order]
    tensors = Tensors(a.tensors[tensor] for tensor in ids_a.tolist())
    chunks = [Ops.empty()]
    sides = _Side(a, ids_a, 0), _Side(b, ids_b, len(a.files))
    for first in range(0, len(ids_a), _BLOCK_TENSORS):
        rows = np.arange(first, min(first + _BLOCK_TENSORS, len(ids_a)))
        side_a, side_b = (side.rows(rows)[0] for side in sides)
        chunks.append(match(side_a, side_b, {}, kind=DIFFER))
    files = _prefixed(SIDE_A, a.files) + _prefixed(SIDE_B, b.files)
    plan = plan_comparisons(Ops.joined(chunks), tensors, files, settings)
    others = ((n, b.tensors.dtype(tensor)) for n, tensor in enumerate(ids_b.tolist()))
    measured = {n: dtype for n, dtype in others if dtype != tensors.dtype(n)}
    return Comparison(
        tuple(sorted(differences, key=lambda d: d.tensor)), replace(plan, measured=measured), len(tensors)
    )


def _partner(a: Tensors, number: int, b: Tensors, states: Mapping[str, str] | None) -> int:
    """The number of the tensor that a tensor of ``a`` is compared with, or -1."""
    key, state = a.identity(number)
    found = b.find(key, state if states is None else states[state])
    return -1 if found is None else found


def plan_self_comparison(catalog: Catalog, settings: PlanSettings) -> Comparison:
    """Plan the comparison of everything a checkpoint stores twice: copies, and parameters with master weights."""
    chunks = [Ops.empty()]
    if settings.compare_replicas:
        first = catalog.fragments["replica"] == 0
        copies = catalog.fragments[~first]
        chunks.append(match(catalog.fragments[first], copies, catalog.implied, kind=COMPARE))
    checks = master_checks(catalog, catalog, in_full=True)
    if checks is not None:
        chunks.append(checks.boxes)
    plan = plan_comparisons(Ops.joined(chunks), catalog.tensors, catalog.files, settings)
    return Comparison((), plan, len(catalog.tensors))


def _chosen(tensors: Tensors, states: Collection[str] | None) -> Ints:
    """The numbers of the tensors of ``states``; ``None`` for all."""
    numbers = (i for i in range(len(tensors)) if states is None or tensors.identity(i)[1] in states)
    return np.fromiter(numbers, dtype=np.int64)


def _partners(a: Tensors, b: Tensors) -> Ints:
    """For each tensor of ``a`` the number of the same tensor in ``b``, or -1."""
    numbers = (b.find(*a.identity(number)) for number in range(len(a)))
    return np.fromiter((-1 if number is None else number for number in numbers), dtype=np.int64, count=len(a))


def _unlike(tensor_a: Tensor, tensor_b: Tensor) -> Difference:
    sides = (
        f"{tensor.dtype.name} {tensor.global_shape} in {side}"
        for tensor, side in ((tensor_a, "A"), (tensor_b, "B"))
    )
    return Difference(tensor_a.label, ", ".join(sides))


def _prefixed(side: str, files: Iterable[File]) -> tuple[File, ...]:
    return tuple(File(side + file.path, file.size_bytes) for file in files)


def _comparisons(a: Catalog, b: Catalog, ids_a: Ints, ids_b: Ints) -> Ops:
    """Ops that compare the common tensors of ``a`` and ``b``, and the copies within each side."""
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
    for catalog, ids in ((a, ids_a), (b, ids_b)):
        number = np.full(len(catalog.tensors), -1)
        number[ids] = np.arange(len(ids))
        master_of = {
            int(number[tensor]): int(number[master])
            for tensor, master in catalog.implied.items()
            if number[tensor] >= 0 and number[master] >= 0
        }
        moved = np.isin(ops["tensor"], list(master_of))
        read_from = ops["source_tensor"].copy()
        read_from[moved] = source_tensors(ops["tensor"][moved], master_of)
        ops["source_tensor"] = read_from
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
