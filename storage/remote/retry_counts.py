"""How often has a store been asked again? Counted in each process, by failure; no driver is needed to know it."""

from __future__ import annotations

import threading
from collections import Counter

_counts: Counter[str] = Counter()
_lock = threading.Lock()


def note_retry(failure: str) -> None:
    """A request failed in passing and is repeated."""
    with _lock:
        _counts[failure] += 1


def count_retries() -> Counter[str]:
    """Failure → how often it was met and the request repeated, in this process so far."""
    with _lock:
        return Counter(_counts)
