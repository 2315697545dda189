"""What documents name within their sentences exists: links, commands, options. Blocks are in ``tests/documents``."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from paddle_reshard.pipeline.cli.main import cli
from tests.conftest import REPO
from tests.documents.blocks import documents, own_arguments, spans
from tests.documents.session import parse_own

DOCUMENTS = documents()


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


def test_commands_within_sentences_parse() -> None:
    """Those that are spelled out; ``…`` stands for what the sentence is not about."""
    found = 0
    for document in DOCUMENTS:
        for span in spans(document.read_text("utf-8")):
            arguments = (
                own_arguments(shlex.split(span)) if span.startswith(("paddle-reshard ", "python")) else None
            )
            if not arguments or "…" in span or span in NEVER_WRITTEN:
                continue
            try:
                parse_own([FILES.get(word, word) for word in arguments])
            except click.exceptions.Exit:
                assert arguments[-1] in ("-h", "--help"), span
            except click.MissingParameter:
                pass  # a sentence names the command and what it is about
            except click.ClickException as error:
                raise AssertionError(f"{document.name}: {span}: {error.format_message()}") from error
            found += 1
    assert found > 10


NEVER_WRITTEN = {"paddle-reshard upload", "paddle-reshard inspect | plan | convert | verify"}
"""A command that a decision decided against; several in one."""
OPTIONS_OF_OTHERS = {"--build-arg", "--json-model-override-args", "--quantization"}
"""Of Docker and SGLang."""
OF_OTHER_PROGRAMS = {"CHANGELOG", "parity", "performance", "s3"}
"""Pages on benchmarks and on the trainers, whose options are not ours."""
FILES = {"FILE": str(REPO / "README.md")}


def test_options_within_sentences_exist() -> None:
    ours = {name for command in cli.commands.values() for option in command.params for name in option.opts}
    ours |= {
        name
        for command in cli.commands.values()
        for option in command.params
        for name in option.secondary_opts
    }
    ours |= {"--help", "--version"}
    unknown = {
        (str(document.relative_to(REPO)), option)
        for document in DOCUMENTS
        if document.relative_to(REPO).parts[0] != "tests" and document.stem not in OF_OTHER_PROGRAMS
        for span in spans(document.read_text("utf-8"))
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*(?!\w)", span)
        if span.startswith(
            ("--", "paddle-reshard", "convert", "verify", "watch", "plan", "inspect", "ls ", "submit")
        )
        and option not in ours
    }
    assert {option for _, option in unknown} == OPTIONS_OF_OTHERS, unknown
