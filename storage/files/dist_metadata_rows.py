"""Parse the two kinds of entries that a ``.metadata`` file has by the million, many at a time.

A file of 227 MiB has a hundred million opcodes, which would take minutes one by one. But all entries have the same
sequence of opcodes; only the values differ. So one entry is parsed opcode by opcode, and from then on NumPy takes
blocks of entries in two ways:

1. Entries that fit a *stencil* (:mod:`~paddle_reshard.storage.files.dist_metadata_stencils`), that is, have the
   layout of an earlier entry, are compared with it as they are.
2. All others are walked over together, one step per opcode (:mod:`~paddle_reshard.storage.files.dist_metadata_walk`),
   and layouts that occur often become stencils.

In either way every byte of an entry is either equal to that of an earlier entry, or the argument of a number, text or
reference. What begins and ends at an opcode boundary is what the opcodes mean. Anything else (a frame, the first use of
a name, an unusual spelling, an attack) is parsed opcode by opcode, and then the entries after it in runs again.

The values are then byte strings, few of them distinct, and the pickle machine itself parses each distinct string once
(:mod:`~paddle_reshard.storage.files.dist_metadata_values`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from paddle_reshard.storage.files.dist_metadata_stencils import ROWS_AT_ONCE, Stencil, rows_at
from paddle_reshard.storage.files.dist_metadata_values import (
    BAD,
    FALSE,
    INDEX,
    INDEX_FIELDS,
    NONE,
    NOTHING,
    OPAQUE,
    PIECE,
    PIECE_FIELDS,
    TRUE,
    Coder,
    Ids,
    Memo,
)
from paddle_reshard.storage.files.dist_metadata_walk import (
    BATCH,
    Flags,
    Longs,
    Scan,
    opcode_set,
)
from paddle_reshard.storage.files.framed_pickle import get_opcode
from paddle_reshard.storage.files.paddle_pickle import Instance, Machine

_FIRST_BLOCK_ENTRIES: Final = 1 << 10
"""The first block is small, because it has no stencils. Each one after it may be twice as large."""
_BLOCK_ENTRIES: Final = 1 << 16
_MOST_STENCILS: Final = 8
"""Stencils of entries of one length; those that fit most entries stay."""
_FEWEST_ENTRIES: Final = 32
"""Entries of one length in a block for which a stencil pays."""
_LONGEST_ENTRY_BYTES: Final = (1 << 16) - 2
"""Longest entry that can have a stencil: lengths, and one for all longer ones, take two bytes."""


class _Block(NamedTuple):
    """Bytes that may be entries, one after the other, and the values that were recognised in them."""

    begins: Longs
    """Positions in the window."""
    ends: Longs
    """Position after each: that of the next one, if one follows."""
    kinds: Ids
    """How each ends."""
    codes: Ids
    """What each holds, a row per value; BAD if it is no entry that can be taken."""


class _BlockEntries(NamedTuple):
    """The entries of a block, in order."""

    begins: Longs
    """Positions in the window."""
    ends: Longs
    """Position after each."""
    sound: Flags
    """Which can be taken."""
    breaks: Longs
    """Entries that are not followed by one that can be taken, ascending."""
    kinds: Ids
    codes: Ids
    """A row per value."""
    highest: Ids
    """Largest memo index to which each refers."""
    first_slot: Longs
    """Where in ``slots`` begins what each stores in the memo; and where the last one's end."""
    slots: Ids
    last: int
    """Position in the window up to which entries were looked for."""


