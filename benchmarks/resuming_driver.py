"""Runs in the trainer's Python: the laboratory's script, which loads from ``RESUME_FROM`` and ends after one step.

Without ``RESUME_FROM`` it is run as it is. ``{node}`` in it is the number of the rank's node. Every rank says how long
loading and the first step took.
"""

import json
import os
import sys
import time

import train
from paddle import distributed
from paddleformers.trainer import Trainer, TrainerCallback


def go_on(checkpoint: str, name: str) -> None:
    """Have the trainer resume, and end when the first step is done."""
    node = int(os.environ["PADDLE_TRAINER_ID"]) // int(os.environ["RANKS_OF_A_NODE"])
    told: dict[str, float] = {"read_seconds": 0.0}
    load, start, read = Trainer._load_flex_checkpoint, Trainer.train, distributed.load_state_dict

    def timed_read(*arguments, **options):
        began = time.perf_counter()
        read(*arguments, **options)
        told["read_seconds"] += time.perf_counter() - began

    def timed_load(trainer, *arguments, **options):
        distributed.barrier()
        began = time.perf_counter(), time.process_time()
        found = load(trainer, *arguments, **options)
        told["load_cpu_seconds"] = time.process_time() - began[1]
        told["loaded"] = time.perf_counter()
        told["load_seconds"] = told["loaded"] - began[0]
        return found

    class FirstStep(TrainerCallback):
        def on_step_end(self, *_, **__):
            distributed.barrier()
            told["step_seconds"] = time.perf_counter() - told.pop("loaded")
            sys.stdout.write(f"\nRESUMED {json.dumps(told)}\nCASE_OK {name}\n")
            sys.stdout.flush()
            distributed.barrier()
            time.sleep(1 if distributed.get_rank() == 0 else 0)
            os._exit(0)

    def train_on(trainer, *_, **__):
        trainer.callback_handler.callbacks.insert(0, FirstStep())
        return start(trainer, resume_from_checkpoint=checkpoint.replace("{node}", str(node)))

    Trainer._load_flex_checkpoint, Trainer.train, distributed.load_state_dict = (
        timed_load,
        train_on,
        timed_read,
    )


if "RESUME_FROM" in os.environ:
    go_on(os.environ["RESUME_FROM"], sys.argv[sys.argv.index("--case") + 1])
train.run(train.asked_of_command_line())
