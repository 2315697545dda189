"""Locate the tensors of a safetensors file, and lay out new files.

*Reading.* :func:`parse_safetensors` reads the header by ranges and checks all of it before using any of it. Every
tensor then is an :class:`~.paddle_pickle.ArrayRef`, a byte range of the file, as in all other formats. The tensors must
tile the file without holes or overlaps, as the safetensors library requires too; a duplicate key, which it accepts, is
an error here.

*Writing.* :func:`encode_safetensors` lays out a file around tensors that have not been read yet, byte for byte as the
safetensors library (0.8.0) would write it.

*Index files.* :func:`parse_index` and :func:`format_index` handle ``*.safetensors.index.json``, which says which of
several files holds which key.

The format: 8 bytes length of the header, the header as JSON, the payloads (safetensors ``README.md``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Final

from paddle_reshard.pipeline.core.errors import FormatError
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json
from paddle_reshard.storage.files.mistaken import BEGIN_BYTES, in_place_of
from paddle_reshard.storage.files.paddle_pickle import ArrayRef, is_file_name, shown_text, truncated
from paddle_reshard.storage.files.paddle_pickle_writer import EncodedFile

MAX_HEADER_BYTES: Final = 100_000_000
"""Longest header; the safetensors library has the same limit."""
MAX_INDEX_BYTES: Final = 1 << 28
"""Longest index file: a million keys of 200 bytes."""
MAX_NAME_BYTES: Final = 1 << 16
"""Longest key or metadata value."""

_LENGTH_BYTES: Final = 8
_ALIGNMENT_BYTES: Final = 8
_MAX_RANK: Final = 64
_MAX_DIMENSION: Final = 1 << 63
_METADATA: Final = "__metadata__"

TAGS: Final[Mapping[str, str]] = {
    "U64": "u8", "I64": "i8", "F64": "f8", "C64": "c8", "F32": "f4", "U32": "u4", "I32": "i4",
    "BF16": "u2", "F16": "f2", "U16": "u2", "I16": "i2", "I8": "i1", "U8": "u1", "BOOL": "b1",
}  # fmt: skip
"""Tag in the header → numpy code of the stored bytes, in the order in which the library lays tensors out.

``U16`` is how files written through numpy from Paddle tensors tag bfloat16 (Paddle 3.3.1
``flex_checkpoint/dcp/utils.py:480-490`` reads both as bfloat16). The 8-bit and smaller floats are left out:
numpy has no code for them (see :data:`FP8_TAG`).
"""
FP8_TAG: Final = "F8_E4M3"
"""Tag of 8-bit floats with 4 bits of exponent, which only a source that dequantises them understands."""
_ITEM_BYTES: Final[Mapping[str, int]] = {**{tag: int(code[1:]) for tag, code in TAGS.items()}, FP8_TAG: 1}
_RANK_OF_TAG: Final[Mapping[str, float]] = {
    **{tag: rank for rank, tag in enumerate(TAGS)},
    FP8_TAG: tuple(TAGS).index("I8") - 0.5,
}
"""The library lays out 8-bit floats before 8-bit integers."""


@dataclass(frozen=True, slots=True)
class SafetensorsPayload:
    """The header of one file."""

    tensors: Mapping[str, ArrayRef]
    """Key → array, in the order of their bytes; all in C order, with ``name`` ``None``."""
    tags: Mapping[str, str]
    """Key → dtype tag as in the header, a key of :data:`TAGS`."""
    metadata: Mapping[str, str]
    """``__metadata__``; empty if the file has none."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A slot for a tensor whose bytes are written later."""

    slot: int
    """The caller's number of the slot."""
    key: str
    """Its key in the file."""
    tag: str
    """Dtype, one of :data:`TAGS` or :data:`FP8_TAG`."""
    shape: tuple[int, ...]
    """Extents, in elements; the payload is little-endian in C order."""

    @property
    def nbytes(self) -> int:
        """Size of the payload in bytes."""
        return prod(self.shape) * _ITEM_BYTES[self.tag]


