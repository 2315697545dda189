"""Errors of the operating system as sentences with the location that the user gave."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paddle_reshard.pipeline.core.errors import ReshardError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_SENTENCES = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than the limit of this process (ulimit -f) or of the file system",
    errno.EIO: "the disk failed (input/output error)",
    errno.ESTALE: "the network file system has lost the file (stale file handle)",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the file system is read-only",
    errno.ENAMETOOLONG: "the name is too long for the file system",
    errno.ELOOP: "too many levels of links",
    errno.ENOENT: "no such file or folder",
}
_PERMANENT = (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT, errno.EINVAL)
"""Errors for which a retry is pointless."""
_SAME_EVERYWHERE = (*NO_SPACE, errno.EFBIG, errno.EROFS)
"""Errors that would also occur on another machine with the same disk."""


@contextmanager
def translated(path: Path, location: str, failure: Callable[[str], ReshardError]) -> Iterator[None]:
    """Turn an ``OSError`` about ``path`` or its surroundings into a ``failure`` about ``location``.

    It is ``retryable`` if the same request may succeed later.
    """
    try:
        yield
    except OSError as error:
        translation = failure(f"{location}: {_sentence(error, path)}")
        translation.retryable = error.errno not in _PERMANENT
        raise translation from error


@contextmanager
def translated_while_moving(
    path: Path, location: str, failure: Callable[[str], ReshardError], doing: str = ""
) -> Iterator[None]:
    """As :func:`translated`, for a file that existed when the conversion was planned.

    Every such failure comes from the machine or the disk, so it is ``retryable``. ``doing`` is appended to the message.
    """
    try:
        yield
    except OSError as error:
        gone = error.errno == errno.ENOENT
        text = f"a file no longer exists ({path})" if gone else _sentence(error, path)
        translation = failure(f"{location}: {text}{doing}")
        translation.retryable = True
        raise translation from error


@contextmanager
def writing(path: Path, failure: Callable[[str], ReshardError]) -> Iterator[None]:
    """Turn an ``OSError`` while a file is written that the user named into a ``failure`` that says what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in NO_SPACE
        advice = "free some, or give a file on another disk" if full else "give another file"
        raise failure(f"{path}: cannot be written: {_reason(error)}; {advice}") from error


def may_succeed_elsewhere(error: ReshardError) -> bool:
    """Whether this is an error of the operating system that may not occur on a different machine."""
    cause = error.__cause__
    return error.retryable and isinstance(cause, OSError) and cause.errno not in _SAME_EVERYWHERE


def _sentence(error: OSError, path: Path) -> str:
    if error.errno == errno.ENOTDIR and (blocking := _file_above(path)) is not None:
        return f"{blocking} is a file, not a folder"
    where = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else path
    return f"{_reason(error)} ({where if where.is_relative_to(path) else path.parent})"


def _reason(error: OSError) -> str:
    return _SENTENCES.get(error.errno or 0) or (error.strerror or str(error)).lower()


def _file_above(path: Path) -> Path | None:
    for above in (path, *path.parents):
        if os.path.lexists(above):
            return None if above.is_dir() else above
    return None
