"""Structured keys in the cells of a job, and the names of the cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paddle_reshard.pipeline.model.model import EXPERT_NUMBER, expert_of

LORA_PREFIX = "model."
"""Prefix of the keys of a LoRA job in ``model_meta.json``, and nowhere else."""


def cell_name(tp: int, pp: int, ep: int | None = None) -> str:
    """The key of a cell in ``model_meta.json``: both parts, even at degree 1; the third under expert parallelism."""
    return f"tp{tp:0>2d}_pp{pp:0>2d}" + ("" if ep is None else f"_ep{ep:0>2d}")


def first_keys(names: Mapping[str, str]) -> dict[str, str]:
    """Parameter name → the first structured key with that name, under which a cell's optimizer stores it."""
    keys: dict[str, str] = {}
    for key, name in names.items():
        keys.setdefault(name, key)
    return keys


def experts_of(keys: Iterable[str]) -> set[int]:
    """Numbers of the routed experts among structured keys."""
    return {expert for key in keys if (expert := expert_of(key)) is not None}


def shift_expert(key: str, by: int) -> str:
    """Add ``by`` to the expert number in a key; keys without one are returned unchanged.

    >>> shift_expert("model.layers.1.mlp.experts.1.up_proj.weight", 2)
    'model.layers.1.mlp.experts.3.up_proj.weight'
    """
    return EXPERT_NUMBER.sub(lambda match: str(int(match[0]) + by), key) if by else key
