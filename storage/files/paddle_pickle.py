"""Locate the arrays of a ``paddle.save`` file.

:func:`parse_pickle` interprets the pickle opcodes of a ``.pdparams``, ``.pdopt`` or ``.distcp`` file one by one and
builds plain containers in which every array is an :class:`ArrayRef`, a byte range of the file. Nothing is imported and
nothing is called. The few globals that such files need are in one table (``ARRAY_GLOBALS``), each with the only form of
call in which it may appear.

``paddle.save`` has two routes (Paddle 3.3.1 ``framework/io.py:784-974``). *Legacy*: a flat dict of bare arrays, with
:data:`STRUCTURED_NAMES` last. *Pickle*: the caller's own graph, each tensor as ``tuple((name, array))``. Both are read
here, and both are written by :mod:`~paddle_reshard.storage.files.paddle_pickle_writer`.

Work is bounded for any file: one step per opcode (:data:`MAX_OPCODES`), one step per value of the result (as many as
opcodes, plus :data:`MAX_SHARED_VALUES` for shared containers), :data:`MAX_NESTING`. Memory is bounded by the bytes of
the file that are not payload, of which many opcodes and containers need many, and by the depth of the stack
(:mod:`~paddle_reshard.pipeline.core.limits`).
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Final, NoReturn, TypeAlias, TypeGuard

from paddle_reshard.pipeline.core.errors import FormatError, UnsafePickleError
from paddle_reshard.pipeline.core.limits import (
    FREE_VALUES,
    LISTS_AS_CONTAINERS,
    MAX_PICKLE_CONTAINERS,
    MAX_STACK_MARKS,
    MAX_STACK_VALUES,
    PICKLE_CONTAINER_BYTES,
    PICKLE_OPCODE_BYTES,
)
from paddle_reshard.storage.files.mistaken import BEGIN_BYTES, in_place_of

STRUCTURED_NAMES: Final = "StructuredToParameterName@@"
"""Key of the legacy route's table: dict key -> tensor name (Paddle 3.3.1 ``framework/io.py:163-187``)."""
BIG_PARAM_INFO: Final = "UnpackBigParamInfor@@"
"""Key of the table of split arrays, typo included (Paddle 3.3.1 ``framework/io_utils.py:220-277``)."""

READ_AHEAD_BYTES: Final = 1 << 16
"""Size of one ranged read. Headers between payloads are about 200 bytes."""
MAX_TEXT_BYTES: Final = 1 << 16
"""Longest text, and longest bytes value outside an array."""
MAX_TOTAL_TEXT_BYTES: Final = 1 << 28
"""All text of one file together; 600,000 arrays with two names of 200 bytes stay below."""
MAX_NESTING: Final = 64
"""Deepest nesting of containers; real files have 4."""
MAX_OPCODES: Final = 1 << 24
"""Opcodes in one file; an array takes about 28, so this is 600,000 arrays."""
MAX_INTEGER_KEY: Final = 1 << 31
"""Integer keys are below it, and not below its negative."""
MAX_SHARED_VALUES: Final = 1 << 16
"""Values that may be reached a second time because the file shares a container."""

_MAX_LINE_BYTES: Final = 256
_MAX_RANK: Final = 64
_MAX_DIMENSION: Final = 1 << 63
_INLINE_BYTES: Final = 64
_OPCODES_BETWEEN_LOOKS: Final = 256
_ARRAYS_BETWEEN_LOOKS: Final = 8
_MAX_ALIKE: Final = 1 << 12
_NO_FRAME: Final = sys.maxsize

_STRUCT_CODE: Final[Mapping[str, str]] = {
    "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d", "c8": "ff", "c16": "dd",
}  # fmt: skip
ITEM_BYTES: Final[Mapping[str, int]] = {code: int(code[1:]) for code in _STRUCT_CODE}
"""Bytes of an element of each dtype that is read and written, by numpy's code without byte order."""


