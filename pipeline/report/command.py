"""The command that a report is of, and the commands that come next, as words that can be shown and repeated."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

PROGRAM = "paddle-reshard"


@dataclass(frozen=True, slots=True)
class Command:
    """A command line without secrets.

    >>> str(Command("convert", ("a b", "c"), (("--to", "tp=1"),)).with_options("--resume"))
    "paddle-reshard convert 'a b' c --to tp=1 --resume"
    """

    name: str
    arguments: tuple[str, ...]
    options: tuple[tuple[str, ...], ...] = ()
    """Each with its flag and its values; what holds secrets has a placeholder as its value."""

    def __str__(self) -> str:
        words = (PROGRAM, self.name, *self.arguments, *(word for option in self.options for word in option))
        return shlex.join(words)

    def with_options(self, *option: str) -> Command:
        """The same with one more option, a flag and its values, if it does not have that flag."""
        return self if self.has(option[0]) else replace(self, options=(*self.options, option))

    def without(self, *flags: str) -> Command:
        """The same without options."""
        return replace(self, options=tuple(option for option in self.options if option[0] not in flags))

    def has(self, flag: str) -> bool:
        """Whether an option was given."""
        return any(option[0] == flag for option in self.options)
