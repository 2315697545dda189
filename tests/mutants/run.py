"""Plant each mutant in a copy of the product, and see whether the nearest tests of `make test` notice it.

``python -m tests.mutants.run [WORD …]``: all mutants, or those whose sentence or file contains one of the words. Tests
are read from the working tree, the product from the copy. A mutant that no test notices ends this with status 1.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from compileall import compile_dir
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import NamedTuple

from tests.conftest import REPO
from tests.mutants.table import MUTANTS, Mutant
from tests.sampling import ELSEWHERE

PRODUCT = ("src", "pipeline", "clusters", "tasks", "storage")
AT_A_TIME = 2
LONGEST_SECONDS = 120.0
IN_MAKE_TEST = " and ".join(f"not {mark}" for mark in ("full", *ELSEWHERE))
PASSED, FAILED, TOO_LONG = 0, 1, -1
"""How pytest ended. Any other status says that nothing was tried: a mutant that cannot be imported, no test."""


class Verdict(NamedTuple):
    """What became of a mutant."""

    mutant: Mutant
    status: int
    told: str
    """The first test that failed, or what pytest said last."""
    seconds: float

    def in_words(self) -> str:
        if self.status == FAILED:
            return f"noticed by {self.told}"
        survived = {PASSED: "SURVIVED", TOO_LONG: f"NO ANSWER in {LONGEST_SECONDS:.0f} s"}
        return f"{survived.get(self.status, f'NOT TRIED, status {self.status}')}: {self.told}"


def mutated(mutant: Mutant) -> str:
    """Its file with the change; a ``ValueError`` unless the code to change is there exactly once."""
    text = (REPO / mutant.file).read_text(encoding="utf-8")
    if (found := text.count(mutant.old)) != 1:
        raise ValueError(f"{mutant.file} has {found} of {mutant.old!r}, one is needed: {mutant.wrong}")
    return text.replace(mutant.old, mutant.new)


def copy_product(to: Path) -> None:
    """Copy the product, compiled so that a changed file is compiled again whatever its time."""
    for name in PRODUCT:
        shutil.copytree(REPO / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        if name != "src":
            compile_dir(to / name, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)


def of_copy(product: Path) -> dict[str, str]:
    """The environment in which Python imports the product from a copy."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(product / "src"), str(REPO)))}


def check_copy(product: Path) -> None:
    """Raise a ``RuntimeError`` unless Python imports the product from a copy: else every mutant would survive."""
    asked = "from paddle_reshard.pipeline.core import geometry; print(geometry.__file__)"
    command = [sys.executable, "-c", asked]
    answer = subprocess.run(command, cwd=product, env=of_copy(product), stdout=subprocess.PIPE, text=True)
    if not answer.stdout.startswith(str(product)):
        raise RuntimeError(f"tests would load {answer.stdout.strip()}, not the copy in {product}")


def run_tests(
    product: Path, tests: Sequence[str], *options: str, seconds: float | None = None
) -> tuple[int, str]:
    """Pytest's status, and the first test that failed or else its last line; a run is ended after some ``seconds``."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider"]
    command += ["--hypothesis-profile", "unshrunk", "-m", IN_MAKE_TEST, *options, *tests]
    with tempfile.TemporaryFile("w+", encoding="utf-8") as output:
        ran = subprocess.Popen(
            command, cwd=REPO, env=of_copy(product), stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = ran.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(ran.pid, signal.SIGKILL)  # with the processes that its tests have started
            ran.wait()
            status = TOO_LONG
        output.seek(0)
        lines = output.read().splitlines() or [""]
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", "\n".join(lines), re.MULTILINE)
    return status, failed[1].removeprefix("tests/") if failed else lines[-1]


def plant(mutant: Mutant, pristine: Path) -> Verdict:
    """Try a mutant in a copy of its own."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        product = Path(folder).resolve() / "product"
        shutil.copytree(pristine, product, symlinks=True)
        (product / mutant.file).write_text(mutated(mutant), encoding="utf-8")
        status, told = run_tests(product, mutant.tests, "-x", seconds=LONGEST_SECONDS)
    return Verdict(mutant, status, told, time.monotonic() - began)


def main(words: Sequence[str]) -> int:
    """Try mutants and print what became of each; 1 if one was not noticed."""
    chosen = [m for m in MUTANTS if not words or any(word in f"{m.wrong} {m.file}" for word in words)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        pristine = Path(folder).resolve()
        copy_product(pristine)
        check_copy(pristine)
        nearest = sorted({test for mutant in chosen for test in mutant.tests})
        status, told = run_tests(pristine, nearest, "-n", str(AT_A_TIME), "--dist", "worksteal")
        if status != PASSED:
            sys.stdout.write(f"without a mutant the tests do not pass: {told}\n")
            return 1
        survivors = 0
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            for verdict in pool.map(lambda mutant: plant(mutant, pristine), chosen):
                survivors += verdict.status != FAILED
                wrong = f"{verdict.mutant.file}: {verdict.mutant.wrong}"
                sys.stdout.write(f"{verdict.seconds:4.0f} s  {wrong}\n        {verdict.in_words()}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{len(chosen)} mutants, {survivors} not noticed\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
