#!/usr/bin/env python
"""hf_from_truth.py CASE OUT [--as-is PREFIX=EXPORT_DIR] -- a Hugging Face folder made from truth.safetensors by the FORWARD map (_gen_aoa_config) of the
library, for families whose own export is broken: proves what the right map is (hf_table.py then compares logits).
fused qkv: per key-value group [q.. | k | v]; up_gate_proj = [gate | up]; Linear weights transposed."""

import json, os, shutil, sys, torch
from safetensors.torch import load_file, save_file
from safetensors import safe_open

case, out = sys.argv[1:3]
asis = dict(a.split("=") for a in sys.argv[4:]) if len(sys.argv) > 4 else {}
t = load_file(case + "/truth.safetensors")
states = (".w_0", ".moment1_0", ".moment2_0", ".beta1_pow_acc_0", ".beta2_pow_acc_0")
t = {k: v for k, v in t.items() if not k.endswith(states)}
cfg = json.load(open(case + "/hf-export/config.json"))
tc = cfg.get("text_config", cfg)
H, G, D = (
    tc["num_attention_heads"],
    tc["num_key_value_heads"],
    tc.get("head_dim") or tc["hidden_size"] // tc["num_attention_heads"],
)
mult = 2 if cfg["model_type"] == "qwen3_next" else 1  # q and its output gate
r = {}
for k, v in t.items():
    if any(k.startswith(p) for p in asis):
        continue
    if "qkv_proj" in k and "visual" not in k:
        g = v.reshape(*v.shape[:-1], G, (H // G * mult + 2) * D)
        for n, p in zip("qkv", g.split([H // G * mult * D, D, D], -1)):
            p = p.reshape(*v.shape[:-1], -1)
            r[k.replace("qkv_proj", n + "_proj")] = (p.T if p.dim() == 2 else p).contiguous()
    elif "up_gate_proj" in k:
        a, b = v.chunk(2, -1)
        r[k.replace("up_gate_proj", "gate_proj")], r[k.replace("up_gate_proj", "up_proj")] = (
            a.T.contiguous(),
            b.T.contiguous(),
        )
    elif (
        v.dim() == 2
        and "embed" not in k
        and not k.startswith("lm_head")
        and not (k.endswith("mlp.gate.weight") and v.shape[0] == tc.get("n_routed_experts"))
    ):
        r[k] = v.T.contiguous()
    else:
        r[k] = v
for p, d in asis.items():
    for f in os.listdir(d):
        if f.endswith(".safetensors"):
            s = safe_open(d + "/" + f, "pt")
            r.update({k: s.get_tensor(k) for k in s.keys() if k.startswith(p)})
os.makedirs(out, exist_ok=True)
save_file(r, out + "/model.safetensors", {"format": "pt"})
shutil.copy(case + "/hf-export/config.json", out)
