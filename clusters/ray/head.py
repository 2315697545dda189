"""Notice that the head of a Ray cluster is lost, although workers may go on for a while without it."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Callable

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.shown import one_line

log = logging.getLogger(__name__)

TOKEN_HINT = "; if it wants a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to that"
"""For errors of a head that wants another token, or any: it does by default."""
CONNECT_SECONDS = 10.0
CHECK_SECONDS = 5.0
"""How often a run checks that the head answers."""
HEAD_SECONDS = 2.0
"""Time in which it has to."""
NOTICED_SECONDS = 25.0
"""Time that passes at most until a lost head is noticed, and until the run has ended after it has given up."""
RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's variable for how many seconds it waits for a head to come back, before it ends the process."""
RECONNECT_SECONDS = 60.0


def patience_seconds() -> float:
    """How long to wait for a head that does not answer: not quite as long as Ray, which ends the process without a word
    about the conversion.

    Raises
    ------
    UsageError
        If the environment variable is not what Ray accepts.
    """
    value = os.environ.get(RECONNECT_VARIABLE)
    if value is None:
        return RECONNECT_SECONDS - NOTICED_SECONDS
    if re.fullmatch("[0-9]{1,9}", value) is None:
        raise UsageError(f"{RECONNECT_VARIABLE}={value!r}: give a whole number of seconds, as in 600")
    return max(0.0, int(value) - NOTICED_SECONDS)


class Head:
    """The head of a cluster. It may come back, and Ray waits for it."""

    def __init__(
        self, address: str, patience_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.address, self.patience_seconds, self.clock = address, patience_seconds, clock
        self.checked_at = clock()
        self.silent_since: float | None = None
        """When it was first found not to answer; ``None`` if it answered."""

    @property
    def answers(self) -> bool:
        """Whether it did when it was last asked."""
        return self.silent_since is None

    def lost(self, at_once: bool = False) -> str | None:
        """Why it is given up; ``None`` if it is not. It is asked every few seconds, or ``at_once``."""
        now = self.clock()
        if not at_once and now - self.checked_at < (CHECK_SECONDS if self.answers else 1.0):
            return None
        self.checked_at = now
        try:
            check_answers(self.address, HEAD_SECONDS)
        except OSError as error:
            return self._silent(now, f"its head at {self.address}: {one_line(error)}")
        if not self.answers:
            log.warning("the head of the Ray cluster at %s answers again", self.address)
        self.silent_since = None
        return None

    def _silent(self, now: float, reason: str) -> str | None:
        if self.silent_since is None:
            self.silent_since = now
            if self.patience_seconds:
                log.warning("Ray is lost (%s); waiting %.0f s for it", reason, self.patience_seconds)
        return reason if now - self.silent_since >= self.patience_seconds else None


def check_answers(address: str, seconds: float = CONNECT_SECONDS) -> None:
    """Check that a process listens at ``host:port``, for which Ray itself would try for minutes.

    Raises ``OSError`` if none does.
    """
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
