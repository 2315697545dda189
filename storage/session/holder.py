"""The process that holds a lock or a claim, and whether it has ended."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Holder:
    """A process, identified uniquely among all hosts, so that it can be looked for."""

    host: str
    machine: str
    """Distinguishes hosts with the same name; empty where there is no ``/etc/machine-id``."""
    boot: str
    pid_space: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def is_gone(holder: Holder, me: Holder, start_of: Callable[[int], str | None]) -> bool:
    """Whether a process has certainly ended: this host has rebooted since, or its pid is free or was reused.

    ``start_of`` returns the start of a running process, ``None`` if there is none. Processes on other hosts and in
    other containers cannot be looked up, so they have never certainly ended.
    """
    if (holder.host, holder.machine) != (me.host, me.machine):
        return False
    if holder.boot != me.boot:
        return True
    if holder.pid_space != me.pid_space:
        return False
    return start_of(holder.pid) != holder.started


def user_at_host() -> str:
    """The user of this process: ``user@host``, with the number of a user without a name."""
    import getpass

    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):
        user = str(os.getuid())
    return f"{user}@{platform.node()}"


def this_process() -> Holder:
    """This process, as a lock or a claim names it."""
    pid = os.getpid()
    machine = Path("/etc/machine-id")
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    return Holder(
        host=platform.node(),
        machine=hashlib.sha256(machine.read_bytes()).hexdigest()[:8] if machine.exists() else "",
        boot=boot.read_text().strip() if boot.exists() else "",
        pid_space=os.readlink(space) if space.exists() else "",
        pid=pid,
        started=process_start(pid) or "",
    )


def process_start(pid: int) -> str | None:
    """When a process of this host started, as a text unique to it; ``None`` if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self").exists():
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return ""
        return ""
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else fields[19]
