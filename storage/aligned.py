"""Memory at addresses between which and a file bytes move fast.

The kernel copies between memory and its cache of a file with one instruction, ``rep movsb``. On AMD's processors (seen
on Zen 3) it is four times slower if the target begins 1 to 31 bytes after the source, not counting whole pages. Memory
that begins as many bytes after a cache line as the range of the file does avoids this in both directions.

A disk reads whole blocks of memory, at addresses that are multiples of a block's size. Memory that begins as many bytes
after a block as the range of the file does can be written without the kernel's cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap

LINE_BYTES = 64
SLOW_BYTES = 32
"""Memory that begins fewer bytes than this after its source is slow to fill."""
SECTOR_BYTES = 512
"""Most disks read from memory at multiples of this, since Linux 6.0 (before: of the disk's blocks)."""
DISK_BLOCK_BYTES = 4096
"""The largest usual size of a disk's blocks; a page of memory is a multiple of it."""

HUGE_PAGE_BYTES = 2 << 20


def padding(address: int, byte_offset: int, unit_bytes: int = LINE_BYTES) -> int:
    """How many bytes after ``address`` memory for a file's bytes from ``byte_offset`` on should begin.

    >>> padding(4096, 70), padding(4096 + 10, 70), padding(4096 + 10, 64)
    (6, 60, 54)
    >>> padding(4096 + 10, 70, DISK_BLOCK_BYTES)
    60
    """
    return (byte_offset - address) % unit_bytes


def padding_between(source_offset: int, byte_offset: int) -> int:
    """The padding after a page of memory that is filled from one file and written to another without the cache.

    >>> padding_between(0, 5000), padding_between(4999, 5000)
    (904, 1416)
    """
    first = padding(0, byte_offset, DISK_BLOCK_BYTES)
    return first + (SECTOR_BYTES if 0 < (first - source_offset) % DISK_BLOCK_BYTES < SLOW_BYTES else 0)


def private_memory(nbytes: int) -> mmap.mmap:
    """New memory that begins with a page, all zeros.

    It is not from the heap, which may not return freed memory to the system, and it is private, as a budget counts it:
    a shared mapping would be none of the process's own memory.

    Raises
    ------
    MemoryError
        If the system has no more, or the process may not have it.
    """
    try:
        return mmap.mmap(-1, max(nbytes, 1), mmap.MAP_PRIVATE)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(
            f"{nbytes} bytes are needed at once, and the system gives no more: give a smaller --memory, or raise the "
            "limit of this process (ulimit -v)"
        ) from error


def memory_in_huge_pages(nbytes: int) -> memoryview:
    """New memory in huge pages where the system has them, for a few MiB that are used again and again.

    A disk is given a huge page in one piece. To find many of them the kernel may have to move other memory about, which
    takes longer than they save.
    """
    whole_bytes = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES  # only such mappings begin with a huge page
    memory = private_memory(whole_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)[:nbytes]


def memory_for(nbytes: int, byte_offset: int) -> memoryview:
    """New memory for ``nbytes`` bytes of a file from ``byte_offset`` on, all zeros."""
    first = padding(0, byte_offset)  # the mapping begins with a page
    return memoryview(private_memory(first + nbytes))[first : first + nbytes]
