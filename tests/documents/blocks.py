"""The fenced blocks of documents, and the lines of commands in them."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import REPO

FENCE = re.compile(r"^ *```(.*)$")
CONTINUED = re.compile(r"\s*\\\n\s*")
CRON = re.compile(r"(?:[\d*/,-]+ +){5}(?P<command>.+?)(?: 2>>\S+)?")
PATTERNS = ("*.md", "docs/**/*.md", "tests/**/*.md", "pipeline/**/*.md")


@dataclass(frozen=True)
class Block:
    """A fenced block of a document, without its indentation."""

    language: str
    text: str
    line: int
    """Number of its first line in the document, from 1."""

    @property
    def first(self) -> str:
        return next((line.strip() for line in self.text.splitlines() if line.strip()), "")


def documents() -> list[Path]:
    """All documents of the repository."""
    found = {path for pattern in PATTERNS for path in REPO.glob(pattern)}
    return sorted(path for path in found if "cases" not in path.parts)


def blocks_of(text: str) -> list[Block]:
    """The blocks of a document in order. Directives of Sphinx, ``{toctree}`` and the like, are none."""
    found, opened, lines = [], None, text.splitlines()
    for number, line in enumerate(lines, 1):
        fence = FENCE.match(line)
        if fence and opened is None:
            opened = number, fence[1].strip()
        elif fence and opened is not None and not fence[1]:
            start, language = opened
            content = textwrap.dedent("\n".join(lines[start : number - 1]))
            found.append(Block(language, content, start + 1))
            opened = None
    assert opened is None, f"line {opened}: a block is not closed"
    return [block for block in found if not block.language.startswith("{")]


def command_lines(block: Block) -> list[str]:
    """The commands of a block: of a shell, without the times of cron, or of a unit of systemd."""
    lines = CONTINUED.sub(" ", block.text).splitlines()
    match block.language:
        case "bash":
            spelled = [cron["command"] if (cron := CRON.fullmatch(line)) else line for line in lines]
            return [line for line in spelled if shlex.split(line, comments=True)]
        case "ini":
            return [line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart=")]
    return []


def words_of(line: str) -> tuple[dict[str, str], list[str]]:
    """The variables that a line sets for its command, and the command with its arguments."""
    words = shlex.split(line, comments=True)
    variables: dict[str, str] = {}
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return variables, words


def own_arguments(words: list[str]) -> list[str] | None:
    """The arguments of this package's command, if a line calls it."""
    if words and Path(words[0]).name == "paddle-reshard":
        return words[1:]
    if len(words) > 2 and Path(words[0]).name.startswith("python") and words[1:3] == ["-m", "paddle_reshard"]:
        return words[3:]
    return None


def spans(text: str) -> Iterator[str]:
    """What a document shows as code within its sentences."""
    outside, inside = [], False
    for line in text.splitlines():
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            outside.append(line)
    for found in re.findall(r"(?<!`)`([^`]+)`(?!`)", "\n".join(outside)):
        yield " ".join(found.split())
