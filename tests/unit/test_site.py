"""The documentation can be read and refers to what exists, without a warning. ``make docs`` writes the site too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.sampling import exhaustive

BUILD = """
import sys
from sphinx.cmd.build import build_main

read, *made = sys.argv[1:]
for folder in made:
    builder = folder.rpartition("/")[2]
    assert build_main(["-q", "-W", "--keep-going", "-d", read, "-b", builder, "docs", folder]) == 0
"""
"""The later builder uses what the first one has read. ``dummy`` resolves references and writes nothing."""


@pytest.mark.parametrize(
    "made",
    [
        {"dummy": "", "man": "paddle-reshard.1"},
        exhaustive({"html": "guides/export.html", "man": "paddle-reshard.1"}),
    ],
    ids=" ".join,
)
def test_documentation_builds(made: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "build.py"  # not -c: Python 3.13 would find its lines for code that is generated
    script.write_text(BUILD)
    command = [sys.executable, script, tmp_path / "read", *(f"{tmp_path}/{builder}" for builder in made)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for builder, file in made.items():
        assert (tmp_path / builder / file).exists()
