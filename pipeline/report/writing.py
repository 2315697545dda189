"""Write reports to files."""

from __future__ import annotations

from pathlib import Path

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.report.data import ReportData
from paddle_reshard.pipeline.report.page import render
from paddle_reshard.storage.local.folders import write_whole


def check_writable(path: Path) -> None:
    """Refuse a report whose folder does not exist, before anything is done."""
    if path.is_dir():
        raise UsageError(f"{path}: the report cannot be written: it is a folder; give the name of a file")
    if not path.absolute().parent.is_dir():
        raise UsageError(
            f"{path}: the report cannot be written: the folder {path.absolute().parent} does not exist"
        )


def save_report(report: ReportData, path: Path) -> None:
    """Write a report; it replaces an existing file, and appears as a whole or not at all."""
    try:
        write_whole(path, render(report).encode("utf-8", errors="replace"))
    except OSError as error:
        raise UsageError(f"{path}: the report cannot be written: {error}") from error
