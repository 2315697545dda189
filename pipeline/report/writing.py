"""Write reports to files."""

from __future__ import annotations

from pathlib import Path

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.report.data import ReportData
from paddle_reshard.pipeline.report.page import render
from paddle_reshard.storage.local.folders import written_whole


def save_report(report: ReportData, path: Path) -> None:
    """Write a report; it replaces an existing file, and appears as a whole or not at all."""
    page = render(report).encode("utf-8", errors="replace")
    with written_whole(path, UsageError) as file:
        file.write(page)
