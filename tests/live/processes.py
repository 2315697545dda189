"""Several processes of one job of Paddle on the CPU, over gloo."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
SECONDS = 240


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def run_job(outputs: Path, count: int, module: str, *arguments: str) -> None:
    """Run a module in ``count`` processes; all must end well. What they print goes into the folder ``outputs``."""
    *ports, master = _free_ports(count + 1)
    endpoints = [f"127.0.0.1:{port}" for port in ports]
    processes = []
    for rank, endpoint in enumerate(endpoints):
        environment = {
            **os.environ,
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(count),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoint,
            "PADDLE_GLOBAL_RANK": str(rank),
            "PADDLE_GLOBAL_SIZE": str(count),
            "PADDLE_MASTER": f"127.0.0.1:{master}",
            "PADDLE_DISTRI_BACKEND": "gloo",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        with (outputs / str(rank)).open("w") as output:
            command = [sys.executable, "-m", module, *arguments]
            processes.append(
                subprocess.Popen(command, cwd=REPO, env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
    deadline = time.monotonic() + SECONDS
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):  # the others would wait for it
                deadline = min(deadline, time.monotonic() + 5)
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
    failed = [
        f"rank {rank} ({process.wait()}):\n{(outputs / str(rank)).read_text()[-6000:]}"
        for rank, process in enumerate(processes)
        if process.wait()
    ]
    assert not failed, "\n".join(failed)
