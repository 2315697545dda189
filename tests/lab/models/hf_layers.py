#!/usr/bin/env python
"""hf_layers.py LOGITS.npz LAYERS.npz DIR -- where do the two models part?"""

import os, sys

os.environ["HF_HUB_OFFLINE"] = "1"
import numpy as np, torch, transformers
from transformers import AutoModelForCausalLM

z, l = np.load(sys.argv[1]), dict(np.load(sys.argv[2]))
m = (
    (transformers.AutoModelForImageTextToText if os.environ.get("VL") else AutoModelForCausalLM)
    .from_pretrained(sys.argv[3], dtype=torch.float32, attn_implementation="eager")
    .eval()
)
for kv in sys.argv[4:]:
    exec(kv)
rec = {}


def hook(n):
    def f(mod, i, o):
        o = o[0] if isinstance(o, (tuple, list)) else o
        if torch.is_tensor(o):
            rec[n] = o.detach().float().numpy()

    return f


for n, s in m.named_modules():
    s.register_forward_hook(hook(n))
with torch.no_grad():
    o = m(input_ids=torch.from_numpy(z["ids"])).logits
print("logits", float((o - torch.from_numpy(z["logits"])).abs().max()))
for n in rec:
    if n in l:
        a, b = rec[n], l[n]
        if a.size == b.size:
            print(n, a.shape, b.shape, "diff", float(np.abs(a.reshape(-1) - b.reshape(-1)).max()))
        else:
            print(n, a.shape, b.shape, "SHAPE")