class _EntryRuns:
    """Runs of whole entries of one class."""

    kind: str
    fields: tuple[str, ...]
    """Attributes, in the order of the columns."""

    def __init__(self, machine: Machine, memo: Memo) -> None:
        self.machine, self.memo = machine, memo
        self.owner: dict[object, object] | None = None
        """The dict whose entries were parsed. The caller checks that it is the right one."""
        self._last: Instance | None = None
        self._order: tuple[str, ...] = ()
        self._made_from: tuple[object, ...] = ()
        self._known = False
        """Whether all names are stored in the memo, before which no entry can be recognised."""
        self._scan: Scan | None = None
        self._entries: _BlockEntries | None = None
        self._stencils: dict[int, list[Stencil]] = {}
        """Length of entries → stencils of this length, those first that fit most."""
        self._block_entries = _FIRST_BLOCK_ENTRIES
        self._coder = Coder(machine, memo)

    def follow(self) -> Instance:
        """Parse as many similar entries as possible, beginning with a new instance. Returns the instance after them."""
        while self._ready() and self._in_place() and self._take():
            pass
        self._last = Instance(self.kind)
        return self._last

    def _in_place(self) -> bool:
        """Whether the stack of the machine is in the state at the start of an entry."""
        raise NotImplementedError

    def _owned_by(self, owner: object) -> bool:
        if self.owner is None and isinstance(owner, dict):
            self.owner = owner
        return self.owner is not None and owner is self.owner

    # -- the entries of a window

    def _ready(self) -> bool:
        """Whether the form of an entry is known. Drops earlier findings when a name is stored in the memo."""
        if not self._order and self._last is not None and self._last.state:
            names = tuple(self._last.state)
            if set(names) <= set(self.fields):
                self._order = names  # type: ignore[assignment]
        if not self._order:
            return False
        made_from = tuple(self.memo.names.get(name) for name in (*self._order, self.kind, "scalar", "i8"))
        if made_from != self._made_from:
            self._made_from, self._scan, self._stencils = made_from, None, {}
            self._block_entries = _FIRST_BLOCK_ENTRIES
            self._coder.forget()
            self._known = None not in made_from[:-2] and self.machine.protocol >= 4
        return self._known

    def _valued(self) -> list[str]:
        """Attributes that have a value of their own in an entry, in its order."""
        return [name for name in self._order if name != "is_flattened"]

    def _prefix(self) -> bytes:
        """How an entry begins, after NEWOBJ."""
        return b"\x94}\x94(" + get_opcode(self.memo.names[self._order[0]])

    def _walk(self, scan: Scan) -> Ids:
        """Walk over entries. Returns the kind of each."""
        names = self.memo.names
        number = None
        if "scalar" in names and "i8" in names:
            number = get_opcode(names["scalar"]) + get_opcode(names["i8"]) + b"C\x08"
        order = list(self._order)
        scan.literal(self._prefix())
        while order:
            name = order.pop(0)
            if name != self._order[0]:
                scan.literal(get_opcode(names[name]))
            if name in ("tensor_key", "dtype"):
                scan.simple(b"\x8chj")
            elif name == "replica_id":
                scan.simple(b"NKMJ\x8a")
            elif name != "is_flattened":
                scan.shape(number)
            elif order and order.pop(0) == "flattened_range":
                flag = scan.one_of(b"\x88\x89")
                scan.literal(get_opcode(names["flattened_range"]))
                scan.good &= scan.shape(number) == (flag == 0x88)
            else:  # the flag and the range go together
                scan.good[:] = False
                break
        kinds = self._tail(scan)
        scan.literal(get_opcode(names[self.kind]) + b")\x81")
        scan.good &= scan.at < scan.limit
        return kinds

    def _tail(self, scan: Scan) -> Ids:
        """Walk over the bytes after the attributes, up to the next new instance. Returns the kind of each tail."""
        raise NotImplementedError

    def _slots(self, kinds: Ids) -> Ids:
        """Chunks that tails of these kinds store in the memo after their value."""
        return np.full(len(kinds), NOTHING, dtype=np.int32)

    def _block(self, scan: Scan, at: int) -> _BlockEntries:
        """The entries from a position on."""
        first = int(np.searchsorted(scan.begins, at))
        begins = scan.begins[first : first + self._block_entries + 1]
        self._block_entries = min(2 * self._block_entries, _BLOCK_ENTRIES)
        count = max(len(begins) - 1, 0)
        block = _Block(
            begins=begins[:count],
            ends=begins[1:].copy(),
            kinds=np.zeros(count, dtype=np.int32),
            codes=np.full((len(self._valued()) + 2, count), BAD, dtype=np.int32),
        )
        unknown = self._fit(scan, block)
        if len(unknown):
            self._walk_over(scan, block, unknown)
        codes = block.codes
        codes[-1] = self._slots(block.kinds)
        sound = (codes != BAD).all(axis=0)
        followed = sound[1:] & (begins[1:count] == block.ends[: max(count - 1, 0)])
        slots, first_slot = self._coder.stored(codes)
        return _BlockEntries(
            begins=block.begins,
            ends=block.ends,
            sound=sound,
            breaks=np.append(np.flatnonzero(~followed), count - 1),
            kinds=block.kinds,
            codes=codes,
            highest=-2 - codes.min(axis=0),
            first_slot=first_slot,
            slots=slots,
            last=int(begins[-1]) if count else len(scan.data),
        )

    def _fit(self, scan: Scan, block: _Block) -> Longs:
        """Find entries by stencils. Returns those that fit none."""
        lengths = np.minimum(block.ends - block.begins, _LONGEST_ENTRY_BYTES + 1).astype(np.uint16)
        order = np.argsort(lengths, kind="stable")
        bounds = np.flatnonzero(np.diff(lengths[order])) + 1
        unknown = [order[:0]]
        for first, stop in pairwise([0, *bounds.tolist(), len(order)]):
            stencils = self._stencils.get(int(lengths[order[first]])) if first < stop else None
            if stencils is None:
                unknown.append(order[first:stop])
                continue
            for at in range(first, stop, ROWS_AT_ONCE):
                unknown.append(self._fit_any(scan, block, order[at : min(at + ROWS_AT_ONCE, stop)], stencils))
            stencils.sort(key=lambda stencil: -stencil.fits)
        return np.concatenate(unknown)

    def _fit_any(self, scan: Scan, block: _Block, entries: Longs, stencils: Sequence[Stencil]) -> Longs:
        """Find entries of one length by stencils. Returns those that fit none."""
        for stencil in stencils:
            words = rows_at(scan.data, block.begins[entries], stencil.nbytes)
            fits = stencil.fitting(words)[: len(entries)]
            count = int(np.count_nonzero(fits))
            if not count:
                continue
            words = words[: len(entries)]
            some = slice(None) if count == len(entries) else np.flatnonzero(fits)
            words[~fits] = words[fits.argmax()]  # those that do not fit are few: nothing of them is looked up
            rows = entries[some]
            block.kinds[rows] = stencil.kind
            for codes, hole in zip(block.codes, stencil.holes, strict=False):
                codes[rows] = self._coder.fitted(words, hole)[some] if hole.code is None else hole.code
            stencil.fits += count
            entries = entries[~fits]
            if not len(entries):
                break
        return entries

    def _walk_over(self, scan: Scan, block: _Block, entries: Longs) -> None:
        """Find entries by a walk, and make stencils of layouts that occur often."""
        walk = scan.of(block.begins[entries])
        kinds = self._walk(walk)
        good = np.flatnonzero(walk.good)
        rows = entries[good]
        block.ends[rows], block.kinds[rows] = walk.at[good], kinds[good]
        block.codes[:, rows] = NOTHING
        for codes, value in zip(block.codes, walk.values, strict=False):
            some = good if value.rows is None else np.flatnonzero(walk.good[value.rows])
            having = entries if value.rows is None else entries[value.rows]
            codes[having[some]] = self._coder.walked(
                scan, value.start[some], value.nbytes[some], value.opcode[some]
            )
        lengths = walk.at[good] - block.begins[rows]
        for nbytes, nth, count in zip(
            *np.unique(lengths, return_index=True, return_counts=True), strict=True
        ):
            if count >= _FEWEST_ENTRIES and nbytes <= _LONGEST_ENTRY_BYTES:
                row, entry = int(good[nth]), int(rows[nth])
                begin = int(block.begins[entry])
                raw = scan.data[begin : begin + int(nbytes)]
                holes = [value.of(row, begin) for value in walk.values]
                codes = block.codes[: len(holes), entry].tolist()
                stencil = Stencil(raw, holes, codes, int(kinds[row]))
                known = self._stencils.setdefault(int(nbytes), [])
                known[_MOST_STENCILS - 1 :] = [stencil]

    # -- rows

    def _take(self) -> bool:
        """Parse the consecutive entries from here on. Returns whether there were any."""
        data, at = self.machine.window.ahead
        if self._scan is None or self._scan.data is not data:
            self._scan, self._entries = Scan(data, self._prefix()), None
        if self._entries is None or at >= self._entries.last:
            self._entries = self._block(self._scan, at)
        entries, memo = self._entries, self.memo
        first = int(np.searchsorted(entries.begins, at))
        if first == len(entries.begins) or entries.begins[first] != at or not entries.sound[first]:
            return False
        stop = 1 + int(entries.breaks[np.searchsorted(entries.breaks, first)])
        first_index = len(memo) + entries.first_slot[first:stop] - entries.first_slot[first]
        wrong = (entries.highest[first:stop] >= first_index) | self._misplaced(entries.kinds[first:stop])
        if wrong.any():
            stop = first + int(wrong.argmax())
        frame_stop = at + self.machine.frame_stop - self.machine.window.position
        stop = first + int(np.searchsorted(entries.ends[first:stop], frame_stop, side="right"))
        if stop == first:
            return False
        memo.extend(entries.slots[entries.first_slot[first] : entries.first_slot[stop]])
        self.machine.window.skip(int(entries.ends[stop - 1]) - at)
        self._keep(entries, first, stop)
        return True

    def _misplaced(self, kinds: Ids) -> Flags:
        """Rows whose tail cannot follow the row before."""
        return np.zeros(len(kinds), dtype=bool)

    def _keep(self, entries: _BlockEntries, first: int, stop: int) -> None:
        """Keep these entries."""
        raise NotImplementedError

    def _by_field(self, names: Sequence[str], codes: Ids, more: Ids) -> dict[str, Ids]:
        """Value ids of each field: of rows of codes of these attributes, and then of more rows.

        Missing attributes have their defaults.
        """
        columns = {name: self._coder.ids(column) for name, column in zip(names, codes, strict=True)}
        default = np.full(codes.shape[1], NONE, dtype=np.int32)
        flat = columns.get("flattened_range", default)
        columns["is_flattened"] = np.where(flat == NONE, FALSE, TRUE).astype(np.int32)
        return {
            name: np.concatenate([columns.get(name, default), column])
            for name, column in zip(self.fields, more, strict=False)
        }


