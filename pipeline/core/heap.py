"""The memory of this process: how much it is, and that what is free inside goes back to the system."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def trim_heap() -> None:
    """Give back what the C library keeps of freed memory for later; one that is not glibc has its own ways.

    Columns of some megabytes each are made and freed while metadata are read and planned, and lie scattered in its
    heap. Without this they count as memory of the process until it ends.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def private_bytes() -> int:
    """Memory that this process shares with no other: what a budget limits; 0 where the system does not tell."""
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text("ascii").split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
