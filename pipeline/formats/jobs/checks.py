"""Refuse jobs that the trainer cannot train, and those that are not known well enough to write their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.core.choices import ADAMW_MINI
from paddle_reshard.pipeline.core.errors import PlanError, UnsupportedError
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.jobs.job import HybridJob
from paddle_reshard.pipeline.model.model import Model
from paddle_reshard.pipeline.model.optimizers import special_optimizer
from paddle_reshard.pipeline.model.rules.table import RuleTable


def check_target(target: HybridJob) -> None:
    """Refuse what the trainer refuses of a job of any model, with its reason, and what is not supported."""
    topology, strategy = target.topology, target.strategy
    if topology.ep > 1:
        _check_expert_parallel(target)
    if target.expert_axis == "dp":
        _check_experts_over_dp(target)
    if strategy in ("stage2", "stage3") and topology.pp > 1:
        raise PlanError(
            f"{strategy} with pp={topology.pp}: the trainer refuses sharding stage 2 and 3 with pipeline "
            "parallelism"
        )
    if strategy == "stage3" and topology.tp > 1:
        raise PlanError(
            f"stage3 with tp={topology.tp}: the trainer only supports tensor parallelism with sharding "
            "stage 1 and 2"
        )
    if strategy == "none" and topology.sharding > 1:
        raise PlanError(f"sharding={topology.sharding} needs a sharding strategy other than none")
    if strategy != "none" and topology.sharding == 1:
        raise PlanError(f"sharding strategy {strategy} needs sharding > 1 in the topology, it is 1")
    if target.sharding.comm_overlap and (strategy != "stage1v2" or topology.pp == 1):
        raise PlanError("comm_overlap belongs to stage1v2 with pp > 1")


def default_strategy(
    job: HybridJob, source: Checkpoint, check: Callable[[HybridJob], None]
) -> tuple[str, str]:
    """The default sharding strategy of a job, and the reason for it, as shown to the user.

    The default is the strategy of the source if ``check`` accepts the job with it, otherwise that of the trainer.
    """
    if job.topology.sharding == 1:
        return "none", "sharding is 1"
    by_default, reason = _default_of_trainer(source)
    if source.job.strategy is None:
        return by_default, f"{reason}; the source's strategy is not known"
    if source.job.strategy == "none":
        return by_default, f"{reason}; the source is not sharded"
    try:
        check(replace(job, strategy=source.job.strategy))
    except PlanError as error:
        return by_default, f"{reason}; not {source.job.strategy} as the source: {error}"
    return source.job.strategy, "as the source"


def _default_of_trainer(source: Checkpoint) -> tuple[str, str]:
    """The trainer's default kind of stage 1, and the reason for it.

    PaddleFormers 1.2 cuts parameters (``trainer/training_args.py:1596``, ``split_param``) and asserts that gradients
    are float32 and parameters half-precision (``:2339``, ``:1925``). PaddleNLP 3.0 does not cut them (``:748``,
    ``sharding_parallel_config`` is empty).
    """
    if source.model.table.convention == "paddlenlp":
        return "stage1v1", "the default of PaddleNLP"
    tensors = source.model.tensors
    if any(tensor.trained for tensor in tensors) and not any(tensor.master for tensor in tensors):
        return "stage1v1", "PaddleFormers has stage1v2 with master weights only"
    return "stage1v2", "the default of PaddleFormers"


def _check_expert_parallel(target: HybridJob) -> None:
    """Refuse what PaddleFormers 1.2.0 refuses under expert parallelism.

    ``trainer/training_args.py:2793-2845``, ``utils/moe_hybrid_parallel_optimizer.py:355-363``, and the groups of
    Paddle 3.3 ``fleet/base/topology.py:769-870``.
    """
    topology, ep = target.topology, target.topology.ep
    if topology.dp > 1:
        raise PlanError(
            f"ep={ep} with dp={topology.dp}: the trainer refuses expert parallelism with data parallelism; use "
            "sharding instead"
        )
    if target.strategy in ("stage2", "stage3"):
        raise PlanError(
            f"ep={ep} with {target.strategy}: the trainer's optimizer for expert parallelism only considers sharding "
            "stage 1"
        )
    if target.strategy == "stage1v1":
        raise PlanError(
            f"ep={ep} with stage1v1: the trainer asserts that expert parallelism only supports ShardingV2; "
            "choose stage1v2"
        )
    if ep % topology.tp or topology.tp * topology.sharding % ep:
        raise PlanError(
            f"ep={ep} with tp={topology.tp}, sharding={topology.sharding}: expert ranks are the tp ranks of neighbours "
            "in a sharding group, so tp must divide ep, and ep must divide tp × sharding"
        )
    if target.sharding.comm_overlap:
        raise UnsupportedError(
            f"ep={ep} with comm_overlap: whether the pipeline engine keeps experts in buffers of their own is not known"
        )


def _check_router(table: RuleTable, target: HybridJob) -> None:
    """Refuse what the router of PaddleFormers refuses (``nn/moe_deepep/moe_gate.py:133``); a class may have another."""
    tp, ep = target.topology.tp, target.topology.ep
    shown = any(min(job.tp, job.ep) > 1 and not job.sequence_parallel for job in table.described or ())
    if min(tp, ep) > 1 and not target.sequence_parallel and not shown:
        raise PlanError(
            f"ep={ep} with tp={tp} without sequence parallelism: the trainer's router asserts "
            "sequence_parallel when tensor parallelism is used"
        )


def _check_adamw_mini(target: HybridJob) -> None:
    """Refuse what PaddleFormers 1.2 cannot train with ``--optim adamw_mini``."""
    if target.topology.tp > 1:
        raise PlanError(
            f"{target.topology}: the optimizer is AdamWMini; each tp rank would need the mean square of its own part "
            "of a parameter, which no file holds. Only tp=1 is possible"
        )
    if target.strategy == "stage1v2":
        raise PlanError(
            "stage1v2: the trainer cannot make a step with AdamWMini under it; choose --sharding-strategy stage1v1"
        )
    if target.strategy not in ("none", "stage1v1"):
        raise UnsupportedError(
            f"{target.strategy}: how it stores AdamWMini's moment2, one number per parameter, is not known; choose "
            "--sharding-strategy stage1v1"
        )


def _check_experts_over_dp(target: HybridJob) -> None:
    """PaddleNLP 3.0.0b4's ``use_expert_parallel``: ``transformers/moe_layer.py:150-180``."""
    topology = target.topology
    if topology.world_size == topology.dp:
        raise PlanError(
            f"experts over dp={topology.dp} and no other axis: the trainer does not create its groups then, and every "
            "rank holds all experts; omit ep"
        )
    if target.strategy in ("stage2", "stage3"):
        raise UnsupportedError(f"experts over dp={topology.dp} with {target.strategy} are not supported")


