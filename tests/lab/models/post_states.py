#!/usr/bin/env python
"""post.py CASE...: after run_case.py: base weights of LoRA cases beside the truth, moments of 16 bits as such in the truth, paths made relative"""

import glob, json, os, shutil, sys
import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from compare_raw import read, write

CORPUS, LAB = os.environ["CORPUS"], os.environ["LAB"]
for n in sys.argv[1:] or [os.path.basename(os.path.dirname(p)) for p in glob.glob(CORPUS + "/*/case.json")]:
    d = f"{CORPUS}/{n}"
    b = f"{LAB}/out/{n}/truth_base.safetensors"
    if os.path.exists(b):
        shutil.copy(b, d)
    if "lowp" in n:
        t = read(d + "/truth.safetensors")
        for k, (dt, sh, x) in list(t.items()):
            if ".moment" in k and dt == "F32":
                u = np.frombuffer(x, "<u4")
                assert not (u & 0xFFFF).any(), k
                t[k] = ("BF16", sh, (u >> 16).astype("<u2").tobytes())
        write(t, d + "/truth.safetensors")
    c = json.load(open(d + "/case.json"))
    c["cmd"] = [
        "python" if i == 0 else a.replace(HERE, "gen").replace(LAB, "lab") for i, a in enumerate(c["cmd"])
    ]
    import cases, cases_states

    if n in cases_states.C and cases_states.C[n].get("environ"):
        c["environ"] = cases_states.C[n]["environ"]
    json.dump(c, open(d + "/case.json", "w"), indent=1)
