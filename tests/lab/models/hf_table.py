#!/usr/bin/env python
"""hf_table.py OUT.jsonl NAME=LOGITS=DIR ... -- hf_check over many folders in one process"""

import json, sys, os

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import numpy as np
from hf_check import check

with open(sys.argv[1], "a") as f:
    for a in sys.argv[2:]:
        name, lg, d = a.split("=")
        if not os.path.isdir(d):
            print(name, "NO DIR")
            continue
        r = dict(name=name, **check(d, np.load(lg)))
        f.write(json.dumps(r) + "\n")
        f.flush()
        s = {
            k: (v if not isinstance(v, (list, dict)) else f"{len(v)}: {list(v)[:4]}")
            for k, v in r.items()
            if k not in ("dir",)
        }
        print(json.dumps(s), flush=True)
