"""Plan the comparison of two checkpoints of any topologies, by logical content.

An implied parameter is the cast of its master weight, padding is not content, aliases are one tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from paddle_reshard.pipeline.core.catalog import Catalog, File, Fragments
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.planning.checks import held_parameters
from paddle_reshard.pipeline.planning.match import match, source_tensors
from paddle_reshard.pipeline.planning.ops import COMPARE, Ops
from paddle_reshard.pipeline.planning.plan import Plan, plan_comparisons

ONLY_IN_A, ONLY_IN_B = "only in A", "only in B"

SIDE_A, SIDE_B = "A/", "B/"
"""How the paths of each side's files begin in the plan of a comparison."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which two checkpoints differ."""

    tensor: str
    detail: str


@dataclass(frozen=True)
class Comparison:
    """Differences that metadata alone show, and a plan to compare the rest."""

    differences: tuple[Difference, ...]
    plan: Plan
    tensors: int
    """How many logical tensors both sides have."""


def plan_comparison(
    a: Catalog,
    b: Catalog,
    states: Collection[str] | None,
    subset: bool,
    budget_bytes: int,
    compare_replicas: bool = True,
) -> Comparison:
    """Plan the comparison of ``a`` and ``b``.

    Parameters
    ----------
    states
        Only these states; ``None``: all.
    subset
        Whether ``b`` may lack tensors that ``a`` has.
    compare_replicas
        Whether all copies that a side has of a tensor are looked at, not only the first.
    """
    ids_a, ids_b = _chosen(a, states), _chosen(b, states)
    differences = [
        Difference(a.tensors[ids_a[i]].label, ONLY_IN_A) for i in ids_a if i not in ids_b and not subset
    ]
    differences += [Difference(b.tensors[ids_b[i]].label, ONLY_IN_B) for i in ids_b if i not in ids_a]
    common = []
    for identity in ids_a.keys() & ids_b.keys():
        one, two = a.tensors[ids_a[identity]], b.tensors[ids_b[identity]]
        if (one.dtype, one.global_shape) != (two.dtype, two.global_shape):
            differences.append(
                Difference(
                    one.label,
                    f"{one.dtype.name} {one.global_shape} in A, {two.dtype.name} {two.global_shape} in B",
                )
            )
        else:
            common.append(identity)
    common.sort()
    tensors = Tensors(a.tensors[ids_a[identity]] for identity in common)
    if not compare_replicas:
        a, b = (replace(side, fragments=side.fragments[side.fragments["replica"] == 0]) for side in (a, b))
    ops = _comparisons(a, b, [ids_a[i] for i in common], [ids_b[i] for i in common])
    files = _prefixed(SIDE_A, a.files) + _prefixed(SIDE_B, b.files)
    plan = plan_comparisons(ops, tensors, files, budget_bytes)
    return Comparison(tuple(sorted(differences, key=lambda d: d.tensor)), plan, len(common))


def plan_self_comparison(catalog: Catalog, budget_bytes: int, compare_replicas: bool = True) -> Comparison:
    """Plan the comparison of everything that a checkpoint stores twice: copies, and parameters of master weights."""
    chunks = [Ops.empty()]
    if compare_replicas:
        first = catalog.fragments["replica"] == 0
        copies = catalog.fragments[~first]
        chunks.append(match(catalog.fragments[first], copies, catalog.implied, kind=COMPARE))
    held = held_parameters(catalog, catalog, in_full=True)
    if held is not None:
        chunks.append(held.boxes)
    plan = plan_comparisons(Ops.joined(chunks), catalog.tensors, catalog.files, budget_bytes)
    return Comparison((), plan, len(catalog.tensors))


def _chosen(catalog: Catalog, states: Collection[str] | None) -> dict[tuple[str, str], int]:
    return {identity: i for identity, i in catalog.index().items() if states is None or identity[1] in states}


def _prefixed(side: str, files: Iterable[File]) -> tuple[File, ...]:
    return tuple(File(side + file.path, file.size_bytes) for file in files)


def _comparisons(a: Catalog, b: Catalog, ids_a: list[int], ids_b: list[int]) -> Ops:
    """Ops that compare each common tensor of ``a`` with that of ``b``, and the copies within each side."""
    follows = _follows_from_master(a, ids_a) & _follows_from_master(b, ids_b)
    rows_a = _rows(a, ids_a, 0, follows)
    rows_b = _rows(b, ids_b, len(a.files), follows)
    one, two = rows_a[rows_a["replica"] == 0], rows_b[rows_b["replica"] == 0]
    ops = Ops.joined(
        [
            match(one, two, {}, kind=COMPARE),
            match(one, rows_a[rows_a["replica"] > 0], {}, kind=COMPARE),
            match(two, rows_b[rows_b["replica"] > 0], {}, kind=COMPARE),
        ]
    )
    # What is read from a master weight is done beside the master weight, so that its bytes are read once.
    for catalog, ids in ((a, ids_a), (b, ids_b)):
        place = {tensor: i for i, tensor in enumerate(ids)}
        beside = {
            place[tensor]: place[master]
            for tensor, master in catalog.implied.items()
            if tensor in place and master in place
        }
        moved = np.isin(ops["tensor"], list(beside))
        read_from = ops["source_tensor"].copy()
        read_from[moved] = source_tensors(ops["tensor"][moved], beside)
        ops["source_tensor"] = read_from
    return ops


def _follows_from_master(catalog: Catalog, ids: list[int]) -> set[int]:
    """Tensors that are equal if their master weights are, which are compared too."""
    chosen = set(ids)
    return {i for i, tensor in enumerate(ids) if catalog.implied.get(tensor) in chosen}


def _rows(catalog: Catalog, ids: list[int], first_file: int, leave_out: set[int]) -> Fragments:
    """Where the values of the chosen tensors lie, numbered by their place in ``ids``; files shifted."""
    order = np.argsort(catalog.fragments["tensor"], kind="stable")
    first = np.searchsorted(catalog.fragments["tensor"][order], np.arange(len(catalog.tensors) + 1))
    numbers = [i for i in range(len(ids)) if i not in leave_out]
    stored = np.array([catalog.implied.get(ids[i], ids[i]) for i in numbers], dtype=np.int64)
    lengths = first[stored + 1] - first[stored]
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    found = catalog.fragments[order[np.repeat(first[stored], lengths) + within]]
    found["tensor"] = np.repeat(np.array(numbers, dtype=np.int32), lengths)
    found["file"] += first_file
    return found
