"""Without its extras the package converts local folders, and says what it lacks for anything else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import case_directory

SOURCE = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
WITHOUT = """
import sys
for name in ("ray", "s3fs", "aiobotocore", "botocore", "aiohttp", "pyarrow"):
    sys.modules[name] = None  # as if it were not installed
from paddle_reshard.pipeline.cli.main import main
main()
"""


def run_without_extras(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_local_conversions_need_no_extra(tmp_path: Path) -> None:
    done = run_without_extras("convert", str(SOURCE), str(tmp_path / "target"), "--to", "tp=1")
    assert (done.returncode, (tmp_path / "target" / "model_state.pdparams").exists()) == (0, True), (
        done.stderr
    )
    assert run_without_extras("inspect", "memory://nothing").returncode == 1


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (
            ("inspect", "s3://bucket/run"),
            f"the package s3fs, which is not installed: {sys.executable} -m pip install 'paddle-reshard[s3]'",
        ),
        pytest.param(
            ("convert", str(SOURCE), "s3://bucket/run", "--to", "tp=1"),
            "pip install 'paddle-reshard[s3]'",
            marks=pytest.mark.full,
        ),
        (
            ("convert", str(SOURCE), "target", "--to", "tp=1", "--cluster", "ray"),
            "pip install 'paddle-reshard[ray]'",
        ),
        (
            ("plan", str(SOURCE), "--to", "tp=1", "--save", "one.plan"),
            "a saved plan needs the package pyarrow, which is not installed: "
            f"{sys.executable} -m pip install 'paddle-reshard[arrow]'",
        ),
        # Before anything is looked for: there is no such source, and no checkpoint yet.
        (
            ("convert", "no-source", "target", "--to", "tp=1", "--plan", __file__),
            "pip install 'paddle-reshard[arrow]'",
        ),
        pytest.param(
            ("watch", str(Path(__file__).parent), "target", "--to", "tp=1", "--once", "--cluster", "ray"),
            "pip install 'paddle-reshard[ray]'",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_error_names_the_extra(arguments: tuple[str, ...], advice: str) -> None:
    done = run_without_extras(*arguments)
    assert done.returncode == 1
    assert advice in done.stderr
    assert "Traceback" not in done.stderr
