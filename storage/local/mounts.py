"""Kinds of file systems that are mounted on this machine."""

from __future__ import annotations

import os
from pathlib import Path


def file_system(device: int) -> str:
    """The type of the file system with a device number, such as ``ext4``; empty if it is unknown.

    Linux ``proc(5)``, ``mountinfo``.
    """
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    here = [mount for mount in mounts if mount.split(" ", 3)[2:3] == [number]]
    kinds = {mount.partition(" - ")[2].partition(" ")[0] for mount in here}
    return kinds.pop() if len(kinds) == 1 else ""