@dataclass(slots=True)
class ArrayRef:
    """The payload of an array in its file; not frozen, as making very many would take four times as long."""

    byte_offset: int
    """Start of the raw little-endian payload, in bytes from the start of the file."""
    dtype: str
    """numpy code without byte order: ``f4``, ``u2`` (bfloat16), ``i8``, ``b1`` ..."""
    shape: tuple[int, ...]
    """Extents, in elements."""
    axes: tuple[int, ...] | None
    """The dims in the order of the payload, the slowest first: ``(1, 0)`` for a transposed matrix (Fortran order).
    ``None``: in their own order (C)."""
    name: str | None
    """Framework tensor name, if stored with the array (the pickle route)."""

    @property
    def nbytes(self) -> int:
        """Length of the payload."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class SplitArray:
    """An array that ``paddle.save`` flattened and cut.

    Protocols 2 and 3 only, for more than ``(2**30 - 1) // itemsize`` elements.
    """

    parts: tuple[ArrayRef, ...]
    """1-D pieces of one dtype; concatenated in this order they are the array in C order."""
    shape: tuple[int, ...]
    """``OriginShape``: extents of the whole array, in elements."""

    @property
    def dtype(self) -> str:
        """The dtype all parts have."""
        return self.parts[0].dtype


@dataclass(frozen=True, slots=True)
class PicklePayload:
    """The contents of one file."""

    root: object
    """Plain dict/list/tuple/str/bytes/int/float/complex/bool/None with :class:`ArrayRef` and
    :class:`SplitArray` leaves. Split arrays are joined under their own key, and :data:`BIG_PARAM_INFO` is removed."""
    protocol: int
    """Pickle protocol: 2 to 5."""


def parse_pickle(read: Callable[[int, int], bytes], size_bytes: int, path: str) -> PicklePayload:
    """Index one file without executing it and without reading the payloads of its arrays.

    ``read(byte_offset, nbytes)`` returns exactly ``nbytes`` bytes. It is called for :data:`READ_AHEAD_BYTES` at a time;
    payloads that extend beyond a read are skipped. ``path`` is for messages only.

    Raises
    ------
    UnsafePickleError
        If the file uses an opcode, a global or a call that is not on the allow-list (``forbidden_*``).
    FormatError
        If it is truncated, gives a wrong length, or contradicts itself. ``reason`` says which.
    """
    machine = Machine(Window(read, size_bytes, path))
    root, opcodes = machine.run()
    return PicklePayload(_rejoined(machine, plain_value(machine, root, opcodes)), machine.protocol)


# ---------------------------------------------------------------------------------------------- reading bytes


def truncated(size_bytes: int, needed_bytes: int) -> str:
    """The error for a file that ends before the bytes that it announces."""
    return f"truncated: the file has {size_bytes} bytes, what it announces here needs at least {needed_bytes}"


class Window:
    """A forward-only view of the file: the last block read, and the position in it."""

    __slots__ = ("_at", "_base", "_data", "_read", "_read_ahead_bytes", "path", "size_bytes", "skipped_bytes")

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        size_bytes: int,
        path: str,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> None:
        self.size_bytes, self.path, self._read_ahead_bytes = size_bytes, path, read_ahead_bytes
        self._read, self._base, self._data, self._at = read, 0, b"", 0
        self.skipped_bytes = 0

    @property
    def position(self) -> int:
        """Byte offset of the next byte."""
        return self._base + self._at

    def byte(self) -> int:
        """Take one byte."""
        if self._at >= len(self._data):
            self._refill(1)
        value = self._data[self._at]
        self._at += 1
        return value

    def take(self, nbytes: int) -> bytes:
        """Take the next bytes."""
        if self._at + nbytes > len(self._data):
            self._refill(nbytes)
        start = self._at
        self._at = start + nbytes
        return self._data[start : self._at]

    def unsigned(self, width_bytes: int) -> int:
        """Take a little-endian number."""
        return self.byte() if width_bytes == 1 else int.from_bytes(self.take(width_bytes), "little")

    def length(self, width_bytes: int) -> int:
        """Take a length; the bytes that it announces must be inside the file."""
        nbytes = self.unsigned(width_bytes)
        self.require(nbytes)
        return nbytes

    def require(self, nbytes: int) -> None:
        """Refuse to go beyond the end of the file."""
        if nbytes > self.size_bytes - self.position:
            detail = truncated(self.size_bytes, self.position + nbytes)
            raise FormatError("length_beyond_end", self.path, self.position, detail)

    @property
    def ahead(self) -> tuple[bytes, int]:
        """The last block read, and the position of the next byte in it."""
        return self._data, self._at

    def skip(self, nbytes: int) -> None:
        """Skip bytes without reading them."""
        self.skipped_bytes += nbytes
        self._at += nbytes
        if self._at > len(self._data):
            self._base, self._data, self._at = self.position, b"", 0

    def line(self) -> bytes:
        """Take the bytes before the next newline, and the newline."""
        start, text = self.position, bytearray()
        while (value := self.byte()) != 0x0A:
            text.append(value)
            if len(text) > _MAX_LINE_BYTES:
                raise FormatError(
                    "value_too_long", self.path, start, f"a name longer than {_MAX_LINE_BYTES} bytes"
                )
        return bytes(text)

    def read_at(self, byte_offset: int, nbytes: int) -> bytes:
        """Read bytes anywhere in the file."""
        data = self._read(byte_offset, nbytes)
        if len(data) != nbytes:
            detail = f"requested {nbytes} bytes, the store returned {len(data)}"
            raise FormatError("short_read", self.path, byte_offset, detail)
        return data

    def _refill(self, nbytes: int) -> None:
        position = self.position
        remaining = self.size_bytes - position
        if nbytes > remaining:
            raise FormatError(
                "truncated",
                self.path,
                position,
                f"truncated: the file has {self.size_bytes} bytes and ends inside the pickle, before its STOP",
            )
        data = self.read_at(position, min(max(nbytes, self._read_ahead_bytes), remaining))
        self._base, self._data, self._at = position, data, 0


# ------------------------------------------------------------------------- values that only live on the stack


@dataclass(slots=True, eq=False, repr=False)
class _Blob:
    """A bytes or bytearray object in the file; short bytes objects are read immediately."""

    byte_offset: int
    nbytes: int
    data: bytes | None
    mutable: bool = False
    """It is a bytearray, which can only be the payload of an array in protocol 5."""
    taken: bool = False
    """It is the payload of an array."""


@dataclass(slots=True, eq=False, repr=False)
class NumpyDtype:
    """A ``numpy.dtype``; usable once BUILD has set its byte order."""

    code: str
    built: bool = False


@dataclass(slots=True, eq=False, repr=False)
class _Array:
    """A ``numpy.ndarray``; usable once BUILD has set its state, or as ``_frombuffer`` made it."""

    ref: ArrayRef | None = None


@dataclass(slots=True, eq=False, repr=False)
class Instance:
    """An instance of an allowed class: its name, and its attributes once BUILD has set them."""

    kind: str
    state: dict[object, object] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """An allowed global, and the one form of use it may appear in."""

    call: Callable[[Machine, tuple[object, ...]], object] | None
    """REDUCE of it; ``None``: never called."""
    kind: str | None = None
    """Name of the class of which NEWOBJ without arguments makes an instance; ``None``: no such class."""


# ------------------------------------------------------------------------------------------------ the machine


class Machine:
    """The pickle machine: a stack, marks and a memo. Every opcode is a function in ``_OPCODES``."""

    __slots__ = (
        "_alike",
        "_opcodes",
        "_opcodes_of_arrays",
        "containers",
        "frame_stop",
        "globals",
        "marks",
        "memo",
        "opcode_offset",
        "protocol",
        "shapes",
        "stack",
        "text_bytes",
        "window",
    )

    def __init__(self, window: Window, allowed: Mapping[tuple[str, str], Global] | None = None) -> None:
        self.window = window
        self.globals = ARRAY_GLOBALS if allowed is None else allowed
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        self.memo: list[object] = []
        self.shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # many arrays share one
        self.protocol, self.opcode_offset, self.text_bytes, self.containers = 0, 0, 0, 0
        self.frame_stop = _NO_FRAME
        self._opcodes = self._opcodes_of_arrays = 0  # until the last look at the sizes; of arrays taken whole
        self._alike: dict[bytes, _Alike] = {}

    def run(self) -> tuple[object, int]:
        """Take every opcode; return the root as it was built, and how many opcodes that took."""
        window = self.window
        self._start()
        for count in range(MAX_OPCODES):
            at = window._at
            self.opcode_offset = window._base + at
            if self.opcode_offset >= self.frame_stop:
                self._leave_frame()
            if count % _OPCODES_BETWEEN_LOOKS == 0:
                self._opcodes = count
                self._check_size(count + self._opcodes_of_arrays)
            if at < len(window._data):  # here and not in a call: there are millions of opcodes
                opcode = window._data[at]
                window._at = at + 1
            else:
                opcode = window.byte()
            if opcode == _STOP:
                return self._root(), count + self._opcodes_of_arrays
            step = _OPCODES[opcode]
            if step is None:
                self.unsafe("forbidden_opcode", f"opcode 0x{opcode:02x} is not allowed in a checkpoint")
            try:
                step(self)
            except IndexError:  # the lists a step indexes are the stack and the marks
                self.bad("stack_underflow", f"opcode 0x{opcode:02x} needs more values than the stack holds")
        self._refuse_opcodes()

    def _refuse_opcodes(self) -> NoReturn:
        self.bad("too_many_opcodes", f"more than {MAX_OPCODES} opcodes")

    def _leave_frame(self) -> None:
        """Refuse an opcode that reaches beyond its frame: ``pickle`` loses what it has read ahead of it."""
        if self.opcode_offset > self.frame_stop:
            self.bad(
                "frame_cut", f"a frame ends at byte {self.frame_stop}, within the opcode before this one"
            )
        self.frame_stop = _NO_FRAME

    def _check_size(self, opcodes: int) -> None:
        """Refuse a file that takes more memory than arrays with so many bytes other than payloads can need."""
        if len(self.marks) > MAX_STACK_MARKS:
            self.bad("nesting_too_deep", f"more than {MAX_STACK_MARKS} marks on the stack")
        if len(self.stack) + sum(map(len, self.marks)) > MAX_STACK_VALUES:
            self.bad("stack_too_deep", f"more than {MAX_STACK_VALUES} values on the stack")
        if opcodes > MAX_OPCODES:
            self._refuse_opcodes()
        told_bytes = self.window.position - self.window.skipped_bytes
        if opcodes > FREE_VALUES + told_bytes / PICKLE_OPCODE_BYTES:
            self.bad(
                "too_many_opcodes", f"{opcodes} opcodes in {told_bytes} bytes; files of arrays have fewer"
            )
        most = min(MAX_PICKLE_CONTAINERS, FREE_VALUES + told_bytes // PICKLE_CONTAINER_BYTES)
        if self.containers > most:
            detail = f"{self.containers} containers in {told_bytes} bytes, at most {most} are read"
            self.bad("too_many_values", detail)

    def bad(self, reason: str, detail: str) -> NoReturn:
        """Refuse the file at the current opcode."""
        raise FormatError(reason, self.window.path, self.opcode_offset, detail)

    def unsafe(self, reason: str, detail: str) -> NoReturn:
        """Refuse something outside the allow-list."""
        raise UnsafePickleError(
            reason, self.window.path, self.opcode_offset, f"{detail}; nothing was executed"
        )

    def is_key(self, value: object) -> bool:
        """Whether a dict of this kind of file may have such a key."""
        return isinstance(value, str) or _is_integer(value, -MAX_INTEGER_KEY, MAX_INTEGER_KEY)

    def make(self, kind: str) -> Instance:
        """Make a new instance, without attributes yet."""
        return Instance(kind)

    def take_arrays(self) -> None:
        """Take whole arrays, or texts, each with its key, as long as they are spelled as picklers spell nearly all.

        The key of the first is on top of the stack. Afterwards the machine is as if it had taken opcode by opcode. What
        it might refuse, and what lies across the end of a frame or of the block read, is left to be taken so.
        """
        taken = 0
        while _take_array(self) or _take_text(self):
            taken += 1
            if taken % _ARRAYS_BETWEEN_LOOKS == 0:
                self.opcode_offset = self.window.position
                self._check_size(self._opcodes + self._opcodes_of_arrays)
            if not _take_text(self):
                return

    def remember(self, index: int | None) -> None:
        """Store the top of the stack under ``index``, or under the next one: picklers count from 0."""
        if index is not None and index != (stored := len(self.memo)):
            if index < stored:
                self.bad("memo_overwritten", f"stores value {index} twice")
            self.bad("memo_out_of_order", f"stores value {index} when {stored} are stored")
        self.memo.append(self.stack[-1])

    def recall(self, index: int) -> object:
        """Return the value stored under ``index``."""
        if index >= len(self.memo):
            self.bad("missing_memo", f"refers to value {index}, which was never stored")
        return self.memo[index]

    def pop_mark(self) -> list[object]:
        """Take everything since the last MARK."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def count_text(self, nbytes: int) -> None:
        """Refuse a text that is too long, or too much text in all."""
        self.text_bytes += nbytes
        if nbytes > MAX_TEXT_BYTES:
            self.bad("value_too_long", f"a text or bytes value of {nbytes} bytes outside an array")
        if self.text_bytes > MAX_TOTAL_TEXT_BYTES:
            self.bad("too_much_text", f"more than {MAX_TOTAL_TEXT_BYTES} bytes of text")

    def _start(self) -> None:
        size_bytes = self.window.size_bytes
        if not size_bytes or self.window.byte() != 0x80:
            begin = self.window.read_at(0, min(size_bytes, BEGIN_BYTES))
            if mistaken := in_place_of(begin, size_bytes):
                raise FormatError("another_file", self.window.path, None, mistaken)
            self.bad("not_a_pickle", "does not start as a pickle of protocol 2 to 5")
        self.protocol = self.window.byte()
        if self.protocol not in (2, 3, 4, 5):
            self.bad("unsupported_protocol", f"pickle protocol {self.protocol}; paddle.save writes 2 to 5")

    def _root(self) -> object:
        trailing = self.window.size_bytes - self.window.position
        if trailing:
            self.bad("trailing_bytes", f"{trailing} bytes after the end of the pickle")
        if self.marks or len(self.stack) > 1:
            self.bad("stack_leftover", "the pickle ends with more than one value")
        if not self.stack:
            self.bad("stack_underflow", "the pickle ends without a value")
        return self.stack[0]


