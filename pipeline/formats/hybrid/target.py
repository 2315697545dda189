"""Lay out the files of a hybrid-parallel checkpoint, byte for byte.

The logical tensors of a source and the settings of the target job determine all files: literals, array slots and zero
padding. Names, order of keys and padding are those of the trainer.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.files import LaidOut, SourceListing, TargetFiles
from paddle_reshard.pipeline.checkpoint.format import Outline, Staged
from paddle_reshard.pipeline.checkpoint.lora import IN_BASE, without_base
from paddle_reshard.pipeline.checkpoint.sidecars import plan_sidecars
from paddle_reshard.pipeline.checkpoint.stages import for_stages, parted, untied_for
from paddle_reshard.pipeline.checkpoint.training_job import naming_arguments
from paddle_reshard.pipeline.core.errors import CheckpointError, PlanError, RuleError, UnsupportedError
from paddle_reshard.pipeline.core.file_names import MODEL_META
from paddle_reshard.pipeline.core.topology import Topology, sharding_in_words
from paddle_reshard.pipeline.core.upstream import DEFAULT_PADDLE
from paddle_reshard.pipeline.formats.hybrid import HYBRID, HYBRID_PLAIN
from paddle_reshard.pipeline.formats.hybrid.writer import HybridWriter
from paddle_reshard.pipeline.formats.jobs.checks import check_job
from paddle_reshard.pipeline.formats.jobs.job import HybridJob
from paddle_reshard.pipeline.formats.jobs.job_bytes import job_bytes
from paddle_reshard.pipeline.formats.jobs.request import JobRequest
from paddle_reshard.pipeline.formats.writing import check_tensors
from paddle_reshard.pipeline.model.model import AUTOMATIC, Model


@dataclass(frozen=True, slots=True)
class HybridTarget(HybridJob):
    """A target of this format. Validated by :func:`check_hybrid`."""

    @property
    def format(self) -> str:
        """Whether it may have ``model_meta.json``."""
        return HYBRID if self.sharded_saving else HYBRID_PLAIN

    def in_words(self) -> str:
        """A one-line description for users."""
        newer = f", files of Paddle {self.paddle_version}" if self.paddle_version != DEFAULT_PADDLE else ""
        return f"{self.format}, {self.topology}, {sharding_in_words(self.strategy)}{newer}"

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

    def lay_out(self, source: Checkpoint, wanted: Checkpoint, listing: SourceListing) -> LaidOut:
        """All tensor files of the target checkpoint, and what becomes of small ones."""
        source, wanted, of_base = self._to_write(source, wanted)
        sidecars = plan_sidecars(listing, wanted, self.topology)
        sidecars = replace(sidecars, not_carried=(*sidecars.not_carried, *of_base))
        files = layout_hybrid(wanted, self)
        copies = parted(wanted.model, files.parameter_names.values())
        return LaidOut(source.catalog, files, sidecars, remarks=self._remarks(copies))

    def _remarks(self, copies: tuple[str, ...]) -> tuple[str, ...]:
        """What starts as a copy, and what the names of parameters require of a job."""
        arguments = naming_arguments(self.topology, self.sequence_parallel)
        if self.names is not None or not arguments:
            return copies
        return (
            *copies,
            f"parameters have the names of a job with {arguments}; a job without finds states of others under "
            "its names, and loads them",
        )

    def outline(self, source: Checkpoint, wanted: Checkpoint, listing: SourceListing) -> Outline:
        """What the fullest rank holds, and the size of all tensors, by the same rules as the files."""
        source, wanted, of_base = self._to_write(source, wanted)
        sidecars = plan_sidecars(listing, wanted, self.topology)
        check_hybrid(wanted, self)
        fullest, tensor_bytes = job_bytes(wanted, self)
        return Outline(fullest, tensor_bytes, (*sidecars.not_carried, *of_base))

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
        if wanted.history.masters_made and not self.writes_meta:
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
        return source, for_stages(wanted, self.topology.pp), of_base

    def check_staged(self, staged: Staged) -> None:
        """Read it as a source and check that its topology and its tensors are as planned."""
        checkpoint = staged.index()
        wanted = untied_for(without_base(staged.wanted), checkpoint.model)
        staged = replace(staged, wanted=wanted)
        planned, read = self.topology, checkpoint.job.topology
        if not checkpoint.has_optimizer and read is not None:
            read = replace(read, sharding=planned.sharding)  # no file tells
        axes = attrgetter("tp", "pp", "sharding", "ep")
        if read is not None and axes(read) != axes(planned):
            raise CheckpointError(f"the staged target reads back as {read}, but {planned} was planned")
        check_tensors(staged, checkpoint)


def check_hybrid(checkpoint: Checkpoint, target: HybridTarget) -> None:
    """Refuse a job that the trainer cannot train, and files that are not known well enough to be written."""
    marked = f"which tensors are is_distributed in {MODEL_META}; --format {HYBRID_PLAIN} does not need it"
    check_job(checkpoint, target, marked if target.writes_meta else None)
    model = checkpoint.model
    if target.topology.ep > 1 and target.names is None:
        _check_counted(model, target.topology)
    if model.has_lora and target.writes_meta and not any(tensor.of_base for tensor in model.tensors):
        raise UnsupportedError(
            f"the {MODEL_META} of a LoRA job also lists the tensors of the base model, which the rule table of "
            f"{model.table.family!r} does not give; use --format {HYBRID_PLAIN}"
        )
    if target.names is None and checkpoint.job.names_predicted is not None:
        raise RuleError(
            "parameter names",
            f"{checkpoint.job.names_predicted}; names of the target cannot be predicted; pass those of a job of the "
            "target topology with --layout model_meta.json",
        )


def _check_counted(model: Model, topology: Topology) -> None:
    """Refuse a model that lacks buffers which are parameters under expert parallelism, where they count in names.

    Files of a job without sharded saving do not list them if they are not stored, so that only the rules know of them.
    """
    held = {rule.key for rule in model.rules}
    for rule in model.table.rules:
        counts = rule.name_class == AUTOMATIC and rule.name_class_ep not in (None, AUTOMATIC)
        if counts and rule.applies(model.config) and rule.key not in held:
            raise RuleError(
                rule.key,
                f"the source does not hold or list it, and with ep={topology.ep} the trainer counts it when it names "
                "parameters; convert from a checkpoint that has it, or pass the names of a job of the target topology "
                "with --layout model_meta.json",
            )


def layout_hybrid(checkpoint: Checkpoint, target: HybridTarget) -> TargetFiles:
    """Lay out all tensor files of the target, and ``model_meta.json``; what :func:`check_hybrid` refuses is refused."""
    check_hybrid(checkpoint, target)
    return HybridWriter(checkpoint, target).layout()


@dataclass(frozen=True)
class HybridRequest(JobRequest):
    """A requested hybrid-parallel target."""

    of_average: ClassVar[bool] = False
    of_stored_parameters: ClassVar[bool] = False

    sharded_saving: bool = True
    """Whether it may have ``model_meta.json``."""

    @property
    def format(self) -> str:
        """Name of the format: with or without ``model_meta.json``."""
        return HYBRID if self.sharded_saving else HYBRID_PLAIN

    def target_for(self, source: Checkpoint) -> HybridTarget:
        """The target; settings not requested come from the source or the trainer's defaults."""
        return self.job_for(source, partial(HybridTarget, sharded_saving=self.sharded_saving))
