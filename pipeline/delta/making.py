"""``delta``: compare two checkpoints, block by block, and publish what differs.

Nobody knows how long a compressed block is before it is made, and a target wants to know the sizes of its files first.
So blocks go to a temporary file without a name, which nothing has to clean up: next to a target on a disk, else where
temporary files go (``TMPDIR``).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO

from paddle_reshard.pipeline.convert.options import check_names, takes
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.errors import TargetError
from paddle_reshard.pipeline.core.events import Observer, Progress, StepEnded, StepStarted, ignore_events
from paddle_reshard.pipeline.core.shown import readable_bytes
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike, parse_memory
from paddle_reshard.pipeline.delta.batches import (
    BATCH_BYTES,
    batches,
    batches_at_a_time,
    in_order,
    read_at,
    read_places,
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
from paddle_reshard.pipeline.delta.writing import Part, identify, manifest_of, open_place, write
from paddle_reshard.storage.checksum import checksum
from paddle_reshard.storage.locate import absolute, is_local, local_path, open_source, source_access
from paddle_reshard.storage.os_errors import told
from paddle_reshard.storage.store import OWN_PREFIX, Source, Target


@takes(DeltaOptions)
def delta(
    old: PathLike,
    new: PathLike,
    target: PathLike,
    *,
    observe: Observer = ignore_events,
    **options: Unpack[DeltaOptions],
) -> DeltaReport:
    """Write down what differs between two checkpoints of one model, for :func:`apply_delta` to make ``new`` of ``old``.

    Every file of ``new`` is covered, byte for byte, whatever it holds. The delta is small where tensors of the same
    keys differ little.

    Parameters
    ----------
    old, new
        Two checkpoints or exports; formats and topologies that differ only make the delta large.
    target
        Where the delta goes, a folder or URL.
    observe
        Is told how far it is as event values, as by :func:`convert`.
    options
        :class:`DeltaOptions`.

    Raises
    ------
    ReshardError
        If one of the two cannot be read or changes meanwhile, or the target cannot be written.
    """
    check_names(options, DeltaOptions)
    began = time.monotonic()
    budget_bytes = parse_memory(options.get("memory", DEFAULT_MEMORY))
    places = [os.fspath(place) for place in (old, new, target)]
    sink = open_place(places[2], places[:2], options)
    one, two = (open_source(place, *source_access(options)) for place in places[:2])
    observe(StepStarted("compare", sum(_files(two).values())))
    compared = {path: tuple(cut(stretches)) for path, stretches in _stretches(one, two)}
    blocks = sum(map(len, compared.values()))
    at_a_time = batches_at_a_time(places[2], blocks, BATCH_BYTES, budget_bytes)
    with _spool(places[2], sink.location) as spool:
        document = _compare(one, two, compared, spool, at_a_time, observe)
        text = format_document(document)
        sizes = {DATA: document.stored_bytes, DOCUMENT: len(text)}
        observe(StepEnded("compare", f"{readable_bytes(sum(sizes.values()))} to write"))
        plan_id = delta_id(text)

        def fill(part: Part) -> memoryview:
            if part.path == DOCUMENT:
                return memoryview(text)[part.start : part.start + part.nbytes]
            return memoryview(os.pread(spool.fileno(), part.nbytes, part.start))

        def check_sources() -> None:
            one.check_unchanged()
            two.check_unchanged()

        written = write(
            sink,
            sizes,
            [part for path, size in sizes.items() for part in _parts(sink, path, size)],
            fill,
            identify(plan_id, {"OLD/": one, "NEW/": two}),
            one.openness & two.openness,
            partial(manifest_of, plan_id, sizes, two, facts={"delta": {"old": document.old_location}}),
            check_sources,
            at_a_time,
            options,
            observe,
        )
    size_of = _sizes_by_coding(document)
    return DeltaReport(
        one.location,
        two.location,
        sink.location,
        files=len(document.files),
        new_bytes=sum(size_of.values()),
        delta_bytes=sum(sizes.values()),
        same_bytes=size_of[Coding.SAME],
        compared_bytes=size_of[Coding.SPARSE] + size_of[Coding.DENSE],
        whole_bytes=size_of[Coding.WHOLE],
        folders_left=tuple(two.folders),
        resumed_bytes=written.resumed_bytes,
        seconds=time.monotonic() - began,
    )


def _files(source: Source) -> dict[str, int]:
    """The files of a checkpoint, without records of this package."""
    return {path: size for path, size in sorted(source.sizes().items()) if not path.startswith(OWN_PREFIX)}


def _stretches(old: Source, new: Source) -> Iterator[tuple[str, list[Stretch]]]:
    """Which bytes of each new file are compared with which old ones."""
    files = _files(old)

    def arrays_of(source: Source, path: str, size_bytes: int) -> tuple[Array, ...]:
        return find_arrays(lambda start, nbytes: source.read(path, start, nbytes), size_bytes, path)

    @cache
    def everywhere() -> Mapping[str, tuple[str, Array]]:
        """Key of every tensor in safetensors → file and place."""
        found = [(path, arrays_of(old, path, size)) for path, size in files.items() if is_safetensors(path)]
        return {array.key: (path, array) for path, arrays in found for array in arrays}

    for path, size_bytes in _files(new).items():
        arrays = arrays_of(new, path, size_bytes)
        there = {array.key: array for array in arrays_of(old, path, files[path])} if path in files else {}

        def find(key: str, path: str = path, there: Mapping[str, Array] = there) -> tuple[str, Array] | None:
            if key in there:
                return path, there[key]
            return everywhere().get(key) if is_safetensors(path) else None

        yield path, stretches_of(path, size_bytes, arrays, find, files.get(path))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Blocks of one file, to be compared."""

    path: str
    start: int
    blocks: tuple[Stretch, ...]


def _compare(
    old: Source,
    new: Source,
    compared: Mapping[str, Sequence[Stretch]],
    spool: IO[bytes],
    at_a_time: int,
    observe: Observer,
) -> Document:
    """Compare all blocks; what is to be stored of them goes to ``spool``, in order."""
    files: dict[str, list[Block]] = {path: [] for path in compared}
    work = (_Batch(path, *batch) for path, blocks in compared.items() for batch in batches(blocks))
    for path, made, stored in in_order(partial(_compare_batch, old, new), work, at_a_time):
        files[path] += made
        spool.writelines(stored)
        observe(Progress(sum(block.nbytes for block in made)))
    spool.flush()
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
    for block, before in zip(batch.blocks, read_places(old, bases), strict=True):
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
    """How many bytes the parts of a file have at least, so that its store takes all of them."""
    least = max(BATCH_BYTES, target.smallest_part_bytes)
    return least if target.most_parts is None else max(least, -(-size_bytes // target.most_parts))


def _spool(target: str, location: str) -> IO[bytes]:
    """A file that is gone as soon as it is closed, or this process is."""
    folder = Path(tempfile.gettempdir())
    if is_local(target):
        above = Path(os.path.abspath(local_path(target))).parent
        folder = next(place for place in (above, *above.parents) if place.is_dir())
    with told(folder, location, TargetError):
        return tempfile.TemporaryFile(dir=folder)


def _sizes_by_coding(document: Document) -> dict[Coding, int]:
    sizes = dict.fromkeys(Coding, 0)
    for blocks in document.files.values():
        for block in blocks:
            sizes[block.coding] += block.nbytes
    return sizes