def _check_experts(checkpoint: Checkpoint, target: HybridJob) -> None:
    """Refuse a distribution of experts that the model does not support."""
    table, axis, topology = checkpoint.model.table, target.expert_axis, target.topology
    if axis is None:
        if table.expert_axis == "dp" and 1 < topology.dp < topology.world_size:
            raise PlanError(
                f"dp={topology.dp}: {table.convention}'s {table.family} distributes experts over data-parallel ranks "
                f"if there are other axes too; add ep={topology.dp}"
            )
        return
    ranks = target.expert_ranks
    what = f"{axis}={ranks}"
    if table.expert_axis != axis:
        alike = axis == "ep" and table.expert_axis is None
        instead = "; omit ep, also in the job's arguments: each of its ranks has all experts" if alike else ""
        raise PlanError(
            f"{what}: {table.convention}'s {table.family} does not distribute experts over {axis}{instead}"
        )
    in_one: set[int] = set()
    if any(rule.shared_out for rule in checkpoint.model.rules):
        in_one = {t.global_shape[0] for t in checkpoint.model.tensors if t.rule.shared_out}
    count = len(checkpoint.model.expert_numbers) or min(in_one, default=0)
    if count == 0:
        raise PlanError(
            f"{what}: no tensor of this model is of single experts, which ranks could share; omit ep"
        )
    if count % ranks:
        raise PlanError(
            f"{what}: the layers have {count} experts that can be told apart, and the trainer asserts that {axis} "
            "divides that number"
        )
    plain = checkpoint.model.plain_expert
    if axis == "ep" and topology.sharding > 1 and plain is not None and checkpoint.has_optimizer:
        raise PlanError(
            f"{plain}: has no master weight; the trainer's stage1v2 under expert parallelism only supports "
            "amp_master_grad, and sharded saving would lose it"
        )


