"""Parse the two kinds of entries that a ``.metadata`` file has by the million, many at a time.

A file of 227 MiB has a hundred million opcodes, which would take minutes one by one. But all entries have the same
sequence of opcodes; only the values differ. So one entry is parsed opcode by opcode, and says which attributes there
are. From then on entries are recognised in one of two ways:

1. A regular expression of whole opcodes takes an entry apart, and a *stencil*
   (:mod:`~paddle_reshard.storage.files.dist_metadata_stencils`) is made of it.
2. NumPy compares all others of this length with the stencil as they are, and those that do not fit it with the next.

In either way every byte of an entry is either equal to that of an earlier entry, or the argument of a number, text or
reference. What begins and ends at an opcode boundary is what the opcodes mean. Anything else (a frame, the first use of
a name, an unusual spelling, an attack) is parsed opcode by opcode, and then the entries after it in runs again.

The values are then byte strings, few of them distinct, and the pickle machine itself parses each distinct string once
(:mod:`~paddle_reshard.storage.files.dist_metadata_values`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from paddle_reshard.storage.files.dist_metadata_stencils import (
    MASKS,
    WORD_BYTES,
    Flags,
    Longs,
    Stencil,
    rows_at,
)
from paddle_reshard.storage.files.dist_metadata_values import (
    BAD,
    FALSE,
    INDEX,
    INDEX_FIELDS,
    NEW_LIST_OPCODES,
    NONE,
    NOTHING,
    PIECE,
    PIECE_FIELDS,
    TRUE,
    Coder,
    Ids,
    Memo,
)
from paddle_reshard.storage.files.framed_pickle import get_opcode
from paddle_reshard.storage.files.paddle_pickle import Instance, Machine

_NEWOBJ: Final = 0x81
_REACH_BYTES: Final = 2 * WORD_BYTES
"""More than a row of an entry may reach beyond it: entries that end so near to the end of a window have no row."""
_ROWS_AT_ONCE: Final = 1 << 13
"""Entries that are compared together: they stay in the cache."""
_MOST_STENCILS: Final = 32
"""Stencils of entries of one length."""
_FEWEST_ENTRIES: Final = 8
"""Entries of one length for which a stencil pays."""
_LONGEST_ENTRY_BYTES: Final = 1 << 10
"""Longest entry of which a stencil is made: so there are few, whatever a file has."""

_REFERENCE: Final = rb"h.|j.{4}"
_TEXT: Final = rb"\x8c.[\x00-\x7f]{0,255}\x94"
_LONG: Final = b"|".join(b"\\x8a\\x%02x.{%d}" % (nbytes, nbytes) for nbytes in range(1, 9))
_NUMBER: Final = rb"K.|M..|J.{4}|" + _LONG
_BATCH: Final = rb"(?:u\()?"
"""May occur between two entries: CPython sets the items of a dict in batches of a thousand."""
_MOST_NUMBERS: Final = 8
"""Largest number of dims of a shape; longer ones are parsed opcode by opcode."""


class _Entries:
    """What may be entries of a window, in order, and the codes of their values."""

    def __init__(self, data: bytes, starts: Longs, columns: int) -> None:
        self.data = data
        self.begins = starts[:-1]
        """Positions in the window."""
        self.ends = starts[1:].copy()
        """Position after each."""
        self.kinds = np.zeros(len(self.begins), dtype=np.int32)
        """How each ends."""
        self.codes = np.full((columns, len(self.begins)), BAD, dtype=np.int32)
        """What each holds, a row per value; BAD if it cannot be taken."""

    def seal(self, coder: Coder) -> None:
        """Prepare for taking them, once all codes are known."""
        count = len(self.begins)
        self.sound = (self.codes != BAD).all(axis=0)
        """Which can be taken."""
        followed = self.sound[1:] & (self.begins[1:] == self.ends[:-1])
        self.breaks = np.append(np.flatnonzero(~followed), count - 1)
        """Entries that are not followed by one that can be taken, ascending."""
        self.highest = -2 - self.codes.min(axis=0)
        """Largest memo index to which each refers."""
        self.slots, self.first_slot = coder.stored(self.codes)
        """What they store in the memo, and where in it that of each begins and that of the last one ends."""


class _EntryRuns:
    """Runs of whole entries of one class."""

    kind: str
    fields: tuple[str, ...]
    """Attributes, in the order of the columns."""
    after: tuple[str, ...]
    """What an entry has after its attributes."""

    def __init__(self, machine: Machine, memo: Memo) -> None:
        self.machine, self.memo = machine, memo
        self.owner: dict[object, object] | None = None
        """The dict whose entries were parsed. The caller checks that it is the right one."""
        self._last: Instance | None = None
        self._order: tuple[str, ...] = ()
        self._made_from: tuple[object, ...] = ()
        self._pattern: re.Pattern[bytes] | None = None
        """An entry; ``None`` until all names are stored in the memo."""
        self._entries: _Entries | None = None
        """Those of the window."""
        self._stencils: dict[int, list[Stencil]] = {}
        """Length of entries → stencils of this length, those first that fit most."""
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

    # -- what an entry looks like

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
            self._made_from, self._entries, self._stencils = made_from, None, {}
            self._coder.forget()
            known = None not in made_from[:-2] and self.machine.protocol >= 4
            self._pattern = re.compile(self._entry(), re.DOTALL) if known else None
        return self._pattern is not None

    def _valued(self) -> list[str]:
        """Attributes that have a value of their own in an entry, in its order."""
        return [name for name in self._order if name != "is_flattened"]

    def _prefix(self) -> bytes:
        """How an entry begins, after NEWOBJ."""
        return b"\x94}\x94(" + get_opcode(self.memo.names[self._order[0]])

    def _entry(self) -> bytes:
        """Regular expression of an entry, from after NEWOBJ to after the next; a group for each value."""
        names = self.memo.names
        number = _NUMBER
        if "scalar" in names and "i8" in names:
            number += b"|" + self._refer("scalar", "i8") + rb"C\x08.{8}\x94\x86\x94R\x94"
        numbers = rb"\(?(?:%b){1,%d}[t\x85\x86\x87]\x94" % (number, _MOST_NUMBERS)
        shape = rb"N|\)|" + numbers + b"|" + _REFERENCE
        forms = {
            "tensor_key": _TEXT + b"|" + _REFERENCE,
            "dtype": _TEXT + b"|" + _REFERENCE,
            "replica_id": b"N|" + _NUMBER,
        }
        attributes = b""
        for name in self._order:
            attributes += self._refer(name)
            if name == "is_flattened":  # goes with the range, which follows
                flat = self._refer("flattened_range") if "flattened_range" in names else b"(?!)"
                attributes += rb"(?:\x88(?=%b(?!N))|\x89(?=%bN))" % (flat, flat)
            else:
                attributes += b"(?P<%b>%b)" % (name.encode(), forms.get(name, shape))
        return rb"\x94}\x94\(" + attributes + b"ub" + self._tail() + self._refer(self.kind) + rb"\)\x81"

    def _refer(self, *names: str) -> bytes:
        """Regular expression of references to these names."""
        return b"".join(re.escape(get_opcode(self.memo.names[name])) for name in names)

    def _tail(self) -> bytes:
        """Regular expression of what follows the attributes, up to the next new instance."""
        raise NotImplementedError

    def _kind(self, match: re.Match[bytes]) -> int:
        """How an entry ends."""
        return 0

    # -- the entries of a window

    def _find(self, data: bytes, at: int) -> _Entries:
        """The entries from a position on."""
        starts = _positions(data, self._prefix())
        starts = starts[np.searchsorted(starts, at) :]
        found = _Entries(data, starts, len(self._valued()) + len(self.after))
        lengths = np.minimum(np.diff(starts), _LONGEST_ENTRY_BYTES + 1).astype(np.uint16)
        order = np.argsort(lengths, kind="stable")
        for of_one_length in np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1):
            for first in range(0, len(of_one_length), _ROWS_AT_ONCE):
                self._recognise(found, of_one_length[first : first + _ROWS_AT_ONCE])
        found.seal(self._coder)
        return found

    def _recognise(self, found: _Entries, entries: Longs) -> None:
        """Work out the codes of entries of one length, or of entries that are all too long for stencils."""
        nbytes = int(found.ends[entries[0]] - found.begins[entries[0]])
        stencils = self._stencils.setdefault(nbytes, [])
        most = _MOST_STENCILS if nbytes <= _LONGEST_ENTRY_BYTES else 0
        for stencil in stencils:
            if len(entries):
                entries = self._fit(found, entries, stencil)
        while len(entries):
            entry, entries = int(entries[0]), entries[1:]
            values = self._take_apart(found, entry)
            if values and len(entries) >= _FEWEST_ENTRIES and len(stencils) < most:
                begin, end = int(found.begins[entry]), int(found.ends[entry])
                codes, kind = found.codes[:, entry].tolist(), int(found.kinds[entry])
                stencils.append(Stencil(found.data[begin:end], values, codes, kind))
                entries = self._fit(found, entries, stencils[-1])
        stencils.sort(key=lambda stencil: -stencil.fits)

    def _fit(self, found: _Entries, entries: Longs, stencil: Stencil) -> Longs:
        """Work out the codes of entries that fit a stencil. Returns the others."""
        rows = rows_at(found.data, found.begins[entries], stencil.nbytes)
        fits = stencil.fitting(rows)
        count = int(np.count_nonzero(fits))
        if count:
            fitting, rows = (entries, rows) if count == len(entries) else (entries[fits], rows[fits])
            found.kinds[fitting] = stencil.kind
            for codes, hole in zip(found.codes, stencil.holes, strict=True):
                codes[fitting] = self._coder.codes(rows, hole)
            stencil.fits += count
        return entries[~fits]

    def _take_apart(self, found: _Entries, entry: int) -> list[tuple[int, int]]:
        """Work out the codes of one entry. Returns where its values are; none if a stencil cannot be made of it."""
        begin = int(found.begins[entry])
        match = self._pattern.match(found.data, begin) if self._pattern else None
        if match is None:
            return []
        spans = [match.span(name) for name in (*self._valued(), *self.after)]
        codes = [
            self._coder.code(found.data[start:stop]) if stop > start else NOTHING for start, stop in spans
        ]
        found.codes[:, entry], found.kinds[entry] = codes, self._kind(match)
        if BAD in codes or match.end() != found.ends[entry]:
            found.ends[entry] = match.end()
            return []
        return [(start - begin, stop - start) for start, stop in spans]

    # -- rows

    def _take(self) -> bool:
        """Parse the consecutive entries from here on. Returns whether there were any."""
        data, at = self.machine.window.ahead
        if self._entries is None or self._entries.data is not data:
            self._entries = self._find(data, at)
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
        self._keep(self._coder.ids(entries.codes[:, first:stop]), entries.kinds[first:stop])
        return True

    def _misplaced(self, kinds: Ids) -> Flags:
        """Rows whose end cannot follow the row before."""
        return np.zeros(len(kinds), dtype=bool)

    def _keep(self, ids: Ids, kinds: Ids) -> None:
        """Keep entries, given as the value ids of their values."""
        raise NotImplementedError

    def _by_field(self, names: Sequence[str], ids: Ids, more: Ids) -> dict[str, Ids]:
        """Value ids of each field: of rows of these attributes, and then of more rows.

        Missing attributes have their defaults.
        """
        columns = dict(zip(names, ids, strict=True))
        missing = np.full(ids.shape[1], NONE, dtype=np.int32)
        columns["is_flattened"] = np.full(ids.shape[1], FALSE, dtype=np.int32)
        if "is_flattened" in self._order:
            columns["is_flattened"][columns["flattened_range"] != NONE] = TRUE
        return {
            name: np.concatenate([columns.get(name, missing), column])
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

    kind, fields, after = INDEX, INDEX_FIELDS, ("file",)

    def __init__(self, machine: Machine, memo: Memo) -> None:
        super().__init__(machine, memo)
        self._named: list[Ids] = []
        """What names a piece, once for neighbours that name the same: those of its replicas."""
        self._lengths: list[Longs] = []
        """Number of these neighbours."""
        self._placed: list[Ids] = []
        """Replica and file, of each."""

    def columns(self, more: Sequence[tuple[int, ...]]) -> IndexColumns:
        """All parsed rows, and ``more``, which have the values of ``fields`` and the file."""
        last = np.array(more, dtype=np.int32).reshape(-1, len(self.fields) + 1).T
        names = self._naming()
        named = np.concatenate([np.empty((len(names), 0), np.int32), *self._named], axis=1)
        replica, file = np.concatenate([np.empty((2, 0), np.int32), *self._placed], axis=1)
        return IndexColumns(
            self._by_field(names, named, last),
            np.concatenate([*self._lengths, np.ones(len(more), np.int64)]),
            np.concatenate([replica, last[self.fields.index("replica_id")]]),
            np.concatenate([file, last[-1]]),
        )

    def _naming(self) -> list[str]:
        return [name for name in self._valued() if name != "replica_id"]

    def _in_place(self) -> bool:
        marks, items = self.machine.marks, self.machine.stack
        return bool(marks and marks[-1]) and len(items) % 2 == 0 and self._owned_by(marks[-1][-1])

    def _tail(self) -> bytes:
        return b"(?P<file>" + _TEXT + b"|" + _REFERENCE + b")" + _BATCH

    def _keep(self, ids: Ids, kinds: Ids) -> None:
        columns = dict(zip((*self._valued(), *self.after), ids, strict=True))
        named = np.array([columns[name] for name in self._naming()])
        firsts = np.append(0, np.flatnonzero((named[:, 1:] != named[:, :-1]).any(axis=0)) + 1)
        self._named.append(named[:, firsts])
        self._lengths.append(np.diff(firsts, append=len(kinds)))
        replica = columns.get("replica_id", np.full(len(kinds), NONE, dtype=np.int32))
        self._placed.append(np.array([replica, columns["file"]]))


class PieceRows(_EntryRuns):
    """``LocalTensorMetadata`` in the list of its key. A row has the column ``key`` before those of its fields.

    The end of a row says what follows: the same list continues, or it ends and that of another key begins. A list
    of one piece is spelled without a MARK and ends in APPEND; others have a MARK and end in APPENDS.
    """

    kind, fields, after = PIECE, PIECE_FIELDS, ("key", "list")
    _FROM_MARK, _ENDS, _TO_MARK = 1, 2, 4
    """The list of a piece has a MARK; it ends with the piece; the list of the next piece has a MARK."""

    def __init__(self, machine: Machine, memo: Memo) -> None:
        super().__init__(machine, memo)
        self.keys: list[int] = []
        """Value ids of the keys whose lists were taken from their first piece to their last."""
        self._found: list[Ids] = []
        """Key and attributes."""

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

    def _tail(self) -> bytes:
        next_list = b"(?P<key>" + _TEXT + b")(?P<list>" + re.escape(NEW_LIST_OPCODES) + rb")(?P<mark>\(?)"
        return b"(?:(?P<end>[ea])" + _BATCH + next_list + b")?"

    def _kind(self, match: re.Match[bytes]) -> int:
        if match["end"] is None:
            return self._FROM_MARK | self._TO_MARK
        from_mark = self._FROM_MARK if match["end"] == b"e" else 0
        return from_mark | self._ENDS | (self._TO_MARK if match["mark"] else 0)

    def _misplaced(self, kinds: Ids) -> Flags:
        before = np.append(self._is_marked(), kinds[:-1] & self._TO_MARK > 0)
        return np.asarray((kinds & self._FROM_MARK > 0) != before)

    def _keep(self, ids: Ids, kinds: Ids) -> None:
        ends = np.flatnonzero(kinds & self._ENDS)
        # The key of a row is that of the last list that began before it.
        own = [self.memo.add(self._outer()[-2]), *ids[-2, ends].tolist()]
        keys = np.repeat(np.array(own, dtype=np.int32), np.diff(ends, prepend=-1, append=len(kinds) - 1))
        self._found.append(np.array([keys, *ids[:-2]]))
        if len(ends):
            self.keys += own[1:-1]
            self._begin_list(own[-1], bool(kinds[ends[-1]] & self._TO_MARK))

    def columns(self, more: Sequence[tuple[int, ...]]) -> dict[str, Ids]:
        """``key`` and the fields of all parsed rows, and of ``more``, which has the values of these."""
        last = np.array(more, dtype=np.int32).reshape(-1, len(self.fields) + 1).T
        names = self._valued()
        ids = np.concatenate([np.empty((len(names) + 1, 0), np.int32), *self._found], axis=1)
        return {"key": np.append(ids[0], last[0]), **self._by_field(names, ids[1:], last[1:])}

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


def _positions(data: bytes, prefix: bytes) -> Longs:
    """Where entries may begin in a window, ascending: after a NEWOBJ, with the first bytes of this prefix."""
    if len(data) < _REACH_BYTES:
        return np.zeros(0, dtype=np.int64)
    first = prefix[:WORD_BYTES]
    words = np.ndarray(len(data) - WORD_BYTES + 1, "<u8", data, strides=(1,))
    after_newobj = np.flatnonzero(np.frombuffer(data, np.uint8, len(data) - _REACH_BYTES) == _NEWOBJ) + 1
    return after_newobj[words[after_newobj] & MASKS[len(first)] == np.uint64(int.from_bytes(first, "little"))]
