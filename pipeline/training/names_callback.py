"""The check of names for the ``Trainer`` of PaddleFormers and PaddleNLP."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.training.names import compare_with_job
from paddle_reshard.storage.locate import StorageOptions

logger = logging.getLogger(__name__)


def names_callback(
    trainer: Any, *, checkpoint: PathLike | None = None, storage_options: StorageOptions | None = None
) -> Any:
    """A callback that runs :func:`check_names` on every rank before the first step, and stops a job that does not fit.

    ``trainer.add_callback(names_callback(trainer))``. The trainer has loaded by then; to ask before, call
    ``names_callback(trainer).check()`` ahead of ``trainer.train()``.

    Parameters
    ----------
    trainer
        A ``Trainer`` of PaddleFormers or PaddleNLP that resumes from a hybrid-parallel checkpoint.
    checkpoint
        Path or URL of the checkpoint. Default: the trainer's ``resume_from_checkpoint``; if it has none, nothing is
        checked.
    storage_options
        fsspec options to access a store that is not a local folder.
    """
    base = import_module(f"{library_of(trainer)}.trainer").TrainerCallback
    return type("NamesCallback", (_NamesCallback, base), {})(trainer, checkpoint, storage_options)


def library_of(trainer: Any) -> str:
    """``paddleformers`` or ``paddlenlp``; a ``UsageError`` if it is a trainer of neither."""
    for cls in type(trainer).__mro__:
        if cls.__name__ == "Trainer" and cls.__module__.startswith(("paddleformers.", "paddlenlp.")):
            return cls.__module__.partition(".")[0]
    raise UsageError(f"{type(trainer).__name__} is not a Trainer of PaddleFormers or PaddleNLP")


class _NamesCallback:
    """Checks once, at the beginning; combined with the trainer's callback base class at creation."""

    def __init__(
        self, trainer: Any, checkpoint: PathLike | None, storage_options: StorageOptions | None
    ) -> None:
        self.trainer, self.checkpoint, self.storage_options = trainer, checkpoint, storage_options

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.check(placed=True)

    def check(self, placed: bool = False) -> None:
        """Compare at once; ``placed``: the trainer has converted and wrapped its model."""
        args = self.trainer.args
        checkpoint = self.checkpoint or args.resume_from_checkpoint
        if not checkpoint:
            return
        unwrap_model = import_module(f"{library_of(self.trainer)}.transformers.model_utils").unwrap_model
        checked = compare_with_job(
            unwrap_model(self.trainer.model),
            checkpoint,
            args.optimizer_name_suffix or "",
            bool((args.bf16 or args.fp16) and args.fp16_opt_level == "O2"),
            self.storage_options,
            placed,
        )
        logger.info("%s: the names and dtypes of %d parameters are those of this job", checkpoint, checked)
