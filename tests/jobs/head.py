"""A real Ray head on this machine: its own ports, its own token, its own folder; stopped by its own process ids."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Head:
    address: str
    env: dict[str, str]
    """What a client needs: the token, and that this machine is 127.0.0.1."""
    folder: Path
    """Where it keeps its logs and what jobs brought."""
    cluster: str
    """Host and port at which drivers join."""


@contextmanager
def running_head(with_package: bool = False) -> Iterator[Head]:
    """A head whose ``python`` has Ray and everything else that is installed here, but this package only if asked."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="head", dir="/tmp")))
        dashboard, *others = _free_ports(7)
        env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray takes the machine's address for 127.0.0.1
        }
        names = ("port", "ray-client-server-port", "metrics-export-port", "dashboard-agent-listen-port")
        names += ("dashboard-agent-grpc-port", "runtime-env-agent-port")
        command = [
            BIN / "ray",
            "start",
            "--head",
            "--block",
            "--node-ip-address=127.0.0.1",
            "--dashboard-host=127.0.0.1",
            f"--dashboard-port={dashboard}",
            *(f"--{name}={port}" for name, port in zip(names, others, strict=True)),
            "--num-cpus=2",
            "--object-store-memory=100000000",
            f"--temp-dir={folder / 'ray'}",
            "--disable-usage-stats",
        ]
        bare = "" if with_package else f"{_bare_python(folder)}:"
        path = f"{bare}{BIN}:{os.environ['PATH']}"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTHONPATH"))}
        log = stack.enter_context((folder / "head.log").open("wb"))
        head = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**clean, **env, "PATH": path},
            start_new_session=True,
        )
        try:
            _wait_for(dashboard, head, folder / "head.log")
            address, cluster = f"http://127.0.0.1:{dashboard}", f"127.0.0.1:{others[0]}"
            yield Head(address, {**env, "PATH": os.environ["PATH"]}, folder, cluster)
        finally:
            _stop(head)


def _bare_python(folder: Path) -> Path:
    """A ``python`` that sees what is installed here, except what an editable install adds."""
    home = folder / "venv"
    venv.EnvBuilder(symlinks=True).create(home)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "base.pth").write_text(sysconfig.get_paths()["purelib"])
    return home / "bin"


def _free_ports(count: int) -> list[int]:
    """Free ports that neither Ray's workers nor outgoing connections take."""
    found: list[int] = []
    while len(found) < count:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as probe:
            if port not in found and probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
    return found


def _wait_for(port: int, head: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 90
    while head.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError(f"no head: {log.read_text(errors='replace')[-2000:]}")


def descendants(pid: int) -> list[int]:
    """Every process that was started by ``pid``, directly or not, as long as its parents live."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


def _stop(head: subprocess.Popen[bytes]) -> None:
    """End the head and everything it has started, by their ids."""
    started = descendants(head.pid)
    head.terminate()
    try:
        head.wait(20)
    except subprocess.TimeoutExpired:
        head.kill()
        head.wait()
    deadline = time.monotonic() + 10
    while (alive := [pid for pid in started if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
