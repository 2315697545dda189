"""What the two formats are called."""

from __future__ import annotations

from typing import Final

HYBRID: Final = "hybrid"
HYBRID_PLAIN: Final = "hybrid-plain"
