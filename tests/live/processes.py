"""Several processes of one job of Paddle on the CPU, over gloo."""

import os
import socket
import subprocess
import sys
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


def run_job(count: int, module: str, *arguments: str) -> None:
    """Run a module in ``count`` processes; all must end well."""
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
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=REPO,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [
        f"rank {rank}:\n{output[-6000:]}"
        for rank, (process, output) in enumerate(zip(processes, outputs, strict=True))
        if process.returncode
    ]
    assert not failed, "\n".join(failed)
