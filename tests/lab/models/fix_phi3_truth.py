#!/usr/bin/env python
"""fix_phi3_truth.py CASE -- phi3 under tp 2: a rank holds [q_r | k_r | v_r]; truth.py joined the ranks plainly; make it the logical [q | k | v]"""

import sys, torch
from safetensors.torch import load_file, save_file

p = sys.argv[1] + "/truth.safetensors"
t = load_file(p)
q, k, v = 32, 16, 16  # per rank: heads 2 * 16, kv heads 1 * 16
for n in t:
    if "qkv_proj" in n and "pow_acc" not in n:
        r = [x.split([q, k, v], -1) for x in t[n].chunk(2, -1)]
        t[n] = torch.cat([r[i][j] for j in range(3) for i in range(2)], -1).contiguous()
save_file(t, p + ".new")
import os

os.replace(p + ".new", p)
