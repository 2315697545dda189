"""Form groups of ops, and order the reads of each group.

An *atom* is a set of ops whose boxes overlap in the bytes of some file: separate them, and a source byte is read twice
or a target byte written from two groups. Large atoms are cut along a dim where this does no harm; small neighbours in
the target files are gathered into groups. If the bands of a group do not fit next to its parts, they are read in
*passes*, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paddle_reshard.pipeline.core.catalog import wide_dims
from paddle_reshard.pipeline.core.columns import Flags
from paddle_reshard.pipeline.core.geometry import MAX_DIMS
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.sorting import distinct, order_by, order_of, places
from paddle_reshard.pipeline.planning.cut import cut, outermost, reach, torn
from paddle_reshard.pipeline.planning.ops import MOVE, PROBE, Ops, hull
from paddle_reshard.pipeline.planning.parts import Parts, plan_parts, small_parts
from paddle_reshard.pipeline.planning.ranges import dense_numbers, label, union_bytes, unions


class GroupMemory(NamedTuple):
    """Memory of groups, in bytes."""

    group_bytes: int
    """Atoms are gathered into groups of about this peak, and cut to about half of it."""
    pass_bytes: int
    """What a group may always read at a time, even if its parts leave less."""
    most_bytes: int
    """Limit for the peak of every group."""
    tiny_bytes: int
    """If the store has a minimum part size, ranges up to this size may be read by several groups."""


class Grouped(NamedTuple):
    """Ops, some of them cut, and the group of each."""

    ops: Ops
    groups: Ints
    rereads: bool
    """Whether several groups read the same bytes."""
    most_read: Ints
    """Bytes that each group reads at most."""


class _Atoms(NamedTuple):
    """Atoms, and the bytes that each writes and reads."""

    number: Ints
    """The atom of each op; for an op that was cut and is left out, one past the last."""
    made: Ints
    read: Ints

    @classmethod
    def measured(cls, ops: Ops, number: Ints) -> _Atoms:
        return cls(number, _made_bytes(ops, number), _read_bytes(ops, number))

    @classmethod
    def joined(cls, several: list[_Atoms]) -> _Atoms:
        """All of these, one after the other; a number below 0 is that of an op that is left out."""
        before = np.cumsum([0, *(len(atoms.made) for atoms in several)])
        numbers = (
            np.where(atoms.number < 0, before[-1], atoms.number + first)
            for atoms, first in zip(several, before[:-1], strict=True)
        )
        made, read = (np.concatenate([atoms[side] for atoms in several]) for side in (1, 2))
        return cls(np.concatenate(list(numbers)), made, read)

    def only(self, chosen: Flags) -> _Atoms:
        """Some of them; ops of the others get the number -1."""
        number = np.where(chosen, np.cumsum(chosen) - 1, -1)
        return _Atoms(number[self.number], self.made[chosen], self.read[chosen])

    def renumbered(self, new: Ints) -> _Atoms:
        """The same atoms, of which each has another number."""
        made, read = np.empty_like(self.made), np.empty_like(self.read)
        made[new], read[new] = self.made, self.read
        return _Atoms(np.append(new, len(new))[self.number], made, read)


class FileSizes(NamedTuple):
    """Sizes of every target file, in bytes."""

    total: Ints
    smallest_part: Ints
    largest_fill: Ints


def group_ops(ops: Ops, copied: Parts, files: FileSizes, memory: GroupMemory) -> Grouped:
    """Assign every op to a group, in the order of the target files; ops of atoms that are too large are cut.

    An atom that can only be cut by reading bytes several times is cut only as far as ``memory.most_bytes`` requires.
    ``ops`` is emptied, so that it is not in memory together with its pieces. Probes do not form atoms: their few bytes
    may be read twice, and large tensors need not share a group because of them.
    """
    probes = Ops.empty()
    if (of_probes := ops["kind"] == PROBE).any():
        probes, ops = ops.split(of_probes)
    smallest = bool((files.smallest_part > 1).any())
    ops, atoms, rank, rereads = _cut_large(ops, files, memory)
    if len(probes) or smallest:
        order = order_of(rank)[: np.count_nonzero(atoms.number < len(atoms.made))]
        ops.reorder(order)
        atoms = atoms._replace(number=atoms.number[order])
        rank = np.zeros(len(probes) + len(ops), dtype=np.int64)
    if len(probes):
        alone = _Atoms.measured(probes, np.arange(len(probes)))
        atoms = _Atoms.joined([alone, atoms])
        ops = Ops.joined([probes, ops])
    if not len(ops):
        return Grouped(ops, atoms.number, False, atoms.read)
    atoms = atoms.renumbered(_file_order(ops, atoms))
    if smallest:
        atoms = _Atoms.measured(ops, _joined(ops, atoms.number, copied, files))
    group = _gathered(atoms.made + atoms.read, memory.group_bytes)
    count = int(group[-1]) + 1
    groups = np.append(group, count)[atoms.number]
    lengths = np.bincount(groups, minlength=count)[:count]
    ops.reorder(order_by(groups, rank)[: lengths.sum()])
    return Grouped(ops, np.repeat(np.arange(count), lengths), rereads, _sums(group, atoms.read, count))


# ----------------------------------------------------------------------------------------------- atoms


def source_ranges(ops: Ops) -> tuple[Ints, Ints, Ints, Ints]:
    """Ranges to read, ``(op, file, start, stop)``: the source side of every op, and both sides of comparisons."""
    first_side = hull(ops, "source")
    comparisons = np.flatnonzero(ops["kind"] != MOVE)
    if not len(comparisons):
        return np.arange(len(ops)), ops["source_file"].astype(np.int64), *first_side
    second_side = hull(ops[comparisons], "target")
    return (
        np.concatenate([np.arange(len(ops)), comparisons]),
        np.concatenate([ops["source_file"], ops["target_file"][comparisons]]).astype(np.int64),
        np.concatenate([first_side[0], second_side[0]]),
        np.concatenate([first_side[1], second_side[1]]),
    )


def _atoms(ops: Ops, tiny_bytes: int) -> _Atoms:
    """The number of each op's atom: ops that overlap in a source or target file share one.

    Each target file reads ranges of up to ``tiny_bytes`` separately. Otherwise a few values that all ranks hold, such
    as a bias, would put the files of all ranks into one atom.
    """
    op, file, start, stop = source_ranges(ops)
    apart = np.zeros(0, dtype=bool)
    if tiny_bytes >= 0:
        apart = (ops["kind"][op] == MOVE) & (stop - start <= tiny_bytes)
        number = np.where(apart, ops["target_file"][op].astype(np.int64) + 1, 0)
        file = file * (int(number.max()) + 1) + number
    read = unions(file, start, stop)
    del file, start, stop
    moves = np.flatnonzero(ops["kind"] == MOVE)
    made = unions(ops["target_file"][moves].astype(np.int64), *(side[moves] for side in hull(ops, "target")))
    atoms = _components(len(ops), [(op, read.number), (moves, made.number)])
    if apart.any():  # what several files read apart may overlap within an atom
        return _Atoms.measured(ops, atoms)
    # Ranges that overlap are of one atom: it reads and writes what these cover together.
    count = int(atoms.max(initial=-1)) + 1
    return _Atoms(
        atoms,
        *(
            _sums(_owners(union.number, atoms[rows]), union.nbytes, count)
            for rows, union in ((moves, made), (op, read))
        ),
    )


def _owners(numbers: Ints, atoms: Ints) -> Ints:
    """The atom of each number; all ranges of a number are of one."""
    owners = np.zeros(int(numbers.max(initial=-1)) + 1, dtype=np.int64)
    owners[numbers] = atoms
    return owners


def _clusters(ops: Ops, groups: Ints) -> Ints:
    """The number of each op's cluster: ops of one group that overlap in a source file share one."""
    op, file, start, stop = source_ranges(ops)
    return _components(len(ops), [(op, label(groups[op] * (int(file.max()) + 1) + file, start, stop))])