_Step: TypeAlias = Callable[[Machine], None]


def shown_text(value: str) -> str:
    """A text for a message, cut where it is long."""
    return repr(value if len(value) <= 100 else value[:100] + "...")


def is_file_name(name: str) -> bool:
    """Whether it names a file next to the one that says so, and nothing elsewhere."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


# ---------------------------------------------------------------------------------------------------- opcodes


def _constant(value: object) -> _Step:
    return lambda m: m.stack.append(value)


def _one_byte(m: Machine) -> None:
    m.stack.append(m.window.byte())


def _integer(width_bytes: int, signed: bool) -> _Step:
    def step(m: Machine) -> None:
        m.stack.append(int.from_bytes(m.window.take(width_bytes), "little", signed=signed))

    return step


def _long1(m: Machine) -> None:
    m.stack.append(int.from_bytes(m.window.take(m.window.byte()), "little", signed=True))


def _float(m: Machine) -> None:
    m.stack.append(struct.unpack(">d", m.window.take(8))[0])


def _text(width_bytes: int) -> _Step:
    def step(m: Machine) -> None:
        nbytes = m.window.length(width_bytes)
        if nbytes > MAX_TEXT_BYTES and m.protocol == 2:
            _refuse_text_payload(m)
        m.count_text(nbytes)
        m.stack.append(_decoded(m, m.window.take(nbytes)))

    return step


def _decoded(m: Machine, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        m.bad("bad_text", "a text that is not UTF-8")


def _blob(width_bytes: int) -> _Step:
    def step(m: Machine) -> None:
        window = m.window
        nbytes = window.length(width_bytes)
        byte_offset = window.position
        data = None
        if nbytes <= _INLINE_BYTES:
            data = window.take(nbytes)
        else:
            window.skip(nbytes)
        m.stack.append(_Blob(byte_offset, nbytes, data))

    return step


def _bytearray(m: Machine) -> None:
    """BYTEARRAY8, the payload of a writable array: never read here, whatever its length."""
    if m.protocol < 5:
        m.unsafe("forbidden_opcode", f"opcode 0x96 is not allowed in a pickle of protocol {m.protocol}")
    nbytes = m.window.length(8)
    m.stack.append(_Blob(m.window.position, nbytes, None, mutable=True))
    m.window.skip(nbytes)


def _empty_dict(m: Machine) -> None:
    m.containers += LISTS_AS_CONTAINERS
    m.stack.append({})


def _empty_list(m: Machine) -> None:
    m.containers += LISTS_AS_CONTAINERS
    m.stack.append([])


def _mark(m: Machine) -> None:
    m.marks.append(m.stack)
    m.stack = []


def _tuple_from_mark(m: Machine) -> None:
    items = m.pop_mark()
    m.containers += 1
    m.stack.append(tuple(items))


def _tuple_of(count: int) -> _Step:
    def step(m: Machine) -> None:
        stack = m.stack
        items = tuple(stack[-count:])
        if len(items) < count:
            raise IndexError
        m.containers += 1
        stack[-count:] = [items]

    return step


def _setitem(m: Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    _put(m, m.stack[-1], [key, value])


def _setitems(m: Machine) -> None:
    items = m.pop_mark()
    _put(m, m.stack[-1], items)


def _put(m: Machine, target: object, items: list[object]) -> None:
    """Set keys and values, given in turn; a key that would silently replace another is an attack."""
    if not isinstance(target, dict) or len(items) % 2:
        m.bad("bad_target", "sets items of something that is not a dict, or half an item")
    keys = items[::2]
    if set(map(type, keys)) == {str}:  # as nearly always, and several times as fast as one by one
        new = dict(zip(keys, items[1::2], strict=True))
        if len(new) == len(keys) and target.keys().isdisjoint(new):
            target.update(new)
            return
    for index in range(0, len(items), 2):
        key = items[index]
        if not m.is_key(key):
            m.bad("bad_key", "a dict key that is neither text nor a small integer")
        if key in target:
            m.bad("duplicate_key", f"the key {shown_text(str(key))} appears twice in one dict")
        target[key] = items[index + 1]


def _is_integer(value: object, start: int, stop: int) -> bool:
    return type(value) is int and start <= value < stop


def _append(m: Machine) -> None:
    value = m.stack.pop()
    _extend(m, m.stack[-1], [value])


def _appends(m: Machine) -> None:
    items = m.pop_mark()
    _extend(m, m.stack[-1], items)


def _extend(m: Machine, target: object, items: list[object]) -> None:
    if not isinstance(target, list):
        m.bad("bad_target", "appends to something that is not a list")
    target.extend(items)


def _memo_get(width_bytes: int) -> _Step:
    return lambda m: m.stack.append(m.recall(m.window.unsigned(width_bytes)))


def _memo_put(width_bytes: int) -> _Step:
    return lambda m: m.remember(m.window.unsigned(width_bytes))


def _memoize(m: Machine) -> None:
    m.remember(None)


def _frame(m: Machine) -> None:
    """A frame is only a hint to read ahead (PEP 3154), but it must hold whole opcodes, and no other frame."""
    nbytes = m.window.length(8)
    if m.frame_stop != _NO_FRAME:
        m.bad("frame_cut", f"a frame begins within another one, which ends at byte {m.frame_stop}")
    m.frame_stop = m.window.position + nbytes


def _global(m: Machine) -> None:
    module, name = m.window.line(), m.window.line()
    m.stack.append(_allowed(m, _decoded(m, module), _decoded(m, name)))


def _stack_global(m: Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    m.stack.append(_allowed(m, module, name))


def _allowed(m: Machine, module: object, name: object) -> Global:
    if not isinstance(module, str) or not isinstance(name, str):
        m.unsafe("forbidden_global", "a global whose name is not text")
    allowed = m.globals.get((module, name))
    if allowed is None:
        m.unsafe(
            "forbidden_global", f"asks for the global {shown_text(f'{module}.{name}')}, which is not allowed"
        )
    return allowed


def _reduce(m: Machine) -> None:
    arguments, function = m.stack.pop(), m.stack.pop()
    if not isinstance(function, Global) or function.call is None or not isinstance(arguments, tuple):
        m.unsafe("forbidden_call", "calls something that is not on the list of calls")
    m.stack.append(function.call(m, arguments))


def _newobj(m: Machine) -> None:
    """Make an instance without arguments of a class on the list; in a file of arrays there is none."""
    arguments, cls = m.stack.pop(), m.stack.pop()
    if not isinstance(cls, Global) or cls.kind is None or arguments != ():
        m.unsafe("forbidden_call", "makes an instance of a class")
    instance = m.make(cls.kind)  # which may have exchanged the stack
    m.stack.append(instance)


def _build(m: Machine) -> None:
    state, target = m.stack.pop(), m.stack[-1]
    if isinstance(target, _Array) and target.ref is None:
        target.ref = _array_ref(m, state)
    elif isinstance(target, NumpyDtype) and not target.built:
        _check_dtype_state(m, target.code, state)
        target.built = True
    elif isinstance(target, Instance) and target.state is None and isinstance(state, dict):
        target.state = state
    else:
        m.unsafe("forbidden_build", "sets the state of something that is not new")


def _short_text(m: Machine) -> None:
    _key(m)
    m.take_arrays()


_key: Final = _text(1)
_SHORT_TEXT: Final = 0x8C
_STOP: Final = ord(".")
_STEPS: Final[Mapping[int, _Step]] = {
    0x95: _frame,
    ord("N"): _constant(None), 0x88: _constant(True), 0x89: _constant(False), ord(")"): _constant(()),
    ord("K"): _one_byte, ord("M"): _integer(2, False), ord("J"): _integer(4, True),
    0x8A: _long1, ord("G"): _float,
    _SHORT_TEXT: _short_text, ord("X"): _text(4), 0x8D: _text(8),
    ord("C"): _blob(1), ord("B"): _blob(4), 0x8E: _blob(8), 0x96: _bytearray,
    ord("("): _mark, ord("}"): _empty_dict, ord("]"): _empty_list,
    ord("t"): _tuple_from_mark, 0x85: _tuple_of(1), 0x86: _tuple_of(2), 0x87: _tuple_of(3),
    ord("s"): _setitem, ord("u"): _setitems, ord("a"): _append, ord("e"): _appends,
    ord("q"): _memo_put(1), ord("r"): _memo_put(4), 0x94: _memoize,
    ord("h"): _memo_get(1), ord("j"): _memo_get(4),
    ord("c"): _global, 0x93: _stack_global, ord("R"): _reduce, 0x81: _newobj, ord("b"): _build,
}  # fmt: skip
_OPCODES: Final[tuple[_Step | None, ...]] = tuple(_STEPS.get(opcode) for opcode in range(256))
"""The opcodes CPython writes for such files with protocols 2 to 5. The others (PERSID, INST, OBJ, EXT, NEXT_BUFFER ...)
do not occur in them and are refused, above all because some of them import or call, or need bytes that are not in the
file."""


# ------------------------------------------------------------------------------------------ arrays taken whole

_PUT: Final = b"\x94"
_FRAME: Final = b"\x95"
_FRAME_BYTES: Final = 9


def _head(put: bytes) -> re.Pattern[bytes]:
    """What follows the key of an array up to its payload, where ``put`` stores every value in the memo.

    A tensor begins with the place of ``tuple`` in the memo and with its name, which is printable. Then come the places
    of ``_reconstruct`` and ``ndarray``, their call, and the shape, the place of the dtype, the order and the length.
    """
    number = rb"(?:K.|M..|J....)"
    few = b"|".join(number * dims + end for dims, end in ((1, rb"\x85"), (2, rb"\x86"), (3, rb"\x87")))
    shape = rb"(?:\)|(?:%b|\(%b{4,64}t)%b)" % (few, number, put)
    state = rb"\(K\x01%b(?:h.|j....)[\x88\x89](C.|B....|\x8e.{8})" % shape
    empty = rb"h.h.K\x00\x85%b%b\x87%bR%b" % (put, rb"h." if put else rb"C\x01b", put, put)
    return re.compile(rb"%b(?:h(.)\x8c(.)([!-~]*)%b)?(%b%b)" % (put, put, empty, state), re.DOTALL)


_HEADS: Final = {put: _head(put) for put in (b"", _PUT)}
_ARRAY_ENDS: Final = {put: put + b"t" + put + b"b" for put in _HEADS}
_TENSOR_ENDS: Final = {
    put: end + b"\x86" + put + b"\x85" + put + b"R" + put for put, end in _ARRAY_ENDS.items()
}
_MOST_BYTES_OF_END: Final = _FRAME_BYTES + len(_TENSOR_ENDS[_PUT])


@dataclass(slots=True)
class _Alike:
    """What the opcodes of arrays of one dtype and shape mean, but for the key, the name and the place."""

    ref: ArrayRef
    """To an array whose payload lies at byte 0."""
    state: tuple[object, ...]
    """What its state holds before the payload."""
    before: list[object]
    """What they store in the memo before the array itself."""
    behind: list[object]
    """And behind it."""
    opcodes: int
    containers: int
    nbytes: int
    length_bytes: int
    """Bytes of the opcode of the payload, and of the length in it."""


def _take_text(m: Machine) -> bool:
    """Take a short text."""
    window = m.window
    data, start = window._data, window._at + 2
    if start > len(data) or data[start - 2] != _SHORT_TEXT:
        return False
    stop = start + data[start - 1]
    if stop > len(data) or window._base + stop > m.frame_stop:
        return False
    try:
        key = data[start:stop].decode("utf-8")
    except UnicodeDecodeError:
        return False
    if m.text_bytes + stop - start > MAX_TOTAL_TEXT_BYTES:
        return False
    m.stack.append(key)
    m.text_bytes += stop - start
    m._opcodes_of_arrays += 1
    window._at = stop
    return True


def _take_array(m: Machine) -> bool:
    """Take the array whose key is on top of the stack; ``False``, and nothing is taken, if it has to be left."""
    window = m.window
    data, base, at = window._data, window._base, window._at
    put = _PUT if data[at : at + 1] == _PUT else b""
    head = _HEADS[put].match(data, at)
    if head is None:
        return False
    function, length, name, opcodes, nbytes = head.groups()
    alike = m._alike.get(opcodes) or _array_like(m, opcodes, len(nbytes))
    if alike is None or (name is not None and not _names_tensor(m, function[0], length[0], name)):
        return False
    start = head.end()
    at = stop = start + alike.nbytes
    frame_stop = m.frame_stop
    if frame_stop == base + start - alike.length_bytes:  # large payloads lie outside frames
        frame_stop = _NO_FRAME
    if base + start > frame_stop or base + stop > min(frame_stop, window.size_bytes):
        return False
    end = (_ARRAY_ENDS if name is None else _TENSOR_ENDS)[put]
    count = alike.opcodes + len(put + end) + (0 if name is None else len(put) + 2)
    offset, payload = base + start, data[start:stop] if alike.nbytes <= _INLINE_BYTES else None
    if stop + _MOST_BYTES_OF_END > len(data) and base + len(data) < window.size_bytes:
        if payload is not None and len(payload) < alike.nbytes:
            return False
        base, at = base + stop, 0
        data = window.read_at(base, min(window._read_ahead_bytes, window.size_bytes - base))
    if data.startswith(_FRAME, at) and frame_stop in (_NO_FRAME, base + at):
        count += 1
        at += _FRAME_BYTES
        frame_stop = base + at + int.from_bytes(data[at - 8 : at], "little")
        if frame_stop > window.size_bytes:
            return False
    if not data.startswith(end, at) or base + at + len(end) > frame_stop:
        return False
    window._base, window._data, window._at = base, data, at + len(end)
    window.skipped_bytes += alike.nbytes if payload is None else 0
    m.frame_stop = frame_stop
    m.containers += alike.containers + (1 if name is None else 3)
    m._opcodes_of_arrays += count
    _put_array(m, alike, offset, None if name is None else name.decode("ascii"), payload, memoized=bool(put))
    return True


def _names_tensor(m: Machine, function: int, length: int, name: bytes) -> bool:
    """Whether a place in the memo is that of ``tuple``, and a name has the length that is said."""
    called = m.memo[function] if function < len(m.memo) else None
    known = isinstance(called, Global) and called.call is _call_tuple
    return known and len(name) == length and m.text_bytes + length <= MAX_TOTAL_TEXT_BYTES


def _array_like(m: Machine, opcodes: bytes, length_bytes: int) -> _Alike | None:
    """What the opcodes of an array mean, which another machine takes one by one; ``None`` if it is to be left.

    The last ``length_bytes`` are the opcode of the payload.
    """
    if len(m._alike) >= _MAX_ALIKE:
        return None
    machine = Machine(Window(lambda at, n: opcodes[at : at + n], len(opcodes), m.window.path), m.globals)
    machine.memo, machine.shapes, stored = m.memo, m.shapes, len(m.memo)
    count = 0
    try:
        while machine.window.position < len(opcodes) - length_bytes:
            _STEPS[machine.window.byte()](machine)
            count += 1
        nbytes = int.from_bytes(opcodes[1 - length_bytes :], "little")
        ref = _array_ref(machine, (*machine.stack, _Blob(0, nbytes, None)))
    except (FormatError, IndexError):
        return None
    finally:
        memo = m.memo[stored:]
        del m.memo[stored:]
    alike = _Alike(
        ref, tuple(machine.stack), memo[:2], memo[3:], count + 1, machine.containers, nbytes, length_bytes
    )
    m._alike[opcodes] = alike
    return alike


def _put_array(
    m: Machine, alike: _Alike, byte_offset: int, name: str | None, payload: bytes | None, *, memoized: bool
) -> None:
    """Put an array, or the tensor with this name, on the stack, and in the memo what its opcodes store there."""
    dtype, shape, axes = alike.ref.dtype, alike.ref.shape, alike.ref.axes
    key, value = m.stack[-1], None
    if memoized or name is None:
        value = _Array(ArrayRef(byte_offset, dtype, shape, axes, None))
    if memoized:
        blob = _Blob(byte_offset, alike.nbytes, payload, taken=True)
        m.memo += (key,) if name is None else (key, name)
        m.memo += (*alike.before, value, *alike.behind, blob, (*alike.state, blob))
    if name is None:
        m.stack.append(value)
        return
    m.text_bytes += len(name)
    tensor = ArrayRef(byte_offset, dtype, shape, axes, key if key == name else name)
    if memoized:
        pair = (name, value)
        m.memo += (pair, (pair,), tensor)
    m.stack.append(tensor)


# ---------------------------------------------------------------------------------------------- allowed calls


def _call_reconstruct(m: Machine, arguments: tuple[object, ...]) -> object:
    """``_reconstruct(numpy.ndarray, (0,), b'b')``: an array without state (numpy ``ndarray.__reduce__``)."""
    known = len(arguments) == 3 and arguments[0] is _NDARRAY and arguments[1] == (0,)
    if known and _short_bytes(arguments[2]) == b"b":
        return _Array()
    m.unsafe("forbidden_call", "_reconstruct in another form than for a numpy array")


def _call_frombuffer(m: Machine, arguments: tuple[object, ...]) -> object:
    """``_frombuffer(payload, dtype, shape, order)``: a whole array of protocol 5 (numpy ``core/numeric.py``).

    numpy 2 also writes ``_frombuffer(payload, dtype, shape, 'K', permutation)``: ``shape`` is that of the payload in C
    order, of which the dims are permuted then.
    """
    if len(arguments) not in (4, 5):
        m.unsafe("forbidden_call", "_frombuffer in another form than for a numpy array")
    payload, dtype, shape, order = arguments[:4]
    if not isinstance(order, str):
        m.unsafe("forbidden_call", "_frombuffer in another form than for a numpy array")
    if not is_shape(shape):
        m.bad("bad_array", "an array whose shape is not a tuple of sizes")
    if len(arguments) == 5:
        if order != "K":
            m.bad(
                "bad_order",
                f"an array of order {shown_text(order)} with an order of dims, which only 'K' has",
            )
        return _Array(_permuted(m, _located(m, payload, dtype, shape, None), arguments[4]))
    if order not in ("C", "F"):
        known = "arrays are stored in order 'C', 'F', or 'K' with an order of dims"
        m.bad("bad_order", f"an array of order {shown_text(order)}; {known}")
    axes = tuple(range(len(shape) - 1, -1, -1)) if order == "F" else None
    return _Array(_located(m, payload, dtype, shape, axes))


def _permuted(m: Machine, array: ArrayRef, permutation: object) -> ArrayRef:
    """``array.transpose(permutation)``."""
    dims = range(len(array.shape))
    if not is_shape(permutation) or sorted(permutation) != list(dims):
        m.bad("bad_order", f"an order of dims that is not an order of {len(dims)} dims")
    axes = tuple(permutation.index(dim) for dim in dims)
    return replace(array, shape=tuple(array.shape[dim] for dim in permutation), axes=_axes(axes))


def _axes(axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """``None`` for dims in their own order."""
    return None if axes == tuple(range(len(axes))) else axes


def _call_dense_tensor(m: Machine, arguments: tuple[object, ...]) -> object:
    """``_reconstruct_dense_tensor_data(array)``: a raw DenseTensor from Paddle 3.4 on, which is the array itself."""
    array = arguments[0] if len(arguments) == 1 else None
    if isinstance(array, _Array) and array.ref is not None:
        return array.ref
    m.unsafe("forbidden_call", "_reconstruct_dense_tensor_data in another form than for an array")


def _call_dtype(m: Machine, arguments: tuple[object, ...]) -> object:
    """``numpy.dtype(code, False, True)`` (numpy ``dtype.__reduce__``)."""
    if len(arguments) != 3 or arguments[1:] != (False, True) or not isinstance(arguments[0], str):
        m.unsafe("forbidden_call", "numpy.dtype in another form than for a plain number type")
    if arguments[0] not in ITEM_BYTES:
        m.bad("unsupported_dtype", f"dtype {shown_text(arguments[0])} is not a plain number type")
    return NumpyDtype(arguments[0])


def _call_scalar(m: Machine, arguments: tuple[object, ...]) -> object:
    """``scalar(dtype, payload)``: a numpy number, as learning-rate schedulers leave them."""
    if len(arguments) == 2 and isinstance(arguments[0], NumpyDtype) and arguments[0].built:
        code, data = arguments[0].code, _short_bytes(arguments[1])
        if data is None or len(data) != ITEM_BYTES[code]:
            m.bad("size_mismatch", f"a number of dtype {code} whose payload is not {ITEM_BYTES[code]} bytes")
        numbers = struct.unpack("<" + _STRUCT_CODE[code], data)
        return complex(*numbers) if code[0] == "c" else numbers[0]
    m.unsafe("forbidden_call", "scalar in another form than for a plain number")


def _call_tuple(m: Machine, arguments: tuple[object, ...]) -> object:
    """``tuple((tensor.name, array))``: a tensor (Paddle 3.3.1 ``framework/io.py:432-443``)."""
    pair = arguments[0] if len(arguments) == 1 else None
    if isinstance(pair, tuple) and len(pair) == 2:
        name, array = pair
        if isinstance(name, str) and isinstance(array, _Array) and array.ref is not None:
            entry = m.stack[-1] if m.stack else None  # its key, which most arrays are called by
            return replace(array.ref, name=entry if name == entry and isinstance(entry, str) else name)
    m.unsafe("forbidden_call", "tuple in another form than for a tensor's name and array")


def _call_eval(m: Machine, arguments: tuple[object, ...]) -> object:
    """``eval('data', {'data': array})``: a raw DenseTensor (Paddle 3.3.1 ``framework/io.py:445-453``)."""
    if len(arguments) == 2 and arguments[0] == "data":
        scope = arguments[1]
        if isinstance(scope, dict) and list(scope) == ["data"]:
            array = scope["data"]
            if isinstance(array, _Array) and array.ref is not None:
                return array.ref
    m.unsafe("forbidden_call", "eval in another form than eval('data', {'data': <array>})")


def _call_encode(m: Machine, arguments: tuple[object, ...]) -> object:
    """``_codecs.encode(text, 'latin1')``: how protocol 2 spells bytes (CPython ``Pickler.save_bytes``)."""
    if len(arguments) == 2 and isinstance(arguments[0], str) and arguments[1] == "latin1":
        try:
            return arguments[0].encode("latin-1")
        except UnicodeEncodeError:
            m.bad("bad_text", "bytes spelled with characters outside latin-1")
    m.unsafe("forbidden_call", "_codecs.encode in another form than for bytes")


def _call_bytes(m: Machine, arguments: tuple[object, ...]) -> object:
    """``bytes()``: how protocol 2 spells empty bytes."""
    if arguments:
        m.unsafe("forbidden_call", "bytes with arguments")
    return b""


def _call_ordered_dict(m: Machine, arguments: tuple[object, ...]) -> object:
    """``OrderedDict()``; its items follow as SETITEMS."""
    if arguments:
        m.unsafe("forbidden_call", "OrderedDict with arguments")
    return {}


_NDARRAY: Final = Global(None)
ARRAY_GLOBALS: Final[Mapping[tuple[str, str], Global]] = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): Global(_call_dtype),
    ("collections", "OrderedDict"): Global(_call_ordered_dict),
    ("_codecs", "encode"): Global(_call_encode),
    **{(f"numpy.{core}.multiarray", "_reconstruct"): Global(_call_reconstruct) for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): Global(_call_scalar) for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): Global(_call_frombuffer) for core in ("core", "_core")},
    ("paddle.framework.io_utils", "_reconstruct_dense_tensor_data"): Global(_call_dense_tensor),
    **{(builtins, "tuple"): Global(_call_tuple) for builtins in ("builtins", "__builtin__")},
    **{(builtins, "bytes"): Global(_call_bytes) for builtins in ("builtins", "__builtin__")},
    **{(builtins, "eval"): Global(_call_eval) for builtins in ("builtins", "__builtin__")},
}
"""Everything a file may name. numpy renamed ``core`` to ``_core`` in 2.0; protocol 2 says ``__builtin__``."""


# -------------------------------------------------------------------------------------- the state of an array


def _short_bytes(value: object) -> bytes | None:
    return value.data if isinstance(value, _Blob) else value if isinstance(value, bytes) else None


def _check_dtype_state(m: Machine, code: str, state: object) -> None:
    """``(3, order, None, None, None, -1, -1, 0)`` (numpy ``dtype.__reduce__``, plain types)."""
    if not isinstance(state, tuple) or len(state) != 8 or state[0] != 3:
        m.bad("bad_dtype", f"the state of dtype {code} is not of the known form")
    order = state[1]
    if order == ">":
        m.bad("big_endian", "big-endian numbers")
    if order != "<" and (order != "|" or ITEM_BYTES[code] > 1):
        m.bad("bad_dtype", f"dtype {code} without a byte order")
    if state[2:] != (None, None, None, -1, -1, 0):
        m.bad("bad_dtype", f"dtype {code} is not a plain number type")


def _array_ref(m: Machine, state: object) -> ArrayRef:
    """``(1, shape, dtype, fortran, payload)`` (numpy ``ndarray.__setstate__``)."""
    if not isinstance(state, tuple) or len(state) != 5 or state[0] != 1:
        m.bad("bad_array", "the state of an array is not of the known form")
    _, shape, dtype, fortran, payload = state
    if not isinstance(fortran, bool):
        m.bad("bad_array", "an array whose Fortran flag is not a flag")
    if not is_shape(shape):
        m.bad("bad_array", "an array whose shape is not a tuple of sizes")
    if isinstance(payload, _Blob) and payload.mutable:
        m.bad("bad_array", "an array whose payload is a bytearray, which its state cannot be")
    return _located(m, payload, dtype, shape, tuple(range(len(shape) - 1, -1, -1)) if fortran else None)


def _located(
    m: Machine, payload: object, dtype: object, shape: tuple[int, ...], axes: tuple[int, ...] | None
) -> ArrayRef:
    """The reference to an array, after a check that its payload has the length that dtype and shape need."""
    if not isinstance(dtype, NumpyDtype) or not dtype.built:
        m.bad("bad_array", "an array without a dtype")
    byte_offset, nbytes = _payload_range(m, payload)
    expected = prod(shape) * ITEM_BYTES[dtype.code]
    if nbytes != expected:
        m.bad("size_mismatch", f"an array of {shape} {dtype.code} holds {nbytes} bytes, expected {expected}")
    return ArrayRef(
        byte_offset,
        dtype.code,
        m.shapes.setdefault(shape, shape),
        None if axes is None else _axes(axes),
        None,
    )


def is_shape(shape: object) -> TypeGuard[tuple[int, ...]]:
    """Whether this is a tuple of extents that an array may have."""
    if not isinstance(shape, tuple) or len(shape) > _MAX_RANK:
        return False
    return all(_is_integer(extent, 0, _MAX_DIMENSION) for extent in shape)


def _payload_range(m: Machine, payload: object) -> tuple[int, int]:
    if isinstance(payload, _Blob):
        if payload.taken and payload.nbytes > 1:  # of shorter bytes CPython has one object each
            m.bad("shared_payload", "two arrays have the same payload, which no pickler writes")
        payload.taken = True
        return payload.byte_offset, payload.nbytes
    if payload == b"":
        return m.opcode_offset, 0
    if isinstance(payload, bytes):
        _refuse_text_payload(m)
    m.bad("bad_array", "an array whose payload is not bytes")


def _refuse_text_payload(m: Machine) -> NoReturn:
    """Protocol 2 stores payloads as UTF-8 text: bytes from 0x80 take two, so no sub-range has an address."""
    m.bad(
        "protocol_2_payload",
        "arrays are stored as text (pickle protocol 2), which cannot be read by ranges; "
        "load the file with paddle.load and save it again with paddle.save(..., protocol=4)",
    )


# ----------------------------------------------------------------------------------------- from graph to tree


class _Level:
    """One open container of the copy: its source, what is still to come of it, and what is done."""

    __slots__ = ("_keys", "done", "has_names", "pending", "source")

    def __init__(self, source: dict[object, object] | list[object] | tuple[object, ...]) -> None:
        self.source = source
        self._keys = list(source) if isinstance(source, dict) else None
        self.has_names = set(map(type, self._keys or ())) <= {str}
        self.pending: Iterator[object] = iter(source.values() if isinstance(source, dict) else source)
        self.done: list[object] = []

    def add(self, m: Machine, value: object) -> None:
        if (
            not self.has_names
            and self._keys is not None
            and isinstance(value, ArrayRef)
            and isinstance(self._keys[len(self.done)], int)
        ):
            m.bad("bad_key", "an array under an integer key")
        self.done.append(value)

    def result(self) -> object:
        if self._keys is not None:
            return dict(zip(self._keys, self.done, strict=True))
        return tuple(self.done) if isinstance(self.source, tuple) else self.done


def plain_value(m: Machine, root: object, opcodes: int) -> object:
    """Copy the graph that so many opcodes built into plain values, of which there may be few more than opcodes.

    The graph may share and even contain itself (that is what a memo is for), so its size as a tree has no
    bound; the copy has one. The stack is explicit: nesting in a file never becomes nesting of calls.
    """
    levels, budget = [_Level([root])], opcodes + MAX_SHARED_VALUES
    while True:
        level = levels[-1]
        for value in level.pending:
            budget -= 1
            if budget < 0:
                m.bad("too_many_values", "shared containers make the content many times the size of the file")
            if type(value) is ArrayRef and level.has_names:  # as nearly all are
                level.done.append(value)
                continue
            if isinstance(value, (dict, list, tuple)):
                if len(levels) > MAX_NESTING:
                    _refuse_nesting(m, levels)
                levels.append(_Level(value))
                break
            level.add(m, _leaf(m, value))
        else:
            levels.pop()
            if not levels:
                return level.done[0]
            levels[-1].add(m, level.result())


def _refuse_nesting(m: Machine, levels: list[_Level]) -> NoReturn:
    if len({id(level.source) for level in levels}) < len(levels):
        m.bad("cyclic", "a container contains itself")
    m.bad("nesting_too_deep", f"containers nested more than {MAX_NESTING} deep")


def _leaf(m: Machine, value: object) -> object:
    if isinstance(value, _Array):
        if value.ref is None:
            m.bad("bad_array", "an array without a state")
        return value.ref
    if isinstance(value, _Blob):
        return _loose_bytes(m, value)
    if isinstance(value, (Global, NumpyDtype)):
        m.bad("bad_value", "a type stands where a value should be")
    return value


def _loose_bytes(m: Machine, blob: _Blob) -> bytes:
    """Read a bytes value that is not the payload of an array."""
    if blob.mutable:
        m.bad("bad_value", "a bytearray that is not the payload of an array")
    if blob.data is None:
        m.count_text(blob.nbytes)
        blob.data = m.window.read_at(blob.byte_offset, blob.nbytes)
    return blob.data


# ----------------------------------------------------------------------------------------------- split arrays


def _rejoined(m: Machine, root: object) -> object:
    """Join every split array under its own key, at the position of its first part."""
    if not isinstance(root, dict) or BIG_PARAM_INFO not in root:
        return root
    table = root[BIG_PARAM_INFO]
    if not isinstance(table, dict):
        m.bad("bad_split", f"{BIG_PARAM_INFO} is not a table")
    owner: dict[str, str] = {}
    joined: dict[str, SplitArray] = {}
    for key, entry in table.items():
        if not isinstance(key, str) or key in root:
            m.bad("bad_split", f"the split array {shown_text(str(key))} is also stored whole")
        names, shape = _split_entry(m, key, entry)
        for name in names:
            if name in owner:
                m.bad("bad_split", f"{shown_text(name)} is a part of two arrays")
            owner[name] = key
        joined[key] = _split_array(m, key, [root.get(name) for name in names], shape)
    out: dict[object, object] = {}
    for key, value in root.items():
        if key in owner:
            out.setdefault(owner[key], joined[owner[key]])
        elif key != BIG_PARAM_INFO:
            out[key] = value
    return out


def _split_entry(m: Machine, key: str, entry: object) -> tuple[list[str], tuple[int, ...]]:
    """Read ``{"OriginShape": shape, "slices": [part keys]}``."""
    if isinstance(entry, dict) and set(entry) == {"OriginShape", "slices"}:
        names, shape = entry["slices"], entry["OriginShape"]
        if (
            isinstance(names, list)
            and names
            and all(isinstance(name, str) for name in names)
            and is_shape(shape)
        ):
            return names, shape
    m.bad("bad_split", f"the entry of the split array {shown_text(key)} is not of the known form")


def _split_array(m: Machine, key: str, values: list[object], shape: tuple[int, ...]) -> SplitArray:
    parts = tuple(part for part in values if isinstance(part, ArrayRef) and len(part.shape) == 1)
    if len(parts) != len(values) or len({part.dtype for part in parts}) != 1:
        m.bad(
            "bad_split",
            f"the split array {shown_text(key)} lacks a part, or its parts are not 1-D of one dtype",
        )
    total = sum(part.shape[0] for part in parts)
    if total != prod(shape):
        m.bad(
            "bad_split", f"the parts of {shown_text(key)} hold {total} elements, {shape} needs {prod(shape)}"
        )
    return SplitArray(parts, shape)
