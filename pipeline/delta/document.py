"""``delta.json``: the blocks that make up the files of the new checkpoint. ``docs/deltas.md`` describes it.

A delta may come from anywhere, so all its sizes and offsets are checked here, before anything is allocated or opened:
blocks cover their files without gaps, and stored bytes cover ``delta.bin``; a block is small, packed and unpacked; old
blocks are inside their files; paths lead to a file of a checkpoint and nowhere else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from paddle_reshard.pipeline.core.errors import FormatError
from paddle_reshard.pipeline.core.file_names import DELTA, TENSOR_FOLDERS
from paddle_reshard.pipeline.delta.coding import BLOCK_BYTES, ITEM_BYTES, Coding, most_written_bytes
from paddle_reshard.storage.formats.strict_json import JsonError, parse_json
from paddle_reshard.storage.formats.typed_json import Bounds, EntryError, shown, typed

DOCUMENT: Final = DELTA
DATA: Final = "delta.bin"
FORMAT: Final = "paddle-reshard delta"
GENERATION: Final = 1
BLOCK_MEMORY_BYTES: Final = 1 << 10
"""The most memory that a block takes while ``delta.json`` is read or written, its text included."""
TEXT_MEMORY_BYTES: Final = 16
"""The most memory that a byte of ``delta.json`` takes while it is read."""

_Bytes = Annotated[int, Bounds(0)]


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive bytes of a new file."""

    nbytes: int
    item_bytes: int
    """Size of the integers that were compared."""
    old_path: str | None
    """File of the old checkpoint that it was compared with."""
    old_start: int
    coding: Coding
    stored_bytes: int
    """Size in ``delta.bin``."""
    written_bytes: int
    """Size when unpacked; equal to ``stored_bytes`` if it is not packed."""
    old_checksum: str
    """Checksum of the old block; empty without one."""
    checksum: str


@dataclass(frozen=True)
class Document:
    """Contents of ``delta.json``."""

    version: str
    """Version of this package that wrote it."""
    old_location: str
    """Where the old checkpoint was; only shown in messages, never opened."""
    old_files: Mapping[str, int]
    """File of the old checkpoint that blocks were compared with → size in bytes."""
    files: Mapping[str, tuple[Block, ...]]
    """File of the new checkpoint → blocks, in order."""

    @property
    def stored_bytes(self) -> int:
        """Size of ``delta.bin``."""
        return sum(block.stored_bytes for blocks in self.files.values() for block in blocks)

    def sizes(self) -> dict[str, int]:
        """File of the new checkpoint → size in bytes."""
        return {path: sum(block.nbytes for block in blocks) for path, blocks in self.files.items()}


@dataclass(frozen=True, slots=True)
class _Old:
    location: str
    files: Mapping[str, _Bytes]


@dataclass(frozen=True, slots=True)
class _Head:
    """Everything but the blocks, which are read one by one."""

    format: str
    generation: int
    version: str
    old: _Old
    files: Mapping[str, Any]
    OPEN: ClassVar = True


def format_document(document: Document) -> bytes:
    """The document as JSON, with a line per block."""
    head = {
        "format": FORMAT,
        "generation": GENERATION,
        "version": document.version,
        "old": {"location": document.old_location, "files": dict(document.old_files)},
        "files": None,
    }
    number = {path: index for index, path in enumerate(document.old_files)}
    lines = ",\n".join(_file_text(path, blocks, number) for path, blocks in document.files.items())
    return (json.dumps(head, indent=1)[: -len("null\n}")] + "{\n" + lines + "\n }\n}\n").encode()


def _file_text(path: str, blocks: tuple[Block, ...], number: Mapping[str, int]) -> str:
    rows = (json.dumps(_row(block, number), separators=(",", ":")) for block in blocks)
    return f"  {json.dumps(path)}: [" + ",".join(f"\n   {row}" for row in rows) + "]"


