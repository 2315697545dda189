"""Write reports to files."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.report.data import ReportData
from paddle_reshard.pipeline.report.page import render


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
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(render(report), "utf-8", errors="replace")
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):  # a read-only file system refuses that too, even if there is nothing
            unfinished.unlink()
        raise UsageError(f"{path}: the report cannot be written: {error}") from error
