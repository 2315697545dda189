"""Checkpoints of any size without a byte of payload: what planning sees, and nothing else.

A model is described by the numbers of its ``config.json``; the files that a job of a topology would write are
laid out by the product's own writer, whose layouts the golden tests hold against the real trainer. From there
two ways lead to a source: :class:`EmptySource` answers ranged reads with the files' literal bytes, zeros
elsewhere, so that everything down to the pickle parser runs; :func:`catalog_of` takes the fragments as they are.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, Job
from paddle_reshard.pipeline.checkpoint.files import TargetFiles, add_literal_files
from paddle_reshard.pipeline.core.catalog import Catalog, Fragments
from paddle_reshard.pipeline.core.file_names import MODEL_META
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import EMA_MASTER_WEIGHT, MASTER_WEIGHT, PARAM, Tensor, dtype_named
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.hybrid.names import parse_rank_file
from paddle_reshard.pipeline.formats.hybrid.target import HybridTarget, layout_hybrid
from paddle_reshard.pipeline.model.model import Model, ModelTensor
from paddle_reshard.pipeline.model.rules.rule import Rule, expected_shape
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from paddle_reshard.storage.store import Openness, Read, ReadRange

ADAM = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
PER_PARAMETER = ("beta1_pow_acc", "beta2_pow_acc")


@dataclass(frozen=True)
class Dims:
    """A model by its numbers: dense, or with experts in every layer."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    experts: int = 0
    ema: bool = False
    states: tuple[str, ...] = field(default=ADAM)

    @property
    def config(self) -> dict[str, Any]:
        """``config.json`` of a llama, or of a qwen3_moe where there are experts."""
        config = {
            "head_dim": self.hidden // self.heads,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "model_type": "qwen3_moe" if self.experts else "llama",
            "num_attention_heads": self.heads,
            "num_hidden_layers": self.layers,
            "num_key_value_heads": self.kv_heads,
            "paddleformers_version": "1.2.0",
            "tie_word_embeddings": False,
            "vocab_size": self.vocab,
        }
        if self.experts:
            config |= {"moe_intermediate_size": self.intermediate, "num_local_experts": self.experts}
        return config

    @property
    def table(self) -> RuleTable:
        """The rule table of the family."""
        family = "qwen3_moe" if self.experts else "llama"
        return next(t for t in shipped_tables() if (t.family, t.convention) == (family, "paddleformers"))

    @property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        return sum(int(np.prod(t.global_shape)) for t in logical(self).model.tensors)


LLAMA_7B = Dims(4096, 11008, 32, 32, 32, 32000)
LLAMA_70B = Dims(8192, 28672, 80, 64, 8, 32000)
MOE_671B = Dims(7168, 18432, 60, 64, 8, 129280, experts=28)
"""671 billion parameters; experts without expert parallelism, cut by tp."""


def logical(dims: Dims) -> Checkpoint:
    """The checkpoint of one card, as tensors only: no file, no fragment."""
    model = Model(tuple(_model_tensors(dims)), dims.table, dims.config)
    tensors: list[Tensor] = []
    implied: dict[int, int] = {}
    for described in model.tensors:
        if described.master:
            implied[len(tensors)] = len(tensors) + 1
        tensors.append(Tensor(described.key, PARAM, described.dtype, described.global_shape))
        wide = [MASTER_WEIGHT] if described.master else []
        wide += [EMA_MASTER_WEIGHT] if described.master and dims.ema else []
        for state in (*wide, *described.accumulators):
            shape = (1,) if state in PER_PARAMETER else described.global_shape
            tensors.append(Tensor(described.key, state, dtype_named("float32"), shape))
    return Checkpoint(
        format="hybrid-plain",
        catalog=Catalog(Tensors(tensors), (), Fragments.empty(), implied),
        own_files=frozenset(),
        model=model,
        job=Job(topology=Topology(), strategy="none", lr_scheduler={"last_epoch": 3, "last_lr": 1e-4}),
        has_ema=dims.ema,
    )


def _model_tensors(dims: Dims) -> Iterator[ModelTensor]:
    bfloat16, float32 = dtype_named("bfloat16"), dtype_named("float32")
    for key, rule, layer in _keys(dims):
        router = key.endswith("mlp.gate.weight")
        yield ModelTensor(
            key=key,
            rule=rule,
            layer=layer,
            global_shape=expected_shape(rule, dims.config, key) or (),
            dtype=float32 if router else bfloat16,
            accumulators=dims.states,
            master=not router,
        )


