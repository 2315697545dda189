"""Parse the two kinds of entries that a ``.metadata`` file has by the million, many at a time.

A file of 227 MiB has a hundred million opcodes, which would take minutes one by one. But all entries have the same
sequence of opcodes; only the values differ. So one entry is parsed opcode by opcode. Then all positions at which such
an entry may begin are walked together, one step per opcode. The bytes between the values must be equal, and the end of
a value follows from its first opcode. A walk begins and ends at opcode boundaries, so what it finds is what the opcodes
mean. Anything else (a frame, the first use of a name, an unusual spelling, an attack) is parsed opcode by opcode, and
then the walk is tried again.

The values are then byte strings, few of them distinct. The pickle machine itself parses each distinct string once. Only
memo references are looked up in each row.

A *value id* numbers a value in :class:`Memo`; a row is a tuple of value ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from copy import copy
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.errors import FormatError
from paddle_reshard.storage.formats.paddle_pickle import (
    ARRAY_GLOBALS,
    Global,
    Instance,
    Machine,
    NumpyDtype,
    Window,
)

PIECE: Final = "LocalTensorMetadata"
INDEX: Final = "LocalTensorIndex"
PIECE_FIELDS: Final = (
    "global_offset",
    "local_shape",
    "dtype",
    "global_shape",
    "is_flattened",
    "flattened_range",
)
INDEX_FIELDS: Final = (
    "tensor_key",
    "global_offset",
    "is_flattened",
    "flattened_range",
    "replica_id",
    "local_shape",
)
DEFAULTS: Final = {"is_flattened": False}
"""Attributes that a file does not set, where the default is not ``None`` (Paddle 3.3.1 ``dcp/metadata.py``)."""

_MAX_KNOWN: Final = 1 << 20
_MAX_INDEX: Final = (1 << 31) - 2

Ids = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]


class Memo:
    """The memo of the pickle machine, and all values by id."""

    __slots__ = ("_ids", "_values", "names")

    def __init__(self) -> None:
        self._values: list[object] = [Instance("opaque"), None, False, True]
        self._ids = array("i")
        self.names: dict[str, int] = {}
        """Memo index of each name of an attribute, of each class, and of what numpy numbers are made with."""

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> object:
        return self._values[self._ids[index]]

    @property
    def count(self) -> int:
        """Number of values."""
        return len(self._values)

    def value(self, value_id: int) -> object:
        """The value with an id."""
        return self._values[value_id]

    def add(self, value: object) -> int:
        """Number a value."""
        if value is None:
            return _NONE
        self._values.append(value)
        return len(self._values) - 1

    def append(self, value: object) -> None:
        """Store one value under the next index."""
        name = _name_of(value)
        if name is not None:
            # Keep the first: CPython stores the name of an attribute once, and may store the same string again.
            self.names.setdefault(name, len(self._ids))
        self._ids.append(self.add(value))

    def extend(self, value_ids: Ids) -> None:
        """Store several values under the next indexes."""
        self._ids.frombytes(value_ids.tobytes())

    def ids_at(self, indexes: Ids) -> Ids:
        """Value ids stored under many indexes."""
        return np.frombuffer(self._ids, dtype=np.int32)[indexes]


_OPAQUE: Final = 0
"""Value id of an instance, or of the dict of its attributes, to which nothing may refer."""
_NONE: Final = 1
_NEW_SLOTS: Final = (_OPAQUE, _OPAQUE)
"""Memo entries of a new instance and of the dict of its attributes."""
_FALSE: Final = 2
_TRUE: Final = 3
_NAMES: Final = frozenset(PIECE_FIELDS + INDEX_FIELDS)
_SCALARS: Final = frozenset(allowed for (_, name), allowed in ARRAY_GLOBALS.items() if name == "scalar")


def _name_of(value: object) -> str | None:
    if isinstance(value, str):
        return value if value in _NAMES else None
    if isinstance(value, Global):
        return "scalar" if value in _SCALARS else value.kind
    return "i8" if isinstance(value, NumpyDtype) and value.code == "i8" else None


# ----------------------------------------------------------------------------------- distinct strings of bytes


class _Chunks:
    """The meaning of distinct byte strings: a value, and the values that their opcodes store in the memo."""

    def __init__(self) -> None:
        self.values, self.starts, self.counts = array("i"), array("i"), array("i")
        self.slots = array("i", _NEW_SLOTS)

    def add(self, value: int, slots: Sequence[int]) -> int:
        """Number a chunk."""
        self.values.append(value)
        self.starts.append(len(self.slots))
        self.counts.append(len(slots))
        self.slots.extend(slots)
        return len(self.values) - 1

    def table(self) -> _Table:
        """The columns, without a copy: no chunk can be added while they are in use."""
        columns = (self.values, self.starts, self.counts, self.slots)
        return _Table(*(np.frombuffer(column, dtype=np.int32) for column in columns))


class _Table(NamedTuple):
    """Columns of all chunks."""

    values: Ids
    """Value id."""
    starts: Ids
    """Start in ``slots`` of the value ids that it stores in the memo."""
    counts: Ids
    """Number of these value ids."""
    slots: Ids
    """Value ids stored in the memo; first those that every new instance stores."""


class _Codes(dict[bytes, int]):
    """Byte string → code, worked out once: a chunk's number, a reference to the memo, or :data:`_BAD`."""

    def __init__(self, decode: Callable[[bytes], int]) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, raw: bytes) -> int:
        if len(self) >= _MAX_KNOWN:
            self.clear()
        code = self[raw] = self._decode(raw)
        return code


