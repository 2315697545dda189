"""What byte strings of a ``.metadata`` file mean: few are distinct, and the pickle machine parses each of them once.

A *value id* numbers a value in :class:`Memo`. A *chunk* is a distinct byte string: its value, and the values that its
opcodes store in the memo. A *code* is a chunk or a reference to the memo; it becomes a value id when it is needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.errors import FormatError
from paddle_reshard.storage.files.dist_metadata_stencils import NUMBER, REFERENCE, Hole
from paddle_reshard.storage.files.dist_metadata_walk import (
    LONGEST_REFERENCE_BYTES,
    MASKS,
    TEXT,
    WORD_BYTES,
    Bytes,
    Longs,
    Scan,
    Words,
)
from paddle_reshard.storage.files.paddle_pickle import (
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

Ids = npt.NDArray[np.int32]


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
            return NONE
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


OPAQUE: Final = 0
"""Value id of an instance, or of the dict of its attributes, to which nothing may refer."""
NONE: Final = 1
_NEW_SLOTS: Final = (OPAQUE, OPAQUE)
"""Memo entries of a new instance and of the dict of its attributes."""
FALSE: Final = 2
TRUE: Final = 3
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
    """Byte string → code, worked out once: a chunk's number, a reference to the memo, or :data:`BAD`."""

    def __init__(self, decode: Callable[[bytes], int]) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, raw: bytes) -> int:
        if len(self) >= _MAX_KNOWN:
            self.clear()
        code = self[raw] = self._decode(raw)
        return code


BAD: Final = -1


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


# ------------------------------------------------------------------------------- from byte strings to codes

NOTHING: Final = 0
"""Chunk that stores nothing."""
_CACHE_BITS: Final = 15
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
"""Multiplier (not even) that distributes words over the cache."""
_MAX_INDEX: Final = (1 << 31) - 2
_FIRST_LONG_INDEX: Final = 256
"""Memo index from which CPython refers with an argument of four bytes."""


class _Cache:
    """Codes of byte strings of up to ``words`` words: a hash table with one slot per hash."""

    def __init__(self, words: int) -> None:
        self._words = np.zeros((words, 1 << _CACHE_BITS), dtype=np.uint64)
        self._nbytes = np.zeros(1 << _CACHE_BITS, dtype=np.uint64)
        self._codes = np.zeros(1 << _CACHE_BITS, dtype=np.int32)

    def find(self, words: Sequence[Words], nbytes: Words, decode: Callable[[Longs], list[int]]) -> Ids:
        """The code of each byte string, given as words; ``decode`` works out those of some rows."""
        mixed = words[0] ^ nbytes
        mixed *= _MIX
        for word in words[1:]:
            mixed ^= word
            mixed *= _MIX
        mixed >>= np.uint64(64 - _CACHE_BITS)
        slot = mixed.view(np.int64)
        known = self._nbytes[slot] == nbytes
        for word, column in zip(words, self._words, strict=False):
            known &= column[slot] == word
        codes = self._codes[slot]
        rows = np.flatnonzero(~known)
        if len(rows):
            codes[rows] = decode(rows)
            slot = slot[rows]
            self._nbytes[slot] = np.broadcast_to(nbytes, known.shape)[rows]
            self._codes[slot] = codes[rows]
            for word, column in zip(words, self._words, strict=False):
                column[slot] = word[rows]
        return codes


class _Numbers:
    """Codes of numbers of one length."""

    def __init__(self, nbytes: int) -> None:
        self._codes = np.full(1 << 8 * nbytes, _UNKNOWN, dtype=np.int32)

    def find(self, numbers: npt.NDArray[Any], decode: Callable[[Longs], list[int]]) -> Ids:
        """The code of each number; ``decode`` works out those of some rows."""
        codes = self._codes[numbers]
        rows = np.flatnonzero(codes == _UNKNOWN)
        if len(rows):
            codes[rows] = self._codes[numbers[rows]] = decode(rows)
        return codes


_UNKNOWN: Final = -(1 << 31)
_CACHED_WORDS: Final = (2, 8)
"""Longest byte strings of the caches."""
_SAVING: Final = 4
"""Values for each different one from which on equal neighbours are looked up together."""


