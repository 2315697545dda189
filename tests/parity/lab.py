"""The laboratory: the real trainer on CPUs, one process per rank, every process ours to end.

The script that starts it makes the corpus too: ``tests/lab/trainer``.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_reshard import ReshardError

REPO = Path(__file__).resolve().parents[2]
PARITY = REPO / ".parity"
SCRIPTS = REPO / "tests" / "lab" / "trainer"
SCRIPT = SCRIPTS / "train.py"
DRIVER = Path(__file__).resolve().parent / "driver.py"
LOCK = REPO / "tests" / "lab" / "environments" / "requirements-pf.lock.txt"
PYTHON = "3.11"
GRACE_SECONDS = 3
PORTS = range(10_000, 14_000, 50)
STORE_OFFSET, MASTER_OFFSET, STORE_PORTS = 1000, 500, 512


class LabError(Exception):
    """The laboratory cannot be set up, or a rank did not reach its end."""


@dataclass(frozen=True)
class Lab:
    """A Python with the trainer, and the folder that holds its environment."""

    python: Path
    root: Path


def open_lab() -> Lab:
    """Return the laboratory, made on first use; ``PARITY_LAB`` names one that exists already."""
    given = os.environ.get("PARITY_LAB")
    root = Path(given).resolve() if given else PARITY / "lab"
    environment = root / "venv-pf"
    python = environment / "bin" / "python"
    if given and not python.exists():
        raise LabError(f"PARITY_LAB={given}: there is no {python}")
    if not given and not (environment / "complete").exists():
        _make_environment(environment)
    return Lab(python, root)


def _make_environment(environment: Path) -> None:
    """Install what the lock file pins, and nothing else."""
    base = _python_of_the_lock()
    shutil.rmtree(environment, ignore_errors=True)
    environment.parent.mkdir(parents=True, exist_ok=True)
    say(f"making {environment} with {base} (paddlepaddle and paddleformers; once, some minutes)")
    pip = [
        str(environment / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
    ]
    for command in (
        [base, "-m", "venv", str(environment)],
        [*pip, "-r", str(LOCK)],
    ):
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


def check_all(names: Collection[str], check: Callable[[Lab, str], tuple[str, list[str]]]) -> int:
    """Let ``check`` tell of each name what was compared and what is wrong; the result is the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failed = 0
    try:
        with alone():
            lab = open_lab()
            for name in names:
                began = time.monotonic()
                try:
                    told, found = check(lab, name)
                except (LabError, ReshardError) as error:
                    told, found = "not compared", [str(error)]
                failed += bool(found)
                say(f"{'FAILED' if found else 'passed'}  {name} ({time.monotonic() - began:.1f} s): {told}")
                for difference in found[:8]:
                    say(f"        {difference}")
                if len(found) > 8:
                    say(f"        and {len(found) - 8} more")
    except LabError as error:
        say(f"parity: {error}")
        return 2
    say(f"{len(names) - failed} passed, {failed} failed")
    return 1 if failed else 0


def say(line: str) -> None:
    """Print at once, also into a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def resume(
    lab: Lab,
    name: str,
    checkpoint: Path,
    out: Path,
    *,
    ranks: int,
    arguments: Mapping[str, Any],
    model: Mapping[str, Any],
    timeout_seconds: float,
    environment: Mapping[str, str],
    options: Sequence[str] = (),
) -> list[str]:
    """Let the real trainer resume from a checkpoint and dump what it then holds; return the ranks' logs."""
    return run_trainer(
        lab,
        name,
        out,
        driver=DRIVER,
        options=["--resume", str(checkpoint), *options],
        ranks=ranks,
        arguments=arguments,
        model=model,
        timeout_seconds=timeout_seconds,
        environment=environment,
    )


def run_trainer(
    lab: Lab,
    name: str,
    out: Path,
    *,
    driver: Path,
    options: list[str],
    ranks: int,
    arguments: Mapping[str, Any],
    model: Mapping[str, Any],
    timeout_seconds: float,
    environment: Mapping[str, str],
) -> list[str]:
    """Run the laboratory's script under ``driver``, one process per rank; return the ranks' logs."""
    command = [str(lab.python), str(driver), str(SCRIPT), "--case", name]
    command += ["--out", str(out), "--args", json.dumps(dict(arguments)), "--model", json.dumps(dict(model))]
    command += options
    return run_command(
        command, name, out.parent, ranks=ranks, timeout_seconds=timeout_seconds, environment=environment
    )


