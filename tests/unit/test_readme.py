"""What the README promises a newcomer."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.conftest import REPO


def test_the_demo_ends_as_the_readme_says() -> None:
    """With the environment that the tests run in, which is not to be made again."""
    command = ["make", "--silent", "demo", f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.demo"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    readme = (REPO / "README.md").read_text("utf-8")
    told = re.search(r"says\n`([^`]+)`[^`]*ends like this:\n\n```\n(.+)\n```\n", readme)
    assert told is not None
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert told[1] in lines
    assert lines[-1] == told[2]
