"""Runs what a document shows, from its first block to its last, in a folder of its own."""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from paddle_reshard.pipeline.cli.main import cli
from paddle_reshard.pipeline.core.file_names import MANIFEST
from tests.conftest import case_directory
from tests.documents.blocks import Block, command_lines, own_arguments, words_of
from tests.documents.elsewhere import CHECKS, parse_python
from tests.documents.pages import Page
from tests.golden.fp8 import store_as_fp8
from tests.jobs.command import run, run_here
from tests.storage.servers import Store

ON_A_CLUSTER = re.compile(r"\bHEAD\b|--cluster ray|^ray ")
CALLS = re.compile(r" *(paddle-reshard|pip|make|python\d?|kubectl|ray|export) ", re.MULTILINE)
REAL_PROGRAMS = {"openssl", "od"}
DIFFERENT = 1
DIGESTS = re.compile(r"\b[0-9a-f]{64}\b")


class Session:
    """The state of a reader: a folder, an environment, the names of a Python session, and what was printed so far."""

    def __init__(self, page: Page, names: dict[str, Any], cluster: dict[str, str] | None = None) -> None:
        """With ``cluster``, what stands for the addresses of a Ray head, its lines are run too."""
        self.page, self.names, self.cluster = page, names, cluster
        self.stands_for = dict(page.stands_for) | (cluster or {})
        self.printed: list[str] = []
        self.visited: set[str] = set()

    def run(self, block: Block) -> None:
        """Run a block, or compare it with what was printed."""
        if self._declared(self.page.shows, block.first):
            return
        if block.language == "text" and self.page.drawings and not CALLS.match(block.text):
            return
        if file := self._declared(self.page.saved, block.first):
            Path(file).write_text(self._translated(block.text) + "\n", "utf-8")
        elif block.language in ("bash", "ini"):
            for line in command_lines(block):
                self.line(line)
        elif block.language == "python":
            self._python(block)
        elif block.language == "pycon":
            self._examples(block)
        elif block.language == "json":
            self._written(block)
        elif block.language == "text":
            self._compare(block)
        else:
            raise AssertionError(
                f"line {block.line}: blocks of {block.language or 'no language'} are not run"
            )

    def _declared(self, kind: Any, text: str) -> str | None:
        for start, what in kind.items():
            if text.startswith(start):
                self.visited.add(start)
                return str(what)
        return None

    def _translated(self, text: str) -> str:
        for shown, meant in self.stands_for.items():
            text = text.replace(shown, meant)
        return text

    def line(self, line: str) -> None:
        variables, words = words_of(self._translated(line))
        arguments = own_arguments(words)
        if self._declared(self.page.not_run, line) or (ON_A_CLUSTER.search(line) and self.cluster is None):
            check_line(words)
        elif arguments is not None:
            self._own(line, variables, arguments)
        elif words[0] == "export":
            for word in words[1:]:
                name, _, value = word.partition("=")
                os.environ[name] = value
        elif words[0] in REAL_PROGRAMS or (words[0] in ("ray", "python3") and self.cluster is not None):
            self._program(line, variables, words)
        elif Path(words[0]).name.startswith("python") and words[1].endswith(".py"):
            self._program(line, variables, [sys.executable, *words[1:]])
        else:
            CHECKS[Path(words[0]).name](words)

    def _own(self, line: str, variables: dict[str, str], arguments: list[str]) -> None:
        if arguments[0] == "watch" and "--once" not in arguments:
            arguments.append("--once")  # which else would not end
        here = not ON_A_CLUSTER.search(line)  # Ray wants a process of its own
        done = run_here(*arguments) if here else run(*arguments, env=variables)
        allowed = (0, DIFFERENT) if arguments[0] == "diff" else (0,)
        self._ended(line, done.returncode if done.returncode not in allowed else 0, done.stdout + done.stderr)

    def _program(self, line: str, variables: dict[str, str], words: list[str]) -> None:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=300, env={**os.environ, **variables}
        )
        self._ended(line, done.returncode, done.stdout + done.stderr)

    def _ended(self, line: str, status: int, printed: str) -> None:
        assert status == 0, f"{line}: status {status}\n{printed}"
        self.printed += printed.splitlines()

    def _python(self, block: Block) -> None:
        parse_python(block.text)
        if self._declared(self.page.not_run, block.first):
            return
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(self._translated(block.text), f"line {block.line}", "exec"), self.names)
        self.printed += printed.getvalue().splitlines()

    def _examples(self, block: Block) -> None:
        examples = doctest.DocTestParser().get_doctest(block.text, self.names, f"line {block.line}", None, 0)
        examples.globs = self.names
        failed = doctest.DocTestRunner(verbose=False).run(examples, clear_globs=False).failed
        assert not failed, f"line {block.line}: {failed} examples print something else"

    def _written(self, block: Block) -> None:
        files = [*Path().glob("*.json"), *Path().glob(f"*/{MANIFEST}")]
        wanted = json.loads(block.text)
        written = [file for file in files if holds(json.loads(file.read_bytes()), wanted)]
        assert written, f"line {block.line}: in none of {list(map(str, files))}"

    def _compare(self, block: Block) -> None:
        found = {spaced(line) for line in self.printed}
        for line in block.text.splitlines():
            if line.strip() and spaced(line) not in found:
                start = line.split()[0]
                near = "\n".join(one for one in self.printed if one.startswith(start)) or "\n".join(
                    self.printed
                )
                raise AssertionError(f"line {block.line}: nothing printed\n{line}\nbut\n{near}")


def holds(document: Any, wanted: Any) -> bool:
    """Whether a JSON document has a value somewhere."""
    if document == wanted:
        return True
    inner = (
        document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    )
    return any(holds(value, wanted) for value in inner)


def spaced(line: str) -> str:
    """A line without what differs between runs and between a terminal and a pipe."""
    return DIGESTS.sub("<digest>", " ".join(line.split()))


def check_line(words: list[str]) -> None:
    """Parse a line that is not run with what would read it."""
    arguments = own_arguments(words)
    if arguments is not None:
        parse_own(arguments)
    else:
        CHECKS[Path(words[0]).name](words)


def parse_own(arguments: list[str]) -> None:
    """Let the command itself read its arguments."""
    context = click.Context(cli)
    command = cli.get_command(context, arguments[0])
    assert command is not None, arguments
    parsed = command.make_context(arguments[0], arguments[1:], parent=context)
    if rest := parsed.params.get("arguments"):
        convert = cli.get_command(context, "convert")
        assert convert is not None
        convert.make_context("convert", list(rest), parent=context)


def lay_out(page: Page, folder: Path, store: Store | None) -> None:
    """Put the checkpoints of a document where it expects them."""
    for place, name in page.holds.items():
        case, _, inner = name.partition(":")
        source = case_directory(case) / (inner or "checkpoint-3")
        if place.startswith("s3://"):
            assert store is not None
            bucket, _, prefix = place.removeprefix("s3://").partition("/")
            for path in source.rglob("*"):
                if path.is_file():
                    store.client.upload_file(str(path), bucket, f"{prefix}/{path.relative_to(source)}")
        else:
            shutil.copytree(source, folder / place)
    for line in page.before:
        done = run_here(*line.split())
        assert done.returncode == 0, f"{line}: {done.stderr}"
    for model in page.fp8:
        store_as_fp8(folder / model)
