"""A companion process that shares memory with this one and serves requests one after the other.

The memory is an anonymous file that both map. It has no name, so nothing remains however either process ends. Requests
and replies are lines of JSON on pipes. The companion ends with this process, because its standard input ends.
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

LAST_OUTPUT_BYTES = 2000


class CompanionLost(ReshardError):
    """The companion process has ended. ``status`` is its exit status, ``last_line`` its last line of output."""

    def __init__(self, status: int | None, last_line: str) -> None:
        super().__init__(status, last_line)
        self.status, self.last_line = status, last_line

    def __str__(self) -> str:
        ended = (
            "is running but has closed its pipe"
            if self.status is None
            else f"ended with status {self.status}"
        )
        return f"the companion process {ended}{': ' + self.last_line if self.last_line else ''}"


class Companion:
    """A running module of this package, ``python -m module FD NBYTES``, and the memory shared with it."""

    def __init__(self, module: str, nbytes: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise UnsupportedError("memory shared with a companion process requires Linux")
        self.module = module
        self.nbytes = nbytes
        self.descriptor = os.memfd_create("paddle_reshard")
        os.ftruncate(self.descriptor, nbytes)
        self.memory = mmap.mmap(self.descriptor, nbytes)
        self.changed = threading.Condition()
        self.start()

    def start(self) -> None:
        """Start the process, or replace a lost one. The memory is kept."""
        self.sent = self.answered = 0
        self.failure: str | None = None
        self.ended = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, str(self.descriptor), str(self.nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[self.descriptor],
            # Ctrl-C is for the training process, which then ends its companion.
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
        return self.answered < self.sent

    def send(self, request: Mapping[str, Any]) -> None:
        """Queue a request and return at once; raises ``CompanionLost`` if the process has ended."""
        assert self.process.stdin is not None  # noqa: S101
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except (OSError, ValueError) as error:
            raise self._lost() from error
        self.sent += 1

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until all requests are done. Returns whether they are.

        Raises
        ------
        CompanionLost
            If the process ended before.
        ReshardError
            If a request failed, with its message.
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
        output = ""
        if self.process.stderr is not None and self.process.poll() is not None:
            output = self.process.stderr.read()[-LAST_OUTPUT_BYTES:].decode(errors="replace").strip()
        return CompanionLost(self.process.poll(), output.splitlines()[-1] if output else "")

    def end(self) -> None:
        """Let the process finish its requests, and wait until it ends."""
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
        """End the process and release the memory."""
        self.end()
        with contextlib.suppress(BufferError):  # remaining views keep the memory
            self.memory.close()
        os.close(self.descriptor)
