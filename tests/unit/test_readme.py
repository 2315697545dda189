"""The demo that the README describes."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.conftest import REPO


def test_the_demo_ends_as_the_readme_describes() -> None:
    """Uses the environment that the tests run in, so that none is set up again."""
    command = ["make", "--silent", "demo", f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.demo"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    readme = (REPO / "README.md").read_text("utf-8")
    promised = re.search(r"reports\s`([^`]+)`[^`]*:\n\n```text\n(.+)\n```\n", readme)
    assert promised is not None
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert promised[1] in lines
    assert lines[-1] == promised[2]
