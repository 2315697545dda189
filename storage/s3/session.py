"""The session of a conversion to S3: an object that is replaced conditionally, and a ledger of small objects.

An object cannot be appended to, so the ledger consists of many objects: lines that arrive while one is being written
are collected for the next.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from paddle_reshard.storage.remote import retry
from paddle_reshard.storage.remote.retry import RetryPolicy
from paddle_reshard.storage.s3.folder import S3Folder
from paddle_reshard.storage.session.ledger import SESSION, parse_ledger
from paddle_reshard.storage.store import OWN_PREFIX, Record

T = TypeVar("T")

LEDGER_PREFIX = f"{OWN_PREFIX}ledger-"


class S3SessionStore:
    """A session among the objects of the target."""

    def __init__(self, folder: S3Folder) -> None:
        self.folder = folder
        self.location = f"{folder.location}/{SESSION}"
        self.run = secrets.token_hex(4)
        self.written = 0
        self.policy: RetryPolicy | None = None
        self._lines: list[bytes] = []
        self._lock = threading.Lock()
        self._last: Future[None] | None = None
        self._pool: ThreadPoolExecutor | None = None

    def read(self) -> tuple[bytes, str] | None:
        """The record and its ETag."""
        return self._attempt(SESSION, self.folder.read_object, SESSION)

    def write(self, data: bytes, version: str | None) -> str | None:
        """Replace the record on condition."""
        return self._attempt(SESSION, self.folder.put_if, SESSION, data, version)

    def _attempt(self, name: str, function: Callable[..., T], *args: Any) -> T:
        return self.folder.attempt(name, function, *args, policy=self.policy)

    def append(self, lines: bytes) -> None:
        """Write lines in the background. Lines that could not be written are written with the next ones."""
        if self._last is not None and self._last.done():
            self._last.result()
        with self._lock:
            self._lines.append(lines)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._last = self._pool.submit(self._write_lines)

    def _write_lines(self) -> None:
        with self._lock:
            lines = b"".join(self._lines)
            count = len(self._lines)
        if lines:
            name = f"{LEDGER_PREFIX}{self.run}-{self.written:06d}"
            self._attempt(name, self.folder.put, name, lines)
            self.written += 1
            with self._lock:
                del self._lines[:count]

    def flush(self) -> None:
        """Wait until all lines are written."""
        if self._pool is not None:
            self._pool.submit(self._write_lines).result()

    def shorten_timeouts(self) -> None:
        """Prefer a quick failure to a late success from here on."""
        self.policy = retry.HURRIED

    def _ledger_names(self) -> list[str]:
        return [name for name in self.folder.listing(self.policy).files if name.startswith(LEDGER_PREFIX)]

    def ledger(self) -> list[Record]:
        """Every line of every object."""

        def read(name: str) -> list[Record]:
            found = self._attempt(name, self.folder.read_object, name)
            return [] if found is None else parse_ledger(found[0])[0]

        return [record for records in self.folder.for_each(read, self._ledger_names()) for record in records]

    def clear(self) -> None:
        """Remove a ledger without a record."""
        self.folder.for_each(lambda name: self._attempt(name, self.folder.delete, name), self._ledger_names())

    def remove(self) -> None:
        """Remove the ledger, then the record."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self.clear()
        self._attempt(SESSION, self.folder.delete, SESSION)
