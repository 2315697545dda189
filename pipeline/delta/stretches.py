"""Choose the bytes of old files with which those of a new file are compared.

A tensor is compared with the tensor of the same key: in the old file of the same name, or, for safetensors, in any old
file. Bytes between tensors, and files without tensors, are compared with those at the same offset.

The choice affects only the size of a delta: each block records what it was compared with, and the checksum of its new
bytes. A file whose tensors cannot be located is compared as plain bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from paddle_reshard.pipeline.core.errors import FormatError
from paddle_reshard.pipeline.delta.coding import BLOCK_BYTES, ITEM_BYTES
from paddle_reshard.storage.formats.paddle_pickle import ITEM_BYTES as BYTES_OF_CODE
from paddle_reshard.storage.formats.paddle_pickle import ArrayRef, SplitArray, parse_pickle
from paddle_reshard.storage.formats.safetensors import parse_safetensors

_PICKLES = (".pdparams", ".pdopt", ".distcp")
_SAFETENSORS = ".safetensors"


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor, or a part of one, where a file holds it."""

    key: str
    start: int
    nbytes: int
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Base:
    """Where the bytes lie that others are compared with."""

    path: str
    start: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive bytes of a new file, and what they are compared with. Stretches tile their file."""

    nbytes: int
    item_bytes: int
    """Size of the integers that are compared; ``nbytes`` is a multiple of it."""
    base: Base | None
    """``None``: nothing to compare them with."""


def is_safetensors(path: str) -> bool:
    """Whether a file holds tensors whose keys mean the same in every file of its checkpoint."""
    return path.endswith(_SAFETENSORS)


def find_arrays(read: Callable[[int, int], bytes], size_bytes: int, path: str) -> tuple[Array, ...]:
    """The tensors of a file, in the order of their bytes; empty if they cannot be located."""
    try:
        if is_safetensors(path):
            tensors = parse_safetensors(read, size_bytes, path).tensors
            found = [_array(key, ref) for key, ref in tensors.items()]
        elif path.endswith(_PICKLES):
            found = list(_leaves(parse_pickle(read, size_bytes, path).root))
        else:
            return ()
    except FormatError:
        return ()
    return tuple(sorted(found, key=lambda array: (array.start, array.nbytes)))


def _leaves(root: object) -> Iterator[Array]:
    """The arrays of a tree of dicts, lists and tuples."""
    left: list[tuple[str, object]] = [("", root)]
    while left:
        key, value = left.pop()
        if isinstance(value, ArrayRef):
            yield _array(key, value)
        elif isinstance(value, SplitArray):
            left += [(f"{key}\0{number}", part) for number, part in enumerate(value.parts)]
        elif isinstance(value, dict):
            left += [(f"{key}\0{name}", item) for name, item in value.items()]
        elif isinstance(value, list | tuple):
            left += [(f"{key}\0{number}", item) for number, item in enumerate(value)]


def _array(key: str, ref: ArrayRef) -> Array:
    item_bytes = BYTES_OF_CODE[ref.dtype]
    return Array(key, ref.byte_offset, ref.nbytes, item_bytes if item_bytes in ITEM_BYTES else 1)


Find = Callable[[str], "tuple[str, Array] | None"]
"""Key of a new tensor → the old file that has it, and where."""


def stretches_of(
    path: str, size_bytes: int, arrays: Iterable[Array], find: Find, old_size_bytes: int | None
) -> list[Stretch]:
    """What each byte of a new file is compared with.

    Parameters
    ----------
    arrays
        The tensors of the file, in the order of their bytes.
    find
        Finds the tensor of a key in the old checkpoint.
    old_size_bytes
        Size of the old file of the same name; ``None`` if there is none.
    """
    made: list[Stretch] = []
    at = 0
    beside: int | None = None if old_size_bytes is None else 0
    """Where the old file of the same name goes on like this one, as far as anybody knows."""
    for array in arrays:
        if array.start < at or not array.nbytes:
            continue  # bytes that several tensors share
        _extend(made, array.start - at, 1, _within(path, beside, old_size_bytes))
        old = find(array.key)
        if old is None or old[1].item_bytes != array.item_bytes:
            _extend(made, array.nbytes, array.item_bytes, None)
            beside = None
        else:
            _extend(made, array.nbytes, array.item_bytes, (Base(old[0], old[1].start), old[1].nbytes))
            beside = old[1].start + old[1].nbytes if old[0] == path else None
        at = array.start + array.nbytes
    _extend(made, size_bytes - at, 1, _within(path, beside, old_size_bytes))
    return made


def _within(path: str, start: int | None, size_bytes: int | None) -> tuple[Base, int] | None:
    """What is left of an old file."""
    return None if start is None or size_bytes is None else (Base(path, start), size_bytes - start)


def _extend(made: list[Stretch], nbytes: int, item_bytes: int, old: tuple[Base, int] | None) -> None:
    """Add bytes that are compared with old ones, as many as there are, the others with nothing."""
    base, there = (None, 0) if old is None else (old[0], min(nbytes, old[1]))
    for count, of in ((there, base), (nbytes - there, None)):
        if not count:
            continue
        last = made[-1] if made else None
        if last is not None and last.item_bytes == item_bytes and _follows(last, of):
            made[-1] = replace(last, nbytes=last.nbytes + count)
        else:
            made.append(Stretch(count, item_bytes, of))


def _follows(last: Stretch, base: Base | None) -> bool:
    if last.base is None or base is None:
        return last.base is base
    return base == Base(last.base.path, last.base.start + last.nbytes)


def cut(stretches: Iterable[Stretch], block_bytes: int = BLOCK_BYTES) -> Iterator[Stretch]:
    """Stretches cut into blocks; ``block_bytes`` is a multiple of every size of integer."""
    for stretch in stretches:
        for start in range(0, stretch.nbytes, block_bytes):
            base = None if stretch.base is None else replace(stretch.base, start=stretch.base.start + start)
            yield Stretch(min(block_bytes, stretch.nbytes - start), stretch.item_bytes, base)
