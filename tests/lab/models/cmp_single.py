#!/usr/bin/env python
"""cmp_single.py CASE SINGLE -- largest relative difference of parameters (master where there is one) of two truths from the same start; names the worst keys"""

import sys, torch
from safetensors.torch import load_file

a, b = (load_file(x + "/truth.safetensors") for x in sys.argv[1:3])
r = []
for k in a:
    if k.endswith(".w_0") or (
        k + ".w_0" not in a
        and not k.split(".")[-1] in ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")
    ):
        if k not in b:
            r.append((9e9, k))
            continue
        x, y = a[k].float(), b[k].float()
        r.append((float((x - y).abs().max() / (y.abs().max() + 1e-12)) if x.shape == y.shape else 8e9, k))
r.sort(reverse=True)
print(
    sys.argv[1].split("/")[-1],
    len(r),
    "worst",
    [(f"{d:.1e}", k) for d, k in r[:3]],
    "only in single",
    len([k for k in b if k not in a]),
)
