"""What is converted of each model family, and how that is proven, as its rule table says it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from paddle_reshard.pipeline.model.rules.rule import Rule
from paddle_reshard.pipeline.model.rules.table import Proof, RuleTable

Extent = Literal["yes", "in part", "no"]


@dataclass(frozen=True, slots=True)
class Family:
    """A model family of one library."""

    name: str
    library: str
    model_types: tuple[str, ...]
    """Values of ``model_type`` in ``config.json``."""
    axes: tuple[str, ...]
    """The axes among tp, pp and ep over which the library can distribute the model. The model is resharded along these
    and, like any model, along sharding and dp."""
    huggingface: Extent
    """Whether it can be exported to and imported from Hugging Face checkpoints; ``in part``: not all variants."""
    multi_token_prediction: bool
    """Whether layers of multi-token prediction are supported."""
    lora: bool
    """Whether checkpoints of LoRA training are supported."""
    proven: Proof


def families(tables: Iterable[RuleTable]) -> tuple[Family, ...]:
    """The families of the tables that record how they were tested, sorted by name and library."""
    proven = [
        _family(table, table.proven) for table in tables if table.proven is not None and table.version is None
    ]
    return tuple(sorted(proven, key=lambda family: (family.name, family.library)))


def _has_stages(table: RuleTable) -> bool:
    """Whether the library's trainer starts a pipeline of the family, unless a config says how to divide it."""
    decoder = next(item for item in table.items if item.repeated)
    if table.segmentation_entry is None:
        return bool(decoder.layer_class)
    pattern = table.segmentation.removeprefix("layer:")
    return any(
        item.layer_class and re.search(pattern, item.layer_class, re.IGNORECASE) for item in table.items
    )


def _family(table: RuleTable, proven: Proof) -> Family:
    axes = {
        "tp": any(rule.split is not None for rule in table.rules),
        "pp": _has_stages(table),
        "ep": table.expert_axis is not None,
    }
    return Family(
        table.family,
        table.convention,
        table.model_types,
        tuple(axis for axis, known in axes.items() if known and axis not in table.refused),
        _extent(
            [rule.huggingface is not None for rule in table.rules if not (_is_twin(rule) or rule.unused)]
        ),
        any(rule.item in table.mtp_items for rule in table.rules),
        table.supports_lora,
        proven,
    )


def _is_twin(rule: Rule) -> bool:
    """Whether a row is only for tensors that are tied to others, and exported as those."""
    return rule.tied_to is not None and (rule.always_tied or bool(rule.where.get("tie_word_embeddings")))


def _extent(known: Sequence[bool]) -> Extent:
    if all(known):
        return "yes"
    return "in part" if any(known) else "no"
