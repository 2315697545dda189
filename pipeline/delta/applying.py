"""``apply_delta``: recreate the new checkpoint from the old one and a delta.

Every block is checked twice: the old bytes must be those that the delta was made from, and the new bytes must have the
recorded checksum. A part is written when all of its blocks are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from paddle_reshard.pipeline.convert.manifest import parse_manifest
from paddle_reshard.pipeline.convert.options import takes
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.errors import CheckpointError, MemoryBudgetError
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.delta.batches import (
    BATCH_BYTES,
    batches,
    batches_at_a_time,
    read_at,
    read_ranges,
)
from paddle_reshard.pipeline.delta.document import (
    DATA,
    DOCUMENT,
    TEXT_MEMORY_BYTES,
    Block,
    Document,
    delta_id,
    parse_document,
)
from paddle_reshard.pipeline.delta.making import smallest_parts
from paddle_reshard.pipeline.delta.options import DeltaOptions
from paddle_reshard.pipeline.delta.packing import unpack
from paddle_reshard.pipeline.delta.reports import ApplyReport
from paddle_reshard.pipeline.delta.writing import Job, Part, manifest_of
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from paddle_reshard.storage.checksum import ALGORITHM, checksum
from paddle_reshard.storage.formats.manifest import own_manifest
from paddle_reshard.storage.store import Receipt, Source


@takes(DeltaOptions)
def apply(
    old: PathLike,
    delta: PathLike,
    target: PathLike,
    *,
    observe: Observer = ignore_events,
    **options: Unpack[DeltaOptions],
) -> ApplyReport:
    """Recreate the newer checkpoint from the older one and a delta: the same files, byte for byte.

    If the new checkpoint was not written by this package and has no manifest, the target gets one,
    ``paddle_reshard.json``, in addition.

    Parameters
    ----------
    old
        Folder or URL of the checkpoint that the delta was made from; it may have been moved.
    delta
        Folder or URL of the delta.
    target
        Folder or URL of the new checkpoint.
    observe
        Called with events of progress, as by :func:`convert`.
    options
        :class:`DeltaOptions`.

    Raises
    ------
    CheckpointError
        If ``old`` is not the checkpoint that the delta was made from, or the delta is damaged.
    ReshardError
        If one of the two cannot be read or changes during the run, or the target cannot be written.
    """
    job = Job.open({"OLD/": old, "DELTA/": delta}, target, options, observe)
    one, changes = job.sources.values()
    document, plan_id = _read_document(changes, job.budget_bytes)
    _check_sizes(one, document)
    files, start = {}, 0
    for path, blocks in document.files.items():
        files[path] = _File(path, blocks, start)
        start += files[path].stored_bytes
    maker = _Maker(one, changes, document.old_location)
    sizes = {path: file.nbytes for path, file in files.items() if path != MANIFEST}
    describe: Callable[[Sequence[Receipt]], bytes] = partial(
        manifest_of, plan_id, sizes, one, facts={"applied_delta": plan_id}
    )
    if MANIFEST in files:
        manifest = _small(maker, files[MANIFEST], job.budget_bytes)
        plan_id = str((own_manifest(manifest) or {}).get("plan_id") or plan_id)
        describe = partial(_verbatim, manifest)
    least = {path: smallest_parts(job.target, size) for path, size in sizes.items()}
    blocks_held = sum(len(file.blocks) for file in files.values())
    at_a_time = batches_at_a_time(
        job.location, blocks_held, max(least.values(), default=BATCH_BYTES), job.budget_bytes
    )
    pieces = {piece.part: piece for path in sizes for piece in files[path].cut(least[path])}

    written = job.write(
        sizes,
        tuple(pieces),
        lambda part: maker.make(pieces[part]),
        plan_id,
        describe,
        at_a_time,
    )
    return ApplyReport(
        one.location,
        changes.location,
        job.target.location,
        len(files),
        written.bytes,
        written.resumed_bytes,
        job.seconds,
    )


apply_delta = apply
"""The same, by its former name."""


def _verbatim(manifest: bytes, receipts: Sequence[Receipt]) -> bytes:
    """The new checkpoint's own manifest, whatever was written."""
    return manifest