@dataclass(frozen=True, slots=True)
class Index:
    """An index file: which file holds which key."""

    weight_map: Mapping[str, str]
    """Key → name of a file next to the index file. If several files hold slices of a key, any of them."""
    metadata: Mapping[str, object]
    """``metadata``: ``total_size`` in bytes, and further entries of the writer."""
    extra: Mapping[str, object]
    """Further entries, such as ``master_weights`` in the index of an optimizer."""


# ---------------------------------------------------------------------------------------------------- reading


def parse_safetensors(
    read: Callable[[int, int], bytes], size_bytes: int, path: str, fp8: bool = False
) -> SafetensorsPayload:
    """Index one file by reading its header.

    ``read(byte_offset, nbytes)`` returns exactly ``nbytes`` bytes, and is called twice for a sound file; ``path`` is
    for messages only. ``fp8`` allows 8-bit floats, :data:`FP8_TAG`, whose arrays then have the code ``u1``.

    Raises
    ------
    FormatError
        If it is truncated, gives a wrong length, contradicts itself, or is something else. ``reason`` says which.
    """
    try:
        return _parse(read, size_bytes, path, fp8)
    except FormatError:
        begin = _read(read, 0, min(size_bytes, BEGIN_BYTES), path)
        if (mistaken := in_place_of(begin, size_bytes)) is None:
            raise
        raise FormatError("another_file", path, None, mistaken) from None


def _parse(read: Callable[[int, int], bytes], size_bytes: int, path: str, fp8: bool) -> SafetensorsPayload:
    if size_bytes < _LENGTH_BYTES:
        raise FormatError("truncated", path, 0, f"{size_bytes} bytes are less than a safetensors header")
    header_bytes = int.from_bytes(_read(read, 0, _LENGTH_BYTES, path), "little")
    if header_bytes > MAX_HEADER_BYTES:
        detail = f"announces a header of {header_bytes} bytes, at most {MAX_HEADER_BYTES} are read"
        raise FormatError("header_too_long", path, 0, detail)
    start = _LENGTH_BYTES + header_bytes
    if start > size_bytes:
        raise FormatError("length_beyond_end", path, 0, truncated(size_bytes, start))
    header = _json_object(_read(read, _LENGTH_BYTES, header_bytes, path), path, _LENGTH_BYTES)
    metadata = header.pop(_METADATA, {})
    _check_metadata(metadata, path)
    codes = {**TAGS, FP8_TAG: "u1"} if fp8 else TAGS
    entries = [(key, *_entry(key, value, start, path, codes)) for key, value in header.items()]
    entries.sort(key=lambda item: (item[2].byte_offset, item[2].nbytes))
    _check_tiling([(key, ref) for key, _, ref in entries], start, size_bytes, path)
    return SafetensorsPayload(
        {key: ref for key, _, ref in entries}, {key: tag for key, tag, _ in entries}, metadata
    )


def is_safetensors(begin: bytes, size_bytes: int) -> bool:
    r"""Whether a file is a safetensors file, by its first nine bytes or more; its name may say otherwise.

    They are the length of the header, and the brace with which that begins. A pickle of Paddle's begins with a protocol
    and opcodes that are no length within any file.

    >>> is_safetensors((2).to_bytes(8, "little") + b"{}", 10), is_safetensors(b"\x80\x02}q\x00(X\x01\x00", 10)
    (True, False)
    """
    length, brace = begin[:_LENGTH_BYTES], begin[_LENGTH_BYTES : _LENGTH_BYTES + 1]
    return brace == b"{" and int.from_bytes(length, "little") <= size_bytes - _LENGTH_BYTES


def _read(read: Callable[[int, int], bytes], byte_offset: int, nbytes: int, path: str) -> bytes:
    data = read(byte_offset, nbytes) if nbytes else b""
    if len(data) != nbytes:
        detail = f"asked for {nbytes} bytes, the store returned {len(data)}"
        raise FormatError("short_read", path, byte_offset, detail)
    return data


