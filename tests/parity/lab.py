"""The laboratory's environments, and what every check that uses them shares."""

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PARITY = REPO / ".parity"
LOCKS = REPO / "tests" / "lab" / "environments"
PYTHON = "3.11"


class LabError(Exception):
    """The laboratory cannot be set up, or a rank did not reach its end."""


def python_of(library: str) -> Path:
    """Python of one of the laboratory's environments: ``pf`` or ``nlp``, as their lock files are called."""
    given = os.environ.get("PARITY_LAB")
    environment = (Path(given).resolve() if given else PARITY / "lab") / f"venv-{library}"
    python = environment / "bin" / "python"
    if given and not python.exists():
        raise LabError(f"PARITY_LAB={given}: there is no {python}; tests/lab/README.md says how to make it")
    if not given and not (environment / "complete").exists():
        _make_environment(environment, LOCKS / f"requirements-{library}.lock.txt")
    return python


def _make_environment(environment: Path, lock: Path) -> None:
    """Install what the lock file pins, and nothing else."""
    base = _python_of_the_lock()
    shutil.rmtree(environment, ignore_errors=True)
    environment.parent.mkdir(parents=True, exist_ok=True)
    say(f"making {environment} with {base} from {lock.name} (once, some minutes)")
    pip = [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    for command in ([base, "-m", "venv", str(environment)], [*pip, "install", "--quiet", "-r", str(lock)]):
        if subprocess.run(command, check=False).returncode:
            raise LabError(f"failed: {' '.join(command)}")
    (environment / "complete").touch()


def _python_of_the_lock() -> str:
    """Find the interpreter for which the versions are pinned."""
    for candidate in (sys.executable, shutil.which(f"python{PYTHON}")):
        if candidate is None:
            continue
        ask = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip() == PYTHON:
            return candidate
    raise LabError(
        f"the versions of the trainer are pinned for Python {PYTHON}; this is "
        f"{sys.version_info.major}.{sys.version_info.minor} and there is no python{PYTHON} on the path. "
        f"Install it, or set PARITY_LAB to a folder whose venv-pf holds the trainer"
    )


@contextlib.contextmanager
def alone(folder: Path = PARITY) -> Iterator[None]:
    """Keep a second run away from the files of this one."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LabError("another parity check is running in this checkout") from None
        yield


def say(line: str) -> None:
    """Print at once, also into a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
