"""A Hugging Face model whose matrices have several blocks of 128 rows and columns, with ragged edges by default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.golden.unified_cases import write_safetensors

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, LAYERS, VOCAB = 320, 700, 4, 2, 2, 64
CONFIG: dict[str, Any] = {
    "architectures": ["Ernie4_5ForCausalLM"],
    "model_type": "ernie4_5", "torch_dtype": "bfloat16", "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HIDDEN // HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip


def shapes(hidden: int = HIDDEN, intermediate: int = INTERMEDIATE) -> dict[str, tuple[int, ...]]:
    """Key → shape of every tensor."""
    narrow = hidden * KV_HEADS // HEADS
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (VOCAB, hidden),
    }
    for layer in range(LAYERS):
        for name, shape in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (narrow, hidden),
            "self_attn.v_proj": (narrow, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }.items():
            found[f"model.layers.{layer}.{name}.weight"] = shape
    return found


def write_wide(folder: Path, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE) -> Path:
    """The model with random values of many magnitudes, in one file; returns ``folder``."""
    rng = np.random.default_rng(17)
    tensors = {}
    for key, shape in shapes(hidden, intermediate).items():
        values = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 3, shape))
        if key.endswith("q_proj.weight"):
            values[:128, :128] = 0
        bits = values.astype(np.float32).view(np.uint32) >> 16
        tensors[key] = ("BF16", shape, bits.astype("<u2").tobytes())
    folder.mkdir()
    config = {"hidden_size": hidden, "intermediate_size": intermediate, "head_dim": hidden // HEADS}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder
