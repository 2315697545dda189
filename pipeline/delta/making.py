"""``delta``: compare two checkpoints, block by block, and publish the difference.

A target needs the sizes of its files first, but the size of a compressed block is known only after compression. Blocks
are therefore collected in an unnamed temporary file, which needs no clean-up: next to a local target, otherwise in the
folder for temporary files (``TMPDIR``).
"""

from __future__ import annotations

import os
import tempfile
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from paddle_reshard.pipeline.convert.options import takes
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.errors import CheckpointError, MemoryBudgetError, TargetError
from paddle_reshard.pipeline.core.events import Observer, Progress, StepEnded, StepStarted, ignore_events
from paddle_reshard.pipeline.core.shown import readable_bytes
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.delta.batches import (
    BATCH_BYTES,
    batches,
    batches_at_a_time,
    in_order,
    read_at,
    read_ranges,
)
from paddle_reshard.pipeline.delta.coding import Coding
from paddle_reshard.pipeline.delta.document import (
    DATA,
    DOCUMENT,
    Block,
    Document,
    delta_id,
    format_document,
)
from paddle_reshard.pipeline.delta.options import DeltaOptions
from paddle_reshard.pipeline.delta.packing import Packed, pack
from paddle_reshard.pipeline.delta.reports import DeltaReport
from paddle_reshard.pipeline.delta.stretches import (
    Array,
    Stretch,
    cut,
    find_arrays,
    is_safetensors,
    stretches_of,
)
from paddle_reshard.pipeline.delta.writing import Job, Part, manifest_of
from paddle_reshard.pipeline.layouts.reading import Readable
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from paddle_reshard.storage.checksum import checksum
from paddle_reshard.storage.locate import absolute, is_local, local_path
from paddle_reshard.storage.os_errors import translated
from paddle_reshard.storage.store import OWN_PREFIX, Source, Target
from paddle_reshard.tasks.index import index_here

OLD, NEW = "OLD/", "NEW/"
"""Prefixes of the files of the two checkpoints in the identity of a run."""
ARRAY_MEMORY_BYTES = 1 << 9
"""Upper bound of the memory for each tensor during comparison, including its key."""


@takes(DeltaOptions)
def delta(
    old: PathLike,
    new: PathLike,
    target: PathLike,
    *,
    observe: Observer = ignore_events,
    **options: Unpack[DeltaOptions],
) -> DeltaReport:
    """Store the difference between two checkpoints, from which :func:`apply_delta` recreates ``new`` given ``old``.

    Every file of ``new`` is covered, byte for byte, whatever it holds. The delta is small if tensors with the same keys
    differ little.

    Parameters
    ----------
    old, new
        Two checkpoints or exports. Formats and topologies may differ, but the delta is then large.
    target
        Folder or URL of the delta.
    observe
        Called with events of progress, as by :func:`convert`.
    options
        :class:`DeltaOptions`.

    Raises
    ------
    ReshardError
        If one of the two cannot be read or changes during the run, or the target cannot be written.
    """
    return _make(Job.open({OLD: old, NEW: new}, target, options, observe))


def delta_of_one_model(
    old: PathLike, new: PathLike, target: PathLike, options: DeltaOptions, observe: Observer = ignore_events
) -> DeltaReport:
    """:func:`delta`, only if both have the same tensors.

    Raises
    ------
    CheckpointError
        If a tensor is in one of the two only, or has another size or dtype; in addition to those of :func:`delta`.
    """
    return _make(Job.open({OLD: old, NEW: new}, target, options, observe), one_model=True)


def _make(job: Job, one_model: bool = False) -> DeltaReport:
    """Compare, write and publish."""
    observe = job.observe
    one, two = job.sources.values()
    observe(StepStarted("compare", sum(_files(two).values())))
    stretches = _stretches(one, two, job.location, job.budget_bytes, one_model)
    compared = {path: tuple(cut(of_file)) for path, of_file in stretches.items()}
    blocks = sum(map(len, compared.values()))
    at_a_time = batches_at_a_time(job.location, blocks, BATCH_BYTES, job.budget_bytes)
    with _Spool(job.location, job.target.location) as spool:
        document = _compare(one, two, compared, spool, at_a_time, observe)
        text = format_document(document)
        sizes = {DATA: document.stored_bytes, DOCUMENT: len(text)}
        observe(StepEnded("compare", f"{readable_bytes(sum(sizes.values()))} to write"))
        plan_id = delta_id(text)

        def fill(part: Part) -> memoryview:
            if part.path == DOCUMENT:
                return memoryview(text)[part.start : part.start + part.nbytes]
            return spool.read(part.start, part.nbytes)

        written = job.write(
            sizes,
            [part for path, size in sizes.items() for part in _parts(job.target, path, size)],
            fill,
            plan_id,
            partial(manifest_of, plan_id, sizes, two, facts={"delta": {"old": document.old_location}}),
            at_a_time,
        )
    size_of = _sizes_by_coding(document)
    return DeltaReport(
        one.location,
        two.location,
        job.target.location,
        files=len(document.files),
        new_bytes=sum(size_of.values()),
        delta_bytes=sum(sizes.values()),
        same_bytes=size_of[Coding.SAME],
        compared_bytes=size_of[Coding.SPARSE] + size_of[Coding.DENSE],
        whole_bytes=size_of[Coding.WHOLE],
        folders_left=tuple(two.folders),
        resumed_bytes=written.resumed_bytes,
        seconds=job.seconds,
    )


def _files(source: Source) -> dict[str, int]:
    """The files of a checkpoint, without records of this package."""
    return {path: size for path, size in sorted(source.sizes().items()) if not path.startswith(OWN_PREFIX)}


def _stretches(
    old: Source, new: Source, what: str, budget_bytes: int, one_model: bool
) -> dict[str, list[Stretch]]:
    """New file → its ranges, each with the old range that it is compared with."""
    files = _files(old)
    before, after = (index_here(_arrays, source, _files(source)) for source in (old, new))
    arrays = sum(len(found) for side in (before, after) for found in side.values())
    needed_bytes = FOOTPRINT_BYTES + arrays * ARRAY_MEMORY_BYTES
    if needed_bytes > budget_bytes:
        raise MemoryBudgetError(what, budget_bytes, needed_bytes)
    if one_model:
        _check_same_tensors(old.location, before, new.location, after)
    everywhere = {
        array.key: (path, array) for path, found in before.items() if is_safetensors(path) for array in found
    }
    made = {}
    for path, size_bytes in _files(new).items():
        there = {array.key: (path, array) for array in before.get(path, ())}
        known = ChainMap(there, everywhere) if is_safetensors(path) else there
        made[path] = stretches_of(path, size_bytes, after[path], known.get, files.get(path))
    return made


def _check_same_tensors(
    old: str, before: Mapping[str, Sequence[Array]], new: str, after: Mapping[str, Sequence[Array]]
) -> None:
    """Refuse two checkpoints that do not have the same tensors."""
    ours, theirs = (
        {
            ("" if is_safetensors(path) else path, array.key): array
            for path, found in side.items()
            for array in found
        }
        for side in (before, after)
    )
    for place in sorted({*ours, *theirs}):
        sizes = [
            "is missing" if array is None else f"has {array.nbytes} bytes, {array.item_bytes} per element,"
            for array in (ours.get(place), theirs.get(place))
        ]
        if sizes[0] != sizes[1]:
            path, key = place
            name = ": ".join(filter(None, (path, key.replace("\0", "/").strip("/"))))
            raise CheckpointError(
                f"{name} {sizes[0]} in {old} and {sizes[1].removesuffix(',')} in {new}: they are not checkpoints of "
                "one model"
            )