def _json_object(data: bytes, path: str, byte_offset: int) -> dict[str, Any]:
    """Parse JSON whose root is an object."""
    if data[:1] != b"{":
        raise FormatError("bad_json", path, byte_offset, "the JSON does not begin with {")
    try:
        root = parse_json(data)
    except JsonError as error:
        position = byte_offset + (error.byte_offset or 0)
        raise FormatError(error.reason, path, position, error.detail) from None
    if not isinstance(root, dict):
        raise FormatError("bad_json", path, byte_offset, "the JSON is not one object")
    return root


def _check_metadata(metadata: object, path: str) -> None:
    if not isinstance(metadata, dict):
        raise FormatError("bad_metadata", path, _LENGTH_BYTES, f"{_METADATA} is not a table")
    for key, value in metadata.items():
        _check_text(key, path)
        if not isinstance(value, str):
            detail = f"{_METADATA} of {shown_text(key)} is not text"
            raise FormatError("bad_metadata", path, _LENGTH_BYTES, detail)
        _check_text(value, path)


def _check_text(value: str, path: str) -> None:
    try:
        nbytes = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise FormatError(
            "bad_text", path, _LENGTH_BYTES, f"half a character in {shown_text(value)}"
        ) from None
    if nbytes > MAX_NAME_BYTES:
        detail = f"a text of {nbytes} bytes, at most {MAX_NAME_BYTES} are read"
        raise FormatError("value_too_long", path, _LENGTH_BYTES, detail)


def _entry(key: str, value: object, start: int, path: str, codes: Mapping[str, str]) -> tuple[str, ArrayRef]:
    """Tag and array of a tensor; ``start`` is the byte offset of the first payload, ``codes`` those of known tags."""
    _check_text(key, path)
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        detail = f"the entry of {shown_text(key)} is not {{dtype, shape, data_offsets}}"
        raise FormatError("bad_entry", path, _LENGTH_BYTES, detail)
    tag, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(tag, str) or tag not in codes:
        detail = f"{shown_text(key)} has the dtype {shown_text(str(tag))}; known: {', '.join(codes)}"
        raise FormatError("unsupported_dtype", path, _LENGTH_BYTES, detail)
    if not _is_sizes(shape) or len(shape) > _MAX_RANK:
        detail = f"the shape of {shown_text(key)} is not a list of sizes"
        raise FormatError("bad_shape", path, _LENGTH_BYTES, detail)
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        detail = f"the data_offsets of {shown_text(key)} are not a range"
        raise FormatError("bad_offsets", path, _LENGTH_BYTES, detail)
    nbytes, expected = offsets[1] - offsets[0], prod(shape) * int(codes[tag][1:])
    if nbytes != expected:
        detail = f"{shown_text(key)} of shape {tuple(shape)} {tag} holds {nbytes} bytes, expected {expected}"
        raise FormatError("size_mismatch", path, _LENGTH_BYTES, detail)
    return tag, ArrayRef(start + offsets[0], codes[tag], tuple(shape), None, None)


def _is_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < _MAX_DIMENSION for v in value)


def _check_tiling(tensors: Iterable[tuple[str, ArrayRef]], start: int, size_bytes: int, path: str) -> None:
    """Prove that the payloads follow one another from the header to the end of the file."""
    for key, ref in tensors:
        if ref.byte_offset != start:
            reason = "hole" if ref.byte_offset > start else "overlap"
            detail = f"{shown_text(key)} begins at byte {ref.byte_offset}, the bytes before it end at {start}"
            raise FormatError(reason, path, ref.byte_offset, detail)
        start += ref.nbytes
    if start > size_bytes:
        raise FormatError("truncated", path, size_bytes, truncated(size_bytes, start))
    if start < size_bytes:
        raise FormatError("trailing_bytes", path, start, f"{size_bytes - start} bytes after the last tensor")


# ---------------------------------------------------------------------------------------------------- writing


