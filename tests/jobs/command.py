"""The command line with ``submit`` and ``watch``, as tests start it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from paddle_reshard.pipeline.cli import main as cli
from paddle_reshard.pipeline.core.file_names import MANIFEST
from tests.conftest import COMMITTED

GOLDEN = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
MAIN = """
import runpy
runpy.run_module("paddle_reshard", run_name="__main__")
"""
"""Ends a script that a test runs in place of the command: what it has changed so far counts."""


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "paddle_reshard", *map(str, arguments)]


def invoke(*arguments: object) -> Result:
    """Run a command in this process; for what ends before it does anything."""
    return CliRunner().invoke(cli.cli, [str(argument) for argument in arguments])


def run_here(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in this process; where it sends its log ends with it."""
    root, logger = logging.getLogger(), logging.getLogger("paddle_reshard")
    before = root.handlers[:], logger.level
    try:
        done = invoke(*arguments)
    finally:
        root.handlers[:], logger.level = before[0], before[1]
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command_line(*arguments),
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, **(env or {})},
    )


def copy_checkpoint(folder: Path, leave_out: tuple[str, ...] = ()) -> Path:
    """A copy of the golden checkpoint, but for files whose name starts with one of ``leave_out``."""
    folder.mkdir(parents=True)
    for path in GOLDEN.iterdir():
        if not path.name.startswith(leave_out or ("\0",)):
            shutil.copy(path, folder / path.name)
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content; a manifest without where and when its source was."""
    return {str(p.relative_to(folder)): _content(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def _content(path: Path) -> bytes:
    if path.name != MANIFEST:
        return path.read_bytes()
    manifest = json.loads(path.read_bytes())
    for fact in ("location", "versions"):
        del manifest["source"][fact]
    del manifest["digest"]
    return json.dumps(manifest).encode()
