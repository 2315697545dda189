"""The layout of the weights that ERNIE 4.5 is published with for Paddle, in repositories named ``-Paddle``.

Safetensors files with an index, as in a Hugging Face checkpoint, but with the tensors of Baidu's own model,
``[in, out]`` (``tools/paddle2torch/tran_4_5t.py`` of PaddlePaddle/ERNIE at f46ea04; FastDeploy reads them if
``config.json`` has ``dtype``)::

    ernie.layers.0.self_attn.qkv_proj.weight   [hidden, q | k | v]     PaddleFormers: [hidden, q k v | q k v | ...]
    ernie.layers.0.mlp.up_gate_proj.weight     [hidden, gate | up]     the same
    lm_head.weight                             [hidden, vocabulary]    [vocabulary, hidden]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from paddle_reshard.pipeline.core.errors import RuleError, UnsupportedError
from paddle_reshard.pipeline.model.rules.entries import Config
from paddle_reshard.pipeline.model.rules.rule import Rule
from paddle_reshard.pipeline.model.rules.table import RuleTable

_PREFIX: Final = "ernie."
_FAMILIES: Final = ("ernie4_5", "ernie4_5_moe")


def is_ernie_layout(keys: Iterable[str]) -> bool:
    """Whether weights with these keys are in this layout."""
    return any(key.startswith(_PREFIX) for key in keys)


def ernie_table(table: RuleTable, config: Config) -> RuleTable:
    """The rule table with the forms that tensors have in this layout, instead of those of Hugging Face.

    Weights of a pre-training recipe, which writes such keys in another layout, are refused, and so are other families.
    """
    if table.recipe:
        raise RuleError(
            f"keys {_PREFIX}...",
            f"the recipe {table.family} publishes none of these; its own export from one card leaves keys and layouts "
            "as they are in training. Convert the training checkpoint with --format huggingface",
        )
    if table.family not in _FAMILIES:
        raise UnsupportedError(
            f"the weights are in the layout of ERNIE's -Paddle repositories (keys {_PREFIX}...), which is not "
            f"supported for {table.family}; supported: {', '.join(_FAMILIES)}. Use the model in the layout of "
            "transformers (-PT)"
        )
    return replace(table, rules=tuple(_in_layout(rule, config) for rule in table.rules))


def _in_layout(rule: Rule, config: Config) -> Rule:
    form = rule.huggingface
    if form is None:
        return rule
    key = rule.key.replace("model.", _PREFIX, 1)
    head = rule.tied_to is not None and not config.get("tie_word_embeddings")
    return replace(rule, huggingface=replace(form, keys=(key,) * len(form.keys), transposed=head))
