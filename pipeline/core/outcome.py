"""How a conversion ended, as events and the audit log have it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from paddle_reshard.pipeline.core.version import __version__

SCHEMA_VERSION: Final = 1
"""It increases when an entry is removed or changes its meaning."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a conversion ended."""

    event: str
    """``converted``, ``refused``, ``failed``, ``stale``, or ``removed`` by ``--keep``."""
    source: str | None
    """Path or URL without secrets; ``None`` for a target that is removed."""
    target: str
    at: float
    """Seconds since the epoch."""
    by: str
    """``user@host``."""
    plan_id: str | None = None
    seconds: float | None = None
    """Duration of the attempt."""
    error: str | None = None

    def data(self) -> dict[str, Any]:
        """As plain data, ready for JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "event": self.event,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.at)),
            "source": self.source,
            "target": self.target,
            "plan_id": self.plan_id,
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "error": self.error,
            "by": self.by,
            "version": __version__,
        }
