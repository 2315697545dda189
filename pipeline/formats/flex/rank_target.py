"""A FlexCheckpoint whose files are those of the ranks of a job.

Each rank of that job finds everything that it asks for in its own files, and reads them without resharding (Paddle
3.3.1 ``flex_checkpoint/dcp/utils.py``, ``check_resumable_locally``). Any other job can read them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.files import LaidOut, SourceListing
from paddle_reshard.pipeline.checkpoint.format import Outline, Staged
from paddle_reshard.pipeline.checkpoint.staged import check_tensors
from paddle_reshard.pipeline.checkpoint.training_job import never_restored
from paddle_reshard.pipeline.core.errors import PlanError, UnsupportedError, UsageError
from paddle_reshard.pipeline.core.topology import sharding_in_words
from paddle_reshard.pipeline.core.upstream import paddle_release
from paddle_reshard.pipeline.formats.flex import FLEX
from paddle_reshard.pipeline.formats.flex.by_rank import PiecesOfRanks
from paddle_reshard.pipeline.formats.flex.names import LIBRARY
from paddle_reshard.pipeline.formats.flex.target import cannot_hold_lora, check_flex, plan_flex_sidecars
from paddle_reshard.pipeline.formats.flex.writer import FlexFiles
from paddle_reshard.pipeline.formats.jobs.checks import check_job, check_target
from paddle_reshard.pipeline.formats.jobs.job import HybridJob
from paddle_reshard.pipeline.formats.jobs.job_bytes import job_bytes
from paddle_reshard.pipeline.formats.jobs.request import JobRequest
from paddle_reshard.pipeline.model.model import Model
from paddle_reshard.pipeline.model.optimizers import muon_parameters
from paddle_reshard.pipeline.model.rules.table import RuleTable

_WHOLE = "omit --to: whole tensors suit every job"
_NUMBERS_COPIES = "3.3"
"""The first Paddle whose metadata tell flattened pieces, and number the copies of a piece."""
_ASKED_FOR = frozenset(["moment1", "moment2", "velocity", "beta1_pow_acc", "beta2_pow_acc"])
"""The states that ``sharded_state_dict`` of Paddle's optimizers knows."""


@dataclass(frozen=True, slots=True)
class RankFlexTarget(HybridJob):
    """A FlexCheckpoint for the ranks of a job. Validated by :func:`check_by_rank`."""

    @property
    def format(self) -> str:
        """``flex``."""
        return FLEX

    def in_words(self) -> str:
        """The target in a line, for people."""
        return (
            f"{FLEX}, files of the ranks of {self.topology}, {sharding_in_words(self.strategy)}, "
            f"files of Paddle {self.paddle_version}"
        )

    def facts(self) -> dict[str, str]:
        """What tells it from other targets of the same source."""
        return {"layout": FLEX, **HybridJob.facts(self)}

    def data(self) -> dict[str, Any]:
        """What was requested and decided, for JSON output."""
        return {
            "format": FLEX,
            "topology": asdict(self.topology),
            "sharding_strategy": self.strategy,
            "sharding_strategy_reason": self.strategy_reason,
            "paddle_version": self.paddle_version,
        }

    def cannot_hold_lora(self, model: Model) -> str | None:
        """A FlexCheckpoint of a LoRA job contains the base model."""
        return cannot_hold_lora(model)

    def lay_out(self, source: Checkpoint, wanted: Checkpoint, listing: SourceListing) -> LaidOut:
        """The files of all ranks, and what becomes of small ones."""
        check_by_rank(wanted, self)
        sidecars = plan_flex_sidecars(listing, wanted, self.paddle_version, self.topology)
        pieces = PiecesOfRanks(wanted, self)
        files = FlexFiles(paddle_release(self.paddle_version))
        for folder in pieces.folders:
            files.add_folder(folder, *pieces.of_folder(folder))
        return LaidOut(source.catalog, files.target_files(), sidecars, remarks=_remarks(wanted, self))

    def outline(self, source: Checkpoint, wanted: Checkpoint, listing: SourceListing) -> Outline:
        """What the fullest rank holds, and the size of all tensors, by the same rules as the files."""
        check_by_rank(wanted, self)
        sidecars = plan_flex_sidecars(listing, wanted, self.paddle_version, self.topology)
        fullest, _ = job_bytes(wanted, self)
        pieces = PiecesOfRanks(wanted, self)
        return Outline(fullest, pieces.nbytes(), sidecars.not_carried)

    def check_staged(self, staged: Staged) -> None:
        """Read it as a source: its tensors must be those that were planned."""
        check_tensors(staged, staged.index())


