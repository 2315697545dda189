"""A rank of a job of two nodes whose script asks ``paddle_reshard.resume``, three times: ``FOLDER WHO``.

The folder holds the runs ``first`` and ``second``. At first each node is asked about another of them; then all about
the same; then, while they convert a newer checkpoint, a process of the last node ends: the one that ``works``, or one
that ``waits``. What a rank got goes into ``rank-N.json``.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import paddle.distributed as dist

import paddle_reshard
from paddle_reshard.pipeline.core.events import GroupEnded, ignore_events
from tests.jobs.test_within_job import STAGE1, arguments

NODES = 2


def main() -> None:
    folder, who = Path(sys.argv[1]), sys.argv[2]
    dist.init_parallel_env()
    rank, size = dist.get_rank(), dist.get_world_size()
    cards = size // NODES
    os.environ["PADDLE_LOCAL_SIZE"] = str(cards)
    node = rank // cards
    args = arguments(sharding=[STAGE1], sharding_parallel_size=size, load_sharded_model=True)
    got: list[str | None] = []

    def ask(run: str, observe: Any = ignore_events) -> None:
        try:
            got.append(paddle_reshard.resume(args, folder / run, local=folder / str(node), observe=observe))
        except (paddle_reshard.ReshardError, RuntimeError) as error:  # gloo's are of the second kind
            got.append(f"{type(error).__name__}: {error}")

    ask("second" if node == NODES - 1 else "first")
    ask("first")
    ends = size - cards if who == "works" else size - 1

    def end(event: object) -> None:
        if rank == ends and isinstance(event, GroupEnded | str):
            os._exit(0)

    end(who if who == "waits" else None)
    ask("second", end)
    (folder / f"rank-{rank}.json").write_text(json.dumps(got))


if __name__ == "__main__":
    main()
