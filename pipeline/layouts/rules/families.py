"""What is converted of each model family, and how that is proven, as its rule table says it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paddle_reshard.pipeline.layouts.rules import Proof, Rule, RuleTable

Extent = Literal["yes", "in part", "no"]


@dataclass(frozen=True, slots=True)
class Family:
    """A model family of one library."""

    name: str
    library: str
    model_types: tuple[str, ...]
    """Values of ``model_type`` in ``config.json``."""
    axes: tuple[str, ...]
    """Of tp, pp and ep, those that the library can spread the model over. It is resharded along these, and along
    sharding and dp, as any model is."""
    huggingface: Extent
    """Whether it becomes a Hugging Face checkpoint, and is made of one; ``in part``: some variants are not."""
    multi_token_prediction: bool
    """Whether its layers of multi-token prediction are known."""
    lora: bool
    """Whether checkpoints of LoRA training are converted."""
    proven: Proof


def families(tables: Sequence[RuleTable]) -> tuple[Family, ...]:
    """The families of tables that say how they are proven, by name and library."""
    found = [_family(table, table.proven) for table in tables if table.proven is not None]
    return tuple(sorted(found, key=lambda family: (family.name, family.library)))


def _family(table: RuleTable, proven: Proof) -> Family:
    decoder = next(item for item in table.items if item.repeated)
    axes = {
        "tp": any(rule.split is not None for rule in table.rules),
        "pp": bool(decoder.layer_class),
        "ep": table.expert_axis is not None,
    }
    return Family(
        table.family,
        table.convention,
        table.model_types,
        tuple(axis for axis, known in axes.items() if known),
        _extent([rule.huggingface is not None for rule in table.rules if not _is_twin(rule)]),
        any(item.mtp for item in table.items),
        table.supports_lora,
        proven,
    )


def _is_twin(rule: Rule) -> bool:
    """Whether a row is only for tensors that have the values of others, and go out as those."""
    return rule.tied_to is not None and (rule.always_tied or bool(rule.where.get("tie_word_embeddings")))


def _extent(known: Sequence[bool]) -> Extent:
    if all(known):
        return "yes"
    return "in part" if any(known) else "no"
