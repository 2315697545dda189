#!/usr/bin/env python
"""diff_export.py A B -- tensors and config.json of two Hugging Face folders"""

import glob, json, sys, torch
from safetensors import safe_open


def load(d):
    r = {}
    for f in sorted(glob.glob(d + "/*.safetensors")):
        s = safe_open(f, "pt")
        for k in s.keys():
            r[k] = s.get_tensor(k)
    return r


a, b = load(sys.argv[1]), load(sys.argv[2])
print("only A:", sorted(set(a) - set(b))[:10], "only B:", sorted(set(b) - set(a))[:10])
n = 0
for k in sorted(set(a) & set(b)):
    x, y = a[k], b[k]
    if x.dtype != y.dtype or x.shape != y.shape or not torch.equal(x, y):
        print(
            "DIFF",
            k,
            x.dtype,
            y.dtype,
            tuple(x.shape),
            tuple(y.shape),
            float((x.float() - y.float()).abs().max()) if x.shape == y.shape else "",
        )
        n += 1
print("equal", len(set(a) & set(b)) - n)
ca, cb = (json.load(open(d + "/config.json")) for d in sys.argv[1:3])
for k in sorted(set(ca) | set(cb)):
    if ca.get(k, "-") != cb.get(k, "-"):
        print("CONFIG", k, ca.get(k, "-"), "|", cb.get(k, "-"))