def encode_safetensors(slots: Sequence[TensorSlot], metadata: Mapping[str, str]) -> EncodedFile:
    """Lay out a file as the safetensors library would.

    Tensors stand by dtype (the order of :data:`TAGS`, with FP8 before 8-bit integers, so every payload is aligned to
    its item size), then by key. The header is compact JSON, filled with spaces up to a multiple of 8 bytes. One
    literal, the header; slots in file order. ``metadata`` is ``__metadata__``, as ``{"format": "pt"}``; if empty, the
    file has none.

    Raises
    ------
    ValueError
        If the format, or :func:`parse_safetensors`, does not support a tag, shape or key; or a key is duplicate.
    """
    for slot in slots:
        _check_slot(slot)
    if len({slot.key for slot in slots}) != len(slots):
        raise ValueError("two tensors have the same key")
    ordered = sorted(slots, key=lambda slot: (_RANK_OF_TAG[slot.tag], slot.key))
    offsets = tuple(accumulate((slot.nbytes for slot in ordered), initial=0))
    header = _header(ordered, offsets, metadata)
    start = len(header)
    return EncodedFile(
        start + offsets[-1],
        ((0, header),),
        tuple((slot.slot, start + at, slot.nbytes) for slot, at in zip(ordered, offsets[:-1], strict=True)),
    )


def _header(slots: Sequence[TensorSlot], offsets: Sequence[int], metadata: Mapping[str, str]) -> bytes:
    """The bytes in front of the tensors. ``offsets``: where each begins behind them, and where the last one ends."""
    entries: dict[str, object] = {_METADATA: dict(metadata)} if metadata else {}
    for slot, span in zip(slots, pairwise(offsets), strict=True):
        entries[slot.key] = {"dtype": slot.tag, "shape": list(slot.shape), "data_offsets": span}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(text)} bytes, at most {MAX_HEADER_BYTES} can be read back")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _check_slot(slot: TensorSlot) -> None:
    if slot.tag not in _ITEM_BYTES:
        raise ValueError(f"{slot.key!r}: dtype tag {slot.tag!r}; known: {', '.join(TAGS)}")
    if not _is_sizes(list(slot.shape)) or len(slot.shape) > _MAX_RANK:
        raise ValueError(f"{slot.key!r}: {slot.shape!r} is not a shape")
    if slot.key == _METADATA or len(slot.key.encode("utf-8")) > MAX_NAME_BYTES:
        raise ValueError(f"{shown_text(slot.key)} cannot be the key of a tensor")


# ------------------------------------------------------------------------------------------------ index files


def parse_index(data: bytes, path: str) -> Index:
    """Read a ``*.safetensors.index.json``.

    Raises
    ------
    FormatError
        It is not such a file: ``weight_map`` is missing, a key appears twice, or a file name is a path.
    """
    if len(data) > MAX_INDEX_BYTES:
        detail = f"an index of {len(data)} bytes, at most {MAX_INDEX_BYTES} are read"
        raise FormatError("header_too_long", path, 0, detail)
    if mistaken := in_place_of(data[:BEGIN_BYTES], len(data)):
        raise FormatError("another_file", path, None, mistaken)
    root = _json_object(data, path, 0)
    weight_map, metadata = root.pop("weight_map", None), root.pop("metadata", {})
    if not isinstance(weight_map, dict):
        raise FormatError("bad_index", path, None, "has no weight_map")
    if not isinstance(metadata, dict):
        raise FormatError("bad_index", path, None, "its metadata is not a table")
    for key, name in weight_map.items():
        _check_text(key, path)
        if not isinstance(name, str) or not is_file_name(name):
            detail = (
                f"the file of {shown_text(key)} is {shown_text(str(name))}, which is not the name of a file"
            )
            raise FormatError("bad_index", path, None, detail)
        _check_text(name, path)
    return Index(weight_map, metadata, root)


def format_index(index: Index) -> bytes:
    """Bytes of an index file that :func:`parse_index`, PaddleFormers and transformers read.

    ``metadata`` comes first, then ``weight_map``, as in the files that PaddleNLP and PaddleFormers write;
    their order within is kept.

    >>> print(format_index(Index({"w": "model.safetensors"}, {"total_size": 8}, {})).decode())
    {
        "metadata": {
            "total_size": 8
        },
        "weight_map": {
            "w": "model.safetensors"
        }
    }
    """
    root = {"metadata": dict(index.metadata), "weight_map": dict(index.weight_map), **index.extra}
    return json.dumps(root, ensure_ascii=False, indent=4).encode("utf-8")