_BAD: Final = -1


class _ChunkMachine(Machine):
    """Parses one byte string, with read access to the memo of the whole file."""

    __slots__ = ("_known", "stored")

    def __init__(self, machine: Machine, known: Memo, raw: bytes) -> None:
        data = b"\x80\x04(" + raw + b"t."
        super().__init__(Window(lambda at, n: data[at : at + n], len(data), ""), machine.globals)
        self._known = known
        self.stored: list[object] = []

    def remember(self, index: int | None) -> None:
        self.stored.append(self.stack[-1])

    def recall(self, index: int) -> object:
        if index >= len(self._known):
            self.bad("missing_memo", "refers to what may be stored later")
        return self._known[index]


# ----------------------------------------------------------------------------------- walking over a window

_WORD_BYTES: Final = 8
_PADDING_BYTES: Final = 512
"""Zeros after a window: more than a step may read from its start."""
_BLOCK_ENTRIES: Final = 1 << 13
_MAX_NUMBERS: Final = 8
"""Largest number of dims of a shape; longer ones are parsed opcode by opcode."""
_MASKS: Final = np.array([(1 << 8 * n) - 1 for n in range(_WORD_BYTES + 1)], dtype=np.uint64)


def _set(opcodes: bytes) -> Flags:
    found = np.zeros(256, dtype=bool)
    found[list(opcodes)] = True
    return found


_BYTES_OF: Final = np.zeros(256, dtype=np.int64)
"""Bytes of an opcode and its argument, for opcodes of fixed length."""
for _opcodes, _nbytes in ((b"N)", 1), (b"hK", 2), (b"M", 3), (b"jJ", 5)):
    _BYTES_OF[list(_opcodes)] = _nbytes
_NEWOBJ: Final = 0x81
_TEXT: Final = 0x8C
_LONG: Final = 0x8A
_LONGEST_REFERENCE_BYTES: Final = 5
_NUMBERS: Final = _set(b"KMJ\x8a")
_TUPLE_ENDS: Final = _set(b"\x85\x86\x87t")
_BATCH: Final = b"u("
"""May occur between two entries: CPython sets the items of a dict in batches of a thousand."""
_NUMPY_NUMBER_TAIL: Final = b"\x94\x86\x94R\x94"


