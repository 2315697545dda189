"""Sources and writers that misbehave on purpose. Workers import them."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paddle_reshard.clusters.engine import Batches, Engine
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.planning.work import RemainingGroups
from paddle_reshard.storage.os_errors import translated_while_moving
from paddle_reshard.storage.remote import retry
from paddle_reshard.storage.store import Read, ReadRange, Receipt, WritePart
from tests.limited import files_up_to
from tests.reads import OneByOne

MEETING = threading.Barrier(2, timeout=30)
MEETING_IS_OVER = threading.Event()
"""Both in every worker of their own."""


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def first_time(marker: Path) -> bool:
    """Whether this is the first call."""
    try:
        marker.open("x").close()
    except FileExistsError:
        return False
    return True


@dataclass(frozen=True)
class Through(Engine):
    """Groups go through a function, which puts what misbehaves before a source or a writer."""

    function: Callable[[RemainingGroups, ReadRange, WritePart], Batches]

    def run(self, works: RemainingGroups, source: ReadRange, target: WritePart) -> Batches:
        return self.function(works, source, target)

    def compare(self, works: RemainingGroups, source: ReadRange) -> Batches:
        raise NotImplementedError


@dataclass(frozen=True)
class KilledOnceReading(OneByOne):
    source: ReadRange
    marker: Path

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        if first_time(self.marker):
            _die()
        self.source.read_into(path, byte_offset, buffer)


@dataclass(frozen=True)
class KilledOnceWriting:
    """Dies when half of a part is written."""

    writer: WritePart
    marker: Path

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        if first_time(self.marker):
            self.writer.write_part(path, byte_offset, buffer[: len(buffer) // 2])
            _die()
        return self.writer.write_part(path, byte_offset, buffer)


@dataclass(frozen=True)
class TakesNoMore:
    """Writes in a process none of whose files may grow beyond a few bytes."""

    writer: WritePart
    copies_in_flight: int = 1

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        with files_up_to(10):
            return self.writer.write_part(path, byte_offset, buffer)


@dataclass(frozen=True)
class StaleOnce(OneByOne):
    """A network file system that has lost a file, on one machine."""

    source: ReadRange
    marker: Path

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        with translated_while_moving(Path(path), path, CheckpointError):
            if first_time(self.marker):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        self.source.read_into(path, byte_offset, buffer)


@dataclass(frozen=True)
class ReadsTwoAtATime(ReadRange):
    """Its first reads wait for each other."""

    source: ReadRange

    def read_many(self, reads: Sequence[Read]) -> None:
        if not MEETING_IS_OVER.is_set():
            MEETING.wait()
            MEETING_IS_OVER.set()
        self.source.read_many(reads)

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        self.source.read_into(path, byte_offset, buffer)


@dataclass(frozen=True)
class FailsOnce(OneByOne):
    """Loses one connection."""

    source: ReadRange
    marker: Path

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        retry.call(retry.HURRIED, self._try, path, byte_offset, buffer)

    def _try(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        if first_time(self.marker):
            raise ConnectionResetError
        self.source.read_into(path, byte_offset, buffer)


@dataclass(frozen=True)
class KillsItsReader(OneByOne):
    """Dies at one byte of one file, whoever reads it."""

    source: ReadRange
    path: str
    byte_offset: int

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        if path == self.path and byte_offset <= self.byte_offset < byte_offset + len(buffer):
            _die()
        self.source.read_into(path, byte_offset, buffer)


@dataclass(frozen=True)
class OneByteOff(OneByOne):
    """A file in which one byte is another."""

    source: ReadRange
    path: str
    byte_offset: int

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        self.source.read_into(path, byte_offset, buffer)
        place = self.byte_offset - byte_offset
        if path == self.path and 0 <= place < len(buffer):
            buffer[place] ^= 1


@dataclass(frozen=True)
class Unreachable(OneByOne):
    """Fails as a store does that cannot be reached."""

    password: str

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        raise ConnectionError(f"{path}: the store does not answer")


@dataclass(frozen=True)
class Watched(OneByOne):
    """Notes which process reads, and a variable of it: by default on which GPU; takes its time."""

    source: ReadRange
    notes: Path
    seconds: float = 0.0
    variable: str = "CUDA_VISIBLE_DEVICES"

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        self.notes.mkdir(parents=True, exist_ok=True)
        (self.notes / str(os.getpid())).write_text(os.environ.get(self.variable, "none"))
        time.sleep(self.seconds)
        self.source.read_into(path, byte_offset, buffer)


@dataclass(frozen=True)
class Awaiting(Watched):
    """Reads on, once the file ``expected`` beside the notes says how many, only when so many processes read."""

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        super().read_into(path, byte_offset, buffer)
        expected = self.notes.with_name("expected")
        deadline = time.monotonic() + 120
        while expected.exists() and len(list(self.notes.iterdir())) < int(expected.read_text() or 0):
            if time.monotonic() > deadline:
                raise TimeoutError("the other processes do not come")
            time.sleep(0.05)
