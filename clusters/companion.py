"""A process beside this one that shares memory with it and does one thing after another.

The memory is an anonymous file that both map: it has no name, so nothing is left behind however either of them
ends. Requests and answers are lines of JSON on pipes. The companion ends when this process does, because its
standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from paddle_reshard.pipeline.core.errors import ReshardError, UnsupportedError

LAST_WORDS_BYTES = 2000


class CompanionLost(ReshardError):
    """The companion process has ended. ``status`` is its exit status, ``words`` its last line of output."""

    def __init__(self, status: int | None, words: str) -> None:
        super().__init__(status, words)
        self.status, self.words = status, words

    def __str__(self) -> str:
        ended = (
            "still runs and has closed its pipe"
            if self.status is None
            else f"ended with status {self.status}"
        )
        return f"the process beside this one {ended}{': ' + self.words if self.words else ''}"


class Companion:
    """A running module of this package, ``python -m module FD NBYTES``, and the memory shared with it."""

    def __init__(self, module: str, nbytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise UnsupportedError("memory shared with a process beside this one needs Linux")
        self.module = module
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("paddle_reshard")
        os.ftruncate(self.descriptor, nbytes)
        self.memory = mmap.mmap(self.descriptor, nbytes)
        self.changed = threading.Condition()
        self.start()

    def start(self) -> None:
        """Start the process, or one in place of a lost one; the memory is kept."""
        self.asked = self.answered = 0
        self.failure: str | None = None
        self.ended = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, str(self.descriptor), str(self.nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[self.descriptor],
            # Ctrl-C is for the training process, which then decides about this one.
            start_new_session=True,
        )
        threading.Thread(target=self._listen, args=(self.process,), daemon=True).start()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None  # noqa: S101
        for line in process.stdout:
            answer = json.loads(line)  # noqa: TID251 (from a process of ours)
            with self.changed:
                self.answered += 1
                self.failure = self.failure or answer.get("error")
                self.changed.notify_all()
        with self.changed:
            self.ended = True
            self.changed.notify_all()

    @property
    def busy(self) -> bool:
        """Whether a request is still in progress."""
        return self.answered < self.asked

    def ask(self, request: Mapping[str, Any]) -> None:
        """Ask for something, to be done after all that was asked before; returns at once.

        Raises
        ------
        CompanionLost
        """
        assert self.process.stdin is not None  # noqa: S101
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except (OSError, ValueError) as error:
            raise self._lost() from error
        self.asked += 1

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until all that was asked is done; whether it is.

        Raises
        ------
        CompanionLost
            If the process ended before.
        ReshardError
            If something that was asked could not be done; in its words.
        """
        with self.changed:
            done = self.changed.wait_for(lambda: not self.busy or self.ended, timeout_seconds)
            failure, self.failure = self.failure, None
        if failure is not None:
            raise ReshardError(failure)
        if self.busy and self.ended:
            raise self._lost()
        return done

    def _lost(self) -> CompanionLost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        words = ""
        if self.process.stderr is not None and self.process.poll() is not None:
            words = self.process.stderr.read()[-LAST_WORDS_BYTES:].decode(errors="replace").strip()
        return CompanionLost(self.process.poll(), words.splitlines()[-1] if words else "")

    def end(self) -> None:
        """Let the process end after what it is doing, and wait for that."""
        with contextlib.suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def close(self) -> None:
        """End the process and let go of the memory."""
        self.end()
        with contextlib.suppress(BufferError):  # views of the memory that live on keep it
            self.memory.close()
        os.close(self.descriptor)
