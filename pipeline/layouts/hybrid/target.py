"""Lay out the files of a hybrid-parallel checkpoint, byte for byte.

The logical tensors of a source and the settings of the target job determine all files: literals, array slots and zero
padding. Names, order of keys and padding are those of the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paddle_reshard.pipeline.core.errors import CheckpointError, PlanError, RuleError, UnsupportedError
from paddle_reshard.pipeline.core.file_names import MODEL_META
from paddle_reshard.pipeline.core.topology import Topology, sharding_in_words
from paddle_reshard.pipeline.core.upstream import DEFAULT_PADDLE
from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint
from paddle_reshard.pipeline.layouts.files import LaidOut, TargetFiles, add_literal_files
from paddle_reshard.pipeline.layouts.format import ADAMW_MINI, Decision, Outline, Staged
from paddle_reshard.pipeline.layouts.hybrid.job import HybridJob
from paddle_reshard.pipeline.layouts.hybrid.job_bytes import job_bytes
from paddle_reshard.pipeline.layouts.hybrid.name import HYBRID, HYBRID_PLAIN
from paddle_reshard.pipeline.layouts.hybrid.ranks import expert_of
from paddle_reshard.pipeline.layouts.hybrid.writer import HybridWriter
from paddle_reshard.pipeline.layouts.lora import IN_BASE, without_base
from paddle_reshard.pipeline.layouts.model import AUTOMATIC, Model
from paddle_reshard.pipeline.layouts.optimizers import muon_parameters, special_optimizer
from paddle_reshard.pipeline.layouts.rules.table import RuleTable
from paddle_reshard.pipeline.layouts.sidecars import plan_sidecars
from paddle_reshard.pipeline.layouts.staged import check_tensors
from paddle_reshard.pipeline.layouts.training_job import TrainingJob, naming_arguments


@dataclass(frozen=True, slots=True)
class HybridTarget(HybridJob):
    """A target of this format: a job, and why it is as it is. Validated by :func:`check_target`."""

    strategy_reason: str = "as requested"
    """Why this strategy was chosen, as shown to the user."""

    @property
    def format(self) -> str:
        """Whether it may have ``model_meta.json``."""
        return HYBRID if self.sharded_saving else HYBRID_PLAIN

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The sharding strategy."""
        return (Decision("sharding", sharding_in_words(self.strategy), self.strategy_reason),)

    def in_words(self) -> str:
        """A one-line description for users."""
        newer = f", files of Paddle {self.paddle_version}" if self.paddle_version != DEFAULT_PADDLE else ""
        return f"{self.format}, {self.topology}, {sharding_in_words(self.strategy)}{newer}"

    def facts(self) -> dict[str, str]:
        """What distinguishes it from other targets of the same source."""
        return {
            "topology": str(self.topology),
            "sharding_strategy": self.strategy,
            "paddle_version": self.paddle_version,
        }

    def data(self) -> dict[str, Any]:
        """What was requested and decided, for JSON output."""
        return {
            "format": self.format,
            "topology": asdict(self.topology),
            "sharding_strategy": self.strategy,
            "sharding_strategy_reason": self.strategy_reason,
            "model_meta": self.writes_meta,
            "paddle_version": self.paddle_version,
        }

    def cannot_hold_lora(self, model: Model) -> str | None:
        """Without pipeline parallelism, PaddleFormers 1.2 can neither save nor resume LoRA that tp cuts."""
        if self.topology.tp == 1 or self.topology.pp > 1:
            return None
        return (
            f"LoRA with {self.topology}: without pipeline parallelism the trainer merges the tensors that tp cuts when "
            "it saves, which no model of PaddleFormers 1.2 implements (NotImplementedError); choose pp=2 or more"
        )

    def lay_out(
        self, source: Checkpoint, wanted: Checkpoint, sizes: Mapping[str, int], folders: Sequence[str]
    ) -> LaidOut:
        """All files of the target checkpoint, including small ones."""
        source, wanted, of_base = self._to_write(source, wanted)
        sidecars = plan_sidecars(sizes, folders, wanted, source.source_config, self.topology)
        files = add_literal_files(layout_hybrid(wanted, self), sidecars.written)
        not_carried = (*sidecars.not_carried, *of_base)
        return LaidOut(source.catalog, files, sidecars.carried, not_carried, remarks=self._remarks())

    def _remarks(self) -> tuple[str, ...]:
        """What the names of parameters require of a job."""
        arguments = naming_arguments(self.topology, self.sequence_parallel)
        if self.names is not None or not arguments:
            return ()
        return (
            f"parameters have the names of a job with {arguments}; a job without finds states of others under "
            "its names, and loads them",
        )

    def outline(
        self, source: Checkpoint, wanted: Checkpoint, sizes: Mapping[str, int], folders: Sequence[str]
    ) -> Outline:
        """What the fullest rank holds, and the size of all tensors, by the same rules as the files."""
        source, wanted, of_base = self._to_write(source, wanted)
        sidecars = plan_sidecars(sizes, folders, wanted, source.source_config, self.topology)
        check_job(wanted, self)
        fullest, tensor_bytes = job_bytes(wanted, self)
        return Outline(fullest, tensor_bytes, (*sidecars.not_carried, *of_base))

    def job(self, source: Checkpoint) -> TrainingJob:
        """The job of this topology that goes on training the source."""
        return TrainingJob(
            source.model.table.convention,
            self.format,
            self.topology,
            self.strategy,
            self.sharding.comm_overlap,
            self.topology.tp > 1 and self.sequence_parallel,
            muon=bool(muon_parameters(source.model.tensors)),
            experts_over_dp=self.expert_axis == "dp",
        )

    def _to_write(
        self, source: Checkpoint, wanted: Checkpoint
    ) -> tuple[Checkpoint, Checkpoint, list[tuple[str, str]]]:
        """Both without what the trainer does not save, and the tensors that this leaves out, with the reason."""
        of_base: list[tuple[str, str]] = []
        if wanted.model.has_lora:
            of_base = [(t.key, IN_BASE) for t in source.model.tensors if t.of_base and not t.missing]
            source, wanted = without_base(source), without_base(wanted)
        # A job can start from parameters alone (ignore_load_lr_and_optim); every rank of a sharding group holds them.
        if not source.has_optimizer and self.writes_meta:
            raise PlanError(
                f"{self.topology}: the source holds parameters only, and a target with {MODEL_META} needs optimizer "
                f"states; use --format {HYBRID_PLAIN}, in which all ranks of a sharding group read the same file, or "
                "--master-weights from-parameters"
            )
        if wanted.masters_made and not self.writes_meta:
            raise PlanError(
                f"--master-weights from-parameters, {self.format}, {sharding_in_words(self.strategy)}: the "
                f"trainer only reads master weights without other states together with {MODEL_META} (stage 1, --format "
                f"{HYBRID}); omit the option: the job's first step makes the same master weights from the parameters"
            )
        if not source.has_optimizer and wanted.has_ema:
            raise PlanError(
                "the source holds parameters and their average only, but a hybrid checkpoint without optimizer states "
                "cannot hold an average; omit it with --drop ema"
            )
        return source, wanted, of_base

    def check_staged(self, staged: Staged) -> None:
        """Read it as a source and check that its topology and its tensors are as planned."""
        found = staged.index()
        staged = replace(staged, wanted=without_base(staged.wanted))
        planned, read = self.topology, found.topology
        if not found.has_optimizer and read is not None:
            read = replace(read, sharding=planned.sharding)  # no file tells
        if read is not None and (read.tp, read.pp, read.sharding, read.ep) != (
            planned.tp,
            planned.pp,
            planned.sharding,
            planned.ep,
        ):
            raise CheckpointError(f"the staged target reads back as {read}, but {planned} was planned")
        check_tensors(staged, found)


