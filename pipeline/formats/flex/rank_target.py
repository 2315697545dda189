"""A FlexCheckpoint whose files are those of the ranks of a job.

Each rank of that job finds everything that it asks for in its own files, and reads them without resharding (Paddle
3.3.1 ``flex_checkpoint/dcp/utils.py``, ``check_resumable_locally``). Any other job can read them too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, ClassVar

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.files import LaidOut, SourceListing
from paddle_reshard.pipeline.checkpoint.format import Outline, Staged
from paddle_reshard.pipeline.checkpoint.training_job import (
    beyond_adam,
    coordinates_of,
    never_restored,
    taken_for_copies,
    takes_from_masters,
)
from paddle_reshard.pipeline.core.errors import PlanError, UnsupportedError, UsageError
from paddle_reshard.pipeline.core.tensors import EMA_PARAM, PARAM, is_per_parameter
from paddle_reshard.pipeline.core.topology import sharding_in_words
from paddle_reshard.pipeline.core.upstream import paddle_release
from paddle_reshard.pipeline.formats.flex import FLEX
from paddle_reshard.pipeline.formats.flex.boxes import Box
from paddle_reshard.pipeline.formats.flex.names import LIBRARY, PLACES, renumbered
from paddle_reshard.pipeline.formats.flex.target import (
    cannot_hold_lora,
    check_flex,
    find,
    is_written,
    paddleformers_folders,
    plan_flex_sidecars,
    states_elsewhere,
)
from paddle_reshard.pipeline.formats.flex.writer import DataArray, FlexFiles, file_name
from paddle_reshard.pipeline.formats.jobs.cells import Cell, CellPlanner
from paddle_reshard.pipeline.formats.jobs.checks import check_job, check_target
from paddle_reshard.pipeline.formats.jobs.job import HybridJob
from paddle_reshard.pipeline.formats.jobs.job_bytes import job_bytes
from paddle_reshard.pipeline.formats.jobs.request import JobRequest
from paddle_reshard.pipeline.formats.writing import UNCUT, NewArray, check_tensors
from paddle_reshard.pipeline.model.model import Model, ModelTensor
from paddle_reshard.pipeline.model.optimizers import muon_parameters
from paddle_reshard.pipeline.model.rules.table import RuleTable

_WHOLE = "omit --to: whole tensors suit every job"
_NUMBERS_COPIES = "3.3"
"""The first Paddle whose metadata tell flattened pieces, and number the copies of a piece."""


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
    _check_supported(model.table, target)
    check_flex(model)
    check_strategy(target)
    check_job(checkpoint, target)
    _check_tensors(model, target)


def _check_supported(table: RuleTable, target: RankFlexTarget) -> None:
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
    """Refuse tensors of which no rank's pieces have been seen, or none that its job reads."""
    if target.topology.tp > 1 and (unmarked := taken_for_copies(model.tensors)) is not None:
        raise PlanError(f"{unmarked}; choose --format hybrid")
    if why := beyond_adam(model.kinds_of_states):
        raise PlanError(why)
    if (muon := muon_parameters(model.tensors)) and target.strategy != "none":
        raise UnsupportedError(
            f"{muon[0]}: the optimizer is Muon; how {target.strategy} divides its tensors among ranks follows from "
            f"a buffer size that no file holds, and Paddle 3.3.1 has no Muon to compare with; {_WHOLE}"
        )
    stacked = next((t.key for t in model.tensors if t.rule.of_experts), None)
    if stacked is not None:
        raise UnsupportedError(
            f"{stacked}: it holds all experts of a layer, and with which dims a rank asks for them is not known of "
            f"every family; {_WHOLE}"
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
    if (size := asked.get("max_shard_size")) is not None:
        raise UsageError(
            f"--max-shard-size {size} with --to: there is a file for every rank; omit one of the two"
        )
    return RankFlexRequest.of(asked)


_OF_RANK = (PARAM, EMA_PARAM)
"""States of which a rank holds its tp piece, however the optimizer's are sharded."""


@dataclass(frozen=True, slots=True)
class _Rank:
    """A rank of the job."""

    number: int
    """As the launcher numbers it."""
    shard: int
    """Its place in its sharding group."""
    cell: Cell
    listed: Mapping[str, str]
    """Parameter name → the key under which the optimizer lists the parameter."""


class PiecesOfRanks:
    """The pieces that every rank of a job asks for; one that several ranks ask for is in the file of each.

    What PaddleFormers 1.2 and Paddle 3.3.1 ask for (``trainer/trainer.py``, ``sharded_state_dict`` of the optimizers),
    seen of real jobs:

    * **model_state**: the tp piece of every tensor of the rank's stage, and of its own experts. Under stage 1 v2
      nothing in bfloat16, which is cast from the master weights; such tensors are written once, each piece in one of
      the files of the ranks that hold it.
    * **master_weight**, **optimizer_state**, **ema_state**: of every parameter whose states the rank holds, the whole
      tp piece, or under stage 1 v2 and of what stage 3 cuts a range of its flattening, without padding; under stage 3
      an empty one too. States that are one number for each parameter are copied to every rank that holds a part of it.
    """

    def __init__(self, checkpoint: Checkpoint, job: HybridJob) -> None:
        self.checkpoint, self.job = checkpoint, job
        self.index = checkpoint.catalog.index()
        self.shift = checkpoint.model.table.written_shift(checkpoint.model.config)
        self.planner = CellPlanner(checkpoint.model, job)
        self.ranks = sorted(self._ranks(), key=lambda rank: rank.number)
        self.folders = paddleformers_folders(checkpoint)
        self.elsewhere = states_elsewhere(checkpoint.model)
        self.with_lora = checkpoint.model.has_lora
        self.has_masters = any(tensor.master for tensor in checkpoint.model.tensors)

    def _ranks(self) -> Iterator[_Rank]:
        degrees = self.job.topology
        library = self.checkpoint.model.table.convention
        numbers = {coordinates_of(rank, degrees, library): rank for rank in range(degrees.world_size)}
        for cell in self.planner.cells():
            listed = {cell.names[tensor.key]: tensor.key for tensor in cell.parameters}
            for shard in cell.held:
                for dp in range(degrees.dp):
                    yield _Rank(numbers[cell.tp, cell.pp, shard, dp], shard, cell, listed)

    def _is_asked_for(self, tensor: ModelTensor, state: str) -> bool:
        """Whether the ranks that hold a state ask for it; without master weights the trainer has only parameters."""
        return state != PARAM or not (
            self.has_masters and takes_from_masters(tensor, self.job.strategy, self.with_lora)
        )

    def nbytes(self) -> int:
        """Bytes of all arrays."""
        shares = (share for folder in self.folders for share in self.of_folder(folder)[0])
        return sum(piece.nbytes for share in shares for piece in share)

    def of_folder(self, folder: str) -> tuple[list[list[DataArray]], dict[Box, list[int]]]:
        """The pieces in every rank's file, and box → the ranks that hold it, in the order of copies.

        As Paddle's ``balanced_dedup_key_in_dict`` does, the first copy of each box is that of the rank that has fewest
        of the first copies before it; what is written once is written there.
        """
        asked = [list(self._of_rank(rank, folder)) for rank in self.ranks]
        holding: dict[Box, list[int]] = {}
        for number, pieces in enumerate(asked):
            for piece, _ in pieces:
                holding.setdefault(piece.box, []).append(number)
        once = {piece.box for pieces in asked for piece, is_asked in pieces if not is_asked}
        first_copies = [0] * len(asked)
        holders: dict[Box, list[int]] = {}
        for box, ranks in holding.items():
            by_name = sorted(ranks, key=file_name)
            first = min(by_name, key=first_copies.__getitem__)
            first_copies[first] += 1
            others = [] if box in once else [rank for rank in by_name if rank != first]
            holders[box] = [first, *others]
        shares = [
            [piece for piece, is_asked in pieces if is_asked or holders[piece.box] == [number]]
            for number, pieces in enumerate(asked)
        ]
        return shares, holders

    def _of_rank(self, rank: _Rank, folder: str) -> Iterator[tuple[DataArray, bool]]:
        """The pieces that a rank holds of a folder, and whether it asks for them."""
        for state in [state for state, (of_state, _) in PLACES.items() if of_state == folder]:
            for tensor in self._holding(rank, state):
                written = is_written(tensor, state, self.index, self.elsewhere)
                if written and (piece := self._piece(rank, tensor, state)):
                    yield piece, self._is_asked_for(tensor, state)

    def _holding(self, rank: _Rank, state: str) -> Sequence[ModelTensor]:
        """The tensors of which a rank holds a state; tied ones under each of their keys."""
        cell = rank.cell
        if state in _OF_RANK:
            return cell.tensors
        held = {cell.names[tensor.key] for tensor in cell.held[rank.shard]}
        holding = [t for t in cell.tensors if t.trained and cell.names[t.key] in held]
        # Stage 3 puts parameters that it cuts first; under another stage all are cut, or none.
        return sorted(holding, key=lambda tensor: self._range(rank, tensor) is None)

    def _piece(self, rank: _Rank, tensor: ModelTensor, state: str) -> DataArray | None:
        """A rank's piece; ``None`` if its range of the tensor is all padding, of which stage 3 asks for nothing too."""
        cell = rank.cell
        stored = renumbered(tensor.key, self.shift) + PLACES[state][1]
        number = find(self.index, tensor, state)
        dtype = self.checkpoint.catalog.tensors[number].dtype
        local, cut = cell.local_shapes[tensor.key], cell.cuts[tensor.key]
        flat = None if state in _OF_RANK else self._range(rank, tensor)
        if flat is not None and flat[0] == flat[1] and self.job.strategy != "stage3":
            return None
        whole = tensor.global_shape
        if is_per_parameter(state):
            local, cut, flat, whole = (1,), UNCUT, None, (1,)
        offset = [0] * len(local)
        if cut.tp > 1 and cut.dim is not None:
            offset[cut.dim] = cell.tp * local[cut.dim]
        box = Box(stored, whole, tuple(offset), local, flat, dtype.name)
        array = NewArray(number, dtype, box.kind(cut, dtype.itemsize), cell.tp)
        return DataArray(box, (stored,), stored, array)

    def _range(self, rank: _Rank, tensor: ModelTensor) -> tuple[int, int] | None:
        """The range of the flattened tp piece whose states a rank holds, without padding; ``None``: all of it."""
        cell = rank.cell
        slice_ = cell.shares[rank.listed[cell.names[tensor.key]]][rank.shard]
        if slice_ is None:
            return None
        elements = prod(cell.local_shapes[tensor.key])
        return min(slice_.start, elements), min(slice_.stop, elements)
