"""What the two formats are called."""

from __future__ import annotations

from typing import Final

FLEX: Final = "flex"
AUTO_PARALLEL: Final = "auto-parallel"
