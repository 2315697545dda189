"""Expand statements with placeholders.

``$LAYER_ID`` and ``$EXPERT_ID`` take all numbers with which the first name on the source's side is a key of the source;
so does ``$LAYER_ID_OFFSET``, which on the right side is one lower. ``*`` expands to all keys of the source with a
number in its position, in order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from paddle_reshard.pipeline.changes.aoa.language import PLACEHOLDER, Name, Statement, check_statement

_NUMBERS = re.compile(r"(?:[0-9]|\*|\$LAYER_ID_OFFSET|\$LAYER_ID|\$EXPERT_ID)+")
_OPEN = re.compile(r"\*|\$(?:LAYER_ID_OFFSET|LAYER_ID|EXPERT_ID)")


class Keys:
    """Keys, indexed by their text without numbers."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._by_text = defaultdict[str, list[str]](list)
        for key in keys:
            self._by_text[_NUMBERS.sub("#", key)].append(key)

    def matching(self, template: str) -> list[Mapping[str, str]]:
        """Placeholder (or ``*``) → number, for every key that matches the template; ordered by the numbers.

        >>> Keys(["a.10.w", "a.2.w", "a.2.b"]).matching("a.$LAYER_ID.w")
        [{'$LAYER_ID': '2'}, {'$LAYER_ID': '10'}]
        """
        groups: dict[str, str] = {}
        pattern = ""
        for fixed, opened in _pieces(template):
            pattern += re.escape(fixed)
            if opened in groups:
                pattern += f"(?P={groups[opened]})"
            elif opened:
                groups[opened] = f"n{len(groups)}"
                pattern += f"(?P<{groups[opened]}>[0-9]+)"
        regex = re.compile(pattern)
        of_keys = [
            {opened: match[group] for opened, group in groups.items()}
            for key in self._by_text.get(_NUMBERS.sub("#", template), ())
            if (match := regex.fullmatch(key))
        ]
        return sorted(of_keys, key=lambda numbers: [int(number) for number in numbers.values()])


def _pieces(template: str) -> list[tuple[str, str]]:
    """``(fixed text, placeholder after it)``, to the end of the template; the last placeholder is ``""``."""
    words = _OPEN.findall(template)
    return list(zip(_OPEN.split(template), [*words, ""], strict=True))


def expand(statement: Statement, source: Keys) -> list[Statement]:
    """A statement, expanded to statements without placeholders by the keys of the source; none if no key matches."""
    return [_starred(numbered, source) for numbered in _numbered(statement, source)]


def _numbered(statement: Statement, source: Keys) -> list[Statement]:
    names = [name for name in (*statement.left, *statement.right) if not name.is_nothing]
    if not any(name.placeholders for name in names):
        return [statement]
    guide = names[0]
    filled = []
    for numbers in source.matching(guide.text):
        left, right = (
            tuple(_fill(statement, name, guide, numbers) for name in side)
            for side in (statement.left, statement.right)
        )
        filled.append(replace(statement, left=left, right=right))
    return filled


def _fill(statement: Statement, name: Name, guide: Name, numbers: Mapping[str, str]) -> Name:
    def number(match: re.Match[str]) -> str:
        text = numbers[match.group()]
        shift = name.layer_shift - guide.layer_shift
        if match.group() != "$LAYER_ID_OFFSET" or not shift:
            return text
        if int(text) + shift < 0:
            raise statement.refused(f"layer {text} of {guide.text} would become layer {int(text) + shift}")
        return str(int(text) + shift)

    return replace(name, text=PLACEHOLDER.sub(number, name.text))


def _starred(statement: Statement, source: Keys) -> Statement:
    if any("*" in name.text for name in statement.right):
        raise statement.refused("cannot expand '*' on the target's side; write name[a:b] or all names")
    if not any("*" in name.text for name in statement.left):
        return statement
    left = tuple(expanded for name in statement.left for expanded in _all(statement, name, source))
    starless = replace(statement, left=left)
    check_statement(starless)
    return starless


def _all(statement: Statement, name: Name, keys: Keys) -> list[Name]:
    if "*" not in name.text:
        return [name]
    matches = keys.matching(name.text)
    if not matches:
        raise statement.refused(f"{name.text} matches no tensor")
    return [replace(name, text=name.text.replace("*", numbers["*"])) for numbers in matches]
