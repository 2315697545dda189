"""How a command that failed ends: its exit status, its message, the kind of the error."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from pathlib import Path

import click

from paddle_reshard.pipeline.cli.signals import exit_status, sentence
from paddle_reshard.pipeline.core.errors import ReshardError

DEFECT = "Defect"
"""Kind of an error that nobody has foreseen."""
LIMITS = "Limits"
"""Topic of errors of a machine that does not give what a command needs."""


@dataclass(frozen=True, slots=True)
class End:
    """How a command failed."""

    status: int
    message: str
    kind: str
    retryable: bool = False
    topic: str = ""
    """The heading of docs/guides/troubleshooting.md that is about it; empty where the message says all."""

    @property
    def shown(self) -> str:
        """The message, with its topic."""
        return f"{self.message} [{self.topic}]" if self.topic else self.message


def end_of(error: BaseException, trouble: int) -> End:
    """What an error means to a user; ``trouble`` is the exit status of a failure."""
    kind = type(error).__name__
    if isinstance(error, click.ClickException):
        return End(error.exit_code, error.format_message(), "UsageError")
    if isinstance(error, ReshardError):
        return End(max(trouble, error.exit_status), str(error), kind, error.retryable, kind)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return End(exit_status(error), sentence(error), "Interrupted", True)
    if lacking := _lacking(error):
        return End(trouble, lacking, kind, True, LIMITS)
    if isinstance(error, OSError):
        lost = isinstance(error, (ConnectionError, TimeoutError))
        return End(trouble, f"{kind}: {error}", kind, lost, OSError.__name__)
    message = f"{kind}: {error} ({_frames(error)}); this is a bug in paddle-reshard"
    return End(trouble, message, DEFECT, topic=DEFECT)


def _lacking(error: BaseException) -> str | None:
    """What this machine did not give, if that is what the error means."""
    if isinstance(error, MemoryError):
        return f"out of memory: {error}" if str(error) else "out of memory"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return "this process may not start another thread: raise its limits (ulimit -v, ulimit -u), or give --workers 1"
    if isinstance(error, ImportError) and Path(error.path or "").suffix == ".so":
        return f"a library cannot be loaded: {error}; is its memory limited (ulimit -v)?"
    if isinstance(error, FileNotFoundError) and error.filename is None and not _has_working_directory():
        return "the working directory has been removed: change to one that exists"
    return None


def _has_working_directory() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def _frames(error: BaseException) -> str:
    """The innermost frames of an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
