r"""The only module that writes to a terminal or a log.

Names of tensors and files, and texts from manifests and stores, are untrusted. Escape sequences in them could overwrite
lines, ring bells, create links or reach the clipboard, and a line feed could forge a line of output. So control and
format characters in all output are shown as ``\x1b`` and the like. JSON has its own escapes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import unicodedata
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click

from paddle_reshard.pipeline.core.answer import Answer
from paddle_reshard.pipeline.core.shown import ToCopy

if TYPE_CHECKING:
    from rich.console import Console

_ESCAPED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories: controls, formats (including bidi and zero width), surrogates, line separators."""
GAP = "  "
"""Between columns, where there is room."""
NARROWEST = 30
"""Columns of a terminal in which sentences can be read; on a narrower one they are as wide, and it breaks lines."""
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
    """Print a line; a sentence that is wider than the terminal is wrapped between words."""
    line, stream = printable(message), sys.stderr if err else sys.stdout
    wraps = stream is not None and stream.isatty() and not isinstance(message, ToCopy)
    width = max(_terminal_width(err), NARROWEST) if wraps else len(line)
    click.echo("\n".join(_wrapped(line, width, GAP)), err=err)


def relay(text: str, err: bool = False) -> None:
    """Print output of another process, lines and columns as they are, without its colours."""
    lines = _COLOUR.sub("", text).split("\n")
    columns = (line.rstrip("\r").split("\t") for line in lines)
    click.echo("\n".join("\t".join(map(printable, line)) for line in columns), nl=False, err=err)


def console() -> Console:
    """A console on stderr that prints text literally: no markup, no emoji, no control characters."""
    from rich.console import Console
    from rich.text import Text

    class Literal(Console):
        def render_str(self, text: str, **options: object) -> Text:
            return super().render_str(printable(text), **{**options, "markup": False, "emoji": False})  # type: ignore[arg-type]

    return Literal(stderr=True, highlight=False, markup=False, emoji=False)


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


def log_to_terminal() -> None:
    """Print warnings of unconfigured loggers in the same safe way as everything else."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LogFormatter("%(message)s"))


# ----------------------------------------------------------------------------------------------- answers


def on_terminal() -> bool:
    """Whether people read what is printed; where programs do, nothing is left out or wrapped."""
    return sys.stdout.isatty()


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values: tab-separated, or on a terminal in two columns, wrapped between words."""
    if not facts or not on_terminal():
        print_table((), facts)
        return
    indent = max(len(printable(name)) for name, _ in facts) + len(GAP)
    width = max(_terminal_width() - indent, NARROWEST)
    for name, value in facts:
        # A command that is broken into lines could not be copied.
        lines = [printable(value)] if isinstance(value, ToCopy) else _wrapped(printable(value), width)
        click.echo(
            f"{click.style(printable(name).ljust(indent - len(GAP)), bold=True)}{GAP}{lines[0]}".rstrip()
        )
        for line in lines[1:]:
            click.echo(" " * indent + line)


def print_table(
    headings: Sequence[str], rows: Sequence[Sequence[str | int]], bold: Container[int] = ()
) -> None:
    """Print each row: tab-separated on a line, or on a terminal in columns, wrapped between words.

    Sizes and counts are plain numbers where they are tab-separated, so that ``cut`` and ``awk`` can add them up. On a
    terminal, columns that contain only numbers are right-aligned, those without any entry are left out, and the rows
    whose numbers are in ``bold`` stand out.
    """
    people = on_terminal()
    cells_of = str if people else _plain
    lines = [[printable(cells_of(cell)) for cell in row] for row in rows]
    if not people:
        for line in ([list(headings)] if headings else []) + lines:
            click.echo("\t".join(line))
        return
    columns = [
        _Column(heading, cells) for heading, *cells in zip(headings, *lines, strict=True) if any(cells)
    ]
    gap = _fit(columns, _terminal_width())
    if columns:
        _print_row([column.heading for column in columns], columns, gap, True)
    for row in range(len(lines)):
        _print_row([column.cells[row] for column in columns], columns, gap, row in bold)


@dataclass
class _Column:
    """A column of a table on a terminal."""

    heading: str
    cells: Sequence[str]
    width: int = field(init=False)
    numbers: bool = field(init=False)
    """Whether all cells are numbers: they are aligned at the right, and stay beside their units."""

    def __post_init__(self) -> None:
        self.width = max(map(len, (self.heading, *self.cells)))
        self.numbers = all(cell[:1].isdigit() for cell in self.cells)

    def narrowest(self) -> int:
        """The width below which a word, or a number and its unit, would be broken."""
        if self.numbers:
            return self.width
        return max(len(word) for cell in (self.heading, *self.cells) for word in cell.split(" "))


def _fit(columns: Sequence[_Column], width: int) -> str:
    """What stands between columns, narrowed where rows would be wider than ``width`` and words allow it."""

    def too_wide(gap: str) -> int:
        return sum(column.width for column in columns) + len(gap) * (len(columns) - 1) - width

    if too_wide(GAP) <= 0:
        return GAP
    narrowest = {id(column): column.narrowest() for column in columns}
    while too_wide(" ") > 0:
        widest = max(columns, key=lambda column: (column.width > narrowest[id(column)], column.width))
        if widest.width == narrowest[id(widest)]:
            break
        widest.width -= 1
    return " "


def _print_row(cells: Sequence[str], columns: Sequence[_Column], gap: str, bold: bool) -> None:
    wrapped = [_wrapped(cell, column.width) for cell, column in zip(cells, columns, strict=True)]
    for parts in zip_longest(*wrapped, fillvalue=""):
        aligned = (
            part.rjust(column.width) if column.numbers else part.ljust(column.width)
            for part, column in zip(parts, columns, strict=True)
        )
        line = gap.join(aligned).rstrip()
        click.echo(click.style(line, bold=True) if bold else line)


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of a text, broken between words only; all but the first begin with ``indent``.

    >>> _wrapped("--to tp=2,pp=2 fits", 9)
    ['--to', 'tp=2,pp=2', 'fits']
    """
    if len(text) <= width:
        return [text]
    import textwrap

    wrap = textwrap.TextWrapper(width, "", indent, break_long_words=False, break_on_hyphens=False).wrap
    return wrap(text) or [""]


def _terminal_width(err: bool = False) -> int:
    import shutil  # with textwrap, only for people: a conversion in a script starts without them

    width = shutil.get_terminal_size()
    if (
        "COLUMNS" not in os.environ
    ):  # of the stream that is written: stdout may be a pipe while stderr is a terminal
        with suppress(OSError, ValueError):
            width = os.get_terminal_size((sys.stderr if err else sys.stdout).fileno())
    return width.columns or 80


def _plain(cell: str | int) -> str:
    return f"{int(cell)}" if isinstance(cell, int) else cell


def print_object(command: str, facts: Mapping[str, Any]) -> None:
    """Print the JSON object of a command that succeeded."""
    print_answer(Answer(command, facts=facts))


def print_answer(answer: Answer) -> None:
    """Print the JSON object of a command, whether it succeeded or not."""
    click.echo(json.dumps(answer.data()))
