"""The documentation builds as a site and as a manual page, without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import REPO

BUILD = """
import sys
from sphinx.cmd.build import build_main

read, *made = sys.argv[1:]
for folder in made:
    builder = folder.rpartition("/")[2]
    assert build_main(["-q", "-W", "--keep-going", "-d", read, "-b", builder, "docs", folder]) == 0
"""
"""The second builder uses what the first one has read."""


def test_documentation_builds(tmp_path: Path) -> None:
    made = {"html": "zh/guides/export.html", "man": "paddle-reshard.1"}
    command = [sys.executable, "-c", BUILD, tmp_path / "read", *(f"{tmp_path}/{builder}" for builder in made)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for builder, file in made.items():
        assert (tmp_path / builder / file).exists()