def _read_document(delta: Source, budget_bytes: int) -> tuple[Document, str]:
    """The contents of ``delta.json``, and the identifier of the delta.

    Raises
    ------
    CheckpointError
        If the folder is not a delta, or ``delta.json`` is damaged.
    MemoryBudgetError
        If ``delta.json`` is too long.
    """
    sizes = delta.sizes()
    for path in (MANIFEST, DOCUMENT, DATA):
        if path not in sizes:
            raise CheckpointError(f"{delta.location}: has no {path}: not a delta, or not a complete one")
    needed_bytes = FOOTPRINT_BYTES + TEXT_MEMORY_BYTES * max(sizes[DOCUMENT], sizes[MANIFEST])
    if needed_bytes > budget_bytes:
        raise MemoryBudgetError(f"{delta.location}/{DOCUMENT}", budget_bytes, needed_bytes, at_least=True)
    where = f"{delta.location}/{MANIFEST}"
    manifest = parse_manifest(delta.read(MANIFEST, 0, sizes[MANIFEST]), where)
    if manifest.changed:
        raise CheckpointError(f"{where}: {manifest.changed}")
    text = delta.read(DOCUMENT, 0, sizes[DOCUMENT])
    parts = [part for part in manifest.parts if part.path == DOCUMENT]
    found = [checksum(text[part.byte_offset : part.byte_offset + part.nbytes]) for part in parts]
    if manifest.files.get(DOCUMENT) != len(text) or found != [part.checksum for part in parts]:
        raise CheckpointError(
            f"{delta.location}/{DOCUMENT}: is damaged: {len(text)} bytes, {ALGORITHM} {', '.join(found)}; the manifest "
            f"says {manifest.files.get(DOCUMENT)} bytes, {', '.join(str(part.checksum) for part in parts)}"
        )
    return parse_document(text, f"{delta.location}/{DOCUMENT}", sizes[DATA]), delta_id(text)


def _check_sizes(old: Source, document: Document) -> None:
    """Refuse a checkpoint whose files cannot be those that the delta was made from."""
    sizes = old.sizes()
    for path, size_bytes in document.old_files.items():
        if sizes.get(path) != size_bytes:
            there = f"has {sizes[path]} bytes" if path in sizes else "is missing"
            raise CheckpointError(
                f"{old.location}/{path}: {there}; the delta was made from {size_bytes} bytes in the checkpoint "
                f"{document.old_location}; pass that one as OLD"
            )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Blocks of a new file that are written as one part, and the offset of their stored bytes in ``delta.bin``."""

    part: Part
    blocks: tuple[Block, ...]
    stored_start: int


@dataclass(frozen=True, slots=True)
class _File:
    """A new file, and the offset of its stored bytes in ``delta.bin``."""

    path: str
    blocks: tuple[Block, ...]
    stored_start: int

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def stored_bytes(self) -> int:
        """Size of its stored bytes."""
        return sum(block.stored_bytes for block in self.blocks)

    def cut(self, part_bytes: int) -> Iterator[_Piece]:
        """Pieces of at least ``part_bytes`` bytes, except the last."""
        stored_start = self.stored_start
        for start, blocks in batches(self.blocks, part_bytes):
            part = Part(self.path, start, sum(block.nbytes for block in blocks))
            yield _Piece(part, blocks, stored_start)
            stored_start += sum(block.stored_bytes for block in blocks)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes new bytes."""

    old: Source
    delta: Source
    made_from: str
    """Where the old checkpoint was when the delta was made."""

    def make(self, piece: _Piece) -> memoryview:
        """The new bytes of a piece.

        Raises
        ------
        CheckpointError
            If the old bytes are not those that the delta was made from, or the new ones have another checksum.
        """
        new = memoryview(bytearray(piece.part.nbytes))
        stored_bytes = sum(block.stored_bytes for block in piece.blocks)
        stored = read_at(self.delta, DATA, piece.stored_start, stored_bytes)
        ranges = [None if b.old_path is None else (b.old_path, b.old_start, b.nbytes) for b in piece.blocks]
        at = stored_at = 0
        for block, before in zip(piece.blocks, read_ranges(self.old, ranges), strict=True):
            made = new[at : at + block.nbytes]
            there = stored[stored_at : stored_at + block.stored_bytes]
            if before is not None:
                self._check_old(block, before)
            try:
                unpack(there, block.coding, block.written_bytes, before, block.item_bytes, made)
                wrong = "" if checksum(made) == block.checksum else f"{ALGORITHM} of the new bytes is wrong"
            except ValueError as error:
                wrong = str(error)
            if wrong:
                start, first = piece.part.start + at, piece.stored_start + stored_at
                raise CheckpointError(
                    f"{self.delta.location}/{DATA}: is damaged in bytes {first} to {first + block.stored_bytes}, which "
                    f"are for bytes {start} to {start + block.nbytes} of {piece.part.path}: {wrong}"
                )
            at, stored_at = at + block.nbytes, stored_at + block.stored_bytes
        return new

    def _check_old(self, block: Block, before: memoryview) -> None:
        found = checksum(before)
        if found != block.old_checksum:
            raise CheckpointError(
                f"{self.old.location}/{block.old_path}: bytes {block.old_start} to {block.old_start + block.nbytes} "
                f"are not those that the delta was made from: {ALGORITHM} is {found}, it was {block.old_checksum} in "
                f"{self.made_from}; pass that checkpoint as OLD"
            )


def _small(maker: _Maker, file: _File, budget_bytes: int) -> bytes:
    """The whole contents of a file."""
    needed_bytes = FOOTPRINT_BYTES + TEXT_MEMORY_BYTES * file.nbytes
    if needed_bytes > budget_bytes:
        raise MemoryBudgetError(file.path, budget_bytes, needed_bytes)
    return b"".join(bytes(maker.make(piece)) for piece in file.cut(max(1, file.nbytes)))
