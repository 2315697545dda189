"""From units of work to a published target: the same steps for a version and for a copy of one."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, TypeVar

from paddle_reshard.pipeline.convert.manifest import describe_parts, format_manifest, manifest_head
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.errors import MemoryBudgetError
from paddle_reshard.pipeline.core.events import Observer, Progress, StepEnded, StepStarted
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from paddle_reshard.pipeline.versions.coding import WINDOW_BYTES
from paddle_reshard.storage.locate import absolute
from paddle_reshard.storage.outputs import Outputs
from paddle_reshard.storage.store import Identity, NewFile, Receipt, Record, Source, TargetStore, WritePart

TENSOR_MEMORY_BYTES = 1 << 11
"""Upper bound of the memory for what is known of each tensor, including its key."""
_WINDOWS_AT_A_TIME = 4
"""New and old bytes of a window, what they differ in, and what compressing holds."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Unit:
    """Consecutive parts of a file of the target, made one after the other."""

    path: str
    start: int
    nbytes: int
    part_bytes: int
    """Size of each part but the last."""
    parts: Callable[[], Iterator[memoryview]]
    """Makes the bytes of the parts."""

    def starts(self) -> range:
        """First byte of each part in the file."""
        return range(self.start, self.start + self.nbytes, self.part_bytes)

    def write(self, writer: WritePart) -> tuple[Receipt, ...]:
        """Make and write all parts."""
        return tuple(
            writer.write_part(self.path, start, part)
            for start, part in zip(self.starts(), self.parts(), strict=True)
        )


@dataclass(frozen=True, slots=True)
class Written:
    """What was written."""

    files: int
    nbytes: int = 0
    resumed_bytes: int = 0
    """How many bytes of it an earlier run had written."""


def units_at_a_time(what: str, deltas: int, tensors: int, budget_bytes: int) -> int:
    """How many units may be worked on at a time, so that all of it stays below the budget.

    ``what`` is made, for the message if there is no room for one unit; ``deltas`` are applied to a tensor at most, and
    ``tensors`` are known.
    """
    unit = (_WINDOWS_AT_A_TIME + deltas) * WINDOW_BYTES
    held = FOOTPRINT_BYTES + tensors * TENSOR_MEMORY_BYTES
    if held + unit > budget_bytes:
        raise MemoryBudgetError(what, budget_bytes, held + unit)
    return min(2 * len(os.sched_getaffinity(0)), (budget_bytes - held) // unit)


def in_order(do: Callable[[Item], Result], items: Iterable[Item], at_a_time: int) -> Iterator[Result]:
    """Do something with each item on threads; results in the order of the items, no more than these in memory."""
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(at_a_time, thread_name_prefix="version") as pool:
        try:
            for item in items:
                if len(waiting) == at_a_time:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(do, item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def write_target(
    target: TargetStore,
    units: Sequence[Unit],
    plan_id: str,
    sources: Sequence[Source],
    stated: Mapping[str, Any],
    made_of: Mapping[str, Any],
    at_a_time: int,
    observe: Observer,
    space_check: bool = True,
) -> Written:
    """Write all units that an earlier run has not written, and publish the target.

    Parameters
    ----------
    units
        Together they fill every file of the target, except the manifest.
    plan_id
        Id of what is made: only a run with the same id and the same sources continues an unfinished one.
    sources
        What it is made from. They are checked for changes when everything is written.
    stated, made_of
        What the manifest says of the request, and its entry about the source.
    """
    new = _new_files(units)
    outputs = Outputs([target])
    outputs.check_names(new)
    if space_check:
        outputs.check_space(new)
    total = sum(unit.nbytes for unit in units)
    observe(StepStarted("write", total))
    with outputs:
        openness = reduce(and_, (source.openness for source in sources))
        writer, records = outputs.begin(new, _identity(plan_id, sources), openness)
        receipts = [receipt for record in records for receipt in record.receipts]
        resumed = sum(receipt.nbytes for receipt in receipts)
        observe(Progress(resumed, before=True))
        done = {record.unit for record in records}
        missing = [number for number in range(len(units)) if number not in done]
        for record in in_order(
            lambda number: Record(number, units[number].write(writer)), missing, at_a_time
        ):
            outputs.note([record])
            receipts += record.receipts
            observe(Progress(sum(receipt.nbytes for receipt in record.receipts)))
        for source in sources:
            source.check_unchanged()
        observe(StepEnded("write", f"{total - resumed} bytes"))
        observe(StepStarted("publish"))
        outputs.finish(receipts)
        manifest = {
            **manifest_head(version.__version__),
            "plan_id": plan_id,
            **stated,
            "files": {file.path: file.size_bytes for file in new},
            "source": made_of,
            "etags": {},
            "parts": describe_parts(receipts, {}),
        }
        target.publish(MANIFEST, format_manifest(manifest))
        observe(StepEnded("publish", target.location))
    return Written(len(new), total, resumed)


def describe_source(source: Source) -> dict[str, Any]:
    """The entry of a manifest about a source."""
    return {
        "location": absolute(source.location),
        "files": dict(source.sizes()),
        "versions": dict(source.versions()),
    }


def _new_files(units: Iterable[Unit]) -> list[NewFile]:
    """The files of the target, with the first bytes of their parts."""
    starts: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for unit in units:
        starts.setdefault(unit.path, []).extend(unit.starts())
        sizes[unit.path] = max(sizes.get(unit.path, 0), unit.start + unit.nbytes)
    return [NewFile(path, size, tuple(sorted(starts[path]))) for path, size in sizes.items()]


def _identity(plan_id: str, sources: Sequence[Source]) -> Identity:
    files: Mapping[str, str] = {
        f"{number}/{path}": f"{size} bytes, {source.versions().get(path)}"
        for number, source in enumerate(sources)
        for path, size in source.sizes().items()
    }
    return Identity(plan_id, version.__version__, sources[0].location, files)
