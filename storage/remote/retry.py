"""Retries: which failures of a store are temporary, and how often a request is retried.

All retries are made and counted here; clients are configured to try once. A request is not retried after a permanent
failure (no permission, no such object, a failed condition).
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from paddle_reshard.storage.remote.retry_counts import note_retry

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long a request is retried. Each wait is random, below a bound that doubles every time."""

    attempts: int = 8
    total_seconds: float = 180.0
    first_wait_seconds: float = 0.2
    longest_wait_seconds: float = 20.0


POLICY = RetryPolicy()
HURRIED = RetryPolicy(attempts=5, total_seconds=15.0)
"""For the first contact and for cleaning up, where a quick failure is better than a late success."""

_STATUSES = frozenset({408, 429, 500, 502, 503, 504})
_CODES = frozenset(
    {
        "BadDigest",
        "ConditionalRequestConflict",
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestLimitExceeded",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
    }
)


class DamagedBody(Exception):
    """The body of a response was truncated or altered; a retry may succeed."""


_PASSING = (
    DamagedBody,
    ConnectionError,
    TimeoutError,
    asyncio.TimeoutError,
    http.client.IncompleteRead,
)
_PASSING_OF_CLIENTS = (
    ("aiohttp", "ClientError"),
    ("botocore.exceptions", "ConnectionError"),
    ("botocore.exceptions", "HTTPClientError"),
    ("botocore.exceptions", "IncompleteReadError"),
)
"""Module and class. A module that is not loaded has raised nothing, and may not even be installed."""


def _passing() -> tuple[type[BaseException], ...]:
    """Classes of failures that pass."""
    loaded = ((sys.modules.get(module), name) for module, name in _PASSING_OF_CLIENTS)
    return (*_PASSING, *(getattr(module, name) for module, name in loaded if module is not None))


class GaveUp(Exception):
    """A temporary failure lasted longer than the policy allows."""

    def __init__(self, attempts: int, cause: BaseException) -> None:
        super().__init__(attempts, cause)
        self.attempts, self.cause = attempts, cause


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__


def response_of(error: BaseException) -> Mapping[str, Any]:
    """The response of an S3 store; empty if there was none."""
    for each in _chain(error):
        response = getattr(each, "response", None)
        if isinstance(response, Mapping):
            return response
    return {}


def code_of(error: BaseException) -> str:
    """The store's error code, else the name of the exception's class."""
    return str(response_of(error).get("Error", {}).get("Code", "")) or type(error).__name__


def operation_of(error: BaseException) -> str:
    """The store's name for the request that failed; empty if unknown."""
    names = (getattr(each, "operation_name", None) for each in _chain(error))
    return next((name for name in names if isinstance(name, str)), "")


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    response = response_of(error)
    if response:
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status in _STATUSES or code_of(error) in _CODES
    passing = _passing()
    if any(isinstance(each, passing) for each in _chain(error)):
        return True
    numbers = (getattr(error, name, None) for name in ("status_code", "status", "code"))
    return any(number in _STATUSES for number in numbers if isinstance(number, int))


def call(policy: RetryPolicy, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function, and repeat the call after temporary failures, up to the policy's limits: then :class:`GaveUp`.

    Permanent failures are raised immediately.
    """
    began, attempt = time.monotonic(), 0
    while True:
        attempt += 1
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not is_transient(error):
                raise
            if attempt >= policy.attempts or time.monotonic() - began >= policy.total_seconds:
                raise GaveUp(attempt, error) from error
            bound = min(policy.longest_wait_seconds, policy.first_wait_seconds * 2.0 ** (attempt - 1))
            seconds, code = random.uniform(0, bound), code_of(error)
        note_retry(code)
        logger.info("attempt %d failed with %s; again in %.1f s", attempt, code, seconds)
        time.sleep(seconds)
