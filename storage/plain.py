"""Open what others may have put in a folder, or replaced there: only plain files, and small ones within a limit.

Whoever can write next to a target or a record can put a link to another file there, a pipe that nobody writes to, a
device without an end, or a file of a terabyte.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from paddle_reshard.pipeline.core.errors import ReshardError
from paddle_reshard.pipeline.core.limits import too_large

UNWAITING = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags with which no link leads elsewhere, and no pipe is waited for."""
KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link that leads to itself",
}
_CHUNK_BYTES = 1 << 20


def read_small(path: Path, most_bytes: int, failure: Callable[[str], ReshardError]) -> bytes:
    """The content of a small file.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    failure
        If it is a link, a pipe, a device or a folder, or has more than ``most_bytes``.
    """
    _check_plain(path, os.lstat(path).st_mode, failure)  # to open a device may already do something
    with open(os.open(path, os.O_RDONLY | UNWAITING), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        _check_plain(path, status.st_mode, failure)
        size_bytes, chunks = status.st_size, []
        if size_bytes <= most_bytes:
            size_bytes = 0
            while size_bytes <= most_bytes and (chunk := file.read(_CHUNK_BYTES)):  # it may grow meanwhile
                chunks.append(chunk)
                size_bytes += len(chunk)
    if size_bytes > most_bytes:
        raise failure(f"{path}: {too_large(size_bytes, most_bytes)}; remove it")
    return b"".join(chunks)


def plain_opener(path: str, flags: int) -> int:
    """The ``opener`` of ``open`` for files that this program has staged."""
    return os.open(path, flags | UNWAITING)


def _check_plain(path: Path, mode: int, failure: Callable[[str], ReshardError]) -> None:
    if not stat.S_ISREG(mode):
        kinds = {**KINDS, stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder"}
        kind = kinds.get(stat.S_IFMT(mode), "a special file")
        raise failure(f"{path}: is {kind} where a small file of this name is needed; remove it")
