"""From parts to a published target: the same steps for a delta and for what is made of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

from paddle_reshard.pipeline.convert.manifest import (
    describe_parts,
    format_manifest,
    manifest_head,
)
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.events import Observer, Progress, StepEnded, StepStarted
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.delta.batches import in_order
from paddle_reshard.pipeline.delta.options import DeltaOptions
from paddle_reshard.storage.apart import check_apart
from paddle_reshard.storage.formats.manifest import own_manifest
from paddle_reshard.storage.locate import absolute, open_target, target_access
from paddle_reshard.storage.outputs import Outputs
from paddle_reshard.storage.store import Identity, NewFile, Receipt, Record, Source, Target


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a file of the target. One unit of work each."""

    path: str
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Written:
    """What was written now, and what an earlier run had written."""

    bytes: int
    resumed_bytes: int


def open_output(location: str, sources: Sequence[str], options: DeltaOptions) -> Target:
    """A target that overlaps none of the sources; an occupied one is refused."""
    for source in sources:
        check_apart(source, location)
    access = target_access(options)
    return open_target(
        location,
        options.get("overwrite", False),
        access.options,
        resumes(options),
        options.get("take_over", False),
        access.schemes,
    )


def _identity(plan_id: str, sources: Mapping[str, Source]) -> Identity:
    """Which request this is: an id of what it makes, and all files of the sources, by the prefix of each."""
    files = {
        prefix + path: f"{size} bytes, {source.versions().get(path)}"
        for prefix, source in sources.items()
        for path, size in source.sizes().items()
    }
    location = next(iter(sources.values())).location
    return Identity(plan_id, version.__version__, location, files)


def manifest_of(
    plan_id: str,
    files: Mapping[str, int],
    source: Source,
    receipts: Sequence[Receipt],
    facts: Mapping[str, Any],
) -> bytes:
    """The manifest of a target; ``facts`` are further entries for people."""
    values = {
        **manifest_head(version.__version__),
        "plan_id": plan_id,
        **facts,
        "files": dict(files),
        "source": {
            "location": absolute(source.location),
            "files": dict(source.sizes()),
            "versions": dict(source.versions()),
        },
        "etags": {},
        "parts": describe_parts(receipts, {}),
    }
    return format_manifest(values)


def write(
    target: Target,
    files: Mapping[str, int],
    parts: Sequence[Part],
    fill: Callable[[Part], memoryview],
    plan_id: str,
    sources: Mapping[str, Source],
    describe: Callable[[Sequence[Receipt]], bytes],
    at_a_time: int,
    options: DeltaOptions,
    observe: Observer,
) -> Written:
    """Write all parts, and publish the target when all of them are there.

    Parameters
    ----------
    files
        Path → size in bytes; the manifest is not among them.
    parts
        What the files are made of. Those that an earlier run wrote are not made again.
    fill
        Makes the bytes of a part; several are made at a time.
    plan_id, sources
        Id of what is made, and what it is made of: prefix → source. The sources are checked for changes when everything
        is written.
    describe
        Makes the manifest.
    """
    if resumes(options) and _is_made(target, plan_id, files):
        return Written(0, sum(files.values()))
    starts: dict[str, list[int]] = {path: [] for path in files}
    for part in parts:
        starts[part.path].append(part.start)
    new = [NewFile(path, size, tuple(starts[path])) for path, size in files.items()]
    outputs = Outputs([target])
    outputs.check_names(new)
    if not options.get("no_space_check"):
        outputs.check_space(new)
    openness = reduce(and_, (source.openness for source in sources.values()))
    total = sum(files.values())
    observe(StepStarted("write", total))
    with outputs:
        writer, records = outputs.begin(new, _identity(plan_id, sources), openness)
        done = {record.unit for record in records}
        receipts = [receipt for record in records for receipt in record.receipts]
        resumed = sum(receipt.nbytes for receipt in receipts)
        observe(Progress(resumed, before=True))

        def one(unit: int) -> Record:
            part = parts[unit]
            return Record(unit, (writer.write_part(part.path, part.start, fill(part)),))

        for record in in_order(one, (unit for unit in range(len(parts)) if unit not in done), at_a_time):
            outputs.note([record])
            receipts += record.receipts
            observe(Progress(record.receipts[0].nbytes))
        for source in sources.values():
            source.check_unchanged()
        observe(StepEnded("write", f"{total - resumed} bytes"))
        observe(StepStarted("publish"))
        outputs.finish(receipts)
        target.publish(MANIFEST, describe(receipts))
        observe(StepEnded("publish", target.location))
    return Written(total - resumed, resumed)


def resumes(options: DeltaOptions) -> bool:
    """Whether an unfinished run is continued."""
    return bool(options.get("resume") or options.get("take_over"))


def _is_made(target: Target, plan_id: str, files: Mapping[str, int]) -> bool:
    """Whether the target is finished: a run was killed when all was done, or has ended before."""
    if (own_manifest(target.published(MANIFEST)) or {}).get("plan_id") != plan_id:
        return False
    sizes = target.reopen().sizes()
    return all(sizes.get(path) == size for path, size in files.items())
