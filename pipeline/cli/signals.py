"""How a command reacts to signals: Ctrl-C, an operator, a closed terminal, a shutdown.

SIGINT, SIGTERM and SIGHUP all end it in the same way: resources are closed, a message says what is kept, and the exit
status is 128 plus the signal's number, as in a shell. A signal that was ignored when the command started stays
ignored; ``nohup`` relies on that.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(KeyboardInterrupt):
    """A signal asked this process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Handler:
    """A handler that records its signal, because Ray turns a signal during its waits into a plain interrupt."""

    def __init__(self) -> None:
        self.received: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        raise Stopped(number)


@contextmanager
def handled_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt the block as SIGINT does. Call it from the main thread."""
    interrupt = _Handler()
    before = {
        number: signal.signal(number, interrupt)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_of(interrupt: BaseException) -> signal.Signals:
    """The signal that caused an interrupt, which click may have wrapped in an error of its own."""
    for error in (interrupt, interrupt.__cause__):
        if isinstance(error, Stopped):
            return signal.Signals(error.number)
    for handler in map(signal.getsignal, (signal.SIGTERM, signal.SIGHUP)):
        if isinstance(handler, _Handler) and handler.received is not None:
            return signal.Signals(handler.received)
    return signal.SIGINT


def exit_status(interrupt: BaseException) -> int:
    """Exit status of an interrupted process.

    >>> exit_status(KeyboardInterrupt()), exit_status(Stopped(15))
    (130, 143)
    """
    return 128 + signal_of(interrupt)


def sentence(interrupt: BaseException) -> str:
    """Which signal ended a command.

    >>> sentence(Stopped(15))
    'interrupted by SIGTERM'
    """
    return f"interrupted by {signal_of(interrupt).name}"