def _get(index: int) -> bytes:
    """The opcode that refers to a memo index, as CPython writes it."""
    return b"h" + bytes([index]) if index < 256 else b"j" + index.to_bytes(4, "little")


class _Values(NamedTuple):
    """A value of each entry: its start in the window, its length, and its first opcode."""

    start: Longs
    nbytes: Longs
    opcode: Bytes
    rows: Longs | None
    """The entries that have it; ``None`` for all."""


class _Scan:
    """Walks over many entries of a window together, one step per opcode.

    It finds the bounds of values. Whether these are valid is determined by the pickle machine.

    Two entries as bytes (in hex, texts quoted). Opcodes between the values are equal, the values are not::

        entry 0    … 29 81 │ 94 7d 94 28 68 05 │ 8c 03 "a.w"   │ 68 06 │ 4b 00 …
        entry 1    … 29 81 │ 94 7d 94 28 68 05 │ 8c 05 "lm.wb" │ 68 06 │ 4b 07 …
                           ↑ at              6             5, 7      2            bytes that each advances

    First :meth:`literal` compares six bytes, then :meth:`simple` takes a string of five bytes in entry 0 and of seven
    in entry 1, then ``literal`` compares two. An entry with different bytes there is not ``good``.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)
        padded = data + bytes(_PADDING_BYTES)
        self.bytes = np.frombuffer(padded, dtype=np.uint8)
        self.words: Words = np.ndarray(len(padded) - _WORD_BYTES + 1, "<u8", padded, strides=(1,))
        """The eight bytes from each byte onwards."""
        self.rows: Longs | None = None
        self.at = np.flatnonzero(self.bytes[: self.size] == _NEWOBJ) + 1
        """Current position in each entry; initially all positions after a possible NEWOBJ."""
        self.good = np.ones(len(self.at), dtype=bool)
        """Whether each position has led through an entry so far."""
        self.values: list[_Values] = []

    def block(self, byte: int) -> _Scan:
        """A walk over the next entries after a byte, few enough to stay in the cache."""
        first = int(np.searchsorted(self.at, byte))
        part = self.among(np.arange(first, min(first + _BLOCK_ENTRIES, len(self.at))))
        part.rows, part.values = None, []
        return part

    def among(self, rows: Longs) -> _Scan:
        """A walk over some of the entries."""
        part = copy(self)
        part.rows, part.at, part.good = rows, self.at[rows], self.good[rows]
        return part

    def join(self, part: _Scan) -> None:
        """Continue from the positions of a walk over some entries."""
        self.at[part.rows], self.good[part.rows] = part.at, part.good

    def drop_bad(self) -> None:
        """Drop all positions that are not entries."""
        self.at, self.good = self.at[self.good], self.good[self.good]

    def literal(self, opcodes: bytes) -> None:
        """Step over exactly these opcodes."""
        self.good &= self._begins(self.at, opcodes)
        self._go(np.int64(len(opcodes)))

    def optional(self, opcodes: bytes) -> Flags:
        """Step over these opcodes if present. Returns which entries have them."""
        there = self._begins(self.at, opcodes)
        self._go(there * np.int64(len(opcodes)))
        return there

    def one_of(self, opcodes: bytes) -> Bytes:
        """Step over any of these opcodes, which have no argument. Returns which one."""
        opcode = self.bytes[self.at]
        self.good &= _set(opcodes)[opcode]
        self._go(np.int64(1))
        return opcode

    def simple(self, opcodes: bytes) -> None:
        """Step over a value of any of these opcodes; ``\\x8c`` is a string that is stored in the memo."""
        opcode = self.bytes[self.at]
        nbytes = _BYTES_OF[opcode]
        for counted, more_bytes in ((_TEXT, 3), (_LONG, 2)):
            rows = np.flatnonzero(opcode == counted)
            nbytes[rows] = more_bytes + self.bytes[self.at[rows] + 1]
        self.good &= _set(opcodes)[opcode]
        self._value(nbytes, opcode)

    def shape(self, number: bytes | None) -> Flags:
        """``None``, a reference, or a tuple of numbers that is stored in the memo; says where it is not ``None``.

        ``number`` is how a numpy number begins, up to its eight bytes.
        """
        opcode = self.bytes[self.at]
        nbytes = _BYTES_OF[opcode]
        spelled = _NUMBERS[opcode] | (opcode == ord("("))
        if number is not None:
            spelled |= self._begins(self.at, number)
        rows = np.flatnonzero(spelled)
        nbytes[rows] = self._tuple_bytes(self.at[rows], number)
        self.good &= (nbytes > 0) & _set(b"N)hj(KMJ\x8a")[opcode]
        self._value(nbytes, opcode)
        return opcode != ord("N")

    def _tuple_bytes(self, start: Longs, number: bytes | None) -> Longs:
        """Lengths of the tuples that begin at ``start``; 0 if there is none that can be walked."""
        found = np.zeros(len(start), dtype=np.int64)
        at = start + (self.bytes[start] == ord("("))
        rows = np.arange(len(start))
        for _ in range(_MAX_NUMBERS + 1):
            opcode = self.bytes[at]
            ends = np.flatnonzero(_TUPLE_ENDS[opcode])
            found[rows[ends]] = at[ends] + 2 - start[rows[ends]]
            nbytes = np.where(_NUMBERS[opcode], _BYTES_OF[opcode], 0)
            longs = np.flatnonzero(opcode == _LONG)
            nbytes[longs] = 2 + self.bytes[at[longs] + 1]
            if number is not None:
                nbytes[self._begins(at, number)] = len(number) + 8 + len(_NUMPY_NUMBER_TAIL)
            on = np.flatnonzero(nbytes)
            if not len(on):
                break
            at, rows = np.minimum(at[on] + nbytes[on], self.size), rows[on]
        return found

    def _begins(self, at: Longs, opcodes: bytes) -> Flags:
        there = np.ones(len(at), dtype=bool)
        for first in range(0, len(opcodes), _WORD_BYTES):
            word = opcodes[first : first + _WORD_BYTES]
            there &= self.words[at + first] & _MASKS[len(word)] == np.uint64(int.from_bytes(word, "little"))
        return there

    def coded(self, start: Longs, nbytes: Longs, code: Callable[[bytes], int]) -> list[int]:
        """``code`` of each byte string."""
        return [
            code(self.data[at : at + size]) for at, size in zip(start.tolist(), nbytes.tolist(), strict=True)
        ]

    def _value(self, nbytes: Longs, opcode: Bytes) -> None:
        self.values.append(_Values(self.at, nbytes, opcode, self.rows))
        self._go(nbytes)

    def _go(self, nbytes: Longs | np.int64) -> None:
        self.at = np.minimum(self.at + nbytes, self.size)


_CACHE_BITS: Final = 15
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
"""Multiplier (not even) that distributes words over the cache."""


class _Cache:
    """Codes of byte strings of up to ``words`` words: a hash table with one slot per hash."""

    def __init__(self, words: int) -> None:
        self.longest_bytes = words * _WORD_BYTES
        self._words = np.zeros((words, 1 << _CACHE_BITS), dtype=np.uint64)
        self._nbytes = np.zeros(1 << _CACHE_BITS, dtype=np.int64)
        self._codes = np.zeros(1 << _CACHE_BITS, dtype=np.int32)

    def find(self, scan: _Scan, start: Longs, nbytes: Longs, code: Callable[[bytes], int]) -> Ids:
        """The code of each byte string; ``code`` computes unknown ones."""
        words = []
        mixed = nbytes.astype(np.uint64)
        for first in range(0, int(nbytes.max(initial=0)), _WORD_BYTES):
            rest = np.clip(nbytes - first, 0, _WORD_BYTES) if first else np.minimum(nbytes, _WORD_BYTES)
            words.append(scan.words[start + first] & _MASKS[rest])
            mixed = (mixed ^ words[-1]) * _MIX
        slot = (mixed >> np.uint64(64 - _CACHE_BITS)).astype(np.int64)
        known = self._nbytes[slot] == nbytes
        for word, column in zip(words, self._words, strict=False):
            known &= column[slot] == word
        found = self._codes[slot]
        rows = np.flatnonzero(~known)
        if len(rows):
            found[rows] = scan.coded(start[rows], nbytes[rows], code)
            slot = slot[rows]
            self._nbytes[slot], self._codes[slot] = nbytes[rows], found[rows]
            for word, column in zip(words, self._words, strict=False):
                column[slot] = word[rows]
        return found


def _caches() -> tuple[_Cache, ...]:
    return _Cache(2), _Cache(8)


class _Coder:
    """Byte strings of a window → codes. Each distinct string is parsed once, with the memo of the whole file."""

    def __init__(self, machine: Machine, memo: Memo) -> None:
        self._machine, self._memo = machine, memo
        self._codes = _Codes(self._code)
        self._caches = _caches()
        self._chunks = _Chunks()
        self.nothing = self.add(_NONE, ())
        """Chunk that stores nothing."""

    def forget(self) -> None:
        """Drop all codes, because byte strings change their meaning when a name is stored in the memo."""
        self._codes.clear()
        self._caches = _caches()

    def add(self, value: int, slots: Sequence[int]) -> int:
        """Number a chunk with this value that stores ``slots`` in the memo."""
        return self._chunks.add(value, slots)

    def coded(self, scan: _Scan, values: _Values, rows: Longs) -> Ids:
        """Codes of the values in some rows."""
        start, nbytes, opcode = values.start, values.nbytes, values.opcode
        if len(rows) < len(start):
            start, nbytes, opcode = start[rows], nbytes[rows], opcode[rows]
        short = opcode == ord("h")
        refers = (short | (opcode == ord("j"))) & (nbytes <= _LONGEST_REFERENCE_BYTES)
        codes = np.empty(len(start), dtype=np.int32)
        if refers.any():
            argument = scan.words[start] >> np.uint64(8)
            index = np.where(short, argument & _MASKS[1], argument & _MASKS[4]).astype(np.int64)
            codes[:] = np.where(((index < 256) == short) & (index < _MAX_INDEX), -2 - index, _BAD)
        spelled = np.flatnonzero(~refers)
        for cache in self._caches:
            if not len(spelled):
                return codes
            fits = nbytes[spelled] < cache.longest_bytes
            these, spelled = spelled[fits], spelled[~fits]
            codes[these] = cache.find(scan, start[these], nbytes[these], self._codes.__getitem__)
        codes[spelled] = scan.coded(start[spelled], nbytes[spelled], self._codes.__getitem__)
        return codes

    def stored(self, chunks: Ids) -> tuple[Ids, Longs, Ids]:
        """The memo slots of entries in order, the start of each entry's slots, and the entries' value ids."""
        table = self._chunks.table()
        counts = table.counts[chunks]
        first_slot = np.r_[0, np.cumsum(counts.sum(axis=0) + len(_NEW_SLOTS))]
        slots = np.full(int(first_slot[-1]), _OPAQUE, dtype=np.int32)
        at = first_slot[:-1] + len(_NEW_SLOTS)
        for chunk, count in zip(chunks, counts, strict=True):
            rows = np.flatnonzero(count)
            lengths = count[rows]
            within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            slots[np.repeat(at[rows], lengths) + within] = table.slots[
                np.repeat(table.starts[chunk[rows]], lengths) + within
            ]
            at[rows] += lengths
        return slots, first_slot, table.values[chunks]

    def _code(self, raw: bytes) -> int:
        """The chunk of a byte string."""
        return self._text(raw) if raw[0] == _TEXT else self._taken_apart(raw)

    def _text(self, raw: bytes) -> int:
        text = raw[2:-1]
        if raw[-1:] != b"\x94" or not text.isascii():
            return _BAD
        value = self._memo.add(text.decode("ascii"))
        return self._chunks.add(value, (value,))

    def _taken_apart(self, raw: bytes) -> int:
        machine = _ChunkMachine(self._machine, self._memo, raw)
        try:
            root, _ = machine.run()
        except FormatError:  # then it is parsed opcode by opcode, which reports any error
            return _BAD
        if not isinstance(root, tuple) or len(root) != 1:
            return _BAD
        slots = [self._memo.add(value) for value in machine.stored]
        return self._chunks.add(self._memo.add(root[0]), slots)


class _Entries(NamedTuple):
    """The entries found by a walk, field by field, in order. Only those that follow another entry are valid."""

    last: int
    """Position in the window at which the last walk began, whether or not it succeeded."""
    begins: Longs
    """Position in the window."""
    ends: Longs
    """Position of the next entry, if one follows."""
    breaks: Longs
    """Entries that are not followed by the next one, ascending."""
    kinds: Ids
    ids: Ids
    """Value ids, a row per value; of what is no reference to the memo."""
    indexes: Ids
    """Memo indexes, a row per value; -1 of what is no reference."""
    highest: Ids
    """Largest memo index of each."""
    first_slot: Longs
    """Where in ``slots`` begins what each stores in the memo; and where the last one's end."""
    slots: Ids