def _components(count: int, links: Sequence[tuple[Ints, Ints]]) -> Ints:
    """Number ``count`` items from 0 so that linked items share a number.

    Each link is columns ``(items, labels)``: items with the same label are linked, directly or through others. With 4
    items and the link ``[([0, 1, 2, 3], [7, 8, 7, 9])]`` the result is ``[0, 1, 0, 2]``; a second link
    ``[([1, 3], [5, 5])]`` makes it ``[0, 1, 0, 1]``.
    """
    component = np.arange(count)
    changed = True
    while changed:
        changed = False
        for items, labels in links:
            lowest = np.full(1 + int(labels.max(initial=-1)), count)
            np.minimum.at(lowest, labels, component[items])
            if not np.array_equal(lowest[labels], component[items]):
                changed = True
                np.minimum.at(component, items, lowest[labels])
        component = component[component]
    return dense_numbers(component)


def _made_bytes(ops: Ops, owners: Ints) -> Ints:
    """Bytes that each owner of ops writes."""
    moves = ops["kind"] == MOVE
    start, stop = (side[moves] for side in hull(ops, "target"))
    file = ops["target_file"][moves].astype(np.int64)
    return union_bytes(owners[moves], file, start, stop, int(owners.max(initial=-1)) + 1)


def _read_bytes(ops: Ops, owners: Ints) -> Ints:
    """Bytes that each owner of ops reads."""
    op, file, start, stop = source_ranges(ops)
    return union_bytes(owners[op], file, start, stop, int(owners.max(initial=-1)) + 1)