def check_target(target: HybridTarget) -> None:
    """Refuse what the trainer refuses, with its reason, and what is not supported.

    Raises
    ------
    PlanError, UnsupportedError
    """
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


def with_default_strategy(target: HybridTarget, source: Checkpoint) -> HybridTarget:
    """The target with the default sharding strategy, and the reason for it.

    The default is the strategy of the source if the target job can use it, otherwise that of the trainer.
    """
    if target.topology.sharding == 1:
        return replace(target, strategy="none", strategy_reason="sharding is 1")
    by_default, reason = _default_of_trainer(source)
    if source.strategy is None:
        return replace(
            target, strategy=by_default, strategy_reason=f"{reason}; the source's strategy is not known"
        )
    if source.strategy == "none":
        return replace(target, strategy=by_default, strategy_reason=f"{reason}; the source is not sharded")
    kept = replace(target, strategy=source.strategy, strategy_reason="as the source")
    try:
        check_target(kept)
    except PlanError as error:
        why = f"{reason}; not {source.strategy} as the source: {error}"
        return replace(target, strategy=by_default, strategy_reason=why)
    return kept


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


def _check_expert_parallel(target: HybridTarget) -> None:
    """Refuse what PaddleFormers 1.2.0 refuses under expert parallelism.

    ``trainer/training_args.py:2793-2845``, ``utils/moe_hybrid_parallel_optimizer.py:355-363``,
    ``nn/moe_deepep/moe_gate.py:133``, and the groups of Paddle 3.3 ``fleet/base/topology.py:769-870``.
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
            f"ep={ep} with stage1v1: the trainer asserts that hybrid expert parallel only supports ShardingV2; "
            "choose stage1v2"
        )
    if ep % topology.tp or topology.tp * topology.sharding % ep:
        raise PlanError(
            f"ep={ep} with tp={topology.tp}, sharding={topology.sharding}: expert ranks are the tp ranks of neighbours "
            "in a sharding group, so tp must divide ep, and ep must divide tp × sharding"
        )
    if topology.tp > 1 and not target.sequence_parallel:
        raise PlanError(
            f"ep={ep} with tp={topology.tp} without sequence parallelism: the trainer's router asserts "
            "sequence_parallel when tensor parallelism is used"
        )
    if target.sharding.comm_overlap:
        raise UnsupportedError(
            f"ep={ep} with comm_overlap: whether the pipeline engine keeps experts in buffers of their own is not known"
        )


def _check_adamw_mini(target: HybridTarget) -> None:
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


def _check_lora(model: Model, target: HybridTarget) -> None:
    """Refuse LoRA targets that are not supported."""
    if target.expert_axis is not None:
        raise UnsupportedError(
            f"LoRA with {target.topology} and experts distributed over {target.expert_axis} is not supported"
        )
    if target.writes_meta and not any(tensor.of_base for tensor in model.tensors):
        raise UnsupportedError(
            f"the {MODEL_META} of a LoRA job also lists the tensors of the base model, which the rule table of "
            f"{model.table.family!r} does not give; use --format {HYBRID_PLAIN}"
        )


def _check_experts_over_dp(target: HybridTarget) -> None:
    """PaddleNLP 3.0.0b4's ``use_expert_parallel``: ``transformers/moe_layer.py:150-180``."""
    topology = target.topology
    if topology.world_size == topology.dp:
        raise PlanError(
            f"experts over dp={topology.dp} and no other axis: the trainer does not create its groups then, and every "
            "rank holds all experts; omit ep"
        )
    if target.strategy in ("stage2", "stage3"):
        raise UnsupportedError(f"experts over dp={topology.dp} with {target.strategy} are not supported")