class _Rows:
    """Runs of whole entries of one class."""

    kind: str
    fields: tuple[str, ...]
    """Attributes, in the order of the columns."""

    def __init__(self, machine: Machine, memo: Memo) -> None:
        self.machine, self.memo = machine, memo
        self.owner: dict[object, object] | None = None
        """The dict whose entries were parsed. The caller checks that it is the right one."""
        self._found: list[Sequence[Ids]] = []
        self._last: Instance | None = None
        self._order: tuple[str, ...] = ()
        self._made_from: tuple[object, ...] = ()
        self._known = False
        """Whether all names are stored in the memo, before which no entry can be recognised."""
        self._scan: _Scan | None = None
        """The walk over the window, from which a walk over the next entries starts."""
        self._entries: _Entries | None = None
        self._coder = _Coder(machine, memo)

    def follow(self) -> Instance:
        """Parse as many similar entries as possible, beginning with a new instance. Returns the instance after them."""
        while self._ready() and self._in_place() and self._take():
            pass
        self._last = Instance(self.kind)
        return self._last

    def columns(self, more: Sequence[tuple[int, ...]]) -> list[Ids]:
        """The columns of all parsed rows, and of ``more``."""
        last = np.array(more, dtype=np.int32).reshape(-1, len(self.fields) + 1)
        return [np.concatenate(parts) for parts in zip(*self._found, last.T, strict=True)]

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
            self._made_from, self._entries = made_from, None
            self._coder.forget()
            self._known = None not in made_from[:-2] and self.machine.protocol >= 4
        return self._known

    def _walk(self, scan: _Scan) -> tuple[Longs, Ids]:
        """Walk over entries. Returns the start and the kind of each."""
        names = self.memo.names
        number = None
        if "scalar" in names and "i8" in names:
            number = _get(names["scalar"]) + _get(names["i8"]) + b"C\x08"
        order = list(self._order)
        scan.literal(b"\x94}\x94(" + _get(names[order[0]]))
        scan.drop_bad()
        begins = scan.at - 4 - len(_get(names[order[0]]))
        while order:
            name = order.pop(0)
            if name != self._order[0]:
                scan.literal(_get(names[name]))
            if name in ("tensor_key", "dtype"):
                scan.simple(b"\x8chj")
            elif name == "replica_id":
                scan.simple(b"NKMJ\x8a")
            elif name != "is_flattened":
                scan.shape(number)
            elif order and order.pop(0) == "flattened_range":
                flag = scan.one_of(b"\x88\x89")
                scan.literal(_get(names["flattened_range"]))
                scan.good &= scan.shape(number) == (flag == 0x88)
            else:  # the flag and the range go together
                scan.good[:] = False
                break
        kinds = self._tail(scan)
        scan.literal(_get(names[self.kind]) + b")\x81")
        return begins, kinds

    def _tail(self, scan: _Scan) -> Ids:
        """Walk over the bytes after the attributes, up to the next new instance. Returns the kind of each tail."""
        raise NotImplementedError

    def _slots(self, kinds: Ids) -> Ids:
        """Chunks that tails of these kinds store in the memo after their value."""
        return np.full(len(kinds), self._coder.nothing, dtype=np.int32)

    def _entries_from(self, scan: _Scan) -> _Entries:
        """The entries that a walk finds."""
        last = int(scan.at[-1]) if len(scan.at) else scan.size
        begins, kinds = self._walk(scan)
        good = np.flatnonzero(scan.good)
        rank = np.cumsum(scan.good) - 1
        codes = np.full((len(scan.values) + 1, len(good)), self._coder.nothing, dtype=np.int32)
        for column, value in zip(codes, scan.values, strict=False):
            rows = good if value.rows is None else np.flatnonzero(scan.good[value.rows])
            column[... if value.rows is None else rank[value.rows[rows]]] = self._coder.coded(
                scan, value, rows
            )
        codes[-1] = self._slots(kinds[good])
        sound = np.flatnonzero((codes != _BAD).all(axis=0))
        if len(sound) < len(good):
            good, codes = good[sound], codes[:, sound]
        begins, ends = begins[good], scan.at[good]
        refers = codes < _BAD
        indexes = np.where(refers, -2 - codes, -1)
        slots, first_slot, ids = self._coder.stored(np.where(refers, self._coder.nothing, codes))
        return _Entries(
            last=last,
            begins=begins,
            ends=ends,
            breaks=np.flatnonzero(np.r_[begins[1:] != ends[:-1], True][: len(begins)]),
            kinds=kinds[good].astype(np.int32),
            ids=ids,
            indexes=indexes,
            highest=indexes.max(axis=0),
            first_slot=first_slot,
            slots=slots,
        )

    # -- rows

    def _take(self) -> bool:
        """Parse the consecutive entries from here on. Returns whether there were any."""
        data, at = self.machine.window.ahead
        if self._scan is None or self._scan.data is not data:
            self._scan, self._entries = _Scan(data), None
        if self._entries is None or at > self._entries.last:
            self._entries = self._entries_from(self._scan.block(at))
        found, memo = self._entries, self.memo
        first = int(np.searchsorted(found.begins, at))
        if first == len(found.begins) or found.begins[first] != at:
            return False
        stop = 1 + int(found.breaks[np.searchsorted(found.breaks, first)])
        first_index = len(memo) + found.first_slot[first:stop] - found.first_slot[first]
        wrong = (found.highest[first:stop] >= first_index) | self._misplaced(found.kinds[first:stop])
        if wrong.any():
            stop = first + int(wrong.argmax())
        if stop == first:
            return False
        memo.extend(found.slots[found.first_slot[first] : found.first_slot[stop]])
        ids, indexes = found.ids[:, first:stop].copy(), found.indexes[:, first:stop]
        refers = indexes >= 0
        ids[refers] = memo.ids_at(indexes[refers])
        self.machine.window.skip(int(found.ends[stop - 1]) - at)
        self._keep(ids, found.kinds[first:stop])
        return True

    def _misplaced(self, kinds: Ids) -> Flags:
        """Rows whose tail cannot follow the row before."""
        return np.zeros(len(kinds), dtype=bool)

    def _keep(self, ids: Ids, kinds: Ids) -> None:
        """Keep rows of value ids, a row per value."""
        raise NotImplementedError

    def _columns(self, ids: Ids) -> list[Ids]:
        """The columns of ``fields``, with defaults for missing attributes."""
        found = dict(zip((name for name in self._order if name != "is_flattened"), ids, strict=False))
        default = np.full(ids.shape[1], _NONE, dtype=np.int32)
        flat = found.get("flattened_range", default)
        found["is_flattened"] = np.where(flat == _NONE, _FALSE, _TRUE).astype(np.int32)
        return [found.get(name, default) for name in self.fields]