def run_command(
    command: list[str],
    name: str,
    logs_in: Path,
    *,
    ranks: int,
    timeout_seconds: float,
    environment: Mapping[str, str],
) -> list[str]:
    """Run a command once per rank, as a launcher of distributed jobs does; return the ranks' logs.

    Every rank must say ``CASE_OK`` and ``name`` before it ends.

    Raises
    ------
    LabError
        If a rank fails or the time is over; with the end of the log of a rank that failed.
    """
    logs = [logs_in / f"rank{rank}.log" for rank in range(ranks)]
    with mailbox() as box:
        ends = _run_ranks(command, logs, _environments(ranks, box, environment), timeout_seconds)
    texts = [log.read_text(errors="replace") for log in logs]
    done = [end == 0 and f"CASE_OK {name}" in text for end, text in zip(ends, texts, strict=True)]
    if not all(done):
        unfinished = [rank for rank in range(ranks) if not done[rank]]
        failed = [rank for rank in unfinished if ends[rank] != -signal.SIGKILL]
        # Ranks that waited in vain for one that failed say so too; the cause is another's.
        causes = [rank for rank in failed if "gloo" not in _last_lines(texts[rank])]
        rank = (causes or failed or unfinished)[0]
        how = f"failed ({ends[rank]})" if failed else f"was not done after {timeout_seconds:g} s"
        raise LabError(f"rank {rank} {how}: {_last_lines(texts[rank])}")
    return texts


@contextlib.contextmanager
def mailbox() -> Iterator[Path]:
    """Make the folder through which the ranks pass point-to-point messages."""
    memory = Path("/dev/shm")
    box = tempfile.mkdtemp(prefix="parity_", dir=memory if memory.is_dir() else None)
    try:
        yield Path(box)
    finally:
        shutil.rmtree(box, ignore_errors=True)


def shared_environment(port: int, box: Path) -> dict[str, str]:
    """What all ranks are told beside who they are, with ``port`` the first of those that are free."""
    shared = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PADDLE_", "PYTHONPATH", "PYTHONDONTWRITE"))
    }
    return shared | {
        "SHIM_BOX": str(box),
        "SHIM_STORE_PORT": str(port + STORE_OFFSET),
        "OMP_NUM_THREADS": "1",
        "GLOG_v": "0",
        # Compiling the trainer's modules takes a rank most of its time; the environment itself stays as it is.
        "PYTHONPYCACHEPREFIX": str(PARITY / "bytecode"),
    }


def _environments(ranks: int, box: Path, more: Mapping[str, str]) -> list[dict[str, str]]:
    """Tell each rank who it is, as a launcher does."""
    port = free_ports(ranks)
    shared = shared_environment(port, box) | dict(more)
    if ranks == 1:
        return [shared | {"FLAGS_selected_gpus": "0"}]
    endpoints = [f"127.0.0.1:{port + rank}" for rank in range(ranks)]
    shared |= {
        "PADDLE_TRAINERS_NUM": str(ranks),
        "PADDLE_LOCAL_SIZE": str(ranks),
        "PADDLE_GLOBAL_SIZE": str(ranks),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_MASTER": f"127.0.0.1:{port + MASTER_OFFSET}",
        "PADDLE_DISTRI_BACKEND": "gloo",
    }
    of_rank = ("PADDLE_TRAINER_ID", "PADDLE_GLOBAL_RANK", "PADDLE_LOCAL_RANK", "PADDLE_RANK_IN_NODE")
    return [
        shared
        | dict.fromkeys((*of_rank, "FLAGS_selected_gpus"), str(rank))
        | {"PADDLE_CURRENT_ENDPOINT": endpoint}
        for rank, endpoint in enumerate(endpoints)
    ]


def free_ports(ranks: int) -> int:
    """Find a base at which all the ports are free that a run may listen on."""
    start = os.getpid() % len(PORTS)
    for base in (*PORTS[start:], *PORTS[:start]):
        wanted = [*range(base, base + ranks), base + MASTER_OFFSET]
        wanted += range(base + STORE_OFFSET, base + STORE_OFFSET + STORE_PORTS, 8)
        if all(_is_free(port) for port in wanted):
            return base
    raise LabError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _run_ranks(
    command: list[str], logs: list[Path], environments: list[dict[str, str]], timeout_seconds: float
) -> list[int]:
    """Run one process per rank until all are done, one fails or the time is over; none outlives this."""
    ranks: list[subprocess.Popen] = []
    try:
        for log, environment in zip(logs, environments, strict=True):
            with log.open("wb") as output:
                ranks.append(
                    subprocess.Popen(
                        command,
                        cwd=log.parent,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        _wait(ranks, timeout_seconds)
    finally:
        for rank in ranks:
            # The group is the rank's own session: whatever it started ends with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
        ends = [rank.wait() for rank in ranks]
    return ends


def _wait(ranks: list[subprocess.Popen], timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        ends = [rank.poll() for rank in ranks]
        if None not in ends:
            return
        if any(ends):
            # The others fail in a moment of their own, which says more than that they were ended.
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.1)


def _last_lines(text: str, count: int = 4) -> str:
    noise = ("INFO", "DEBUG", "WARN", "Skipping the first batches", "^^^")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not any(n in line for n in noise)]
    return " / ".join(lines[-count:]) or "an empty log"
