"""From parts to a published target: the same steps for a delta and for what is made of one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from typing import Any

from paddle_reshard.pipeline.convert.manifest import (
    describe_parts,
    format_manifest,
    manifest_head,
)
from paddle_reshard.pipeline.convert.options import check_names
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.events import Observer, Progress, StepEnded, StepStarted
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike, parse_memory
from paddle_reshard.pipeline.delta.batches import in_order
from paddle_reshard.pipeline.delta.options import DeltaOptions
from paddle_reshard.storage.apart import check_apart
from paddle_reshard.storage.formats.manifest import own_manifest
from paddle_reshard.storage.locate import absolute, open_source, open_target, source_access, target_access
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


@dataclass(frozen=True, slots=True)
class Job:
    """A run of ``delta`` or ``apply_delta``: what it reads, what it makes, and how."""

    sources: Mapping[str, Source]
    """Prefix → source."""
    target: Target
    location: str
    """The target's location, as given."""
    options: DeltaOptions
    observe: Observer
    budget_bytes: int
    _began: float = field(default_factory=time.monotonic)

    @classmethod
    def open(
        cls, sources: Mapping[str, PathLike], target: PathLike, options: DeltaOptions, observe: Observer
    ) -> Job:
        """Open the sources, each with its prefix, and a target that overlaps none of them.

        Raises
        ------
        ReshardError
            If a source cannot be opened, or the target is in use.
        """
        check_names(options, DeltaOptions)
        budget_bytes = parse_memory(options.get("memory", DEFAULT_MEMORY))
        made = os.fspath(target)
        locations = {prefix: os.fspath(location) for prefix, location in sources.items()}
        for location in locations.values():
            check_apart(location, made)
        access = target_access(options)
        sink = open_target(
            made,
            options.get("overwrite", False),
            access.options,
            _resumes(options),
            options.get("take_over", False),
            access.schemes,
        )
        opened = {
            prefix: open_source(location, *source_access(options)) for prefix, location in locations.items()
        }
        return cls(opened, sink, made, options, observe, budget_bytes)

    @property
    def seconds(self) -> float:
        """Time since it was opened."""
        return time.monotonic() - self._began

    def write(
        self,
        files: Mapping[str, int],
        parts: Sequence[Part],
        fill: Callable[[Part], memoryview],
        plan_id: str,
        describe: Callable[[Sequence[Receipt]], bytes],
        at_a_time: int,
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
        plan_id
            Id of what is made. The sources are checked for changes when everything is written.
        describe
            Makes the manifest.
        """
        if _resumes(self.options) and _is_made(self.target, plan_id, files):
            return Written(0, sum(files.values()))
        new = _new_files(files, parts)
        outputs = Outputs([self.target])
        outputs.check_names(new)
        if not self.options.get("no_space_check"):
            outputs.check_space(new)
        openness = reduce(and_, (source.openness for source in self.sources.values()))
        total = sum(files.values())
        self.observe(StepStarted("write", total))
        with outputs:
            writer, records = outputs.begin(new, _identity(plan_id, self.sources), openness)
            done = {record.unit for record in records}
            receipts = [receipt for record in records for receipt in record.receipts]
            resumed = sum(receipt.nbytes for receipt in receipts)
            self.observe(Progress(resumed, before=True))

            def one(unit: int) -> Record:
                part = parts[unit]
                return Record(unit, (writer.write_part(part.path, part.start, fill(part)),))

            for record in in_order(one, (unit for unit in range(len(parts)) if unit not in done), at_a_time):
                outputs.note([record])
                receipts += record.receipts
                self.observe(Progress(record.receipts[0].nbytes))
            for source in self.sources.values():
                source.check_unchanged()
            self.observe(StepEnded("write", f"{total - resumed} bytes"))
            self.observe(StepStarted("publish"))
            outputs.finish(receipts)
            self.target.publish(MANIFEST, describe(receipts))
            self.observe(StepEnded("publish", self.target.location))
        return Written(total - resumed, resumed)


def _new_files(files: Mapping[str, int], parts: Sequence[Part]) -> list[NewFile]:
    """The files of the target, with the first bytes of their parts."""
    starts: dict[str, list[int]] = {path: [] for path in files}
    for part in parts:
        starts[part.path].append(part.start)
    return [NewFile(path, size, tuple(starts[path])) for path, size in files.items()]


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


def _resumes(options: DeltaOptions) -> bool:
    """Whether an unfinished run is continued."""
    return bool(options.get("resume") or options.get("take_over"))


def _is_made(target: Target, plan_id: str, files: Mapping[str, int]) -> bool:
    """Whether the target is finished: a run was killed when all was done, or has ended before."""
    if (own_manifest(target.published(MANIFEST)) or {}).get("plan_id") != plan_id:
        return False
    sizes = target.reopen().sizes()
    return all(sizes.get(path) == size for path, size in files.items())
