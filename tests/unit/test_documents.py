"""Commands, links and Python names in the documents exist."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import paddle_reshard
from paddle_reshard.pipeline.cli.main import cli
from tests.conftest import REPO

DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "tests/**/README.md", "pipeline/**/README.md")
    for path in REPO.glob(pattern)
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO)))
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text("utf-8")):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text("utf-8")), link


def anchors(text: str) -> set[str]:
    """What a link may name in a page: its headings as GitHub spells them, and explicit ids."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    spelled = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return spelled | set(re.findall(r'id="([^"]+)"', text))


def test_command_lines_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    lines = [line for document in DOCUMENTS for line in command_lines(document.read_text("utf-8"))]
    assert len(lines) > 30
    context = click.Context(cli)
    for line in lines:
        name, *arguments = shlex.split(line, comments=True)
        command = cli.get_command(context, name)
        assert command is not None, line
        try:
            parsed = command.make_context(name, arguments, parent=context)
            if rest := parsed.params.get("arguments"):
                convert = cli.get_command(context, "convert")
                assert convert is not None
                convert.make_context("convert", list(rest), parent=context)
        except click.ClickException as error:
            raise AssertionError(f"{line}: {error.format_message()}") from error


def command_lines(text: str) -> Iterator[str]:
    """Arguments of the lines in code blocks that call the command, with values for what they leave open."""
    for block in code_blocks(text, ""):
        for line in re.findall(r"paddle[-_]reshard (.+)", block.replace("\\\n", " ")):
            line = re.split(r" {3,}(?=[a-z])| 2>>", line)[0]
            for shown, value in (
                ("[DST]", "DST"),
                ("SRC…", "SRC"),
                ("…", "tp=1"),
                ("TOPOLOGY", "tp=1"),
                ("FILE", "README.md"),
                ("simulate plan.reshard", "simulate README.md"),
            ):
                line = line.replace(shown, value)
            yield line


def code_blocks(text: str, language: str) -> list[str]:
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [block for of, block in blocks if of == language]


def test_python_blocks_parse_and_import_what_exists() -> None:
    names = set()
    for document in DOCUMENTS:
        for block in code_blocks(document.read_text("utf-8"), "python"):
            for node in ast.walk(ast.parse(textwrap.dedent(block))):
                names.update(names_of_the_package(node))
    assert {"convert", "load_into", "rank_pieces", "CheckpointConverter"} <= names
    for name in names:
        assert hasattr(paddle_reshard, name), name


def names_of_the_package(node: ast.AST) -> list[str]:
    match node:
        case ast.ImportFrom(module="paddle_reshard"):
            return [alias.name for alias in node.names]
        case ast.Attribute(value=ast.Name(id="paddle_reshard")):
            return [node.attr]
    return []
