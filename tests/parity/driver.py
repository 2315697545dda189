"""Runs in the trainer's Python: the laboratory's script, which loads a checkpoint and tells what it then holds."""

import os
import sys
import types

import paddle
import train
import truth
from paddleformers.trainer import Trainer, TrainerCallback


def main() -> None:
    """What every row asks for: of the arguments the node's own, values that are equal only if they were loaded."""
    node = int(os.environ.get("PADDLE_TRAINER_ID", "0")) // int(os.environ.get("RANKS_OF_A_NODE", "1"))
    sys.argv = [argument.replace("{node}", str(node)) for argument in sys.argv]
    answer_for_bfloat16(os.environ.get("CPU_HAS_BFLOAT16"))
    forget_correction_biases()
    if os.environ.get("CHECK_NAMES"):
        train.check_names()
    if os.environ.get("TRAIN_ON"):
        train_on(sys.argv)
    train.run(train.asked_of_command_line())


def answer_for_bfloat16(wanted: str | None) -> None:
    """Have Paddle take this CPU for one with ("yes") or without ("no") bfloat16, and say what it takes it for."""
    if wanted is not None:
        from paddle.base import core

        core.is_bfloat16_supported = paddle.amp.is_bfloat16_supported = lambda *_: wanted == "yes"
    print(f"CPU has bfloat16: {'yes' if paddle.amp.is_bfloat16_supported() else 'no'}", flush=True)


def forget_correction_biases() -> None:
    """Zero what the script sets to the same values in every job, and training leaves: it is equal only if loaded."""
    start = Trainer.train

    def train_from_zero(trainer, *arguments, **options):
        for key, tensor in trainer.model.state_dict().items():
            if key.endswith(".e_score_correction_bias"):
                paddle.assign(paddle.zeros_like(tensor), tensor)
        return start(trainer, *arguments, **options)

    Trainer.train = train_from_zero


def train_on(arguments: list[str]) -> None:
    """Have the script, which ends after loading, dump the state there and then train another step and save."""
    place = arguments.index("--resume")
    checkpoint = arguments[place + 1]
    out = arguments[arguments.index("--out") + 1]
    arguments[place : place + 2] = ["--steps", "4", "--truth", "0"]
    start = Trainer.train

    def train_from_checkpoint(trainer, **options):
        class Dump(TrainerCallback):
            def on_train_begin(self, *_, **__):
                truth.gather(trainer, types.SimpleNamespace(out=out), trainer.args)

        trainer.add_callback(Dump())
        return start(trainer, **{**options, "resume_from_checkpoint": checkpoint})

    Trainer.train = train_from_checkpoint


if __name__ == "__main__":
    main()
