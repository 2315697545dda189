"""Disks that take no more, without one: no file of this process may grow beyond a few bytes (``setrlimit(2)``)."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_up_to(nbytes: int) -> Iterator[None]:
    """A write beyond takes what fits, and the next one fails with EFBIG, as with ENOSPC on a disk that is full."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, most[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
