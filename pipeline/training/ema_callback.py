"""Averages during training, for the ``Trainer`` of PaddleFormers and PaddleNLP."""

from __future__ import annotations

import json
import logging
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from paddle_reshard.pipeline.core.errors import ReshardError, UnsupportedError, UsageError
from paddle_reshard.pipeline.core.file_names import CONFIG, MODEL_META
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.model.optimizer_keys import MASTER_WEIGHTS
from paddle_reshard.pipeline.training.async_ema import AsyncEma
from paddle_reshard.pipeline.training.flex import FlexRank, RankBoxes
from paddle_reshard.pipeline.training.names_callback import library_of
from paddle_reshard.pipeline.training.paddle_objects import rank_boxes, rank_pieces, stage3_of
from paddle_reshard.pipeline.training.resume import RankPieces
from paddle_reshard.pipeline.training.stretches import Weights
from paddle_reshard.storage.locate import open_source, source_access

logger = logging.getLogger(__name__)
_TP_DEGREES = {"paddleformers": "tensor_model_parallel_size", "paddlenlp": "tensor_parallel_degree"}


def ema_callback(
    trainer: Any,
    *,
    resume_from: PathLike | None = None,
    rules: PathLike | None = None,
    **options: Any,
) -> Any:
    """A callback that averages the weights of ``trainer`` and saves the average in its checkpoints.

    ``trainer.add_callback(ema_callback(trainer, decay=0.999))``. It writes the files of the trainer's own average
    (``ema.tp00_pp00_shard00.pdopt``, or ``ema_state/``) and, like that, requires sharded models or FlexCheckpoints.

    Parameters
    ----------
    resume_from
        A checkpoint to continue from, of any topology, sharding strategy and size of communication buffers.
    rules
        A rule table for the model family, instead of the built-in tables.
    options
        See :class:`~paddle_reshard.pipeline.training.async_ema.AsyncEma`.

    Raises
    ------
    UsageError
        If the trainer saves in another format.
    UnsupportedError
        If experts are distributed over data-parallel ranks.
    """
    args, library = trainer.args, library_of(trainer)
    if library == "paddlenlp" and args.use_expert_parallel and args.data_parallel_degree > 1:
        raise UnsupportedError(
            "EMA during training does not support PaddleNLP experts distributed over data-parallel "
            "ranks, because only the first of these ranks saves other tensors; train with "
            "PaddleFormers, or without use_expert_parallel"
        )
    stage3 = any(option.value == "stage3" for option in args.sharding)
    if not _is_flex(trainer) and (stage3 or getattr(trainer, "sharding_io", None) is None):
        raise UsageError(
            "EMA during training requires sharded checkpoints; train with "
            "save_checkpoint_format=sharding_io or flex_checkpoint (PaddleFormers; only the latter "
            "with sharding stage 3), or with save_sharded_model=true (PaddleNLP)"
        )
    if options.get("loss_threshold") is not None and args.zcc_save_ema_coef is None:
        raise UsageError(
            "the trainer passes the loss to its callbacks only if zcc_save_ema_coef is set; "
            "loss_threshold needs it"
        )
    base = import_module(f"{library}.trainer").TrainerCallback
    callback = type("EmaCallback", (_EmaCallback, base), {})
    return callback(trainer, resume_from, rules, AsyncEma(lambda: weights_of(trainer), **options))


def weights_of(trainer: Any) -> Weights:
    """The tensors that the trainer's own average covers: this rank's master weights and saved float32 parameters."""
    model, stage3 = _model(trainer), stage3_of(trainer.optimizer)
    if stage3 is not None and stage3._offload:
        raise UnsupportedError(
            "EMA does not support sharding stage 3 with offload, because no state_dict contains its master weights; "
            "train without offload"
        )
    if _is_flex(trainer):
        saved = model.state_dict()
    else:
        saved, *_ = trainer.sharding_io.manipulate_state_dict_and_config(model, merge_tensor_parallel=False)
    params = {key: tensor for key, tensor in saved.items() if str(tensor.dtype).endswith("float32")}
    cut = next((key for key, tensor in params.items() if hasattr(tensor, "fw_storage")), None)
    if cut is not None:
        raise UnsupportedError(
            f"{cut}: EMA does not support float32 parameters cut by sharding stage 3; train in "
            f"bfloat16, or with sharding stage 1 or 2"
        )
    return Weights(trainer.optimizer.state_dict().get(MASTER_WEIGHTS, {}), params)


