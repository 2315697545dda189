"""What the format is called."""

from __future__ import annotations

from typing import Final

UNIFIED: Final = "unified"