def _remarks(wanted: Checkpoint, target: RankFlexTarget) -> tuple[str, ...]:
    """What the trainer gets wrong by itself, or starts only with other arguments."""
    lost = never_restored(wanted.model.tensors, target.strategy, wanted.model.has_lora)
    trained = [tensor for tensor in wanted.model.tensors if tensor.trained]
    without_masters = target.strategy == "stage1v2" and trained and not any(t.master for t in trained)
    needs = (
        "stage1v2 without master weights: PaddleFormers 1.2 asserts --amp_master_grad for it, and that needs --bf16 or "
        "--fp16 (trainer/training_args.py:1925, 2281); a float32 job resumes with stage1v1 (--split_param false)"
    )
    return tuple(remark for remark in (lost, needs if without_masters else None) if remark is not None)


def check_strategy(job: HybridJob) -> None:
    """Refuse the sharding strategy under which the trainer resumes from no FlexCheckpoint, seen of real jobs."""
    check_target(job)
    if job.strategy == "stage2":
        raise PlanError(
            "stage2: PaddleFormers 1.2 saves FlexCheckpoints under it and resumes from none, not even its own: with "
            "bfloat16 it fails (trainer/trainer.py:1293), otherwise the moments stay zero without a word; choose "
            "stage1v1, stage1v2 or stage3, or --format hybrid"
        )


def check_by_rank(checkpoint: Checkpoint, target: RankFlexTarget) -> None:
    """Refuse a job that the trainer cannot train, and files that are not known well enough to be written."""
    model = checkpoint.model
    _check_asked(model.table, target)
    check_flex(model)
    check_strategy(target)
    check_job(checkpoint, target)
    _check_tensors(model, target)


def _check_asked(table: RuleTable, target: RankFlexTarget) -> None:
    """Refuse names, versions and settings with which what the ranks ask for is not known."""
    topology = target.topology
    if table.library != LIBRARY:
        raise PlanError(
            f"--format {FLEX} --to {topology}: which pieces the ranks of a job ask for is known of {LIBRARY}, and the "
            f"names are those of {table.library}; translate them with --convention {LIBRARY}, or {_WHOLE}"
        )
    if paddle_release(target.paddle_version).metadata < _NUMBERS_COPIES:
        raise PlanError(
            f"--paddle-version {target.paddle_version} with --to {topology}: only metadata of Paddle "
            f"{_NUMBERS_COPIES} and later tell the pieces of ranks and their copies apart; {_WHOLE}"
        )
    if target.sharding.comm_overlap:
        raise PlanError(
            "comm_overlap: a job of PaddleFormers 1.2 with it saves FlexCheckpoints, but as it resumes its optimizer "
            "has no buffers yet and asks for no master weight and no moment: they are lost without a word; "
            "resume without --sharding_comm_overlap, or choose --format hybrid"
        )


def _check_tensors(model: Model, target: RankFlexTarget) -> None:
    """Refuse tensors of which no rank's pieces have been seen."""
    for tensor in model.tensors:
        if strange := sorted(set(tensor.accumulators) - _ASKED_FOR):
            raise PlanError(
                f"{tensor.key} ({strange[0]}): the trainer's optimizers neither save this state in a "
                f"FlexCheckpoint nor ask for it (sharded_state_dict of Paddle 3.3.1); {_WHOLE}"
            )
    if (muon := muon_parameters(model.tensors)) and target.strategy != "none":
        raise UnsupportedError(
            f"{muon[0]}: the optimizer is Muon; how {target.strategy} divides its tensors among ranks follows from "
            f"a buffer size that no file holds, and Paddle 3.3.1 has no Muon to compare with; {_WHOLE}"
        )
    stacked = next((t.key for t in model.tensors if t.rule.of_experts), None)
    if stacked is not None:
        raise UnsupportedError(
            f"{stacked}: it holds all experts of a layer; with fused experts PaddleFormers 1.2 fails as it saves a "
            f"FlexCheckpoint of qwen3_moe (KeyError in sharded_state_dict), and with which dims a rank of other models "
            f"asks for them is not known of every family; {_WHOLE}"
        )


@dataclass(frozen=True)
class RankFlexRequest(JobRequest):
    """A requested FlexCheckpoint whose files are those of the ranks of a job."""

    of_average: ClassVar[bool] = False
    of_stored_parameters: ClassVar[bool] = False
    format: ClassVar[str] = FLEX

    def target_for(self, source: Checkpoint) -> RankFlexTarget:
        """The target; settings not requested come from the source or the trainer's defaults."""
        return self.job_for(source, RankFlexTarget, check_strategy)


def parse_by_rank(asked: Mapping[str, Any]) -> RankFlexRequest:
    """A FlexCheckpoint for the ranks of a job."""
    if (files := asked.get("files")) is not None:
        raise UsageError(f"--files {files} with --to: there is a file for every rank; omit one of the two")
    return RankFlexRequest.of(asked)
