"""The two kinds of entries that a ``.metadata`` file has by the million, taken many at a time.

A file of 227 MiB has a hundred million opcodes; taken one by one they take minutes. But entry after entry has the
same sequence of opcodes, only the values differ. So from one entry that was taken opcode by opcode a regular
expression is made which matches exactly such a sequence: every alternative in it is one whole opcode with its
argument. It starts where an opcode starts, and it ends where one ends; so what it matches is what the opcodes say.
What it does not match (a frame boundary, the first use of a name, an unusual spelling, an attack) is taken opcode
by opcode as always, and after that it is tried again.

The values are byte strings then, and few of them are distinct. Each distinct one is taken apart by the pickle
machine itself, once. Only references to the memo are looked up in each row.

A *value id* numbers a value in :class:`Memo`; a row is a tuple of value ids.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.errors import FormatError
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

_FIRST_SPAN_BYTES: Final = 1 << 12
_LAST_SPAN_BYTES: Final = 1 << 20
_MAX_KNOWN: Final = 1 << 20
_MAX_INDEX: Final = (1 << 31) - 2

Ids = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class Memo:
    """The memo of the pickle machine, and all values by number."""

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
        """How many values have a number."""
        return len(self._values)

    def value(self, value_id: int) -> object:
        """The value of a number."""
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
            # The first one: CPython stores the name of an attribute once, and may store the same text again.
            self.names.setdefault(name, len(self._ids))
        self._ids.append(self.add(value))

    def extend(self, value_ids: Ids) -> None:
        """Store many."""
        self._ids.frombytes(value_ids.tobytes())

    def ids_at(self, indexes: Ids) -> Ids:
        """Value ids stored under many indexes."""
        return np.frombuffer(self._ids, dtype=np.int32)[indexes]


_OPAQUE: Final = 0
"""Value id of an instance, or of the dict of its attributes: nothing may refer to it again."""
_NONE: Final = 1
_NEW_SLOTS: Final = (_OPAQUE, _OPAQUE)
"""What a new instance and the dict of its attributes store in the memo."""
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
    """What distinct byte strings say: a value, and which values the opcodes store in the memo on the way."""

    def __init__(self) -> None:
        self.values, self.lengths, self.starts = array("i"), array("i"), array("i")
        self.counts, self.kinds, self.slots = array("i"), array("i"), array("i", _NEW_SLOTS)

    def add(self, value: int, nbytes: int, slots: Sequence[int], kind: int = 0) -> int:
        """Number a chunk."""
        self.values.append(value)
        self.lengths.append(nbytes)
        self.starts.append(len(self.slots))
        self.counts.append(len(slots))
        self.kinds.append(kind)
        self.slots.extend(slots)
        return len(self.values) - 1

    def table(self) -> _Table:
        """The columns, without a copy: nothing can be added while they are in use."""
        columns = (self.values, self.lengths, self.starts, self.counts, self.kinds, self.slots)
        return _Table(*(np.frombuffer(column, dtype=np.int32) for column in columns))


class _Table(NamedTuple):
    """What is known of each chunk."""

    values: Ids
    """Value id."""
    lengths: Ids
    """Length in bytes."""
    starts: Ids
    """Where in ``slots`` begin the value ids that it stores in the memo."""
    counts: Ids
    """How many those are."""
    kinds: Ids
    """What kind of tail it is, for those that are one."""
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


def _is_reference(raw: bytes) -> bool:
    return (raw[0], len(raw)) in ((0x68, 2), (0x6A, 5))


def _reference(raw: bytes) -> int:
    """Code of BINGET (2 bytes, below 256) or LONG_BINGET (5 bytes, from there on)."""
    index = int.from_bytes(raw[1:], "little")
    return -2 - index if (index < 256) == (len(raw) == 2) and index < _MAX_INDEX else _BAD


class _ChunkMachine(Machine):
    """Takes one byte string apart, with the memo of the whole file for reading."""

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


# ----------------------------------------------------------------------------------------------- what matches

_INT: Final = rb"K.|M..|J.{4}|\x8a(?:\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})"
_REF: Final = rb"j.{4}|h."
_TEXT: Final = rb"\x8c.[ -~]*\x94"


def _get(index: int) -> bytes:
    """The opcode that refers to a memo index, as CPython spells it."""
    return b"h" + bytes([index]) if index < 256 else b"j" + index.to_bytes(4, "little")


class _Rows:
    """Runs of whole entries of one class."""

    kind: str
    fields: tuple[str, ...]
    """Attributes, in the order of the columns."""

    def __init__(self, machine: Machine, memo: Memo) -> None:
        self.machine, self.memo = machine, memo
        self.owner: dict[object, object] | None = None
        """The dict whose entries were taken; that it is the right one is for the caller to check."""
        self._found: list[Sequence[Ids]] = []
        self._last: Instance | None = None
        self._order: tuple[str, ...] = ()
        self._made_from: tuple[object, ...] = ()
        self._pattern: re.Pattern[bytes] | None = None
        self._literal_bytes = 0
        self._groups: list[str] = []
        """Attribute of which each group of the pattern is the value; then what the last one is."""
        self._prefix_bytes: list[int] = []
        """Length of what stands before the value in each group."""
        self._codes = _Codes(self._code)
        self._chunks = _Chunks()
        self._nothing = self._chunks.add(_NONE, 0, ())
        self._span_bytes = _FIRST_SPAN_BYTES

    def follow(self) -> Instance:
        """Take as many entries as look alike, from a new instance on; return the instance after them."""
        while self._ready() and self._in_place() and self._take():
            pass
        self._last = Instance(self.kind)
        return self._last

    def columns(self, more: Sequence[tuple[int, ...]]) -> list[Ids]:
        """The columns of all rows that were taken, and of ``more``."""
        last = np.array(more, dtype=np.int32).reshape(-1, len(self.fields) + 1)
        return [np.concatenate(parts) for parts in zip(*self._found, last.T, strict=True)]

    def _in_place(self) -> bool:
        """Whether the stack of the machine is as it is where an entry begins."""
        raise NotImplementedError

    def _owned_by(self, owner: object) -> bool:
        if self.owner is None and isinstance(owner, dict):
            self.owner = owner
        return self.owner is not None and owner is self.owner

    # -- the pattern

    def _ready(self) -> bool:
        """Make the pattern, and make it anew when a name has come to be stored elsewhere."""
        if not self._order and self._last is not None and self._last.state:
            names = tuple(self._last.state)
            if set(names) <= set(self.fields):
                self._order = names  # type: ignore[assignment]
        if not self._order:
            return False
        made_from = tuple(self.memo.names.get(name) for name in (*self._order, self.kind, "scalar", "i8"))
        if made_from != self._made_from:
            self._made_from = made_from
            known = None not in made_from[:-2] and self.machine.protocol == 4
            self._pattern = self._compiled() if known else None
        return self._pattern is not None

    def _compiled(self) -> re.Pattern[bytes] | None:
        names = self.memo.names
        integer = _INT
        if "scalar" in names and "i8" in names:
            number = _get(names["scalar"]) + _get(names["i8"])
            integer += rb"|" + re.escape(number) + rb"C\x08.{8}\x94\x86\x94R\x94"
        shape = rb"(?:%s){1,3}[\x85-\x87]\x94|%s|\)|\((?:%s){4,}t\x94" % (integer, _REF, integer)
        values = {"tensor_key": rb"%s|%s" % (_TEXT, _REF), "dtype": rb"%s|%s" % (_TEXT, _REF),
                  "replica_id": rb"N|%s" % integer}  # fmt: skip
        self._groups, self._prefix_bytes, self._literal_bytes = [], [], 0
        self._codes.clear()
        pattern = self._literal(b"\x94}\x94(")
        order = list(self._order)
        while order:
            name = order.pop(0)
            pattern += self._literal(_get(names[name]))
            if name != "is_flattened":
                pattern += rb"(%s)" % values.get(name, shape + rb"|N")
                self._group(name)
                continue
            # The flag and the range go together: one group.
            if not order or order.pop(0) != "flattened_range":
                return None
            between = _get(names["flattened_range"])
            pattern += rb"(\x89%sN|\x88%s(?:%s))" % (re.escape(between), re.escape(between), shape)
            self._group("flattened_range", 1 + len(between))
        return re.compile(pattern + self._tail(_get(names[self.kind])) + rb"|.+", re.DOTALL)

    def _group(self, name: str, prefix_bytes: int = 0) -> None:
        self._groups.append(name)
        self._prefix_bytes.append(prefix_bytes)

    def _literal(self, opcodes: bytes) -> bytes:
        self._literal_bytes += len(opcodes)
        return re.escape(opcodes)

    def _tail(self, class_: bytes) -> bytes:
        """What follows the attributes, up to the next new instance of ``class_``; with one group."""
        raise NotImplementedError

    # -- distinct values

    def _code(self, raw: bytes) -> int:
        """Code of what one group matched. What groups of different kinds match is never the same."""
        if _is_reference(raw):
            return _reference(raw)
        if raw[0] == 0x8C:
            return self._text(raw)
        if raw[0] in b"\x88\x89":  # is_flattened, with flattened_range behind it
            prefix_bytes = max(self._prefix_bytes)
            if _is_reference(raw[prefix_bytes:]):
                return _reference(raw[prefix_bytes:])
            return self._taken_apart(raw, prefix_bytes)
        return self._taken_apart(raw, 0)

    def _text(self, raw: bytes) -> int:
        if raw[1] != len(raw) - 3:
            return _BAD
        value = self.memo.add(raw[2:-1].decode("ascii"))
        return self._chunks.add(value, len(raw), (value,))

    def _taken_apart(self, raw: bytes, skipped_bytes: int) -> int:
        machine = _ChunkMachine(self.machine, self.memo, raw[skipped_bytes:])
        try:
            root, _ = machine.run()
        except FormatError:  # it is taken opcode by opcode then, and refused there if it must be
            return _BAD
        if not isinstance(root, tuple) or len(root) != 1:
            return _BAD
        slots = [self.memo.add(value) for value in machine.stored]
        return self._chunks.add(self.memo.add(root[0]), len(raw), slots)

    # -- rows

    def _take(self) -> bool:
        """Take the next run of entries; say whether there may be more of it."""
        if self._pattern is None:
            return False
        data, at = self.machine.window.ahead
        rows = self._pattern.findall(data, at, min(at + self._span_bytes, len(data)))
        if rows and not rows[-1][-1]:  # the rest of the span, which no entry matched
            rows.pop()
        taken = self._absorb(rows) if rows else 0
        if taken < len(rows):
            self._span_bytes = _FIRST_SPAN_BYTES
            return False
        self._span_bytes = min(self._span_bytes * 4, _LAST_SPAN_BYTES)
        return taken > 0

    def _absorb(self, rows: list[tuple[bytes, ...]]) -> int:
        """Take these entries up to the first that must be taken opcode by opcode; return how many."""
        groups = len(self._groups)
        found = map(self._codes.__getitem__, chain.from_iterable(rows))
        codes = np.fromiter(found, np.int32, len(rows) * groups).reshape(-1, groups)
        table = self._chunks.table()
        chunk = np.where(codes < 0, self._nothing, codes)
        counts = table.counts[chunk]
        stored = counts.sum(axis=1) + len(_NEW_SLOTS)
        first_index = len(self.memo) + np.cumsum(stored) - stored
        refers = codes < _BAD
        indexes = -2 - codes
        bad = (codes == _BAD) | (refers & (indexes >= first_index[:, None]))
        wrong = np.flatnonzero(bad.any(axis=1) | self._misplaced(table.kinds[chunk[:, -1]]))
        taken = int(wrong[0]) if len(wrong) else len(rows)
        if not taken:
            return 0
        codes, refers, indexes, chunk = codes[:taken], refers[:taken], indexes[:taken], chunk[:taken]
        self.memo.extend(_stored(chunk, counts[:taken], table))
        ids = table.values[chunk]
        ids[refers] = self.memo.ids_at(indexes[refers])
        refer_bytes = np.where(indexes < 256, 2, 5) + np.array(self._prefix_bytes)
        nbytes = int(np.where(refers, refer_bytes, table.lengths[chunk]).sum())
        kinds = table.kinds[chunk[:, -1]]
        del table  # the chunks cannot grow while they are viewed
        self.machine.window.skip(nbytes + taken * self._literal_bytes)
        self._keep(ids, kinds)
        return taken

    def _misplaced(self, kinds: Ids) -> npt.NDArray[np.bool_]:
        """Rows whose tail cannot follow the row before."""
        return np.zeros(len(kinds), dtype=bool)

    def _keep(self, ids: Ids, kinds: Ids) -> None:
        """Keep rows of value ids, a column per group."""
        raise NotImplementedError

    def _columns(self, ids: Ids) -> list[Ids]:
        """The columns of ``fields``, the default where an entry does not say."""
        found = {name: ids[:, i] for i, name in enumerate(self._groups)}
        default = np.full(len(ids), _NONE, dtype=np.int32)
        flat = found.get("flattened_range", default)
        found["is_flattened"] = np.where(flat == _NONE, _FALSE, _TRUE).astype(np.int32)
        return [found.get(name, default) for name in self.fields]


def _stored(chunk: Ids, counts: Ids, table: _Table) -> Ids:
    """What rows of chunks store in the memo, in order: the instance and its dict, then what is in them."""
    counts = np.column_stack([np.full(len(chunk), len(_NEW_SLOTS)), counts]).ravel()
    starts = np.column_stack([np.zeros(len(chunk), np.int64), table.starts[chunk]]).ravel()
    some = np.flatnonzero(counts)
    counts, starts = counts[some], starts[some]
    first = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return table.slots[first + np.arange(len(first))]


class IndexRows(_Rows):
    """``LocalTensorIndex`` → file name. A row has the column ``file`` after those of its fields."""

    kind, fields = INDEX, INDEX_FIELDS

    def _in_place(self) -> bool:
        marks, items = self.machine.marks, self.machine.stack
        return bool(marks and marks[-1]) and len(items) % 2 == 0 and self._owned_by(marks[-1][-1])

    def _tail(self, class_: bytes) -> bytes:
        self._group("file")
        return self._literal(b"ub") + rb"(%s|%s)" % (_TEXT, _REF) + self._literal(class_ + b")\x81")

    def _keep(self, ids: Ids, kinds: Ids) -> None:
        self._found.append([*self._columns(ids), ids[:, -1]])


class PieceRows(_Rows):
    """``LocalTensorMetadata`` in the list of its key. A row has the column ``key`` before those of its fields.

    The tail of a row says what follows: the same list goes on, or it ends and that of another key begins. A list
    of one piece is spelled without a MARK and ends in APPEND; others have a MARK and end in APPENDS.
    """

    kind, fields = PIECE, PIECE_FIELDS
    _GOES_ON, _MANY_MANY, _MANY_ONE, _ONE_MANY, _ONE_ONE = range(5)
    _KINDS: Final = {(b"e", True): 1, (b"e", False): 2, (b"a", True): 3, (b"a", False): 4}

    def __init__(self, machine: Machine, memo: Memo) -> None:
        super().__init__(machine, memo)
        self._class = b""
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

    def _tail(self, class_: bytes) -> bytes:
        self._group("tail")
        self._class = class_
        head = rb"[ea]%s\]\x94\(?" % _TEXT
        return self._literal(b"ub") + rb"((?:%s)?%s)" % (head, re.escape(class_ + b")\x81"))

    def _code(self, raw: bytes) -> int:
        head = raw.removesuffix(self._class + b")\x81")
        if head == raw or (head and head[0] not in b"ea"):  # with which no value begins
            return super()._code(raw)
        if not head:
            return self._chunks.add(_NONE, len(raw), (), self._GOES_ON)
        text, _, mark = head[1:].rpartition(b"]\x94")
        if text[1] != len(text) - 3:
            return _BAD
        key = self.memo.add(text[2:-1].decode("ascii"))
        return self._chunks.add(key, len(raw), (key, _OPAQUE), self._KINDS[head[:1], mark == b"("])

    def _misplaced(self, kinds: Ids) -> npt.NDArray[np.bool_]:
        comes_from_many = kinds <= self._MANY_ONE
        goes_to_many = (kinds <= self._MANY_MANY) | (kinds == self._ONE_MANY)
        before = np.concatenate([[self._is_marked()], goes_to_many[:-1]])
        return np.asarray(comes_from_many != before)

    def _keep(self, ids: Ids, kinds: Ids) -> None:
        begins = np.flatnonzero(kinds != self._GOES_ON)
        # The key of a row is that of the last list that began before it.
        bounds = [0, *(begins + 1).tolist(), len(ids)]
        lengths = np.diff(bounds)
        own = [self.memo.add(self._outer()[-2]), *ids[begins, -1].tolist()]
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