class IndexColumns(NamedTuple):
    """All indexes as columns of value ids."""

    named: dict[str, Ids]
    """The fields of an index, which name a piece; those of replicas of one piece that follow each other once."""
    lengths: Longs
    """Number of indexes that each row of ``named`` is for."""
    replica: Ids
    """The replica of every index."""
    file: Ids


class IndexRows(_EntryRuns):
    """``LocalTensorIndex`` → file name."""

    kind, fields = INDEX, INDEX_FIELDS

    def __init__(self, machine: Machine, memo: Memo) -> None:
        super().__init__(machine, memo)
        self._named: list[Ids] = []
        """What names a piece, once for neighbours that name the same: those of its replicas."""
        self._lengths: list[Longs] = []
        """Number of these neighbours."""
        self._placed: list[Ids] = []
        """Replica and file, of each."""
        self._partly: _BlockEntries | None = None
        """The block from which entries are taken."""
        self._taken = np.zeros(0, dtype=bool)

    def columns(self, more: Sequence[tuple[int, ...]]) -> IndexColumns:
        """All parsed rows, and ``more``, which have the values of ``fields`` and the file."""
        self._keep_block()
        last = np.array(more, dtype=np.int32).reshape(-1, len(self.fields) + 1).T
        names = [name for name in self._valued() if name != "replica_id"]
        named = np.concatenate([np.empty((len(names), 0), np.int32), *self._named], axis=1)
        placed = np.concatenate([np.empty((2, 0), np.int32), *self._placed], axis=1)
        lengths = np.concatenate([*self._lengths, np.ones(len(more), np.int64)])
        self._named, self._placed = [], []
        replica, file = (self._coder.ids(column) for column in placed)
        return IndexColumns(
            self._by_field(names, named, last),
            lengths,
            np.concatenate([replica, last[self.fields.index("replica_id")]]),
            np.concatenate([file, last[-1]]),
        )

    def _in_place(self) -> bool:
        marks, items = self.machine.marks, self.machine.stack
        return bool(marks and marks[-1]) and len(items) % 2 == 0 and self._owned_by(marks[-1][-1])

    def _tail(self, scan: Scan) -> Ids:
        scan.literal(b"ub")
        scan.simple(b"\x8chj")
        scan.optional(BATCH)
        return np.zeros(len(scan.at), dtype=np.int32)

    def _keep(self, entries: _BlockEntries, first: int, stop: int) -> None:
        if entries is not self._partly:
            self._keep_block()
            self._partly, self._taken = entries, np.zeros(len(entries.begins), dtype=bool)
        self._taken[first:stop] = True

    def _keep_block(self) -> None:
        """Keep the entries of the last block that were taken."""
        if self._partly is None:
            return
        names, codes = self._valued(), self._partly.codes
        if not self._taken.all():
            codes = codes[:, self._taken]
        changes = np.ones(codes.shape[1], dtype=bool)
        changes[1:] = False
        for name, column in zip(names, codes, strict=False):
            if name != "replica_id":
                changes[1:] |= column[1:] != column[:-1]
        firsts = np.flatnonzero(changes)
        self._named.append(codes[[row for row, name in enumerate(names) if name != "replica_id"]][:, firsts])
        self._lengths.append(np.diff(firsts, append=len(changes)))
        placed = np.full((2, len(changes)), NOTHING, dtype=np.int32)
        if "replica_id" in names:
            placed[0] = codes[names.index("replica_id")]
        placed[1] = codes[len(names)]
        self._placed.append(placed)
        self._partly = None


