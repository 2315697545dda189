"""Counts retried requests by failure, in each process. Requires no driver."""

from __future__ import annotations

import threading
from collections import Counter

_counts: Counter[str] = Counter()
_lock = threading.Lock()


def note_retry(failure: str) -> None:
    """Count a request that failed temporarily and is retried."""
    with _lock:
        _counts[failure] += 1


def count_retries() -> Counter[str]:
    """Failure → number of retries after it, in this process so far."""
    with _lock:
        return Counter(_counts)