def _sums(keys: Ints, values: Ints, count: int) -> Ints:
    return np.bincount(keys, weights=values, minlength=count).astype(np.int64)


# --------------------------------------------------------------------------------------- cutting atoms


def _cut_large(ops: Ops, files: FileSizes, memory: GroupMemory) -> tuple[Ops, _Atoms, Ints, bool]:
    """Cut atoms until each writes about half of ``memory.group_bytes``, where possible.

    Returns the ops and their atoms; the rank of each op among those of its group, the largest for ops that were cut and
    are left out; and whether bytes are read several times. The size of an atom that only compares is what it reads.

    With groups of 64 MiB the goal is 32 MiB. An atom that moves 800 rows of 256 KiB each, 200 MiB, is cut into
    ⌈200 / 32⌉ = 7 stretches: six of ⌈800 / 7⌉ = 115 rows (28.75 MiB) and one of 110. In a target stored column by
    column each stretch would be 115 scattered elements of every column: such an atom is cut along its columns instead.
    """
    if not len(ops):
        none = np.zeros(0, dtype=np.int64)
        return ops, _Atoms(none, none, none), none, False
    measured = _atoms(ops, memory.tiny_bytes if (files.smallest_part > 1).any() else -1)
    rank, pieces_rank = measured.number, len(measured.made)
    cuts = _choose_cuts(ops, measured, np.full(pieces_rank, MAX_DIMS), files, memory)
    if not cuts.chosen.any():
        return ops, measured, rank, False
    # Nearly all ops stay as they are: these are not moved.
    kept, rereads = [measured.only(~cuts.chosen)], cuts.rereads
    large = np.flatnonzero(cuts.chosen[rank])
    large = large[order_of(rank[large])]
    whole, ops, atoms = ops, ops[large], rank[large]
    rank[large] = pieces_rank + 1
    done = [Ops.empty()]
    while len(ops):
        ops, atoms, parents, _ = _cut_evenly(ops, atoms, cuts.dim, cuts.stretches)
        measured = _Atoms.measured(ops, atoms)
        cuts = _choose_cuts(ops, measured, cuts.dim[parents], files, memory)
        rereads |= cuts.rereads
        stays = ~cuts.chosen[atoms]
        kept.append(measured._replace(number=atoms[stays]).only(~cuts.chosen))
        atoms = atoms[~stays]
        enough, ops = ops.split(stays)
        done.append(enough)
    joined = _Atoms.joined(kept)
    rank = np.concatenate([rank, np.full(len(joined.number) - len(whole), pieces_rank)])
    return Ops.joined([whole, *done]), joined, rank, rereads