def _arrays(store: Readable, path: str, size_bytes: int) -> tuple[Array, ...]:
    return find_arrays(lambda start, nbytes: store.read(path, start, nbytes), size_bytes, path)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Blocks of a file that are compared together."""

    path: str
    start: int
    blocks: tuple[Stretch, ...]


def _compare(
    old: Source,
    new: Source,
    compared: Mapping[str, Sequence[Stretch]],
    spool: _Spool,
    at_a_time: int,
    observe: Observer,
) -> Document:
    """Compare all blocks and append their stored bytes to ``spool``, in order."""
    files: dict[str, list[Block]] = {path: [] for path in compared}
    work = (_Batch(path, *batch) for path, blocks in compared.items() for batch in batches(blocks))
    for path, made, stored in in_order(partial(_compare_batch, old, new), work, at_a_time):
        files[path] += made
        spool.append(stored)
        observe(Progress(sum(block.nbytes for block in made)))
    used = {block.old_path for blocks in files.values() for block in blocks}
    return Document(
        version.__version__,
        absolute(old.location),
        {path: size for path, size in _files(old).items() if path in used},
        {path: tuple(blocks) for path, blocks in files.items()},
    )


def _compare_batch(old: Source, new: Source, batch: _Batch) -> tuple[str, list[Block], list[bytes]]:
    after = read_at(new, batch.path, batch.start, sum(block.nbytes for block in batch.blocks))
    bases = [None if b.base is None else (b.base.path, b.base.start, b.nbytes) for b in batch.blocks]
    made, stored = [], []
    for block, before in zip(batch.blocks, read_ranges(old, bases), strict=True):
        now, after = after[: block.nbytes], after[block.nbytes :]
        packed = pack(now, before, block.item_bytes)
        made.append(_described(block, packed, now, before))
        stored.append(packed.stored)
    return batch.path, made, stored


def _described(block: Stretch, packed: Packed, new: memoryview, old: memoryview | None) -> Block:
    base = None if packed.coding is Coding.WHOLE else block.base
    return Block(
        block.nbytes,
        block.item_bytes,
        None if base is None else base.path,
        0 if base is None else base.start,
        packed.coding,
        len(packed.stored),
        packed.written_bytes,
        "" if base is None or old is None else checksum(old),
        checksum(new),
    )


def _parts(target: Target, path: str, size_bytes: int) -> Iterator[Part]:
    part_bytes = smallest_parts(target, size_bytes)
    for start in range(0, size_bytes, part_bytes):
        yield Part(path, start, min(part_bytes, size_bytes - start))


def smallest_parts(target: Target, size_bytes: int) -> int:
    """Minimum size of the parts of a file, in bytes, so that the store accepts their size and number."""
    least = max(BATCH_BYTES, target.smallest_part_bytes)
    return least if target.most_parts is None else max(least, -(-size_bytes // target.most_parts))


class _Spool:
    """A temporary file that disappears when it is closed or the process ends."""

    def __init__(self, target: str, location: str) -> None:
        self.folder, self.location = Path(tempfile.gettempdir()), location
        if is_local(target):
            above = Path(os.path.abspath(local_path(target))).parent
            self.folder = next(folder for folder in (above, *above.parents) if folder.is_dir())
        with self._translated():
            self.file = tempfile.TemporaryFile(dir=self.folder, buffering=0)  # noqa: SIM115 (closed on exit)

    def _translated(self) -> AbstractContextManager[None]:
        return translated(self.folder, self.location, TargetError)

    def append(self, blocks: Iterable[bytes]) -> None:
        """Append blocks."""
        with self._translated():
            for block in blocks:
                rest = memoryview(block)
                while rest:
                    rest = rest[self.file.write(rest) :]

    def read(self, start: int, nbytes: int) -> memoryview:
        """Read bytes that were appended; threads may call it concurrently."""
        buffer = memoryview(bytearray(nbytes))
        done = 0
        with self._translated():
            while done < nbytes:
                done += os.preadv(self.file.fileno(), [buffer[done:]], start + done)
        return buffer

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def _sizes_by_coding(document: Document) -> dict[Coding, int]:
    sizes = dict.fromkeys(Coding, 0)
    for blocks in document.files.values():
        for block in blocks:
            sizes[block.coding] += block.nbytes
    return sizes
