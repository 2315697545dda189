"""Lay out the files of a unified checkpoint, byte for byte.

As PaddleFormers 1.2 and PaddleNLP 3.0 write them (``trainer/unified_checkpoint``): a single card writes one file of
each kind (``load_save_single_card.py``); tensor-parallel ranks write a file each, and divide the merged tensors by size
(``utils.py``, ``filter_params``). Index files list keys in the order of the files and of the trainer's state dicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.files import LaidOut, SourceListing, TargetFiles
from paddle_reshard.pipeline.checkpoint.format import NotLoaded
from paddle_reshard.pipeline.checkpoint.sidecars import plan_sidecars
from paddle_reshard.pipeline.checkpoint.stages import check_apart
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.tensors import ACCUMULATORS, MASTER_WEIGHT, PARAM
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.unified import UNIFIED
from paddle_reshard.pipeline.formats.unified.names import (
    MASTER_WEIGHTS,
    MODEL,
    OPTIMIZER,
    file_name,
    index_name,
    optimizer_key,
)
from paddle_reshard.pipeline.formats.writing import NewArray, NewFiles, SettledTarget, lacking, schedule_file
from paddle_reshard.pipeline.model.model import ModelTensor
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.weights import TAGS
from paddle_reshard.storage.files.safetensors import Index, TensorSlot, encode_safetensors, format_index

METADATA = {"format": "np"}
"""Marks weights in Paddle's own layout."""
_NUMPY_TAGS = TAGS | {"bfloat16": "U16"}
"""PaddleNLP passes bfloat16 to NumPy as uint16, PaddleFormers as the dtype of ``ml_dtypes``."""


@dataclass(frozen=True, slots=True)
class UnifiedTarget(SettledTarget):
    """A unified checkpoint."""

    format: ClassVar[str] = UNIFIED

    files: int = 1
    """Files of each kind, as that many tensor-parallel ranks write them. The default is 1, because a job on one card
    silently ignores all files but the first; jobs on several cards read any number."""

    def __post_init__(self) -> None:
        if self.files < 1:
            raise UsageError(f"--files {self.files}: a checkpoint has at least one file of each kind")

    def in_words(self) -> str:
        """The target in a line, for people."""
        return f"{self.format}, {self.files} file{'s' if self.files > 1 else ''} of each kind"

    def facts(self) -> dict[str, str]:
        """What tells it from other targets of the same source."""
        return {"layout": self.format}

    def data(self) -> dict[str, Any]:
        """What is asked of it."""
        return {"format": self.format, "files": self.files}

    def lay_out(self, source: Checkpoint, wanted: Checkpoint, listing: SourceListing) -> LaidOut:
        """All tensor files of a unified checkpoint, and what becomes of small ones."""
        missing = "which keys the trainer expects in a unified checkpoint"
        wanted.model.table.check_known(wanted.model.config, missing)
        check_apart(wanted.model)
        sidecars = plan_sidecars(listing, wanted, Topology(dp=self.files))
        schedule = schedule_file(listing.paths, wanted)
        topology, table = source.job.topology, wanted.model.table
        tied = self.files == 1 and any(tensor.tied_to and tensor.trained for tensor in wanted.model.tensors)
        lost = "" if topology is None else not_loaded(table, tied).by(topology)
        remarks = (lost,) if lost else ()
        return LaidOut(
            source.catalog, layout_unified(wanted, self), sidecars.with_written(schedule), remarks=remarks
        )


_CUT_BY_CLASS = frozenset({"ernie4_5_moe_vl"})
"""Families of PaddleFormers whose class says how tp cuts its tensors."""


_UNDER_TP = (
    "PaddleFormers 1.2 reads no unified checkpoint under tensor parallelism: its loader stops with "
    "NotImplementedError, as this class has no _get_tensor_parallel_mappings; such a job needs --format "
    "hybrid or flex"
)
_TIED_ONCE = (
    "it has the optimizer states of tied words under one key, as a job on one card saves them, and in a job with "
    "stages the first looks for them under the other: it stops at a KeyError; such a job needs --format hybrid or "
    "flex, or unified with --files 2"
)


def not_loaded(table: RuleTable, tied_once: bool) -> NotLoaded:
    """Which jobs do not load such a checkpoint; ``tied_once``: tied words have states under one of their keys.

    Under tp PaddleFormers' loader asks the class how to cut (1.2.0 ``trainer/unified_checkpoint/load_local.py:117``).
    Of the models that it trains only those of its recipes and ERNIE's vision models answer
    (``transformers/conversion_utils.py:1399``, ``transformers/ernie4_5_moe_vl/model/modeling_moe.py``). A stage
    takes of the listed keys those that it has parameters for, and misses none (``utils.py``, ``get_expected_keys``,
    also of PaddleNLP 3).
    """
    answers = table.library != "paddleformers" or table.recipe or table.family in _CUT_BY_CLASS
    return NotLoaded("", "" if answers else _UNDER_TP, _TIED_ONCE if tied_once else "")


