"""What a command loads before it answers: shells complete, scripts ask for the version, people mistype."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.cli.main import COMMANDS
from tests.conftest import COMMITTED

DEMO = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
STORES = {"pyarrow", "fsspec", "s3fs", "aiobotocore", "awscrt", "ray", "paddle", "asyncio"}
HEAVY = {"numpy", "rich", *STORES}
ASK = """
import atexit, json, sys
from paddle_reshard.pipeline.cli.main import main
atexit.register(lambda: print("\\n" + json.dumps(sorted(sys.modules)), file=sys.stderr))
main()
"""


def loaded(*arguments: object, status: int = 0, **variables: str) -> set[str]:
    """Top-level modules that a command has loaded when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **variables},
    )
    assert done.returncode == status, done.stderr
    modules = json.loads(done.stderr.splitlines()[-1])
    return {*modules, *(name.partition(".")[0] for name in modules)}


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_the_version_load_next_to_nothing(option: str) -> None:
    assert not loaded(option) & HEAVY


@pytest.mark.parametrize(
    "arguments",
    [
        ("convrt",),
        ("convert", "a", "b", "--too", "tp=1"),
        ("convert", "a", "b", "--to", "mp=2"),
        ("convert", "a", "b"),
        ("convert", "a", "b", "--to", "tp=2", "--dtype", "bfloat16"),
        ("convert", "a", "b", "--to", "tp=2", "--memory", "1B"),
        ("convert", "a", "--target", "b:hybrid:mp=2"),
        ("convert", "a", "b", "--to", "tp=2", "--json", "--format", "unified"),
        ("plan", "a", "b", "--to", "tp=0"),
        ("inspect",),
        ("submit", "a", "b", "--to", "tp=2", "--format", "hf"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_told_before_anything_is_loaded(arguments: tuple[str, ...]) -> None:
    assert not loaded(*arguments, status=2) & HEAVY


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_loads_next_to_nothing(shell: str) -> None:
    name = "_PADDLE_RESHARD_COMPLETE"
    words = {"COMP_WORDS": "paddle-reshard convert --for", "COMP_CWORD": "--for" if shell == "fish" else "2"}
    program = ASK.replace("import atexit", "import sys; sys.argv[0] = 'paddle-reshard'\nimport atexit")
    for variables in ({name: f"{shell}_source"}, {name: f"{shell}_complete", **words}):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, **variables},
        )
        assert ("--format" if words.items() <= variables.items() else "paddle-reshard") in done.stdout
        modules = json.loads(done.stderr.splitlines()[-1])
        assert not {module.partition(".")[0] for module in modules} & HEAVY


def of_formats(modules: set[str]) -> set[str]:
    """Which formats' code that reads a source or makes a target is loaded."""
    found = (
        re.fullmatch(r"paddle_reshard\.pipeline\.formats\.(\w+\.(source|target))", name) for name in modules
    )
    return {match[1] for match in found if match}


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["for people", "json"])
def test_inspecting_a_local_checkpoint_loads_what_its_format_needs(options: tuple[str, ...]) -> None:
    modules = loaded("inspect", DEMO, *options)
    assert "numpy" in modules
    assert not modules & {*STORES, "rich", "html", "difflib", "socket", "secrets", "hashlib", "tempfile"}
    assert not modules & {"numpy.typing", "paddle_reshard.clusters", "paddle_reshard.pipeline.convert.run"}
    assert of_formats(modules) == {"hybrid.source"}


def test_converting_on_a_disk_loads_what_it_needs(tmp_path: Path) -> None:
    modules = loaded("convert", DEMO, tmp_path / "T", "--to", "tp=2", "--quiet")
    assert "awscrt" in modules  # for checksums
    assert not modules & {
        *(HEAVY - {"numpy", "awscrt"}),
        "numpy.ma",
        "socket",
        "secrets",
        "shutil",
        *(("subprocess",) if sys.version_info >= (3, 11) else ()),  # in 3.10 NumPy imports it, by platform
    }
    assert of_formats(modules) == {"hybrid.source", "hybrid.target"}


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_a_command_starts_no_threads_for_linear_algebra() -> None:
    ask = """
import atexit, os, time
from paddle_reshard.pipeline.cli.main import main

def count():
    # a thread that Python has joined stays in /proc for a moment; those of linear algebra never end
    deadline = time.monotonic() + 20
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    print("threads:", len(os.listdir("/proc/self/task")))

atexit.register(count)
main()
"""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", ask, "inspect", str(DEMO)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    assert "threads: 1\n" in done.stdout


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_of_a_command_loads_no_further_command_and_next_to_nothing(command: str) -> None:
    declaring = {f"paddle_reshard.pipeline.cli.commands.{module}" for module in COMMANDS.values()}
    shared = {"paddle_reshard.pipeline.cli.commands.conversion"} if command in ("submit", "watch") else set()
    own = f"paddle_reshard.pipeline.cli.commands.{COMMANDS[command]}"
    modules = loaded(command, "--help")
    assert modules & declaring == {own, *shared}
    assert not modules & HEAVY


def test_importing_the_package_loads_nothing() -> None:
    program = "import sys, paddle_reshard; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert not {name.partition(".")[0] for name in done.stdout.split()} & HEAVY


def test_every_public_name_exists_in_the_module_given_to_type_checkers() -> None:
    tree = ast.parse(Path(paddle_reshard.__file__).read_text("utf-8"))
    told = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paddle_reshard.")
        for alias in node.names
    }
    assert set(told) == {*paddle_reshard.__all__} <= set(dir(paddle_reshard))
    for name, module in told.items():
        assert getattr(paddle_reshard, name) is getattr(sys.modules[module], name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        paddle_reshard.nothing  # noqa: B018
