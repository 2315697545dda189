"""Errors of the operating system as sentences with the path that the user gave."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paddle_reshard.pipeline.core.errors import ReshardError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_SENTENCES = {
    errno.ENOSPC: "no space is left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is larger than the limit of this process (ulimit -f) or of the file system",
    errno.EIO: "the disk failed (input/output error)",
    errno.ESTALE: "the network file system has lost the file (stale file handle)",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the file system is read-only",
    errno.ENAMETOOLONG: "the name is too long for the file system",
    errno.ELOOP: "too many levels of links",
    errno.ENOENT: "nothing can be made there",
}
_FOR_GOOD = (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT, errno.EINVAL)
"""Errors for which a retry is pointless."""
_ALIKE_EVERYWHERE = (*NO_SPACE, errno.EFBIG, errno.EROFS)
"""Errors that would also occur on another machine with the same disk."""


@contextmanager
def told(path: Path, given: str, failure: type[ReshardError]) -> Iterator[None]:
    """Let an ``OSError`` about ``path`` or what lies around it become a ``failure`` about ``given``.

    ``retryable`` says whether it may go away without another request.
    """
    try:
        yield
    except OSError as error:
        refused = failure(f"{given}: {_sentence(error, path)}")
        refused.retryable = error.errno not in _FOR_GOOD
        raise refused from error


@contextmanager
def told_while_moving(path: Path, given: str, failure: type[ReshardError], doing: str = "") -> Iterator[None]:
    """As :func:`told`, for a file that was there when it was planned to read or write it.

    Every such failure is the machine's or the disk's and may go away: ``retryable``. ``doing`` says more of it.
    """
    try:
        yield
    except OSError as error:
        gone = error.errno == errno.ENOENT
        text = f"a file is not there any more ({path})" if gone else _sentence(error, path)
        refused = failure(f"{given}: {text}{doing}")
        refused.retryable = True
        raise refused from error


def may_succeed_elsewhere(error: ReshardError) -> bool:
    """Whether this is an error of the operating system that may not occur on a different machine."""
    cause = error.__cause__
    return error.retryable and isinstance(cause, OSError) and cause.errno not in _ALIKE_EVERYWHERE


def _sentence(error: OSError, path: Path) -> str:
    if error.errno == errno.ENOTDIR and (blocking := _file_above(path)) is not None:
        return f"{blocking} is a file, not a folder"
    text = _SENTENCES.get(error.errno or 0) or (error.strerror or str(error)).lower()
    where = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else path
    return f"{text} ({where if where.is_relative_to(path) else path.parent})"


def _file_above(path: Path) -> Path | None:
    for above in (path, *path.parents):
        if os.path.lexists(above):
            return None if above.is_dir() else above
    return None
