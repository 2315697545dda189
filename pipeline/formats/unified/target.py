"""Lay out the files of a unified checkpoint, byte for byte.

As PaddleFormers 1.2 and PaddleNLP 3.0 write them (``trainer/unified_checkpoint``): a single card writes one file of
each kind (``load_save_single_card.py``); several write several of a kind, as many as they are or as have its tensors
(``utils.py``, ``filter_params``), and read any number. Index files list keys in the order of the files and of the
trainer's state dicts.
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
from paddle_reshard.pipeline.core.tensors import ACCUMULATORS, MASTER_WEIGHT, PARAM, Tensor
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
from paddle_reshard.pipeline.formats.writing import (
    NewArray,
    NewFiles,
    SettledTarget,
    file_numbers,
    lacking,
    schedule_file,
)
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

    max_shard_bytes: int | None = None
    """Maximum size of the tensors in a file; a larger tensor has a file of its own. ``None``: one file of each kind,
    because a job on one card silently ignores all files but the first; jobs on several cards read any number."""

    def in_words(self) -> str:
        """The target in a line, for people."""
        return self.format

    def facts(self) -> dict[str, str]:
        """What tells it from other targets of the same source."""
        return {"layout": self.format}

    def data(self) -> dict[str, Any]:
        """What is asked of it."""
        return {"format": self.format, "max_shard_bytes": self.max_shard_bytes}

    def lay_out(self, source: Checkpoint, wanted: Checkpoint, listing: SourceListing) -> LaidOut:
        """All tensor files of a unified checkpoint, and what becomes of small ones."""
        missing = "which keys the trainer expects in a unified checkpoint"
        wanted.model.table.check_known(wanted.model.config, missing)
        check_apart(wanted.model)
        sidecars = plan_sidecars(listing, wanted, Topology())
        schedule = schedule_file(listing.paths, wanted)
        files, alone = layout_unified(wanted, self)
        topology, table = source.job.topology, wanted.model.table
        tied = alone and any(tensor.tied_to and tensor.trained for tensor in wanted.model.tensors)
        lost = "" if topology is None else not_loaded(table, tied).by(topology)
        remarks = tuple(filter(None, (lost, "" if alone else _FIRST_ALONE)))
        return LaidOut(source.catalog, files, sidecars.with_written(schedule), remarks=remarks)


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
    "flex, or unified in several files, with --max-shard-size"
)
_FIRST_ALONE = (
    "it has several files of a kind, of which a job on one card silently reads only the first; such a job needs --to "
    "tp=1, or --format unified without --max-shard-size"
)


def not_loaded(table: RuleTable, tied_once: bool, several: bool = False) -> NotLoaded:
    """Which jobs do not load such a checkpoint; ``tied_once``: tied words have states under one of their keys;
    ``several``: a kind has several files, whose first a single card reads (``load_save_single_card.py`` of both).

    Under tp PaddleFormers' loader asks the class how to cut (1.2.0 ``trainer/unified_checkpoint/load_local.py:117``).
    Of the models that it trains only those of its recipes and ERNIE's vision models answer
    (``transformers/conversion_utils.py:1399``, ``transformers/ernie4_5_moe_vl/model/modeling_moe.py``). A stage
    takes of the listed keys those that it has parameters for, and misses none (``utils.py``, ``get_expected_keys``,
    also of PaddleNLP 3).
    """
    answers = table.library != "paddleformers" or table.recipe or table.family in _CUT_BY_CLASS
    return NotLoaded(
        "",
        "" if answers else _UNDER_TP,
        _TIED_ONCE if tied_once else "",
        alone=_FIRST_ALONE if several else "",
    )


_Entry = tuple[str, int]
"""Key of an array of the target, and the number of its tensor in the catalog."""


def layout_unified(wanted: Checkpoint, target: UnifiedTarget) -> tuple[TargetFiles, bool]:
    """Lay out all tensor files of the target, and their index files; and whether they are as those of a single card.

    They are if each kind fits into one file. ``wanted`` is the source with all requested changes applied.
    """
    writer = _Writer(wanted, target.max_shard_bytes)
    kinds = _Contents(wanted, alone=True).kinds()
    alone = not any(number for entries in kinds.values() for number in writer.file_numbers(entries))
    if not alone:
        kinds = _Contents(wanted, alone=False).kinds()
    for kind, entries in kinds.items():
        facts: dict[str, object] = {}
        if kind == OPTIMIZER:
            facts = {} if alone else {"quant_ckpt_resume_times": 0}
            facts["master_weights"] = MASTER_WEIGHTS in kinds
        writer.add(kind, entries, facts)
    return writer.new.target_files(), alone


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

    def kinds(self) -> dict[str, list[_Entry]]:
        """Kind → what its files hold; no kind is empty but that of the model."""
        kinds = {MODEL: list(self.parameters())}
        if any(tensor.trained for tensor in self.tensors):
            kinds[OPTIMIZER] = list(self.states())
            if masters := list(self.master_weights()):
                kinds[MASTER_WEIGHTS] = masters
        return kinds

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

    def __init__(self, wanted: Checkpoint, max_shard_bytes: int | None) -> None:
        self.tensors, self.max_shard_bytes = wanted.catalog.tensors, max_shard_bytes
        self.tags = _NUMPY_TAGS if wanted.model.table.convention == "paddlenlp" else TAGS
        self.new = NewFiles()

    def file_numbers(self, entries: Sequence[_Entry]) -> list[int]:
        """The number of the file of each entry of a kind."""
        sizes = [self.tensors[number].nbytes for _, number in entries]
        return [0] * len(sizes) if self.max_shard_bytes is None else file_numbers(sizes, self.max_shard_bytes)

    def add(self, kind: str, entries: Sequence[_Entry], facts: dict[str, object]) -> None:
        """All files of one kind, and its index."""
        numbers = self.file_numbers(entries)
        blocks: list[list[tuple[str, int, Tensor]]] = [[] for _ in range(max(numbers, default=0) + 1)]
        for file, (key, number) in zip(numbers, entries, strict=True):
            blocks[file].append((key, number, self.tensors[number]))
        total_bytes = sum(self.tensors[number].nbytes for _, number in entries)
        weight_map: dict[str, str] = {}
        for number, of_file in enumerate(blocks):
            name = file_name(kind, number, len(blocks))
            slots = [
                TensorSlot(slot, key, self.tags[tensor.dtype.name], tensor.global_shape)
                for slot, (key, _, tensor) in enumerate(of_file)
            ]
            arrays = [NewArray.whole(index, tensor) for _, index, tensor in of_file]
            self.new.add_encoded(name, encode_safetensors(slots, METADATA), arrays)
            weight_map |= {key: name for key, _, _ in of_file}
        self.new.add_literal(
            index_name(kind), format_index(Index(weight_map, {"total_size": total_bytes}, facts))
        )
