"""Forked ranks of a job on this machine: the parent has imported the library once for all of them."""

import os
import random
import shutil
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

GRACE_SECONDS = 5
STORES, MASTER, MINE, PORTS = 6000, 10, 19, range(21_000, 26_000, 520)


def fork_ranks(count: int, work: Callable[[int], None], logs: Path, seconds: float) -> list[int]:
    """Let ``count`` forked processes do ``work(rank)``; return their exit statuses, negative for a signal.

    None outlives this: what takes longer than ``seconds``, or waits for one that failed, is ended. Each writes into
    ``rank<N>.log`` in ``logs``.
    """
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    box = tempfile.mkdtemp(prefix="ranks_", dir=memory)
    mine = _reserved()
    port = mine.getsockname()[1] - MINE
    ranks = {}
    for rank in range(count):
        pid = os.fork()
        if not pid:
            _be_rank(rank, count, port, box, logs, work)
        ranks[pid] = rank
    statuses = [0] * count
    until = time.monotonic() + seconds
    try:
        while ranks and time.monotonic() < until:
            for pid in list(ranks):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    statuses[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
                    if status:
                        until = min(until, time.monotonic() + GRACE_SECONDS)
            time.sleep(0.05)
    finally:
        for pid, rank in ranks.items():
            os.kill(pid, 9)
            statuses[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        mine.close()
        shutil.rmtree(box, ignore_errors=True)
    return statuses


def _reserved() -> socket.socket:
    """Reserve a stretch of ports by listening on one of them, so that another run on this machine takes another."""
    for port in random.Random(time.time_ns()).sample(PORTS, len(PORTS)):
        mine = socket.socket()
        try:
            mine.bind(("127.0.0.1", port + MINE))
        except OSError:
            mine.close()
        else:
            return mine
    raise OSError(f"as many jobs of other runs have the ports from {PORTS[0]} to {PORTS[-1]}")


def _be_rank(rank: int, count: int, port: int, box: str, logs: Path, work: Callable[[int], None]) -> None:
    code = 1
    try:
        log = os.open(logs / f"rank{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        me, n = str(rank), str(count)
        os.environ |= {"SHIM_BOX": box, "SHIM_STORE_PORT": str(port + STORES), "FLAGS_selected_gpus": me}
        if count > 1:
            ends = [f"127.0.0.1:{port + other}" for other in range(count)]
            os.environ |= {
                "PADDLE_TRAINER_ID": me, "PADDLE_GLOBAL_RANK": me, "PADDLE_LOCAL_RANK": me,
                "PADDLE_RANK_IN_NODE": me, "PADDLE_TRAINERS_NUM": n, "PADDLE_LOCAL_SIZE": n,
                "PADDLE_GLOBAL_SIZE": n, "PADDLE_TRAINER_ENDPOINTS": ",".join(ends),
                "PADDLE_CURRENT_ENDPOINT": ends[rank], "PADDLE_MASTER": f"127.0.0.1:{port + MASTER}",
                "PADDLE_DISTRI_BACKEND": "gloo",
            }  # fmt: skip
        import cpu_gloo_shim
        import paddle.distributed.parallel

        cpu_gloo_shim._BOX = box
        paddle.distributed.parallel._global_parallel_env = None
        work(rank)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
