"""Runs in the trainer's Python: the laboratory's script, with our average beside the trainer's own.

``EMA_DECAY``: of both. ``EMA_SEEN``: a folder for what is averaged of every step, as the rank holds it.
``EMA_RESUME``: a checkpoint from which the trainer goes on; ``EMA_FROM``: the one from which our average does.
"""

import os
import sys
from pathlib import Path

import numpy as np
import train
from paddleformers.trainer import Trainer

HEAVY = ("pyarrow", "ray")


def main() -> None:
    start = Trainer.train

    def train_with_averages(trainer, *_, **__):
        trainer.add_callback(_our_callback(trainer, os.environ.get("EMA_FROM")))
        return start(trainer, resume_from_checkpoint=os.environ.get("EMA_RESUME"))

    Trainer.train = train_with_averages
    train.run(train.asked_of_command_line())


def _our_callback(trainer, resumed):
    for name in HEAVY:
        sys.modules.pop(name, None)  # what the trainer's libraries have imported
    from paddle_reshard.pipeline.training.ema_callback import ema_callback, weights_of

    if heavy := sys.modules.keys() & HEAVY:
        raise ImportError(f"the average beside training has imported {heavy}")

    callback = ema_callback(trainer, decay=float(os.environ["EMA_DECAY"]), resume_from=resumed)
    update, save = callback.ema.update, callback.ema.save

    def update_and_show(step, loss=None):
        weights = weights_of(trainer)
        held = {key: tensor.numpy() for key, tensor in {**weights.master_weights, **weights.params}.items()}
        file_name = callback._file_name(trainer.args)
        np.savez(Path(os.environ["EMA_SEEN"]) / f"step{step}_{file_name}.npz", **held)
        return update(step, loss)

    def save_beside(directory, rank):
        save(f"{directory}-ours", rank)

    callback.ema.update, callback.ema.save = update_and_show, save_beside
    return callback


if __name__ == "__main__":
    main()