def _keys(dims: Dims) -> Iterator[tuple[str, Rule, int | None]]:
    """Structured keys in model order: a layer's experts one after the other."""
    table = dims.table
    for item in table.items:
        rules = [r for r in table.rules if r.item == item.name and _applies(r, dims)]
        for layer in range(dims.layers) if item.repeated else (None,):
            experts = [r for r in rules if "{expert}" in r.key]
            for rule in rules:
                if rule not in experts:
                    yield rule.key.replace("{layer}", str(layer)), rule, layer
                elif rule is experts[0]:
                    for expert in range(dims.experts):
                        for each in experts:
                            key = each.key.replace("{layer}", str(layer)).replace("{expert}", str(expert))
                            yield key, each, layer


def _applies(rule: Rule, dims: Dims) -> bool:
    dense = ".mlp.up_gate_proj." in rule.key or ".mlp.down_proj." in rule.key
    stacked = ".mlp.experts." in rule.key and "{expert}" not in rule.key
    return not rule.key.endswith(".bias") and not (dims.experts and dense) and not stacked


def files_of(dims: Dims, target: HybridTarget) -> TargetFiles:
    """The files that a job of ``target`` would write."""
    return layout_hybrid(logical(dims), target)


def catalog_of(dims: Dims, target: HybridTarget) -> Checkpoint:
    """The checkpoint that a job of ``target`` would have written, its fragments as reading would find them."""
    checkpoint = logical(dims)
    laid_out = layout_hybrid(checkpoint, target)
    held = [i for i, file in enumerate(laid_out.files) if parse_rank_file(file.path)]
    order = sorted(held, key=lambda i: laid_out.files[i].path)
    number = np.full(len(laid_out.files), -1, dtype=np.int32)
    number[order] = np.arange(len(order))
    fragments = laid_out.fragments.copy()
    fragments["file"] = number[fragments["file"]]
    fragments = fragments[np.argsort(fragments["tensor"], kind="stable")]
    fragments["replica"] = _replicas(fragments)
    stored = set(np.unique(fragments["tensor"]).tolist())
    catalog = Catalog(
        checkpoint.catalog.tensors,
        tuple(laid_out.files[i] for i in order),
        fragments,
        {tensor: source for tensor, source in checkpoint.catalog.implied.items() if tensor not in stored},
    )
    return replace(
        checkpoint,
        own_files=frozenset(file.path for file in catalog.files) | {MODEL_META},
        catalog=catalog,
        job=replace(checkpoint.job, topology=target.topology, strategy=target.strategy),
    )


def _replicas(fragments: Fragments) -> np.ndarray[Any, Any]:
    """How many times each box was met before; the rows are sorted by tensor and, within one, by cell."""
    columns = [fragments["extents"][:, d] for d in (1, 0)] + [fragments["offset"][:, d] for d in (1, 0)]
    order = np.lexsort((*columns, fragments["tensor"]))
    keys = np.stack([fragments["tensor"], *columns], axis=1)[order]
    opens = np.r_[True, (keys[1:] != keys[:-1]).any(axis=1)]
    first = np.maximum.accumulate(np.where(opens, np.arange(len(order)), 0))
    replicas = np.zeros(len(order), dtype=np.int16)
    replicas[order] = np.arange(len(order)) - first
    return replicas


class Unstored(ReadRange):
    """A store whose files lie nowhere, and never change."""

    location = "nowhere"
    folders: Sequence[str] = ()
    openness = Openness()

    @abstractmethod
    def sizes(self) -> Mapping[str, int]:
        """Name of every file → size in bytes."""

    def versions(self) -> Mapping[str, str]:
        return dict.fromkeys(self.sizes(), "1")

    def modified(self) -> Mapping[str, int]:
        return {}

    def check_unchanged(self) -> None:
        pass

    def read_many(self, reads: Sequence[Read]) -> None:
        for read in reads:
            self.read_into(read.path, read.byte_offset, read.buffer)


class EmptySource(Unstored):
    """The files of a layout as a store: literal bytes where there are any, zeros elsewhere."""

    def __init__(self, files: TargetFiles, config: bytes | None) -> None:
        """``config``: content of ``config.json`` if it is not among ``files``."""
        if config is not None:
            files = add_literal_files(files, [("config.json", config)])
        self._sizes = {file.path: file.size_bytes for file in files.files}
        self._literals: dict[str, tuple[list[int], list[bytes]]] = {
            file.path: ([], []) for file in files.files
        }
        for file, offset, content in files.literals:
            starts, contents = self._literals[files.files[file].path]
            starts.append(offset)
            contents.append(content)

    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        starts, contents = self._literals[path]
        stop = byte_offset + len(buffer)
        for i in range(max(0, bisect_right(starts, byte_offset) - 1), len(starts)):
            if starts[i] >= stop:
                break
            low, high = max(starts[i], byte_offset), min(starts[i] + len(contents[i]), stop)
            if low < high:
                buffer[low - byte_offset : high - byte_offset] = contents[i][
                    low - starts[i] : high - starts[i]
                ]
