"""The documentation builds as a site and as a manual page, without a warning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO


@pytest.mark.parametrize(
    ("builder", "made"), [("html", "zh/guides/export.html"), ("man", "paddle-reshard.1")]
)
def test_documentation_builds(builder: str, made: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-d",
        tmp_path / "trees",
        "-b",
        builder,
    ]
    done = subprocess.run([*command, "docs", tmp_path], cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / made).exists()
