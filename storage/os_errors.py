"""What an operating system refuses, as a sentence with the path that the user gave."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paddle_reshard.pipeline.errors import ReshardError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_SENTENCES = {
    errno.ENOSPC: "no space is left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the file system is read-only",
    errno.ENAMETOOLONG: "the name is too long for the file system",
    errno.ELOOP: "its links lead in a circle",
    errno.ENOENT: "nothing can be made there",
}
_FOR_GOOD = (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT, errno.EINVAL)
"""Would be refused again, however often it is tried."""


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
