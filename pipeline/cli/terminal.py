r"""The only module that writes to a terminal or a log.

Names of tensors and files, and texts from manifests and stores, are untrusted. Escape sequences in them could overwrite
lines, ring bells, create links or reach the clipboard, and a line feed could forge a line of output. So control and
format characters in all output are shown as ``\x1b`` and the like. JSON has its own escapes.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import unicodedata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from paddle_reshard.pipeline.core.answer import Answer

if TYPE_CHECKING:
    from rich.console import Console

_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories: controls, formats (including bidi and zero width), surrogates, line separators."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str) -> str:
    r"""Text with every character that a terminal would act on escaped.

    >>> printable("a\x1b[2Jb\nc") == r"a\x1b[2Jb\nc"
    True
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode("ascii") if unicodedata.category(c) in _ESCAPED else c for c in text
    )


def say(message: str, err: bool = False) -> None:
    """Print a line."""
    click.echo(printable(message), err=err)


def relay(text: str, err: bool = False) -> None:
    """Print output of another process, lines and columns as they are, without its colours."""
    lines = _COLOUR.sub("", text).split("\n")
    columns = (line.rstrip("\r").split("\t") for line in lines)
    click.echo("\n".join("\t".join(map(printable, line)) for line in columns), nl=False, err=err)


def console(err: bool = False, width: int | None = None) -> Console:
    """A console that prints text literally: no markup, no emoji, no control characters."""
    from rich.console import Console
    from rich.text import Text

    class Literal(Console):
        def render_str(self, text: str, **options: object) -> Text:
            return super().render_str(printable(text), **{**options, "markup": False, "emoji": False})  # type: ignore[arg-type]

    return Literal(stderr=err, width=width, highlight=False, markup=False, emoji=False)


class LogFormatter(logging.Formatter):
    """Formats log records; the lines of a traceback stay separate lines."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record."""
        return "\n".join(map(printable, super().format(record).split("\n")))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format the message, which is a single line."""
        return printable(super().formatMessage(record))


def log_formatter() -> LogFormatter:
    """Formats records of a log that is kept, with times in UTC."""
    formatter = LogFormatter("%(asctime)sZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    return formatter


def log_to_terminal(formatter: logging.Formatter | None = None) -> None:
    """Print warnings of unconfigured loggers in the same safe way as everything else, or as ``formatter`` has them."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(formatter or LogFormatter("%(message)s"))


# ----------------------------------------------------------------------------------------------- answers


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values: in two columns on a terminal, tab-separated elsewhere."""
    print_table((), facts)


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str | int]]) -> None:
    """Print each row on its own line, without truncation: in columns on a terminal, tab-separated elsewhere.

    Columns that contain only numbers are right-aligned. Sizes and counts are plain numbers where they are
    tab-separated, so that ``cut`` and ``awk`` can add them up.
    """
    on_terminal = sys.stdout.isatty()
    cells_of = str if on_terminal else _plain
    lines = [
        tuple(printable(cells_of(cell)) for cell in row) for row in ((headings, *rows) if headings else rows)
    ]
    if not lines:
        return
    if not on_terminal:
        for line in lines:
            click.echo("\t".join(line))
        return
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numbers = [
        all(_is_number(cell) for cell in column) for column in zip(*lines[bool(headings) :], strict=True)
    ]
    for row, line in enumerate(lines):
        cells = [
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, numbers, strict=True)
        ]
        if headings and row == 0:
            click.secho("  ".join(cells).rstrip(), bold=True)
        elif headings:
            click.echo("  ".join(cells).rstrip())
        else:
            click.echo("  ".join((click.style(cells[0], bold=True), *cells[1:])).rstrip())


def _plain(cell: str | int) -> str:
    return f"{int(cell)}" if isinstance(cell, int) else cell


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit()


def print_object(command: str, facts: Mapping[str, Any]) -> None:
    """Print the JSON object of a command that succeeded."""
    print_answer(Answer(command, facts=facts))


def print_answer(answer: Answer) -> None:
    """Print the JSON object of a command, whether it succeeded or not."""
    click.echo(json.dumps(answer.data()))
