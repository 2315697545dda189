"""A clock for reports: steps without events are reported too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def every_second(action: Callable[[], None]) -> Iterator[None]:
    """Call ``action`` once a second, in a thread, until the block ends."""
    stopped = threading.Event()

    def tick() -> None:
        while not stopped.wait(1.0):
            action()

    thread = threading.Thread(target=tick, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
