"""How does a command end that is told to: by Ctrl-C, by an operator, by the end of a terminal or of a machine?

SIGINT, SIGTERM and SIGHUP all end it in the same way: what is open is closed, a sentence says what is kept, and the
exit status is 128 and the signal's number, as a shell would say it. A signal that was ignored when the command started
stays ignored: ``nohup`` counts on that.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Stop:
    """A handler that remembers what it was called for: Ray makes a plain interrupt of one that comes while it waits."""

    def __init__(self) -> None:
        self.heard: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.heard = number
        raise Stopped(number)


@contextmanager
def heard_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end what is being done as SIGINT does. For the main thread."""
    stop = _Stop()
    before = {
        number: signal.signal(number, stop)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_of(interrupt: BaseException) -> signal.Signals:
    """The signal that was behind an interrupt; click puts an error of its own in front of one."""
    for error in (interrupt, interrupt.__cause__):
        if isinstance(error, Stopped):
            return signal.Signals(error.number)
    for handler in map(signal.getsignal, (signal.SIGTERM, signal.SIGHUP)):
        if isinstance(handler, _Stop) and handler.heard is not None:
            return signal.Signals(handler.heard)
    return signal.SIGINT


def exit_status(interrupt: BaseException) -> int:
    """What a process that was interrupted exits with.

    >>> exit_status(KeyboardInterrupt()), exit_status(Stopped(15))
    (130, 143)
    """
    return 128 + signal_of(interrupt)


def sentence(interrupt: BaseException) -> str:
    """What ended a command; a conversion that keeps something has said so by then.

    >>> sentence(Stopped(15))
    'interrupted by SIGTERM'
    """
    return f"interrupted by {signal_of(interrupt).name}"
