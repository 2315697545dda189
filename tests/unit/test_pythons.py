"""The sample of tests that `make pythons` runs with every Python."""

import re
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "pythons.sh"


def test_archives_are_unpacked_as_every_python_can() -> None:
    tests = SCRIPT.parent
    callers = [path for path in tests.rglob("*.py") if f".{'extractall'}(" in path.read_text("utf-8")]
    assert callers == [tests / "conftest.py"]


def test_every_test_of_the_sample_exists() -> None:
    names = re.search(r"^sample=\(\n.*?^\)$", SCRIPT.read_text(), re.DOTALL | re.MULTILINE)[0]
    echo = f"{names}; echo ${{sample[@]}}"
    named = subprocess.run(["bash", "-c", echo], capture_output=True, text=True, check=True).stdout.split()
    for path, _, test in (name.partition("::") for name in named):
        assert f"\ndef {test or 'test_'}" in (SCRIPT.parents[1] / path).read_text("utf-8"), (path, test)