class Coder:
    """Byte strings of a window → codes. Each distinct string is parsed once, with the memo of the whole file.

    A code is the number of a chunk, ``-2 - index`` for a reference to the memo, or :data:`BAD`.
    """

    def __init__(self, machine: Machine, memo: Memo) -> None:
        self._machine, self._memo = machine, memo
        self._chunks = _Chunks()
        self.add(NONE, ())  # NOTHING
        self.forget()

    def forget(self) -> None:
        """Drop all codes, because byte strings change their meaning when a name is stored in the memo."""
        self._codes = _Codes(self._code)
        self._caches = [_Cache(words) for words in _CACHED_WORDS]
        self._numbers = {nbytes: _Numbers(nbytes - 1) for nbytes in (2, 3)}

    def add(self, value: int, slots: Sequence[int]) -> int:
        """Number a chunk with this value that stores ``slots`` in the memo."""
        return self._chunks.add(value, slots)

    def walked(self, scan: Scan, start: Longs, nbytes: Longs, opcode: Bytes) -> Ids:
        """Codes of values that a walk found."""
        refers = ((opcode == ord("h")) | (opcode == ord("j"))) & (nbytes <= LONGEST_REFERENCE_BYTES)
        codes = np.full(len(start), BAD, dtype=np.int32)
        index = scan.words[start] >> np.uint64(8) & MASKS[np.minimum(nbytes, WORD_BYTES) - 1]
        for size in (2, LONGEST_REFERENCE_BYTES):
            these = refers & (nbytes == size)
            codes[these] = _references(index[these], size)
        rest = np.flatnonzero(~refers)
        for cache, most in zip(self._caches, _CACHED_WORDS, strict=True):
            fits = nbytes[rest] <= most * WORD_BYTES
            rows, rest = rest[fits], rest[~fits]
            if len(rows):
                words = scan.words_of(start[rows], nbytes[rows])
                decode = partial(self._decoded, scan, start[rows], nbytes[rows])
                codes[rows] = cache.find(words, nbytes[rows].astype(np.uint64), decode)
        codes[rest] = self._decoded(scan, start, nbytes, rest)
        return codes

    def fitted(self, rows: Words, hole: Hole) -> Ids:
        """Codes of the values in a hole of a stencil, of entries that fit it."""

        def column(kind: str, byte: int) -> npt.NDArray[Any]:
            return np.ndarray(len(rows), kind, rows, hole.at + byte, rows.strides[:1])

        if hole.kind == REFERENCE:
            return _references(column("u1" if hole.nbytes == 2 else "<u4", 1), hole.nbytes)

        def decode(some: Longs) -> list[int]:
            return [
                self._codes[rows[row].tobytes()[hole.at : hole.at + hole.nbytes]] for row in some.tolist()
            ]

        if hole.kind == NUMBER:
            return self._numbers[hole.nbytes].find(column("u1" if hole.nbytes == 2 else "<u2", 1), decode)
        words = [
            column("<u8", first) & MASKS[min(WORD_BYTES, hole.nbytes - first)]
            for first in range(0, hole.nbytes, WORD_BYTES)
        ]
        # Neighbours often have the same, as the key of the ranks of a tensor: only the first of them is looked up.
        changes = words[0][1:] != words[0][:-1]
        for word in words[1:]:
            if np.count_nonzero(changes) * _SAVING > len(rows):
                return self._found(words, hole.nbytes, decode)
            changes |= word[1:] != word[:-1]
        firsts = np.concatenate([[0], np.flatnonzero(changes) + 1])
        rows = rows[firsts]
        codes = self._found([word[firsts] for word in words], hole.nbytes, decode)
        return np.repeat(codes, np.diff(firsts, append=len(changes) + 1))

    def _found(self, words: Sequence[Words], nbytes: int, decode: Callable[[Longs], list[int]]) -> Ids:
        for cache, most in zip(self._caches, _CACHED_WORDS, strict=True):
            if len(words) <= most:
                return cache.find(words, np.uint64(nbytes), decode)
        return np.array(decode(np.arange(len(words[0]))), dtype=np.int32)

    def _decoded(self, scan: Scan, start: Longs, nbytes: Longs, some: Longs) -> list[int]:
        return [self._codes[raw] for raw in scan.raw(start[some], nbytes[some])]

    def stored(self, codes: Ids) -> tuple[Ids, Longs]:
        """The memo slots of entries in order, and where those of each begin and those of the last one end."""
        table = self._chunks.table()
        total = np.full(codes.shape[1], len(_NEW_SLOTS), dtype=np.int64)
        storing = []
        for column in codes:
            chunk = np.maximum(column, NOTHING)
            count = table.counts[chunk]
            if count.any():
                total += count
                storing.append((chunk, count))
        first_slot = np.concatenate([[0], np.cumsum(total)])
        slots = np.full(int(first_slot[-1]), OPAQUE, dtype=np.int32)
        at = first_slot[:-1] + len(_NEW_SLOTS)
        for chunk, count in storing:
            for nth in range(int(count.max())):
                rows = np.flatnonzero(count > nth)
                slots[at[rows] + nth] = table.slots[table.starts[chunk[rows]] + nth]
            at += count
        return slots, first_slot

    def ids(self, codes: Ids) -> Ids:
        """Value ids."""
        ids = self._chunks.table().values[np.maximum(codes, NOTHING)]
        refers = codes < BAD
        if refers.any():
            ids[refers] = self._memo.ids_at(-2 - codes[refers])
        return ids

    def _code(self, raw: bytes) -> int:
        """The chunk of a byte string."""
        return self._text(raw) if raw[0] == TEXT else self._taken_apart(raw)

    def _text(self, raw: bytes) -> int:
        text = raw[2:-1]
        if len(text) != raw[1] or raw[-1:] != b"\x94" or not text.isascii():
            return BAD
        value = self._memo.add(text.decode("ascii"))
        return self._chunks.add(value, (value,))

    def _taken_apart(self, raw: bytes) -> int:
        machine = _ChunkMachine(self._machine, self._memo, raw)
        try:
            root, _ = machine.run()
        except FormatError:  # then it is parsed opcode by opcode, which reports any error
            return BAD
        if not isinstance(root, tuple) or len(root) != 1:
            return BAD
        slots = [self._memo.add(value) for value in machine.stored]
        return self._chunks.add(self._memo.add(root[0]), slots)


def _references(index: npt.NDArray[Any], nbytes: int) -> Ids:
    """Codes of references of this length (with the opcode) to these memo indexes, if CPython writes them so."""
    codes = -2 - index.astype(np.int32)
    if nbytes > 2:
        codes[(codes > -2 - _FIRST_LONG_INDEX) | (codes <= -2 - _MAX_INDEX)] = BAD
    return codes