def _check_states(model: Model, strategy: str) -> None:
    """Refuse a source without states that a job with sharding has, and counts when it cuts slices."""
    if not any(rule.states_if_sharded for rule in model.rules):
        return
    trained = {tensor.item for tensor in model.tensors if tensor.trained}  # others are frozen in any job
    for tensor in model.tensors:
        if tensor.rule.states_if_sharded and not tensor.trained and tensor.item in trained:
            raise UnsupportedError(
                f"{tensor.key} has no optimizer states in the source, as in a job without sharding. A job with "
                f"{strategy} has them, and cuts the slices of other tensors accordingly; convert from a "
                "checkpoint of a job with sharding, or to one without"
            )


def _check_family(table: RuleTable, topology: Topology) -> None:
    """Refuse combinations of axes with which the trainer cannot start a job of the family."""
    for axis, reason in table.needed.items():
        if getattr(topology, axis) == 1:
            raise PlanError(
                f"{axis}=1: {table.convention} cannot train {table.family} without {axis}: {reason}"
            )
    for axes, reason in table.refused.items():
        degrees = {axis: getattr(topology, axis) for axis in axes.split(",")}
        if min(degrees.values()) > 1:
            together = ", ".join(f"{axis}={degree}" for axis, degree in degrees.items())
            raise PlanError(
                f"{together}: {table.convention} cannot train {table.family} with "
                f"{'these' if len(degrees) > 1 else 'it'}: {reason}"
            )


def _check_determined(
    table: RuleTable, config: Mapping[str, Any], target: HybridJob, marked: str | None
) -> None:
    """Refuse what the files of a model without a rule table do not determine."""
    topology = target.topology
    degrees = {"tp": topology.tp, "pp": topology.pp, "vpp": topology.vpp, "ep": topology.ep}
    if table.convention == "paddlenlp":  # which distributes experts over data-parallel ranks
        degrees["dp"] = topology.dp
    stages_given = target.segmentation is not None or target.sharding.comm_overlap
    table.check_job(config, degrees, stages_given, marked)


def check_job(checkpoint: Checkpoint, target: HybridJob, marked: str | None = None) -> None:
    """Refuse what the trainer cannot train, and what is not known well enough to be written.

    Whether sizes divide is found where they are divided (:class:`CellPlanner`). ``marked`` is what the files of the job
    say of its tensors beside their values, and what a model without a rule table does not determine.
    """
    model, table = checkpoint.model, checkpoint.model.table
    check_target(target)
    _check_router(table, target)
    _check_determined(table, model.config, target, marked)
    _check_family(table, target.topology)
    if refused := table.unsupported_option(model.config, stages_known=True):
        raise refused
    _check_experts(checkpoint, target)
    if target.strategy != "none" and checkpoint.has_optimizer:
        _check_states(model, target.strategy)
    if model.has_lora and target.expert_axis is not None:
        raise UnsupportedError(
            f"LoRA with {target.topology} and experts distributed over {target.expert_axis} is not supported"
        )
    if special_optimizer(model) == ADAMW_MINI:
        _check_adamw_mini(target)
    if target.strategy != "none" and checkpoint.has_optimizer:
        _check_frozen(model, target.strategy)


def _check_frozen(model: Model, strategy: str) -> None:
    """Refuse frozen parameters under sharding, unless it is known that the optimizer does not list them.

    PaddleFormers' lists only trained parameters (1.2.0 trainer.py:3359): those with states, if any has. In a model of
    an unknown family, a trained parameter may have had no gradient: it is listed and has no state.
    """
    untrained = model.untrained
    by_states = bool(untrained) and (
        model.table.not_known is None
        and model.table.convention == "paddleformers"
        and any(t.trained for t in model.tensors)
    )
    if untrained and not by_states:
        raise UnsupportedError(
            f"{untrained[0]} has no optimizer state: whether the target job counts frozen parameters when it "
            f"distributes parameters is not known, so {strategy} is not supported for this model"
        )
