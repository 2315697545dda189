"""Jobs of Paddle on the CPU, over gloo; each process is forked from one that has imported it, which takes seconds."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import runpy
import socket
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

REPO = Path(__file__).resolve().parents[1]
SECONDS = 240
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def run_paddle(program: str, *arguments: object) -> str:
    """What a process prints that is no rank of a job; it must end well. ``program``: its text, or a module."""
    return _run([{}], program, arguments)[0]


def run_ranks(count: int, program: str, *arguments: object) -> list[str]:
    """What the ranks of a job print, all of which must end well."""
    *ends, master = (f"127.0.0.1:{port}" for port in _free_ports(count + 1))
    return _run(
        [
            {
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(count),
                "PADDLE_TRAINER_ENDPOINTS": ",".join(ends),
                "PADDLE_CURRENT_ENDPOINT": end,
                "PADDLE_GLOBAL_RANK": str(rank),
                "PADDLE_GLOBAL_SIZE": str(count),
                "PADDLE_MASTER": master,
                "PADDLE_DISTRI_BACKEND": "gloo",
            }
            for rank, end in enumerate(ends)
        ],
        program,
        arguments,
    )


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports: list[int] = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _run(environments: list[dict[str, str]], program: str, arguments: tuple[object, ...]) -> list[str]:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["paddle", "paddle.distributed", "paddle_reshard.pipeline.api", __name__])
    argv = ["-c", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(rank)) for rank in range(len(environments))]
        processes = [
            server.Process(target=_be, args=({**os.environ, **ON_CPU, **own}, program, argv, output))
            for own, output in zip(environments, outputs, strict=True)
        ]
        try:
            with mock.patch.dict(os.environ, ON_CPU):  # of the process that is forked, where this starts it
                for process in processes:
                    process.start()
            deadline = time.monotonic() + SECONDS
            while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
                if any(process.exitcode for process in processes):  # the others would wait for it
                    deadline = min(deadline, time.monotonic() + 5)
                multiprocessing.connection.wait([p.sentinel for p in processes if p.is_alive()], 0.5)
        finally:
            for process in processes:
                if process.pid:
                    process.kill()
                    process.join()
        told = [output.read_text() for output in outputs]
    failed = [
        f"rank {rank} ({process.exitcode}):\n{told[rank][-6000:]}"
        for rank, process in enumerate(processes)
        if process.exitcode
    ]
    assert not failed, "\n".join(failed)
    return told


def _be(environment: dict[str, str], program: str, argv: list[str], output: Path) -> None:
    """Be the process: print into the file, and run the program as Python would."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(REPO)
    sys.argv = argv
    if "\n" not in program:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