class IndexRows(_Rows):
    """``LocalTensorIndex`` → file name. A row has the column ``file`` after those of its fields."""

    kind, fields = INDEX, INDEX_FIELDS

    def _in_place(self) -> bool:
        marks, items = self.machine.marks, self.machine.stack
        return bool(marks and marks[-1]) and len(items) % 2 == 0 and self._owned_by(marks[-1][-1])

    def _tail(self, scan: _Scan) -> Ids:
        scan.literal(b"ub")
        scan.simple(b"\x8chj")
        scan.optional(_BATCH)
        return np.zeros(len(scan.at), dtype=np.int32)

    def _keep(self, ids: Ids, kinds: Ids) -> None:
        self._found.append([*self._columns(ids), ids[-2]])


class PieceRows(_Rows):
    """``LocalTensorMetadata`` in the list of its key. A row has the column ``key`` before those of its fields.

    The tail of a row says what follows: the same list continues, or it ends and that of another key begins. A list
    of one piece is spelled without a MARK and ends in APPEND; others have a MARK and end in APPENDS.
    """

    kind, fields = PIECE, PIECE_FIELDS
    _GOES_ON, _MANY_MANY, _MANY_ONE, _ONE_MANY, _ONE_ONE = range(5)

    def __init__(self, machine: Machine, memo: Memo) -> None:
        super().__init__(machine, memo)
        self._list = self._coder.add(_NONE, (_OPAQUE,))
        self.keys: list[int] = []
        """Value ids of the keys whose lists were taken from their first piece to their last."""

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

    def _tail(self, scan: _Scan) -> Ids:
        scan.literal(b"ub")
        opcode = scan.bytes[scan.at]
        ended = np.flatnonzero(_set(b"ea")[opcode])
        kinds = np.full(len(opcode), self._GOES_ON, dtype=np.int32)
        part = scan.among(ended)
        part.one_of(b"ea")
        part.optional(_BATCH)
        part.simple(b"\x8c")
        part.literal(b"]\x94")
        many = part.optional(b"(")
        kinds[ended] = np.where(opcode[ended] == ord("e"), self._MANY_ONE, self._ONE_ONE) - many
        scan.join(part)
        return kinds

    def _slots(self, kinds: Ids) -> Ids:
        return np.where(kinds == self._GOES_ON, self._coder.nothing, self._list).astype(np.int32)

    def _misplaced(self, kinds: Ids) -> npt.NDArray[np.bool_]:
        comes_from_many = kinds <= self._MANY_ONE
        goes_to_many = (kinds <= self._MANY_MANY) | (kinds == self._ONE_MANY)
        before = np.concatenate([[self._is_marked()], goes_to_many[:-1]])
        return np.asarray(comes_from_many != before)

    def _keep(self, ids: Ids, kinds: Ids) -> None:
        begins = np.flatnonzero(kinds != self._GOES_ON)
        # The key of a row is that of the last list that began before it.
        bounds = [0, *(begins + 1).tolist(), len(kinds)]
        lengths = np.diff(bounds)
        own = [self.memo.add(self._outer()[-2]), *ids[-2, begins].tolist()]
        key = np.repeat(np.array(own, dtype=np.int32), lengths)
        self._found.append([key, *self._columns(ids)])
        if len(begins):
            self.keys += own[1:-1]
            self._begin_list(own[-1], int(kinds[begins[-1]]) in (self._MANY_MANY, self._ONE_MANY))

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
