"""Memory that the control groups of a process leave it: the limits of containers, of pods, of systemd's slices.

A process that exceeds such a limit is killed without a word, so a run that would exceed it is refused before it moves
anything. Page cache does not count: the kernel gives it up first.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.units import SMALLEST_BUDGET_BYTES

PROCESS = "/proc/self/cgroup"
MOUNT = "/sys/fs/cgroup"
UNLIMITED_BYTES = 1 << 62
"""Version 1 writes the largest number of pages instead of ``max``."""
ReadText = Callable[[str], str | None]
"""The text of a file; ``None`` if it does not exist or cannot be read."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The limit that leaves the least memory."""

    path: str
    """The file that holds the limit."""
    limit_bytes: int
    used_bytes: int
    """In use by all processes below the limit, without page cache that can be dropped."""

    @property
    def left_bytes(self) -> int:
        """What can still be allocated."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class _Version:
    """Names of one version of control groups."""

    limit: str
    usage: str
    statistics: tuple[str, ...]
    """Entries of ``memory.stat`` that can be dropped, those of all groups below included."""


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = _Version("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"))


def tightest_limit(groups: str | None, read: ReadText) -> MemoryLimit | None:
    """The limit, in any group from the process's own up to the root, that leaves the least memory.

    ``groups`` is the text of ``/proc/self/cgroup``. ``None`` if there is no limit.
    """
    limits = (_limit(folder, version, read) for folder, version in _folders(groups or ""))
    return min(filter(None, limits), key=lambda limit: limit.left_bytes, default=None)


def memory_limit() -> MemoryLimit | None:
    """The limit of this process that leaves the least memory; ``None`` if it has none."""
    return tightest_limit(_text(PROCESS), _text)


def _folders(groups: str) -> Iterator[tuple[str, _Version]]:
    """Every folder that may hold a limit.

    Inside a container the path is often that on the host, while the container's own group is mounted as the root.
    Folders that do not exist are therefore to be skipped, not an error.
    """
    for line in groups.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        if not controllers:
            root, version = MOUNT, _V2
        elif "memory" in controllers.split(","):
            root, version = f"{MOUNT}/memory", _V1
        else:
            continue
        inner = posixpath.normpath(path).strip("/")  # a group outside the namespace begins with /..
        while inner:
            yield f"{root}/{inner}", version
            inner = posixpath.dirname(inner)
        yield root, version


def _limit(folder: str, version: _Version, read: ReadText) -> MemoryLimit | None:
    path = f"{folder}/{version.limit}"
    limit_bytes, used_bytes = _number(read(path)), _number(read(f"{folder}/{version.usage}"))
    if limit_bytes is None or used_bytes is None or limit_bytes >= UNLIMITED_BYTES:
        return None
    entries = dict(
        line.split(maxsplit=1) for line in (read(f"{folder}/memory.stat") or "").splitlines() if " " in line
    )
    dropped = sum(_number(entries.get(name)) or 0 for name in version.statistics)
    return MemoryLimit(path, limit_bytes, max(0, used_bytes - dropped))


def _number(text: str | None) -> int | None:
    """``None`` for a file that does not exist, and for ``max``."""
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() else None


def check_memory_limit(more_bytes: int, room_bytes: int, budget_bytes: int) -> None:
    """Refuse to allocate ``more_bytes`` for groups if this process would be killed for it.

    ``room_bytes`` is the part of the budget that groups may take.
    """
    limit = memory_limit()
    if limit is None or more_bytes <= limit.left_bytes:
        return
    enough_bytes = budget_bytes - room_bytes + limit.left_bytes
    smaller = f"use --memory {enough_bytes >> 20}MiB, or " if enough_bytes >= SMALLEST_BUDGET_BYTES else ""
    raise UsageError(
        f"--memory {budget_bytes >> 20}MiB: {more_bytes} bytes are still to be allocated, but {limit.path} leaves "
        f"{limit.left_bytes} bytes ({limit.limit_bytes} less {limit.used_bytes} in use), and the process would be "
        f"killed; {smaller}raise the memory limit of the container"
    )


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text("ascii", "replace")
    except OSError:
        return None
