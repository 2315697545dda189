"""``--notify``: report how a conversion ended to a webhook, or to a command.

A notification that fails is a warning and changes nothing else. What it is sent to is never shown in full: the path
of a webhook's URL is often its password.
"""

from __future__ import annotations

import base64
import json
import logging
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit, urlunsplit

import click

from paddle_reshard.pipeline.core.errors import FinishedError, ReshardError, UsageError

if TYPE_CHECKING:
    from paddle_reshard.pipeline.convert.conversion import ConversionReport
    from paddle_reshard.pipeline.core.outcome import Outcome

log = logging.getLogger(__name__)

TIMEOUT_SECONDS: Final = 10.0
"""For an answer of a webhook."""
COMMAND_SECONDS: Final = 60.0
PAUSES: Final = (1.0, 4.0)
"""Seconds before the second and the third try."""


class NotificationError(Exception):
    """A notification that was not delivered."""

    def __init__(self, message: str, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


@dataclass(frozen=True)
class Webhook:
    """A URL to which outcomes are posted."""

    url: str = field(repr=False)
    authorization: str | None = field(repr=False)
    shown: str
    """The part that is safe to show."""

    @classmethod
    def parse(cls, text: str) -> Webhook:
        """From a URL, which may hold a user and a password.

        Raises
        ------
        ValueError
            If it is not a URL of a host.
        """
        parts = urlsplit(text)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        if not host:
            raise ValueError("no host")
        at = host if parts.port is None else f"{host}:{parts.port}"
        authorization = None
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            authorization = f"Basic {base64.b64encode(pair.encode()).decode()}"
        return cls(
            urlunsplit((*(parts.scheme, at), *parts[2:4], "")), authorization, f"{parts.scheme}://{at}"
        )

    def send(self, message: bytes) -> None:
        """Post a message. A redirect is not followed: it would send the message to a host that nobody named."""
        from http.client import HTTPException
        from urllib.error import HTTPError
        from urllib.request import HTTPRedirectHandler, Request, build_opener

        class Stay(HTTPRedirectHandler):
            def redirect_request(self, *_: object) -> None:
                return None

        headers = {"Content-Type": "application/json", "User-Agent": "paddle-reshard"}
        if self.authorization is not None:
            headers["Authorization"] = self.authorization
        request = Request(self.url, message, headers, method="POST")
        try:
            with build_opener(Stay).open(request, timeout=TIMEOUT_SECONDS):
                return
        except HTTPError as error:
            error.close()
            raise NotificationError(
                f"HTTP {error.code}", error.code in (408, 429) or error.code >= 500
            ) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise NotificationError(f"{type(reason).__name__}", True) from None


@dataclass(frozen=True)
class Program:
    """A command that is run with an outcome on its standard input, without a shell."""

    words: tuple[str, ...] = field(repr=False)

    @property
    def shown(self) -> str:
        """Its name; the arguments may hold secrets."""
        return self.words[0]

    def send(self, message: bytes) -> None:
        """Run it, without its output."""
        import subprocess

        quiet = subprocess.DEVNULL
        try:
            done = subprocess.run(
                self.words, input=message, stdout=quiet, stderr=quiet, timeout=COMMAND_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise NotificationError(f"did not end within {COMMAND_SECONDS:.0f} s", False) from None
        except (OSError, ValueError) as error:
            raise NotificationError(getattr(error, "strerror", None) or str(error), False) from None
        if done.returncode:
            raise NotificationError(f"exit status {done.returncode}", False)


def read_receiver(text: str) -> Webhook | Program:
    """A URL, or a command, or ``@FILE`` with either. Messages never show it.

    >>> read_receiver("https://me:secret@example.com/hook?key=secret")
    Webhook(shown='https://example.com')

    Raises
    ------
    click.BadParameter
        If it is neither.
    """
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text("utf-8").strip()
        except (OSError, ValueError):
            raise click.BadParameter("@FILE cannot be read") from None
    try:
        if text.lower().startswith(("http://", "https://")):
            return Webhook.parse(text)
        if words := tuple(shlex.split(text)):
            return Program(words)
    except ValueError:
        pass
    raise click.BadParameter("neither a URL nor a command")


def notify(receiver: Webhook | Program | None, outcome: Outcome) -> None:
    """Send an outcome; a failure is a warning."""
    if receiver is None:
        return
    message = json.dumps(outcome.data()).encode()
    for pause in (*PAUSES, None):
        try:
            return receiver.send(message)
        except NotificationError as error:
            if pause is None or not error.retryable:
                log.warning("paddle-reshard: --notify %s: not notified: %s", receiver.shown, error)
                return None
            time.sleep(pause)
    return None


class Notifier:
    """Reports how the conversion of a command ended."""

    def __init__(
        self, receiver: Webhook | Program | None, sources: Sequence[str], targets: tuple[str, ...]
    ) -> None:
        self.receiver, self.sources, self.targets = receiver, sources, targets
        self.started = time.monotonic()

    def converted(self, report: ConversionReport) -> None:
        """Report success, for each target."""
        if self.receiver is None:
            return
        roots = report.moved.fingerprint_roots
        for target in report.plan.target_locations:
            done = self._outcome("converted", target)
            notify(self.receiver, replace(done, plan_id=report.plan.plan.plan_id, root=roots.get(target)))

    def failed(self, error: ReshardError | OSError | MemoryError) -> None:
        """Report an error, for each target."""
        if self.receiver is None:
            return
        refused = isinstance(error, ReshardError) and not error.retryable
        for target in self.targets:
            notify(
                self.receiver,
                replace(self._outcome("refused" if refused else "failed", target), error=str(error)),
            )

    def _outcome(self, event: str, target: str) -> Outcome:
        from paddle_reshard.pipeline.core.outcome import Outcome
        from paddle_reshard.storage.remote.folder import without_secrets
        from paddle_reshard.storage.session.holder import user_at_host

        seconds = time.monotonic() - self.started
        where = ", ".join(map(without_secrets, self.sources)), without_secrets(target)
        return Outcome(event, *where, time.time(), user_at_host(), seconds=seconds)


@contextmanager
def notifying(sources: Sequence[str], *targets: str) -> Iterator[Notifier]:
    """Notify the receiver of ``--notify`` if the block fails, except for wrong usage."""
    notifier = Notifier(click.get_current_context().params.get("notify"), sources, targets)
    try:
        yield notifier
    except (UsageError, FinishedError):
        raise
    except (ReshardError, OSError, MemoryError) as error:
        if notifier.receiver is not None:
            notifier.failed(error)
        raise
