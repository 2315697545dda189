"""Keep a moving average beside training, and fill a job of another topology from a checkpoint.

``trainer``, ``model`` and ``optimizer`` are Paddle's objects; Paddle has no types, so they are ``Any`` here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import paddle_reshard as pr


def with_trainer(trainer: Any, checkpoint: str | None = None) -> None:
    """For the ``Trainer`` of PaddleFormers and PaddleNLP: the average goes into its checkpoints."""
    trainer.add_callback(pr.ema_callback(trainer, decay=0.999, resume_from=checkpoint))


def in_a_loop(model: Any, optimizer: Any, losses: Iterable[float], checkpoint: str) -> pr.EmaCounts:
    """In a loop of your own, on a job of one rank."""
    with pr.AsyncEma(optimizer, decay=0.999, interval=10) as ema:
        ema.load(checkpoint, pr.rank_pieces(model, optimizer))
        for step, loss in enumerate(losses, 1):
            ema.update(step, loss)
        return ema.counts


def fill(model: Any, optimizer: Any, checkpoint: str) -> pr.LoadReport:
    """Each process reads what its own tensors need."""
    state_dict = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return pr.load_into(state_dict, checkpoint, allow_missing=["*.inv_freq"])
