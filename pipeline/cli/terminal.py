r"""The one way to a terminal or a log.

Names of tensors and files, and what manifests and stores say, are made by others. Escape sequences in them would let
them overwrite lines, ring bells, name links or reach the clipboard, and a line feed would forge a line of ours; so
whatever is printed has its control and format characters shown as ``\x1b`` and the like. JSON escapes by itself.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of Unicode: controls, formats (bidi and width among them), halves of characters, separators of lines."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def printable(text: str) -> str:
    r"""A text in which every character that a terminal would act on is spelled out.

    >>> printable("a\x1b[2Jb\nc") == r"a\x1b[2Jb\nc"
    True
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode("ascii") if unicodedata.category(c) in _UNSEEN else c for c in text
    )


def say(message: str, err: bool = False) -> None:
    """Print one line."""
    click.echo(printable(message), err=err)


def pass_on(text: str, err: bool = False) -> None:
    """Print lines of another process: they stay lines, and lose their colours."""
    lines = _COLOUR.sub("", text).split("\n")
    click.echo("\n".join(printable(line.rstrip("\r")) for line in lines), nl=False, err=err)


def console(err: bool = False, width: int | None = None) -> Console:
    """A console that prints every text as it is: no markup, no emoji, nothing to act on."""
    from rich.console import Console
    from rich.text import Text

    class Literal(Console):
        def render_str(self, text: str, **options: object) -> Text:
            return super().render_str(printable(text), **{**options, "markup": False, "emoji": False})  # type: ignore[arg-type]

    return Literal(stderr=err, width=width, highlight=False, markup=False, emoji=False)


class LogFormatter(logging.Formatter):
    """Log lines; what a traceback says stays on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """One record."""
        return "\n".join(map(printable, super().format(record).split("\n")))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The message alone, which is one line."""
        return printable(super().formatMessage(record))


def log_to_terminal() -> None:
    """Let warnings that nobody has set up a log for be printed as everything else is."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LogFormatter("%(message)s"))
