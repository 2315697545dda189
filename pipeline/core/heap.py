"""Memory that is free inside the process goes back to the system."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give back what the C library keeps of freed memory for later; one that is not glibc has its own ways.

    Columns of some megabytes each are made and freed while metadata are read and planned, and lie scattered in its
    heap. Without this they count as memory of the process until it ends.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
