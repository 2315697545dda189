"""``--log-file FILE``: what a command reports while it runs, appended to a file, with times in UTC."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from paddle_reshard.pipeline.cli.terminal import log_formatter

_ROOT = "paddle_reshard"


class _LogFile(logging.FileHandler):
    """The log of one command. A file that cannot be written does not affect the command."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Lose the record, as a stream that is full loses its lines."""


def open_log_file(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Begin to append to the file that the option names.

    Raises
    ------
    click.BadParameter
        If it cannot be written.
    """
    if path is None or context.resilient_parsing:
        return path
    try:
        handler = _LogFile(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror or error}") from error
    handler.setFormatter(log_formatter())
    logger = logging.getLogger(_ROOT)
    logger.addHandler(handler)
    logger.addHandler(_Warnings())
    logger.setLevel(logging.INFO)
    logger.propagate = False
    from paddle_reshard.pipeline.core.version import __version__

    log_line(f"paddle-reshard {__version__}: {context.info_name}")
    return path


class _Warnings(logging.Handler):
    """Warnings go where they go without a log file, unless the command has a log of its own on stderr."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning."""
        handlers = logging.getLogger(_ROOT).handlers
        if logging.lastResort is not None and all(isinstance(h, (_LogFile, _Warnings)) for h in handlers):
            logging.lastResort.handle(record)


def log_line(line: str, level: int = logging.INFO) -> None:
    """Append a line to the log file of this command, if it has one, and print it nowhere else."""
    for handler in logging.getLogger(_ROOT).handlers:
        if isinstance(handler, _LogFile):
            handler.handle(logging.LogRecord(_ROOT, level, "", 0, line, None, None))


def note_failure(message: str) -> None:
    """Append the error that ends the command."""
    log_line(message, logging.ERROR)


@contextmanager
def log_file_closed() -> Iterator[None]:
    """Close the log file at the end of the block, if one was opened, and leave logging as it was."""
    logger = logging.getLogger(_ROOT)
    level, propagate = logger.level, logger.propagate
    try:
        yield
    finally:
        own: list[Any] = [
            handler for handler in logger.handlers if isinstance(handler, (_LogFile, _Warnings))
        ]
        for handler in own:
            logger.removeHandler(handler)
            handler.close()
        if own:
            logger.setLevel(level)
            logger.propagate = propagate
