"""The one stream of events of a command. What shows, writes or counts is an observer of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from paddle_reshard.pipeline.core.events import Event
from paddle_reshard.pipeline.core.outcome import Outcome
from paddle_reshard.pipeline.core.run_state import RunState


@dataclass(frozen=True, slots=True)
class Checked:
    """A watcher has looked at every checkpoint of a run."""

    results: Mapping[str, str]
    """Checkpoint → ``converted``, ``done``, ``waiting``, ``stale`` or ``failed``."""


Happening = Event | Outcome | Checked
"""What observers of a stream are called with: events of a function, how a conversion ended, what a watcher found."""


@dataclass
class Stream:
    """An observer that adds up events and hands them on, to one observer after the other."""

    state: RunState
    observers: list[Callable[[Happening], None]] = field(default_factory=list)
    clocks: list[Callable[[], None]] = field(default_factory=list)
    """Called once a second while :meth:`ticking`, so that steps without events are reported too."""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        """Held while the state changes; no observer is called meanwhile, since what it prints may be drawn."""
        self._turn = threading.Lock()

    def __call__(self, event: Happening) -> None:
        """Hand an event on."""
        with self._turn:
            if not isinstance(event, (Outcome, Checked)):
                with self.lock:
                    self.state(event)
            for observe in self.observers:
                observe(event)

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """Call the clocks once a second, in a thread, until the block ends."""
        stopped = threading.Event()

        def tick() -> None:
            while not stopped.wait(1.0):
                with self._turn:
                    for clock in self.clocks:
                        clock()

        thread = threading.Thread(target=tick, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()
