"""All targets of a conversion, written as if they were one.

The files of a single target keep their paths. With several targets, a path begins with the index of its target,
``1/optimizer.pdopt``, so that one plan, one ledger line and one group can refer to all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType

from paddle_reshard.pipeline.core.errors import TargetError
from paddle_reshard.pipeline.core.part_limits import PartLimits
from paddle_reshard.storage.store import (
    OWN_PREFIX,
    CopyRange,
    Identity,
    NewFile,
    Openness,
    ReadRange,
    Receipt,
    Record,
    Source,
    TargetStore,
    WritePart,
)


def prefixes(count: int) -> list[str]:
    """The prefix of the paths of each target.

    >>> prefixes(1), prefixes(2)
    ([''], ['0/', '1/'])
    """
    return [""] if count == 1 else [f"{number}/" for number in range(count)]


def wrong_name(path: str, name_bytes: int | None) -> str | None:
    """Why a target cannot hold a file of this path; ``None`` if it can. ``name_bytes``: maximum length of a name.

    >>> wrong_name("model_state/0_0.distcp", 255), wrong_name("a/../b", 255)
    (None, "which leads elsewhere: '..'")
    """
    names = path.split("/")
    if relative := [name for name in names if name in ("", ".", "..")]:
        return f"which leads elsewhere: {relative[0]!r}"
    if "\0" in path:
        return "which contains a NUL character"
    if path.startswith(OWN_PREFIX):
        return "which is reserved for this tool's own records"
    longest = max(len(name.encode("utf-8", "surrogatepass")) for name in names)
    if name_bytes is not None and longest > name_bytes:
        return f"which has {longest} bytes: the limit of the file system is {name_bytes}"
    return None


class Outputs:
    """All targets. Targets that an earlier run completed before it was killed are not touched."""

    def __init__(self, targets: Sequence[TargetStore]) -> None:
        self.targets = dict(zip(prefixes(len(targets)), targets, strict=True))
        self.made: set[str] = set()
        """Prefixes of targets that are complete already."""
        self._stack = ExitStack()

    @property
    def locations(self) -> tuple[str, ...]:
        """The locations of the targets."""
        return tuple(target.location for target in self.targets.values())

    @property
    def location(self) -> str:
        """The locations of the targets in one line, for messages."""
        return ", ".join(self.locations)

    def limits(self, source: Source) -> PartLimits:
        """Limits that the stores of all targets accept."""
        targets = self.targets.values()
        counts = [target.most_parts for target in targets if target.most_parts is not None]
        copies = {target.copies_from(source) for target in targets}
        return PartLimits(
            max(target.smallest_part_bytes for target in targets),
            min(counts, default=None),
            copies.pop() if len(copies) == 1 else None,
        )

    def check_names(self, files: Sequence[NewFile]) -> None:
        """Refuse names that a target cannot hold, whatever a source calls its files."""
        for prefix, target in self.pending():
            room = target.room()
            for file in files:
                if file.path.startswith(prefix):
                    path = file.path.removeprefix(prefix)
                    if (reason := wrong_name(path, None if room is None else room.name_bytes)) is not None:
                        raise TargetError(f"{target.location}: cannot hold a file named {path!r}, {reason}")

    def check_space(self, files: Sequence[NewFile]) -> None:
        """Refuse if a disk has less free space than the targets on it need together."""
        needed: dict[int, int] = {}
        there: dict[int, tuple[int, list[str]]] = {}
        for prefix, target in self.pending():
            room = target.room()
            if room is None or room.free_bytes is None:
                continue
            own = sum(room.taken_by(file.size_bytes) for file in files if file.path.startswith(prefix))
            needed[room.device] = needed.get(room.device, 0) + max(0, own - room.held_bytes)
            there.setdefault(room.device, (room.free_bytes, []))[1].append(target.location)
        for device, (free_bytes, locations) in there.items():
            if needed[device] > free_bytes:
                error = TargetError(
                    f"{', '.join(locations)}: needs {needed[device]} bytes, but the disk has {free_bytes} bytes free; "
                    "free some space, or write to another disk"
                )
                error.retryable = True
                raise error

    def pending(self) -> Iterator[tuple[str, TargetStore]]:
        """``(prefix, target)`` of the targets to be made."""
        return ((prefix, target) for prefix, target in self.targets.items() if prefix not in self.made)

    def begin(
        self, files: Sequence[NewFile], identity: Identity, openness: Openness
    ) -> tuple[WritePart, list[Record]]:
        """Begin every target. A unit of work counts as done if all of them have recorded it."""
        writers: dict[str, WritePart | None] = dict.fromkeys(self.made)
        records: list[dict[int, Record]] = []
        for number, (prefix, target) in enumerate(self.targets.items()):
            if prefix in self.made:
                continue
            own = [
                replace(file, path=file.path.removeprefix(prefix))
                for file in files
                if file.path.startswith(prefix)
            ]
            writers[prefix], written = target.begin(own, replace(identity, target=number), openness)
            records.append({record.unit: _prefixed(record, prefix) for record in written})
        units = set.intersection(*(set(of_target) for of_target in records)) if records else set()
        joined = [_joined([of_target[unit] for of_target in records]) for unit in sorted(units)]
        only = writers.get("")
        return (_Writers(writers) if only is None else only), joined

    def note(self, records: Sequence[Record]) -> None:
        """Record finished units."""
        for prefix, target in self.pending():
            own = (
                [replace(r, receipts=tuple(_own(r.receipts, prefix))) for r in records] if prefix else records
            )
            target.note(own)

    def finish(self, receipts: Sequence[Receipt]) -> dict[str, Source]:
        """Complete the files of all targets; prefix → source from which they can be read back."""
        return {prefix: target.finish(_own(receipts, prefix)) for prefix, target in self.pending()}

    def __enter__(self) -> Outputs:
        for _, target in self.pending():
            self._stack.enter_context(target)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)


def _own(receipts: Iterable[Receipt], prefix: str) -> list[Receipt]:
    """The receipts of one target, by its own paths."""
    return [
        replace(receipt, path=receipt.path.removeprefix(prefix))
        for receipt in receipts
        if receipt.path.startswith(prefix)
    ]


def _prefixed(record: Record, prefix: str) -> Record:
    return replace(record, receipts=tuple(replace(r, path=prefix + r.path) for r in record.receipts))


def _joined(records: Sequence[Record]) -> Record:
    """The records of all targets for one unit, joined; all have the same drift."""
    return replace(records[0], receipts=tuple(r for record in records for r in record.receipts))


@dataclass(frozen=True, slots=True)
class _Writers:
    """Writes every part into the target that its path names; ``None``: that target is complete already."""

    writers: Mapping[str, WritePart | None]

    @property
    def copies_in_flight(self) -> int:
        """The lowest maximum of all targets."""
        return min((w.copies_in_flight for w in self.writers.values() if w is not None), default=1)

    def _find(self, path: str) -> tuple[str, WritePart | None]:
        prefix = path[: path.index("/") + 1]
        return prefix, self.writers[prefix]

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        """Write one whole part."""
        prefix, writer = self._find(path)
        if writer is None:
            return Receipt(path, byte_offset, len(buffer))
        receipt = writer.write_part(path.removeprefix(prefix), byte_offset, buffer)
        return replace(receipt, path=path)

    def copy_part(self, copy: CopyRange, source: ReadRange) -> Receipt:
        """Have the storage copy one whole part."""
        prefix, writer = self._find(copy.path)
        if writer is None:
            return Receipt(copy.path, copy.byte_offset, copy.nbytes)
        receipt = writer.copy_part(replace(copy, path=copy.path.removeprefix(prefix)), source)
        return replace(receipt, path=copy.path)