def pieces_of(trainer: Any) -> RankPieces:
    """The pieces of logical tensors that this rank of a trainer holds."""
    args, tp = trainer.args, 1
    if args.use_hybrid_parallel:
        tp = int(getattr(args, _TP_DEGREES[library_of(trainer)]))
    tp_rank = int(args.tensor_parallel_rank) if tp > 1 else 0
    return rank_pieces(_model(trainer), trainer.optimizer, tp=max(tp, 1), tp_rank=tp_rank)


def _is_flex(trainer: Any) -> bool:
    return getattr(trainer.args, "save_checkpoint_format", None) == "flex_checkpoint"


def _model(trainer: Any) -> Any:
    """The model whose ``state_dict`` has structured keys."""
    unwrap_model = import_module(f"{library_of(trainer)}.transformers.model_utils").unwrap_model
    return unwrap_model(trainer.model if _is_flex(trainer) else trainer.sharding_io.model)


class _EmaCallback:
    """Updates the average at the end of every step; combined with the trainer's callback base class at creation."""

    def __init__(
        self,
        trainer: Any,
        resume_from: PathLike | None,
        rules: PathLike | None,
        ema: AsyncEma,
    ) -> None:
        self.trainer, self.resume_from, self.rules, self.ema = trainer, resume_from, rules, ema
        self.flex_rank: FlexRank | None = None
        self.meta: Any = None
        """Contents of ``model_meta.json``, without which a trainer does not read the average of a FlexCheckpoint."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.resume_from is not None:
            own = CONFIG in open_source(os.fspath(self.resume_from), *source_access({})).sizes()
            config = None if own else _model(self.trainer).config.to_dict()
            self.ema.load(self.resume_from, pieces_of(self.trainer), rules=self.rules, config=config)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ema.update(state.global_step, getattr(state, "loss", None))
        if control.should_save:
            # The ranks of a FlexCheckpoint exchange their boxes; a rank that has lost its average must take part too.
            rank = self._flex_rank() if _is_flex(self.trainer) else self._file_name(args)
            if self.ema.progress.updates:
                self._save(Path(args.output_dir) / f"checkpoint-{state.global_step}", rank)

    def _save(self, directory: Path, rank: str | FlexRank) -> None:
        try:
            self.ema.save(directory, rank)
            if isinstance(rank, FlexRank) and rank.number == 0 and self.meta is not None:
                (directory / MODEL_META).write_text(json.dumps(self.meta))
        except (ReshardError, OSError) as error:
            if self.ema.when_lost == "raise":
                raise
            path = rank.path if isinstance(rank, FlexRank) else rank
            logger.error("%s: the average of the weights was not saved: %s", directory / path, error)

    def _flex_rank(self) -> FlexRank:
        """This rank among all ranks. They exchange their boxes only once, because boxes never change."""
        if self.flex_rank is None:
            distributed = import_module("paddle.distributed")
            trainer, model = self.trainer, _model(self.trainer)
            own = rank_boxes(model, trainer.optimizer)
            boxes: list[RankBoxes] = []
            if distributed.get_world_size() > 1:
                distributed.all_gather_object(boxes, own)
            self.flex_rank = FlexRank(distributed.get_rank(), tuple(boxes or [own]))
            collector = import_module(f"{library_of(trainer)}.trainer.utils.zero_cost_checkpoint")
            facts = collector.DistInfoCollectorValidator(trainer.args, trainer.hcg)
            self.meta = facts.gather_distributed_model_meta(model, trainer.optimizer)
        return self.flex_rank

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        logger.info("the average of the weights: %s", self.ema.counts)
        self.ema.close()

    def _file_name(self, args: Any) -> str:
        suffix = args.optimizer_name_suffix
        return f"ema.{suffix}.pdopt" if suffix else "ema.pdopt"
