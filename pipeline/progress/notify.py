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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit, urlunsplit

import click

from paddle_reshard.pipeline.core.outcome import Outcome
from paddle_reshard.pipeline.progress.stream import Happening

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
        """From a URL, which may hold a user and a password; a ``ValueError`` if it names no host."""
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


@dataclass(frozen=True)
class Notifications:
    """An observer that sends how conversions ended. A failure to send is a warning."""

    receiver: Webhook | Program

    def __call__(self, event: Happening) -> None:
        """Send an outcome."""
        if not isinstance(event, Outcome):
            return
        message = json.dumps(event.data()).encode()
        for pause in (*PAUSES, None):
            try:
                return self.receiver.send(message)
            except NotificationError as error:
                if pause is None or not error.retryable:
                    log.warning("paddle-reshard: --notify %s: not notified: %s", self.receiver.shown, error)
                    return None
                time.sleep(pause)
        return None
