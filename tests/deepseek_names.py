"""What the parameters of the recipe ``deepseek_v3_pretrain`` are called elsewhere, by its ``convert_ckpt_to_sft.py``.

Written down from the recipe, and sharing nothing with the rule tables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from tests import oracle

STATES = r"(?P<key>.*?)(?P<state>\.(?:w_0|moment[12]_0|beta[12]_pow_acc_0|ema_w_0|ema))?"
BIAS = "e_score_correction_bias"

_PUBLISHED = {
    "self_attn.fused_rms_norm_linear.rms_norm_weight": ("input_layernorm.weight",),
    "self_attn.fused_rms_norm_linear.q_down_weight": ("self_attn.q_a_proj.weight",),
    "self_attn.fused_rms_norm_linear.kv_down_weight": ("self_attn.kv_a_proj_with_mqa.weight",),
    "self_attn.memory_recompute_att.q_ln_weight": ("self_attn.q_a_layernorm.weight",),
    "self_attn.memory_recompute_att.kv_ln_weight": ("self_attn.kv_a_layernorm.weight",),
    "self_attn.memory_recompute_att.q_up_weight": ("self_attn.q_b_proj.weight",),
    "self_attn.memory_recompute_att.kv_up_weight": ("self_attn.kv_b_proj.weight",),
}
"""As in the recipe's ``convert_ckpt_to_sft.py``."""
_NOT_PUBLISHED = r"layers\.\d+\.(self_attn\.)?input_layernorm|router|norm_weight$|out_proj_weight"
SAME_THERE = r"embed_tokens|norm\.weight|rms_norm_weight|ln_weight|e_score_correction_bias"


def _published(key: str) -> tuple[str, ...]:
    """The keys in a Hugging Face checkpoint; two for gate and up."""
    if re.search(_NOT_PUBLISHED, key) and "rms_norm_weight" not in key:
        return ()
    key = key.replace("deepseek_v2.", "model.")
    head, _, rest = key.partition(".layers.")
    number, _, inside = rest.partition(".")
    inner = _PUBLISHED.get(inside, (inside,))
    if inside.endswith(".w1"):
        inner = tuple(inside.replace("w1", f"{half}_proj.weight") for half in ("gate", "up"))
    elif inside.endswith(".w2"):
        inner = (inside.replace("w2", "down_proj.weight"),)
    return tuple(f"{head}.layers.{number}.{name}" for name in inner) if rest else (key,)


def named(truth: Mapping[str, np.ndarray], transposed: str, without: str = r"$^") -> oracle.Tensors:
    """Tensors of the recipe under published keys, without states that only the recipe has.

    ``transposed``: what the other model has transposed; ``without``: what it has not. Both are regular expressions.
    """
    found = {}
    for name, value in truth.items():
        match = re.fullmatch(STATES, name)
        assert match is not None
        key, state = match["key"], match["state"] or ""
        keys = _published(key)
        if not keys or (BIAS in key and state not in ("", ".ema")):
            continue
        for published, part in zip(keys, _parts(value, len(keys)), strict=True):
            turned = "_pow_acc" not in state and re.search(transposed, key)
            if not re.search(without, published):
                found[published + state] = np.ascontiguousarray(part.T if turned else part)
    return found


def _parts(value: np.ndarray, count: int) -> list[np.ndarray]:
    return np.split(value, count, axis=-1) if value.ndim > 1 else [value] * count