def _row(block: Block, number: Mapping[str, int]) -> list[Any]:
    old = -1 if block.old_path is None else number[block.old_path]
    return [
        *(block.nbytes, block.item_bytes, old, block.old_start),
        *(block.coding.value, block.stored_bytes, block.written_bytes, block.old_checksum, block.checksum),
    ]


def delta_id(document: bytes) -> str:
    """Identifier of a delta: a digest of ``delta.json``, which holds the checksums of all new blocks."""
    return hashlib.sha256(document).hexdigest()[:32]


def parse_document(data: bytes, path: str, data_bytes: int) -> Document:
    """Read ``delta.json``.

    Parameters
    ----------
    path
        Its location, for messages.
    data_bytes
        Size of ``delta.bin``.

    Raises
    ------
    FormatError
        If it is not what this package writes, or contradicts itself.
    """
    try:
        values = parse_json(data)
    except JsonError as error:
        raise FormatError("not_json", path, None, f"not valid JSON: {error}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise FormatError("not_a_delta", path, None, f"is no {FORMAT}")
    if values.get("generation") != GENERATION:
        generation = shown(values.get("generation"))
        detail = f"a delta of generation {generation}, this version reads {GENERATION}; use a newer version"
        raise FormatError("unknown_generation", path, None, detail)
    try:
        head = typed(values, _Head)
        old = list(head.old.files.items())
        files = {name: tuple(_blocks(name, rows, old)) for name, rows in head.files.items()}
    except EntryError as error:
        raise FormatError("damaged", path, None, f"not what a delta holds: {error}") from error
    document = Document(head.version, head.old.location, head.old.files, files)
    if document.stored_bytes != data_bytes:
        detail = f"{DATA} has {data_bytes} bytes, the blocks take {document.stored_bytes}"
        raise FormatError("damaged", path, None, detail)
    return document


def _blocks(name: str, rows: object, old: list[tuple[str, int]]) -> Iterator[Block]:
    folder, _, own = name.rpartition("/")
    if (folder and folder not in TENSOR_FOLDERS) or own in ("", ".", "..") or "\0" in own:
        raise EntryError("bad_path", f"{shown(name)} is not the path of a file of a checkpoint")
    if not isinstance(rows, list):
        raise EntryError("wrong_type", f"the blocks of {shown(name)} are {shown(rows)}, not a list")
    for number, row in enumerate(rows):
        nbytes, item_bytes, file, old_start, coding, stored, written, *checksums = typed(
            row, tuple[int, int, int, int, Coding, int, int, str, str]
        )
        if not -1 <= file < len(old):
            raise EntryError("bad_block", f"block {number} of {shown(name)}: there is no old file {file}")
        path, old_bytes = (None, 0) if file < 0 else old[file]
        block = Block(nbytes, item_bytes, path, old_start, coding, stored, written, *checksums)
        if reason := _objection(block, old_bytes):
            raise EntryError("bad_block", f"block {number} of {shown(name)}: {reason}")
        yield block


def _objection(block: Block, old_bytes: int) -> str:
    """What is wrong with a block, by its own numbers; ``old_bytes`` is the size of its old file."""
    nbytes, coding, stored, written = block.nbytes, block.coding, block.stored_bytes, block.written_bytes
    if min(block.old_start, stored, written) < 0:
        return "a number is negative"
    if block.item_bytes not in ITEM_BYTES or not 0 < nbytes <= BLOCK_BYTES or nbytes % block.item_bytes:
        return f"{nbytes} bytes of integers of {block.item_bytes}; at most {BLOCK_BYTES} are read"
    if (block.old_path is None) != (coding is Coding.WHOLE):
        return f"is {coding.value}, compared with {shown(block.old_path)}"
    if block.old_path is not None and block.old_start + nbytes > old_bytes:
        return f"lies beyond the end of {shown(block.old_path)}, which has {old_bytes} bytes"
    most = most_written_bytes(coding, nbytes)
    fits = 0 < written <= most if coding is Coding.SPARSE else written == most
    if not fits or stored > written or (stored == 0) != (written == 0):
        return f"{stored} bytes that become {written}, for {nbytes} that are {coding.value}"
    return ""
