#!/usr/bin/env python
"""p5_numpy2.py SRC DST (run with numpy >= 2): the files of a protocol 4 or 5 case, loaded and saved again by paddle.save with protocol 5"""

import os, pickle, shutil, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import numpy as np, paddle
import state_patches as P

paddle.set_device("cpu")
P.patch_p5(None)
src, dst = sys.argv[1:3]
shutil.rmtree(dst, ignore_errors=True)
shutil.copytree(src, dst)
for f in sorted(os.listdir(src)):
    if not f.endswith((".pdparams", ".pdopt")):
        continue
    o = paddle.load(f"{src}/{f}", keep_name_table=True)
    names = o.pop("StructuredToParameterName@@", {}) if isinstance(o, dict) else {}
    for k, n in names.items():
        o[k].name = n
    paddle.save(o, f"{dst}/{f}")
    b = open(f"{dst}/{f}", "rb").read()
    print(f, b[:2].hex(), b"numpy._core.numeric" in b or b"numpy._core" in b, len(b))
