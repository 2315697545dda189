"""What byte strings of a ``.metadata`` file mean: few are distinct, and the pickle machine parses each of them once.

A *value id* numbers a value in :class:`Memo`. A *chunk* is a distinct byte string: its value, and the values that its
opcodes store in the memo. A *code* is a chunk or a reference to the memo; it becomes a value id when it is needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.errors import FormatError
from paddle_reshard.storage.files.dist_metadata_stencils import (
    MASKS,
    TEXT,
    WORD_BYTES,
    Hole,
    Longs,
    Words,
    is_reference,
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

BAD: Final = -1
"""Code of a byte string that is not taken in runs. Further down are the references: ``-2 - index``."""
NOTHING, _NEW_INSTANCE, _NEW_LIST = range(3)
"""Chunks of every file: no bytes, an instance and the dict of its attributes, a list."""
NEW_LIST_OPCODES: Final = b"]\x94"
_MAX_INDEX: Final = (1 << 31) - 3
"""Memo index that no file reaches; what refers to a higher one refers to this one instead."""
_CACHE_BITS: Final = 15
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
"""Multiplier (not even) that distributes words over the cache."""


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


class _Cache:
    """Codes of byte strings: a hash table with one slot per hash."""

    def __init__(self) -> None:
        self._words: list[Words] = []
        self._nbytes = np.zeros(1 << _CACHE_BITS, dtype=np.int32)
        self._codes = np.zeros(1 << _CACHE_BITS, dtype=np.int32)

    def find(self, words: Sequence[Words], nbytes: int, decode: Callable[[Longs], list[int]]) -> Ids:
        """The code of each byte string of this length, given as words; ``decode`` works out those of some rows."""
        while len(self._words) < len(words):
            self._words.append(np.zeros(1 << _CACHE_BITS, dtype=np.uint64))
        mixed = words[0] * _MIX
        for word in words[1:]:
            mixed ^= word
            mixed *= _MIX
        slot = (mixed >> np.uint64(64 - _CACHE_BITS)).view(np.int64)
        known = self._nbytes[slot] == nbytes
        for word, column in zip(words, self._words, strict=False):
            known &= column[slot] == word
        codes = self._codes[slot]
        rows = np.flatnonzero(~known)
        if len(rows):
            codes[rows] = decode(rows)
            slot = slot[rows]
            self._nbytes[slot], self._codes[slot] = nbytes, codes[rows]
            for word, column in zip(words, self._words, strict=False):
                column[slot] = word[rows]
        return codes


class Coder:
    """Byte strings of values → codes. Each distinct string is parsed once, with the memo of the whole file."""

    def __init__(self, machine: Machine, memo: Memo) -> None:
        self._machine, self._memo = machine, memo
        self._values, self._starts, self._counts = array("i"), array("i"), array("i")
        """Of each chunk: its value id, and which part of ``_slots`` has the value ids that it stores in the memo."""
        self._slots = array("i")
        for slots in ((), (OPAQUE, OPAQUE), (OPAQUE,)):
            self._add(NONE, slots)
        self.forget()

    def forget(self) -> None:
        """Drop all codes, because byte strings change their meaning when a name is stored in the memo."""
        self._codes: dict[bytes, int] = {}
        self._cache = _Cache()

    def code(self, raw: bytes) -> int:
        """The code of one value."""
        if is_reference(raw):
            return -2 - min(int.from_bytes(raw[1:], "little"), _MAX_INDEX)
        code = self._codes.get(raw)
        if code is None:
            if len(self._codes) >= _MAX_KNOWN:
                self._codes.clear()
            code = self._codes[raw] = self._chunk(raw)
        return code

    def codes(self, rows: Words, hole: Hole) -> Ids | int:
        """Codes of the values in a hole of a stencil, of entries that fit it."""
        if hole.code is not None:
            return hole.code

        def column(kind: str, byte: int) -> npt.NDArray[Any]:
            return np.ndarray(len(rows), kind, rows, hole.at + byte, rows.strides[:1])

        def decode(some: Longs) -> list[int]:
            data = rows[some].tobytes()
            return [
                self.code(data[at : at + hole.nbytes]) for at in range(hole.at, len(data), rows.strides[0])
            ]

        if hole.refers:
            index = column("u1" if hole.nbytes == 2 else "<u4", 1).astype(np.int64)
            return (-2 - np.minimum(index, _MAX_INDEX)).astype(np.int32)
        words = [
            column("<u8", first) & MASKS[min(WORD_BYTES, hole.nbytes - first)]
            for first in range(0, hole.nbytes, WORD_BYTES)
        ]
        return self._cache.find(words, hole.nbytes, decode)

    def stored(self, codes: Ids) -> tuple[Ids, Longs]:
        """The memo slots of entries in order, and where those of each begin and those of the last one end."""
        chunks = np.full((codes.shape[1], len(codes) + 1), _NEW_INSTANCE, dtype=np.int32)
        np.maximum(codes.T, NOTHING, out=chunks[:, 1:])
        counts = np.frombuffer(self._counts, dtype=np.int32)[chunks]
        first_slot = np.append(0, np.cumsum(counts.sum(axis=1)))
        storing = counts > 0
        chunks, counts = chunks[storing], counts[storing]
        # The slots of a chunk follow each other, in the table as in the result: only the distance differs.
        distance = np.frombuffer(self._starts, dtype=np.int32)[chunks] - np.cumsum(counts) + counts
        at = np.arange(first_slot[-1]) + np.repeat(distance, counts)
        return np.frombuffer(self._slots, dtype=np.int32)[at], first_slot

    def ids(self, codes: Ids) -> Ids:
        """Value ids."""
        ids = np.frombuffer(self._values, dtype=np.int32)[np.maximum(codes, NOTHING)]
        refers = codes < BAD
        ids[refers] = self._memo.ids_at(-2 - codes[refers])
        return ids

    def _add(self, value: int, slots: Sequence[int]) -> int:
        """Number a chunk with this value that stores ``slots`` in the memo."""
        self._values.append(value)
        self._starts.append(len(self._slots))
        self._counts.append(len(slots))
        self._slots.extend(slots)
        return len(self._values) - 1

    def _chunk(self, raw: bytes) -> int:
        """The chunk of a byte string, or :data:`BAD`: then it is parsed opcode by opcode, which reports any error."""
        if raw == NEW_LIST_OPCODES:
            return _NEW_LIST
        if raw[0] == TEXT:
            return self._text(raw)
        machine = _ChunkMachine(self._machine, self._memo, raw)
        try:
            root, _ = machine.run()
        except FormatError:
            return BAD
        if not isinstance(root, tuple) or len(root) != 1:
            return BAD
        slots = [self._memo.add(value) for value in machine.stored]
        return self._add(self._memo.add(root[0]), slots)

    def _text(self, raw: bytes) -> int:
        text = raw[2:-1]
        if len(text) != raw[1] or raw[-1:] != b"\x94" or not text.isascii():
            return BAD
        value = self._memo.add(text.decode("ascii"))
        return self._add(value, (value,))
