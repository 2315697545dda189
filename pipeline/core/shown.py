"""The display of results: a line at a prompt, and facts on the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

Facts = list[tuple[str, str]]
"""Names and what they are, in the order in which they matter."""
SHOWN_DIFFERENCES = 20
"""Differences that are listed for people; JSON has all."""
SHOWN_WORKERS = 16
SHOWN_AMPLIFICATION = 1.05
"""Show the amplification of reads if it exceeds this."""


class Result:
    """A result that prints as a few facts, however much it holds."""

    __slots__ = ()

    def facts(self) -> Facts:
        """The facts about the result, as name and value."""
        raise NotImplementedError

    def _in_short(self) -> str:
        """The result in a line, for a prompt."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._in_short()}>"


def counted(number: int, word: str) -> str:
    """A number and its noun, for messages.

    >>> counted(1, "difference"), counted(2, "difference"), counted(3, "topology")
    ('1 difference', '2 differences', '3 topologies')
    """
    plural = f"{word[:-1]}ies" if word.endswith("gy") else f"{word}s"
    return f"{number} {word if number == 1 else plural}"


class ToCopy(str):
    """A command or arguments to be copied: never broken into lines."""

    __slots__ = ()


class Bytes(int):
    """A size in a table: for people as ``1.5 KiB``, and a plain number where programs read."""

    def __str__(self) -> str:
        return readable_bytes(self)


class Count(int):
    """A number in a table: for people as ``1,536``, and plain where programs read."""

    def __str__(self) -> str:
        return f"{self:,}"


def readable_bytes(size_bytes: int) -> str:
    """A size for people.

    >>> readable_bytes(1536)
    '1.5 KiB'
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, max(0, size_bytes.bit_length() - 1) // 10)
    return f"{size_bytes / 1024**power:.{1 if power else 0}f} {units[power]}"


def reread_in_words(amplification: float, once_bytes: int | None) -> str:
    """How often bytes are read, if more than once, and the budget that would avoid it."""
    often = amplification > SHOWN_AMPLIFICATION
    again = f", {amplification:.2f} times the bytes needed" if often else ""
    return again if once_bytes is None else f"{again}; once with a budget of {readable_bytes(once_bytes)}"


def readable_seconds(seconds: float) -> str:
    """A duration for people.

    >>> readable_seconds(0.25), readable_seconds(75), readable_seconds(7260)
    ('0.2 s', '1 min 15 s', '2 h 01 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def one_line(message: object) -> str:
    """A message in one line, for a sentence."""
    return " ".join(str(message).split())[:500]


ONLY_IN = "only in"


def only_in(side: str) -> str:
    """What is said of a tensor that only one side of a comparison holds.

    >>> only_in("A")
    'only in A'
    """
    return f"{ONLY_IN} {side}"


def by_reason(not_carried: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Files and tensors that are not carried, grouped by reason: the reason, and their names."""
    for reason, group in groupby(sorted(not_carried, key=lambda entry: entry[1]), key=lambda entry: entry[1]):
        names = [name for name, _ in group]
        yield reason, names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"