def _check_experts(checkpoint: Checkpoint, target: HybridTarget) -> None:
    """Refuse a distribution of experts that the model does not support."""
    table, axis, topology = checkpoint.model.table, target.expert_axis, target.topology
    if axis is None:
        if table.expert_axis == "dp" and 1 < topology.dp < topology.world_size:
            raise PlanError(
                f"dp={topology.dp}: {table.convention}'s {table.family} distributes experts over data-parallel ranks "
                f"if there are other axes too; add ep={topology.dp}"
            )
        return
    ranks = {"ep": topology.ep, "tp": topology.tp, "dp": topology.dp}[axis]
    what = f"{axis}={ranks}"
    if table.expert_axis != axis:
        raise PlanError(
            f"{what}: {table.convention}'s {table.family} does not distribute experts over {axis}"
        )
    experts = [t for t in checkpoint.model.tensors if t.rule.of_expert]
    count = len({expert_of(t.key) for t in experts})
    if count == 0 or count % ranks:
        raise PlanError(
            f"{what}: the layers have {count} experts as separate tensors, and the trainer asserts that {axis} divides "
            "that number"
        )
    plain = next((t.key for t in experts if not t.master), None)
    if axis == "ep" and topology.sharding > 1 and plain is not None and checkpoint.has_optimizer:
        raise PlanError(
            f"{plain}: has no master weight; the trainer's stage1v2 under expert parallelism only supports "
            "amp_master_grad, and sharded saving would lose it"
        )


