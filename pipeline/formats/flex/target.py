"""Lay out the files of a dist checkpoint, byte for byte.

Tensors are written whole, which every job can load: its loader reads the boxes that it needs from each tensor. (Paddle
3.3.1 misreads ragged flattened ranges of three dims and more, ``dcp/utils.py``, ``minimal_nd_slice``.) The files of a
folder hold consecutive tensors of the model; all states of a tensor in a folder are in the same file. Keys and their
order are those that the trainer writes on a single card.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.files import LaidOut, Sidecars, SourceListing, TargetFiles
from paddle_reshard.pipeline.checkpoint.sidecars import plan_sidecars
from paddle_reshard.pipeline.checkpoint.stages import check_apart
from paddle_reshard.pipeline.core.errors import RuleError, UsageError
from paddle_reshard.pipeline.core.file_names import MODEL_META, SIGNAL_PREFIX
from paddle_reshard.pipeline.core.tensors import ACCUMULATORS, MASTER_WEIGHT, PARAM
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.upstream import DEFAULT_PADDLE, paddle_release
from paddle_reshard.pipeline.formats.flex import AUTO_PARALLEL, FLEX
from paddle_reshard.pipeline.formats.flex.names import (
    AUTO_FOLDER,
    EMA_STATE,
    LIBRARY,
    MASTER_WEIGHTS,
    MODEL_STATE,
    OPTIMIZER_STATE,
    PLACES,
    auto_parallel_path,
    renumbered,
)
from paddle_reshard.pipeline.formats.flex.writer import DataArray, FlexFiles
from paddle_reshard.pipeline.formats.model_meta import format_model_meta
from paddle_reshard.pipeline.formats.writing import SettledTarget, file_numbers, lacking, schedule_file
from paddle_reshard.pipeline.model.model import (
    Model,
    ModelTensor,
    NamedTensor,
    check_given_names,
    predict_parameter_names,
)
from paddle_reshard.pipeline.model.optimizers import check_states

PADDLE_CLASSES = ("linear", "embedding", "create_parameter", "layer_norm")
"""Classes in parameter names that come from Paddle and not from the model."""
_OF_OPTIMIZER = (MASTER_WEIGHT, *ACCUMULATORS)


@dataclass(frozen=True, slots=True)
class FlexTarget(SettledTarget):
    """A dist checkpoint."""

    format: str = FLEX
    """``auto-parallel``: one folder with the nested keys of auto-parallel training."""
    max_shard_bytes: int = 4 << 30
    """Maximum size of the tensors in a file; larger ones of a key have a file of their own. Ranks read whole files into
    memory."""
    paddle_version: str = DEFAULT_PADDLE
    """The Paddle version that will read it, a key of :data:`~paddle_reshard.pipeline.core.upstream.PADDLE_RELEASES`."""
    names: Mapping[str, str] | None = None
    """Auto-parallel: structured key → parameter name in the target job; ``None``: by the naming rules."""

    def __post_init__(self) -> None:
        paddle_release(self.paddle_version)

    def in_words(self) -> str:
        """The target in a line, for people."""
        return f"{self.format}, files of Paddle {self.paddle_version}"

    def facts(self) -> dict[str, str]:
        """What tells it from other targets of the same source."""
        return {"layout": self.format, "paddle_version": self.paddle_version}

    def data(self) -> dict[str, Any]:
        """What is asked of it."""
        return {
            "format": self.format,
            "max_shard_bytes": self.max_shard_bytes,
            "paddle_version": self.paddle_version,
        }

    def cannot_hold_lora(self, model: Model) -> str | None:
        """A FlexCheckpoint of a LoRA job contains the base model."""
        return cannot_hold_lora(model)

    def lay_out(self, source: Checkpoint, wanted: Checkpoint, listing: SourceListing) -> LaidOut:
        """All tensor files of a dist checkpoint, and what becomes of small ones."""
        auto_parallel = self.format == AUTO_PARALLEL
        if auto_parallel:
            missing = "the parameter names of auto-parallel training"
            wanted.model.table.check_known(wanted.model.config, missing)
        check_flex(wanted.model)
        topology = None if auto_parallel else Topology()
        sidecars = plan_flex_sidecars(listing, wanted, self.paddle_version, topology)
        return LaidOut(source.catalog, layout_flex(wanted, self), sidecars)


def check_flex(model: Model) -> None:
    """Refuse a model whose tensors or keys no FlexCheckpoint can have."""
    model.table.check_whole(model.config)
    model.table.check_keys(model.config)
    check_apart(model)
    check_states(model)


def cannot_hold_lora(model: Model) -> str | None:
    """Why a FlexCheckpoint cannot hold a model with LoRA; ``None``: it can, with the base model."""
    if any(tensor.of_base and not tensor.missing for tensor in model.tensors):
        return None
    return (
        "a FlexCheckpoint of LoRA also holds the base model, which the source does not contain; supply it with "
        "--fill BASE; or merge LoRA into it with "
        "--merge-into BASE"
    )


class _Item(NamedTuple):
    """An array of the target."""

    model_key: str
    """Structured key of its tensor; all arrays of a key are in the same file."""
    folder: str
    array: DataArray


def layout_flex(wanted: Checkpoint, target: FlexTarget) -> TargetFiles:
    """Lay out all tensor files of a dist checkpoint, and their metadata."""
    if target.format == AUTO_PARALLEL:
        folders, items = [AUTO_FOLDER], list(_auto_items(wanted, target))
    else:
        folders, items = paddleformers_folders(wanted), list(_flex_items(wanted))
    files = FlexFiles(paddle_release(target.paddle_version))
    for folder in folders:
        of_folder = [item for item in items if item.folder == folder]
        files.add_folder(folder, _in_files(of_folder, target.max_shard_bytes))
    return files.target_files()


def paddleformers_folders(wanted: Checkpoint) -> list[str]:
    """The folders that the trainer expects; ``master_weight`` exists even without master weights."""
    trained = any(tensor.trained for tensor in wanted.model.tensors)
    return [
        MODEL_STATE,
        *([MASTER_WEIGHTS, OPTIMIZER_STATE] if trained else []),
        *([EMA_STATE] if wanted.has_ema else []),
    ]


def plan_flex_sidecars(
    listing: SourceListing, wanted: Checkpoint, paddle_version: str, topology: Topology | None
) -> Sidecars:
    """The small files for a job of this ``topology``; ``None``: for auto-parallel training.

    The learning-rate schedule gets its own file if the source has it in optimizer files only.
    """
    files = schedule_file(listing.paths, wanted, paddle_release(paddle_version).pickle_protocol)
    if topology is not None and any(tensor.trained for tensor in wanted.model.tensors):
        files += [(f"{SIGNAL_PREFIX}{rank}", b"1") for rank in range(topology.world_size)]
    if topology is not None and wanted.has_ema:
        # A zero-cost-checkpoint job compares these degrees with its own before it reshards an average, and stops
        # without them (PaddleFormers 1.2 zero_cost_checkpoint.py, check_same_strategy).
        files.append((MODEL_META, format_model_meta(LIBRARY, topology, {}).encode()))
    return plan_sidecars(listing, wanted, topology or Topology()).with_written(files)


# ------------------------------------------------------------------------------------------- what is written


def _flex_items(wanted: Checkpoint) -> Iterator[_Item]:
    """Every tensor under its key; tied tensors and their states under each of their keys.

    The trainer writes the states of tied weights under the alphabetically first key if a single rank holds them (Paddle
    3.3.1 ``optimizer/adamw.py``, ``sharded_state_dict``), and under both if two stages do. Both kinds of jobs can load
    both keys. A parameter that several modules of one layer have is never on two stages.
    """
    index, elsewhere = wanted.catalog.index(), states_elsewhere(wanted.model)
    shift, tensors = wanted.model.table.written_shift(wanted.model.config), wanted.catalog.tensors
    for state, (folder, ending) in PLACES.items():
        for tensor in wanted.model.tensors:
            if is_written(tensor, state, index, elsewhere):
                number = find(index, tensor, state)
                stored = renumbered(tensor.key, shift) + ending
                yield _Item(tensor.key, folder, DataArray.whole(number, tensors[number], (stored,), stored))


def _auto_items(wanted: Checkpoint, target: FlexTarget) -> Iterator[_Item]:
    index, tensors = wanted.catalog.index(), wanted.catalog.tensors
    names = _parameter_names(wanted, target)
    for state in (PARAM, *ACCUMULATORS, MASTER_WEIGHT):
        for tensor in wanted.model.tensors:
            if is_written(tensor, state, index) and (state == PARAM or tensor.tied_to is None):
                path = auto_parallel_path(tensor.key, names[tensor.key], state, tensor.master)
                name = f"{names[tensor.key]}.dist" if state == PARAM else path[-1]
                number = find(index, tensor, state)
                yield _Item(tensor.key, AUTO_FOLDER, DataArray.whole(number, tensors[number], path, name))


def is_written(
    tensor: ModelTensor, state: str, index: Mapping[tuple[str, str], int], elsewhere: Collection[str] = ()
) -> bool:
    """Whether the trainer has a state of a tensor under its key.

    ``index`` is what the source has, ``elsewhere`` the result of :func:`states_elsewhere`.
    """
    if state in _OF_OPTIMIZER and tensor.key in elsewhere:
        return False
    if state == PARAM:
        return not tensor.missing
    if state == MASTER_WEIGHT:
        return tensor.master
    if state in ACCUMULATORS:
        return state in tensor.accumulators
    return (tensor.tied_to or tensor.key, state) in index


def states_elsewhere(model: Model) -> frozenset[str]:
    """Keys of parameters that several modules of a layer have, but for the alphabetically first key of each: under that
    one the optimizer saves their states, and asks for them."""
    item_of = {tensor.key: tensor.item for tensor in model.tensors}
    of_parameter: dict[str, list[str]] = {}
    for tensor in model.tensors:
        if tensor.tied_to is not None and item_of[tensor.tied_to] == tensor.item:
            of_parameter.setdefault(tensor.tied_to, [tensor.tied_to]).append(tensor.key)
    return frozenset(key for keys in of_parameter.values() for key in sorted(keys)[1:])


def find(index: Mapping[tuple[str, str], int], tensor: ModelTensor, state: str) -> int:
    """The number of a tensor that the target needs; a ``PlanError`` if the source does not have it."""
    key = tensor.tied_to or tensor.key
    if (number := index.get((key, state))) is None:
        raise lacking(key, state)
    return number


def _parameter_names(wanted: Checkpoint, target: FlexTarget) -> Mapping[str, str]:
    """Structured key → parameter name in a program of one rank."""
    model = wanted.model
    if target.names is not None:
        if set(target.names) != {t.key for t in model.tensors}:
            differing = min(set(target.names) ^ {t.key for t in model.tensors})
            raise RuleError(
                differing, "must be both in the model and in the parameter names given with --layout"
            )
        check_given_names(model.tensors, target.names)
        return target.names
    hint = "give the names of the target job with --layout model_meta.json"
    if wanted.job.names_predicted is not None:
        raise RuleError("parameter names", f"{wanted.job.names_predicted}; {hint}")
    for tensor in model.tensors:
        own_class = tensor.rule.parameter_name is not None or tensor.rule.name_class not in PADDLE_CLASSES
        if model.table.convention == "paddlenlp" and own_class and tensor.tied_to is None:
            raise RuleError(
                tensor.key,
                f"its parameter name begins with the model's own class {tensor.rule.name_class!r}, which has another "
                f"name in PaddleNLP's auto-parallel models; {hint}",
            )
    model.table.check_names(1, 1, 1, False)
    # Not the numbers that nameless buffers had in a process of the source: no other source of this model knows them.
    tensors = [NamedTensor(tensor.key, tensor.rule, tensor.tied_to) for tensor in model.tensors]
    return predict_parameter_names(tensors, model.config, 1, 1, False)


# --------------------------------------------------------------------------------------------------- bytes


def _in_files(items: Sequence[_Item], max_bytes: int) -> list[list[DataArray]]:
    """The arrays of each of several files of consecutive keys; no file is empty unless there are no items."""
    sizes: dict[str, int] = {}
    for item in items:
        sizes[item.model_key] = sizes.get(item.model_key, 0) + item.array.nbytes
    numbers = file_numbers(sizes.values(), max_bytes)
    of_key = dict(zip(sizes, numbers, strict=True))
    shares: list[list[DataArray]] = [[] for _ in range(numbers[-1] + 1 if numbers else 1)]
    for item in items:
        shares[of_key[item.model_key]].append(item.array)
    return shares


def parse_flex(format: str, asked: Mapping[str, Any]) -> FlexTarget:
    """A dist checkpoint of whole tensors; names of parameters are those of its one cell."""
    for option in ("layout", "sharding_strategy"):
        if asked.get(option):
            entries = f" ({', '.join(asked[option].values)})" if option == "layout" else ""
            raise UsageError(
                f"--{option.replace('_', '-')}{entries} without --to: whole tensors, in files of no rank, are the same "
                "for every job"
            )
    names: Mapping[str, Mapping[str, str]] | None = asked.get("names")
    if names is not None and len(names) != 1:
        raise UsageError(
            f"--layout names the parameters of {len(names)} cells; auto-parallel training has the names of one program"
        )
    size = asked.get("max_shard_size")
    return FlexTarget(
        format,
        **({} if size is None else {"max_shard_bytes": size.nbytes}),
        paddle_version=asked.get("paddle_version") or DEFAULT_PADDLE,
        names=None if names is None else next(iter(names.values())),
    )