class PieceRows(_EntryRuns):
    """``LocalTensorMetadata`` in the list of its key. A row has the column ``key`` before those of its fields.

    The tail of a row says what follows: the same list continues, or it ends and that of another key begins. A list
    of one piece is spelled without a MARK and ends in APPEND; others have a MARK and end in APPENDS.
    """

    kind, fields = PIECE, PIECE_FIELDS
    _GOES_ON, _MANY_MANY, _MANY_ONE, _ONE_MANY, _ONE_ONE = range(5)

    def __init__(self, machine: Machine, memo: Memo) -> None:
        super().__init__(machine, memo)
        self._list = self._coder.add(NONE, (OPAQUE,))
        self.keys: list[int] = []
        """Value ids of the keys whose lists were taken from their first piece to their last."""
        self._found: list[Ids] = []
        """Codes of the attributes."""
        self._key_ids: list[Ids] = []

    def _in_place(self) -> bool:
        marks = self.machine.marks
        outer = self._outer()
        enclosing = marks[:-1] if self._is_marked() else marks
        known = len(outer) >= 2 and len(outer) % 2 == 0 and isinstance(outer[1], list)
        if not known or not isinstance(outer[-1], list) or not isinstance(outer[-2], str):
            return False
        return bool(enclosing and enclosing[-1]) and self._owned_by(enclosing[-1][-1])

    def _is_marked(self) -> bool:
        """Whether the current list has a MARK."""
        marks = self.machine.marks
        return bool(marks and marks[-1]) and isinstance(marks[-1][-1], list)

    def _outer(self) -> list[object]:
        """The stack with keys and lists in turn."""
        return self.machine.marks[-1] if self._is_marked() else self.machine.stack

    def _tail(self, scan: Scan) -> Ids:
        scan.literal(b"ub")
        opcode = scan.bytes[scan.at]
        ended = np.flatnonzero(opcode_set(b"ea")[opcode])
        kinds = np.full(len(opcode), self._GOES_ON, dtype=np.int32)
        part = scan.among(ended)
        part.one_of(b"ea")
        part.optional(BATCH)
        part.simple(b"\x8c")
        part.literal(b"]\x94")
        many = part.optional(b"(")
        kinds[ended] = np.where(opcode[ended] == ord("e"), self._MANY_ONE, self._ONE_ONE) - many
        scan.join(part)
        return kinds

    def _slots(self, kinds: Ids) -> Ids:
        return np.where(kinds == self._GOES_ON, NOTHING, self._list).astype(np.int32)

    def _misplaced(self, kinds: Ids) -> Flags:
        comes_from_many = kinds <= self._MANY_ONE
        goes_to_many = (kinds <= self._MANY_MANY) | (kinds == self._ONE_MANY)
        before = np.concatenate([[self._is_marked()], goes_to_many[:-1]])
        return np.asarray(comes_from_many != before)

    def _keep(self, entries: _BlockEntries, first: int, stop: int) -> None:
        codes, kinds = entries.codes[:, first:stop], entries.kinds[first:stop]
        begins = np.flatnonzero(kinds != self._GOES_ON)
        # The key of a row is that of the last list that began before it.
        names = self._valued()
        own = [self.memo.add(self._outer()[-2]), *self._coder.ids(codes[len(names), begins]).tolist()]
        lengths = np.diff(begins, prepend=-1, append=len(kinds) - 1)
        self._key_ids.append(np.repeat(np.array(own, dtype=np.int32), lengths))
        self._found.append(codes[: len(names)].copy())
        if len(begins):
            self.keys += own[1:-1]
            self._begin_list(own[-1], int(kinds[begins[-1]]) in (self._MANY_MANY, self._ONE_MANY))

    def columns(self, more: Sequence[tuple[int, ...]]) -> dict[str, Ids]:
        """``key`` and the fields of all parsed rows, and of ``more``, which has the values of these."""
        last = np.array(more, dtype=np.int32).reshape(-1, len(self.fields) + 1).T
        names = self._valued()
        codes = np.concatenate([np.empty((len(names), 0), np.int32), *self._found], axis=1)
        self._found.clear()
        return {"key": np.concatenate([*self._key_ids, last[0]]), **self._by_field(names, codes, last[1:])}

    def _begin_list(self, key: int, many: bool) -> None:
        """Bring the stack of the machine to where the list of this key begins."""
        machine = self.machine
        if self._is_marked():
            pieces = machine.pop_mark()
            machine.stack[-1].extend(pieces)  # type: ignore[attr-defined]
        machine.stack += [self.memo.value(key), []]
        if many:
            machine.marks.append(machine.stack)
            machine.stack = []
