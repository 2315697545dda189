"""What no test can run here is at least read: each program of the documents has a check, and a reason.

``CHECKS`` has one for every program that a line may begin with, apart from this package's own command.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable

import paddle_reshard
from tests.conftest import REPO
from tests.documents.blocks import own_arguments

PROJECT = (REPO / "pyproject.toml").read_text("utf-8")
EXTRAS = set(re.findall(r"^(\w+) = \[\"", PROJECT.split("[project.optional-dependencies]")[1], re.MULTILINE))
TARGETS = set(re.findall(r"^([\w./-]+):", (REPO / "Makefile").read_text("utf-8"), re.MULTILINE))


def make(words: list[str]) -> None:
    """``make`` sets up environments, and runs what is tested here: its targets exist."""
    assert words[1] in TARGETS, words


def pip(words: list[str]) -> None:
    """``pip`` needs a package index: ``make package`` installs the wheel. The extras exist."""
    if words[2] == "-r":
        assert (REPO / words[3]).exists(), words
        return
    name, extras = re.fullmatch(r"([\w.-]+?)(?:\[([\w,]+)\])?", words[2]).groups()  # type: ignore[union-attr]
    assert words[1] == "install"
    assert name in (".", "paddle-reshard"), words
    assert set(filter(None, (extras or "").split(","))) <= EXTRAS, words


def uv(words: list[str]) -> None:
    """``uv`` installs as ``pip`` does: ``make pythons`` installs the wheel with it."""
    assert words == ["uv", "tool", "install", "."], words


def python(words: list[str]) -> None:
    """``python`` with the environments of the lab, which hold PaddleFormers or PaddleNLP; or with pytest."""
    if words[1] != "-m":
        assert (REPO / words[1]).exists(), words
    elif words[2] == "pytest":
        assert all((REPO / word).exists() for word in words if word.startswith("tests/")), words
    elif words[2] != "venv":
        assert (REPO / f"{words[2].replace('.', '/')}.py").exists(), words


def kubectl(words: list[str]) -> None:
    """``kubectl`` needs a cluster; the manifests in ``deploy`` read the secret of this name."""
    assert words[1:4] == ["create", "secret", "generic"], words
    manifests = [path.read_text("utf-8") for path in (REPO / "deploy").glob("*.yaml")]
    assert any(f"secretRef: {{ name: {words[4]} }}" in text for text in manifests), words


def hub(words: list[str]) -> None:
    """``hf`` needs an account on the Hub."""
    assert words[1] == "upload"
    assert len(words) == 4, words


def ray(words: list[str]) -> None:
    """``ray`` needs a head, as in ``make cluster``: what the job would run is parsed."""
    from tests.documents.session import parse_own

    inner = own_arguments(words[words.index("--") + 1 :])
    assert inner is not None, words
    parse_own(inner)


def model_signing(words: list[str]) -> None:
    """``model_signing`` is a package of others: its two commands, and their options in 1.1.1."""
    options = {"sign": {"--private_key", "--signature"}, "verify": {"--public_key", "--signature"}}
    assert words[2] == "key" and {*words[4::2]} == options[words[1]], words


def export(words: list[str]) -> None:
    """``export`` of a token that a real cluster would ask for."""
    assert all("=" in word for word in words[1:]), words


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": make, "pip": pip, "uv": uv, "python": python, "python3": python, "python3.11": python,
    "kubectl": kubectl, "hf": hub, "ray": ray, "export": export, "model_signing": model_signing,
}  # fmt: skip


def parse_python(text: str) -> None:
    """Names of this package exist, and its functions take the arguments that they are given."""
    for node in ast.walk(ast.parse(textwrap.dedent(text))):
        if isinstance(node, ast.Call) and (name := name_of(node.func)) in paddle_reshard.__all__:
            given = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(getattr(paddle_reshard, name)).bind(*node.args, **given)


def name_of(called: ast.expr) -> str:
    """The last part of what is called."""
    match called:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