def _check_counted(model: Model, topology: Topology) -> None:
    """Refuse a model that lacks buffers which are parameters under expert parallelism, where they count in names.

    Files of a job without sharded saving do not list them if they are not stored, so that only the rules know of them.
    """
    held = {tensor.rule.key for tensor in model.tensors}
    for rule in model.table.rules:
        counts = rule.name_class == AUTOMATIC and rule.name_class_ep not in (None, AUTOMATIC)
        if counts and rule.applies(model.config) and rule.key not in held:
            raise RuleError(
                rule.key,
                f"the source does not hold or list it, and with ep={topology.ep} the trainer counts it when it names "
                "parameters; convert from a checkpoint that has it, or pass the names of a job of the target topology "
                "with --target-meta model_meta.json",
            )


def _check_family(table: RuleTable, topology: Topology) -> None:
    """Refuse combinations of axes with which the trainer cannot start a job of the family."""
    for axes, reason in table.refused.items():
        degrees = {axis: getattr(topology, axis) for axis in axes.split(",")}
        if min(degrees.values()) > 1:
            together = ", ".join(f"{axis}={degree}" for axis, degree in degrees.items())
            raise PlanError(
                f"{together}: {table.convention} cannot train {table.family} with these: {reason}"
            )


def _check_told(table: RuleTable, config: Mapping[str, Any], target: HybridJob) -> None:
    """Refuse what the files of a model without a rule table do not determine."""
    topology = target.topology
    degrees = {"tp": topology.tp, "pp": topology.pp, "vpp": topology.vpp, "ep": topology.ep}
    if table.convention == "paddlenlp":  # which distributes experts over data-parallel ranks
        degrees["dp"] = topology.dp
    stages_given = target.segmentation is not None or target.sharding.comm_overlap
    marked = f"which tensors are is_distributed in {MODEL_META}; --format {HYBRID_PLAIN} does not need it"
    table.check_job(config, degrees, stages_given, marked if target.writes_meta else None)


def check_job(checkpoint: Checkpoint, target: HybridTarget) -> None:
    """Refuse what the trainer cannot train, and what is not known well enough to be written.

    Whether sizes divide is found where they are divided (:class:`CellPlanner`).

    Raises
    ------
    PlanError, UnsupportedError, RuleError
    """
    check_target(target)
    _check_told(checkpoint.model.table, checkpoint.model.config, target)
    _check_family(checkpoint.model.table, target.topology)
    _check_experts(checkpoint, target)
    if target.topology.ep > 1 and target.names is None:
        _check_counted(checkpoint.model, target.topology)
    if checkpoint.model.has_lora:
        _check_lora(checkpoint.model, target)
    if special_optimizer(checkpoint.model) == ADAMW_MINI:
        _check_adamw_mini(target)
    # PaddleFormers' optimizer lists only trained parameters (1.2.0 trainer.py:3359): those with states, if any has.
    tensors = checkpoint.model.tensors
    # In a model of an unknown family, a trained parameter may have had no gradient: it is listed and has no state.
    known = checkpoint.model.table.not_known is None
    by_states = (
        known and checkpoint.model.table.convention == "paddleformers" and any(t.trained for t in tensors)
    )
    untrained = [t.key for t in tensors if not t.trained and t.tied_to is None]
    if untrained and not by_states and target.strategy != "none" and checkpoint.has_optimizer:
        raise UnsupportedError(
            f"{untrained[0]} has no optimizer state: whether the target job counts frozen parameters when it "
            f"distributes parameters is not known, so {target.strategy} is not supported for this model"
        )
    if target.names is None and checkpoint.names_predicted is not None:
        raise RuleError(
            "parameter names",
            f"{checkpoint.names_predicted}; names of the target cannot be predicted; pass those of a job of the "
            "target topology with --target-meta model_meta.json",
        )


def layout_hybrid(checkpoint: Checkpoint, target: HybridTarget) -> TargetFiles:
    """Lay out all files of the target checkpoint.

    Raises
    ------
    PlanError
        If the model cannot take this topology, or a parameter name is not known.
    """
    check_job(checkpoint, target)
    return HybridWriter(checkpoint, target).layout()
