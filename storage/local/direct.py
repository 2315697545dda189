"""Writes that bypass the kernel's cache of files (``O_DIRECT``).

For an ordinary write the kernel finds a page for every 4 KiB, copies into it and writes it to the disk later, all of
which is processor time of the machine, and its cache fills with a checkpoint that nobody reads. The disk can also read
the memory of the process itself.

Only whole *units* of a file can be written like this, and parts begin and end anywhere. The units that lie wholly in a
part are written directly. What is before and after them goes through the cache, as does the end of a file, because two
parts may write to the same unit. So no unit is written in both ways by different writers. If a unit is in the cache
nevertheless, because it was read or written earlier, the kernel writes it back if necessary and drops it, before and
after the disk is written to; while it cannot, it writes through the cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paddle_reshard.storage.aligned import DISK_BLOCK_BYTES, memory_in_huge_pages, padding_between
from paddle_reshard.storage.local.source import file_system

CLONING = {"ext4": False, "xfs": True}
"""File systems of a single machine on which direct and cached writes to one file are known to agree, and whether files
can share blocks there, in which case ``copy_file_range`` may copy nothing at all."""
SMALLEST_BYTES = 256 << 10
"""Smaller writes are left to the cache: each would wait for the disk."""
WRITE_BYTES = 256 << 10
"""How much is written to the cache at a time. For larger writes the kernel looks for as large stretches of contiguous
memory (large folios, on ext4 since Linux 6.16), which can take several times the processor time of the write itself."""
WRITEBACK_BYTES = 1 << 20
"""Writeback of smaller writes is the kernel's decision."""
BLOCK_BYTES = 4 << 20
MOST_BLOCKS = 8
EDGE_BYTES = 64 << 10
"""A multiple of the unit of every file system."""
_REFUSED = {errno.EINVAL, errno.EOPNOTSUPP}
"""Errors of a file system or disk that cannot write directly what it was given, or not from where that is in memory."""


@dataclass(frozen=True, slots=True)
class Direct:
    """Where files are written directly."""

    device: int
    """Number of the device. On another machine, the same path may lead to another file system."""
    unit_bytes: int
    clones: bool
    """Whether files of this file system can share blocks."""

    def applies_to(self, descriptor: int) -> bool:
        """Whether an open file is on this device."""
        return os.fstat(descriptor).st_dev == self.device

    def may_share(self, byte_offset: int, source_offset: int) -> bool:
        """Whether a copy may share the blocks of its source, as far as their positions tell."""
        return self.clones and byte_offset % self.unit_bytes == 0 == source_offset % self.unit_bytes

    def whole_units(self, byte_offset: int, nbytes: int) -> tuple[int, int]:
        """``[start, stop)``, the units of a file that lie wholly in a range; empty if there are none.

        >>> Direct(0, 4096, False).whole_units(4095, 8194), Direct(0, 4096, False).whole_units(1, 4096)
        ((4096, 12288), (4096, 4096))
        """
        start = -(-byte_offset // self.unit_bytes) * self.unit_bytes
        return start, max(start, (byte_offset + nbytes) // self.unit_bytes * self.unit_bytes)


def direct_writes(folder: Path) -> Direct | None:
    """How files in a folder are written directly; ``None`` if they are not."""
    device = os.stat(folder).st_dev
    kind = file_system(device)
    if kind not in CLONING or not hasattr(os, "O_DIRECT"):
        return None
    # The kernel caches pages, or blocks of the file system where these are larger.
    return Direct(device, max(mmap.PAGESIZE, os.statvfs(folder).f_bsize), CLONING[kind])


class PartFile:
    """An open file of a new checkpoint. The descriptor is used by nobody else while parts are written."""

    def __init__(self, descriptor: int, direct: Direct | None) -> None:
        self.descriptor = descriptor
        self.direct = direct if direct is not None and direct.applies_to(descriptor) else None
        self._flags: int | None = None
        """The flags of the file, while the cache is bypassed with them and ``O_DIRECT``."""

    def bypasses(self, nbytes: int) -> bool:
        """Whether a write of this size is direct, but for its edges."""
        return self.direct is not None and nbytes >= SMALLEST_BYTES

    def write(self, byte_offset: int, buffer: memoryview) -> None:
        """Write all of ``buffer``, directly where possible."""
        first = last = byte_offset + len(buffer)
        if self.direct is not None:
            start, stop = self.direct.whole_units(byte_offset, len(buffer))
            middle = buffer[start - byte_offset : stop - byte_offset]
            if len(middle) >= SMALLEST_BYTES:
                first, last = start, start + self._write_directly(start, middle)
        self._write_to_cache(byte_offset, buffer[: first - byte_offset])
        self._write_to_cache(last, buffer[last - byte_offset :])

    def _write_directly(self, byte_offset: int, buffer: memoryview) -> int:
        """Write whole units without the cache. Returns how many bytes were written before the file system refused."""
        done = 0
        try:
            self._bypass(True)
            while done < len(buffer):
                count = os.pwrite(self.descriptor, buffer[done:], byte_offset + done)
                done += count
                if count % DISK_BLOCK_BYTES or not count:  # the largest size of a file, or an error to come
                    break
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
        return done

    def _bypass(self, wanted: bool) -> None:
        """Bypass the cache with the next writes, or use it."""
        if wanted and self._flags is None:
            flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            self._flags = flags
        elif not wanted and self._flags is not None:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, self._flags)
            self._flags = None

    def _write_to_cache(self, byte_offset: int, buffer: memoryview) -> None:
        if not buffer:
            return
        self._bypass(False)
        done = 0
        while done < len(buffer):
            block = buffer[done : done + WRITE_BYTES]
            done += os.pwrite(self.descriptor, block, byte_offset + done)
        start_writeback(self.descriptor, byte_offset, len(buffer))


def start_writeback(descriptor: int, byte_offset: int, nbytes: int) -> None:
    """Let the disk start writing back while the conversion continues.

    Otherwise the kernel keeps dirty pages until there are many, or until publishing flushes all of them at once. Linux
    starts to write them when advised that they are not needed soon; other systems may ignore the advice.
    """
    if nbytes >= WRITEBACK_BYTES and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, byte_offset, nbytes, os.POSIX_FADV_DONTNEED)


class Blocks:
    """Memory from which files are written: a few blocks, whatever the number of threads.

    Pickled without its memory.
    """

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._permits = threading.BoundedSemaphore(MOST_BLOCKS)

    def __reduce__(self) -> tuple[type[Blocks], tuple[()]]:
        return Blocks, ()

    @contextmanager
    def block(self) -> Iterator[memoryview]:
        """A block of memory that begins with a page. Waits while all are in use."""
        with self._permits:
            block = self._free.pop() if self._free else memory_in_huge_pages(BLOCK_BYTES)
            try:
                yield block
            finally:
                self._free.append(block)


def pieces(
    block: memoryview, byte_offset: int, nbytes: int, source_offset: int
) -> Iterator[tuple[int, memoryview]]:
    """Cut a range of a file into pieces: how many bytes come before each, and memory in ``block`` for it.

    From there all but the edges of the whole range can be written directly. The content is copied there fast if it is
    at ``source_offset`` in a file, or in memory as many bytes after a page.
    """
    done = 0
    while done < nbytes:
        start = byte_offset + done
        stop = (start + BLOCK_BYTES - EDGE_BYTES) // EDGE_BYTES * EDGE_BYTES
        size = min(nbytes - done, stop - start)
        first = padding_between(source_offset + done, start)
        yield done, block[first : first + size]
        done += size