class _Cuts(NamedTuple):
    """Which atoms are cut, and how."""

    chosen: Flags
    dim: Ints
    """Along which it is cut; 0 if it is not."""
    rereads: bool
    """Whether bytes will be read several times."""
    stretches: Ints
    """Into about how many."""


def _choose_cuts(ops: Ops, measured: _Atoms, used: Ints, files: FileSizes, memory: GroupMemory) -> _Cuts:
    """How atoms that are too large are cut; ``used`` is the dim along which each was cut before, if it was."""
    atoms, count = measured.number, len(used)
    most = memory.most_bytes - memory.pass_bytes
    size = np.where(measured.made > 0, measured.made, measured.read)
    least = memory.group_bytes // 2
    together_bytes = np.zeros(count, dtype=np.int64)
    if 2 * int(files.smallest_part.sum()) > least:
        together_bytes = _smallest_together(ops, atoms, files, count)
    goal = np.clip(2 * together_bytes, least, max(most, 1))
    dim, rereads = _cut_dims(ops, atoms, size > goal)
    # A second dim, or one that makes bytes be read again, is a last resort.
    again = (used < MAX_DIMS) & (dim != used) | rereads
    chosen = (dim < MAX_DIMS) & (size > np.where(again, np.maximum(goal, most), goal))
    stretches = -(-size // np.maximum(np.where(rereads, max(most, 1), goal), 1))
    return _Cuts(chosen, np.where(chosen, dim, 0), bool((chosen & rereads).any()), stretches)


def _cut_dims(ops: Ops, atoms: Ints, large: Flags) -> tuple[Ints, Flags]:
    """The dim along which each ``large`` atom can be cut, ``MAX_DIMS`` if it cannot, or is not large.

    And whether its pieces would interleave in a source file, so that bytes are read several times.
    """
    dim, rereads = np.full(len(large), MAX_DIMS), np.zeros(len(large), dtype=bool)
    rows = np.flatnonzero(large[atoms])
    if len(rows):
        number = np.cumsum(large) - 1
        dim[large], rereads[large] = _cut_dims_of_all(ops[rows], number[atoms[rows]], int(number[-1]) + 1)
    return dim, rereads


def _cut_dims_of_all(ops: Ops, atoms: Ints, count: int) -> tuple[Ints, Flags]:
    possible = _extends(ops, atoms, count) & ~torn(ops, atoms, count, target=True)
    harmless = possible & ~torn(ops, atoms, count, target=False)
    first = np.where(possible.any(axis=1), possible.argmax(axis=1), MAX_DIMS)
    best = np.where(harmless.any(axis=1), harmless.argmax(axis=1), first)
    rereads = np.asarray(possible.any(axis=1) & ~harmless.any(axis=1))
    # Compared boxes with different dim orders: cut the larger first.
    if rereads.any():
        writes = np.zeros(count, dtype=bool)
        writes[atoms[ops["kind"] == MOVE]] = True
        best = np.where(rereads & ~writes, _widest_dims(ops, atoms, count), best)
    return best.astype(np.int64), rereads


def _widest_dims(ops: Ops, atoms: Ints, count: int) -> Ints:
    """For each atom the outermost dim of its longest source range."""
    op, _, start, stop = source_ranges(ops)
    comparisons = op[len(ops) :]
    outer = np.concatenate([outermost(ops, "source"), outermost(ops[comparisons], "target")])
    order = np.argsort(stop - start, kind="stable")
    widest = np.zeros(count, dtype=np.int64)
    widest[atoms[op[order]]] = outer[order]  # ascending by length: the longest is assigned last
    return widest


def _extends(ops: Ops, owners: Ints, count: int) -> Flags:
    """For each of ``count`` owners of ops and each dim, whether any of its ops has more than one element there."""
    extended = np.zeros((count, MAX_DIMS), dtype=bool)
    for dim in wide_dims(ops):
        extended[owners[ops.along("extents", dim) > 1], dim] = True
    return extended


def _cut_evenly(ops: Ops, owners: Ints, dim: Ints, count: Ints) -> tuple[Ops, Ints, Ints, Ints]:
    """Cut the ops of every owner along its ``dim`` into about ``count`` stretches.

    Returns the pieces; the new owner of each, as many as there are stretches; the old owner of each new one; and the op
    that each piece was cut from.
    """
    low, high = (side[np.arange(len(dim)), dim] for side in reach(ops, owners, len(dim)))
    step = np.maximum(1, -(-np.maximum(high - low, 1) // np.maximum(count, 1)))
    pieces = cut(ops, dim[owners], low[owners], step[owners])
    parents = owners[pieces.origin]
    new = dense_numbers(parents * (int(pieces.stretch.max()) + 1) + pieces.stretch)
    old = np.zeros(int(new.max()) + 1, dtype=np.int64)
    old[new] = parents
    return pieces.ops, new, old, pieces.origin


def _smallest_together(ops: Ops, atoms: Ints, files: FileSizes, count: int) -> Ints:
    """Bytes that each atom must write so that every file it writes to gets a part of the minimum size."""
    moves = ops["kind"] == MOVE
    number = max(len(files.total), 1)
    pairs = distinct(atoms[moves] * number + ops["target_file"][moves])
    return _sums(pairs // number, files.smallest_part[pairs % number], count)


# ------------------------------------------------------------------------------------- gathering atoms


def _file_order(ops: Ops, atoms: _Atoms) -> Ints:
    """The rank of each atom by its first target byte; atoms that write nothing follow, by their first source byte.

    Probes come first: a checkpoint that contradicts itself throughout is refused before anything is moved.
    """
    moves = ops["kind"] == MOVE
    # Three ops of atoms 1, 0, 1 that write at bytes 0, 8, 4: atom 0 begins at 8 and atom 1 at 0, so their ranks are
    # 1 and 0.
    sources = int(ops["source_file"].max(initial=-1)) + 1
    targets = int(ops["target_file"].max(initial=-1)) + 1
    file = np.where(moves, sources + ops["target_file"], ops["source_file"])
    file += (sources + targets) * ~(moves | (ops["kind"] == PROBE))
    begins = places(file, np.where(moves, ops["target_byte"], ops["source_byte"]))
    first = np.full(len(atoms.made) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, atoms.number, begins)
    first = first[:-1]
    rank = np.empty(len(first), dtype=np.int64)
    rank[order_of(first)] = np.arange(len(first))
    return rank


def _joined(ops: Ops, atoms: Ints, copied: Parts, files: FileSizes) -> Ints:
    """Join atoms until every part has the store's minimum size; the order of the numbers stays."""
    if (files.smallest_part <= 1).all():
        return atoms
    while True:
        parts = plan_parts(ops, atoms, copied, files.total, files.smallest_part, files.largest_fill)
        joins = small_parts(parts, files.total, files.smallest_part)
        if not joins:
            return atoms
        pairs = np.array(joins).ravel(), np.repeat(np.arange(len(joins)), 2)
        joined = _components(int(atoms.max()) + 1, [pairs])[atoms]
        if int(joined.max()) == int(atoms.max()):
            return atoms
        atoms = joined


def _gathered(sizes: Ints, room_bytes: int) -> Ints:
    """The group of each of a sequence of sizes: as many as fit ``room_bytes``, and at least one.

    >>> _gathered(np.array([40, 20, 60, 5]), 64).tolist()
    [0, 0, 1, 2]
    """
    groups, group, filled_bytes = [], -1, 0
    for size in sizes.tolist():
        if group < 0 or filled_bytes + size > room_bytes:
            group, filled_bytes = group + 1, 0
        filled_bytes += size
        groups.append(group)
    return np.array(groups, dtype=np.int64)


# ---------------------------------------------------------------------------------------------- passes


def set_passes(ops: Ops, groups: Ints, made: Ints, most_read: Ints, memory: GroupMemory) -> tuple[Ops, Ints]:
    """Divide the reads of each group into passes if they do not fit next to its parts, which take ``made`` bytes.

    A group is known to read at most ``most_read`` bytes.

    Returns the ops sorted by group and pass, some of them cut, and their groups.

    A group of 64 MiB whose parts take 40 MiB can read 24 MiB at a time (``allowed``). It has to read 40 MiB, so its ops
    are cut until none needs more than half of that, 12 MiB, together with the ops that share its bytes::

        read together   10   10    8   12   MiB, in the order of the source files
        bytes before     0   10   20   28
        pass (÷ 12)      0    0    1    2

    The pieces of a pass begin within 12 MiB, and none has more than 12 MiB: a pass never exceeds 24 MiB.
    """
    ops["pass"] = 0
    allowed = np.maximum(memory.pass_bytes, min(memory.group_bytes, memory.most_bytes) - made)
    many = most_read > allowed
    if many.any():
        rows = np.flatnonzero(many[groups])
        read = _read_bytes(ops[rows], groups[rows])
        many[: len(read)] &= read > allowed[: len(read)]
    if not many.any():
        return ops, groups
    many_ops = many[groups]
    few_groups, groups = groups[~many_ops], groups[many_ops]
    ops, few = ops.split(many_ops)
    ops, groups, clusters = _cut_for_reading(ops, groups, np.maximum(1, allowed // 2))
    group_of = np.zeros(int(clusters.max()) + 1, dtype=np.int64)
    group_of[clusters] = groups
    sizes = _read_bytes(ops, clusters)
    first = np.full(len(sizes), np.iinfo(np.int64).max)
    np.minimum.at(first, clusters, ops["source_byte"])
    file = np.zeros(len(sizes), dtype=np.int64)
    file[clusters] = ops["source_file"]
    order = np.lexsort((first, file, group_of))  # by file, so that the steps of a mixture keep their order
    before = np.cumsum(sizes[order]) - sizes[order]
    opens = np.r_[True, group_of[order][1:] != group_of[order][:-1]]
    before -= np.maximum.accumulate(np.where(opens, before, 0))
    number = np.empty(len(sizes), dtype=np.int64)
    number[order] = before // np.maximum(1, allowed[group_of[order]] // 2)
    ops["pass"] = number[clusters]
    ops, groups = Ops.joined([few, ops]), np.concatenate([few_groups, groups])
    order = np.lexsort((ops["pass"], groups))
    ops.reorder(order)
    return ops, groups[order]


def _cut_for_reading(ops: Ops, groups: Ints, most: Ints) -> tuple[Ops, Ints, Ints]:
    """Cut ops along the outermost dims of their source boxes until no cluster reads more than ``most[group]`` bytes.

    Returns the ops, their groups and their clusters.
    """
    clusters = _clusters(ops, groups)
    done: list[tuple[Ops, Ints, Ints]] = []
    numbered = 0
    while len(ops):
        count = int(clusters.max()) + 1
        size = _read_bytes(ops, clusters)
        possible = _extends(ops, clusters, count) & ~torn(ops, clusters, count, target=False)
        wanted = np.ones(count, dtype=np.int64)
        wanted[clusters] = most[groups]
        chosen = (size > wanted) & possible.any(axis=1)
        keep = ~chosen[clusters]
        kept = dense_numbers(clusters[keep])
        done.append((ops[keep], groups[keep], kept + numbered))
        numbered += int(kept.max(initial=-1)) + 1
        ops, groups, clusters = ops[~keep], groups[~keep], clusters[~keep]
        if len(ops):
            dims = possible.argmax(axis=1)
            ops, clusters, _, origin = _cut_evenly(ops, clusters, dims, -(-size // wanted))
            groups = groups[origin]
    return (
        Ops.joined([ops for ops, _, _ in done]),
        np.concatenate([groups for _, groups, _ in done]),
        np.concatenate([clusters for _, _, clusters in done]),
    )