_Entry = tuple[str, int]
"""Key of an array of the target, and the number of its tensor in the catalog."""


def layout_unified(wanted: Checkpoint, target: UnifiedTarget) -> TargetFiles:
    """Lay out all tensor files of the target, and their index files.

    ``wanted`` is the source with all requested changes applied.
    """
    contents = _Contents(wanted, alone=target.files == 1)
    writer = _Writer(wanted, target.files)
    writer.add(MODEL, list(contents.parameters()), {})
    if any(tensor.trained for tensor in wanted.model.tensors):
        masters = list(contents.master_weights())
        facts = {} if target.files == 1 else {"quant_ckpt_resume_times": 0}
        writer.add(OPTIMIZER, list(contents.states()), {**facts, "master_weights": bool(masters)})
        if masters:
            writer.add(MASTER_WEIGHTS, masters, {})
    return writer.new.target_files()


class _Contents:
    """What goes into the files of each kind, in the trainer's order."""

    def __init__(self, wanted: Checkpoint, alone: bool) -> None:
        self.index, self.tensors = wanted.catalog.index(), wanted.model.tensors
        self.keys: dict[str, list[str]] = {}
        for tensor in self.tensors:
            self.keys.setdefault(tensor.tied_to or tensor.key, []).append(tensor.key)
        if alone:  # on a single card the trainer looks keys up by parameter name; the last key wins
            self.keys = {identity: keys[-1:] for identity, keys in self.keys.items()}
        self.identities = [tensor for tensor in self.tensors if tensor.tied_to is None]

    def _entry(self, key: str, tensor: ModelTensor, state: str) -> _Entry:
        number = self.index.get((tensor.tied_to or tensor.key, state))
        if number is None:
            raise lacking(tensor.key, state)
        return key, number

    def parameters(self) -> Iterator[_Entry]:
        for tensor in self.tensors:
            if not tensor.missing:
                yield self._entry(tensor.key, tensor, PARAM)

    def states(self) -> Iterator[_Entry]:
        for state in ACCUMULATORS:
            for tensor in self.identities:
                if state in tensor.accumulators:
                    for key in self.keys[tensor.key]:
                        yield self._entry(optimizer_key(key, state), tensor, state)

    def master_weights(self) -> Iterator[_Entry]:
        """Master weights, and after them copies of the parameters that need none."""
        masters = [tensor for tensor in self.identities if tensor.master]
        for tensor in masters:
            for key in self.keys[tensor.key]:
                yield self._entry(key, tensor, MASTER_WEIGHT)
        for tensor in self.tensors if masters else ():
            if tensor.dtype.name == "float32" and not tensor.missing:
                yield self._entry(tensor.key, tensor, PARAM)


class _Writer:
    """Lays out the files of each kind."""

    def __init__(self, wanted: Checkpoint, files: int) -> None:
        self.tensors, self.files = wanted.catalog.tensors, files
        self.tags = _NUMPY_TAGS if wanted.model.table.convention == "paddlenlp" else TAGS
        self.new = NewFiles()

    def add(self, kind: str, entries: Sequence[_Entry], facts: dict[str, object]) -> None:
        """All files of one kind, and its index."""
        held = [(key, number, self.tensors[number]) for key, number in entries]
        sizes = [tensor.nbytes for _, _, tensor in held]
        blocks = split_by_bytes(sizes, self.files)
        weight_map: dict[str, str] = {}
        for number, block in enumerate(blocks):
            name = file_name(kind, number, len(blocks))
            of_file = [held[entry] for entry in block]
            slots = [
                TensorSlot(slot, key, self.tags[tensor.dtype.name], tensor.global_shape)
                for slot, (key, _, tensor) in enumerate(of_file)
            ]
            arrays = [NewArray.whole(index, tensor) for _, index, tensor in of_file]
            self.new.add_encoded(name, encode_safetensors(slots, METADATA), arrays)
            weight_map |= {key: name for key, _, _ in of_file}
        self.new.add_literal(
            index_name(kind), format_index(Index(weight_map, {"total_size": sum(sizes)}, facts))
        )


def split_by_bytes(sizes_bytes: Sequence[int], ranks: int) -> list[list[int]]:
    """Divide tensors of these sizes into consecutive blocks of about equal size; each block lists indices.

    >>> split_by_bytes([4, 1, 1, 2, 4], 3)
    [[0], [1, 2, 3], [4]]
    """
    if ranks == 1:
        return [list(range(len(sizes_bytes)))]
    largest = -(-sum(sizes_bytes) // ranks)
    blocks: list[list[int]] = []
    block: list[int] = []
    shared_bytes = 0
    for number, nbytes in enumerate(sizes_bytes):
        full = shared_bytes + nbytes > largest * (len(blocks) + 1)
        if block and (full or len(sizes_bytes) - number < ranks - len(blocks)):
            blocks.append(block)
            block = []
        block.append(number)
        shared_bytes += nbytes
    blocks.append(block)
    return blocks + [[] for _ in range(ranks - len(blocks))]
