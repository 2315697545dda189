#!/usr/bin/env python
"""run rs_* cases (trainer resume in another topology) and compare the loaded state with the source's truth"""

import os, re, subprocess, sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from cases import CASES
from run_case import LAB, CORPUS

names = sys.argv[1:] or [n for n in CASES if n.startswith("rs_")]
for n in names:
    c = CASES[n]
    r = subprocess.run(
        [sys.executable, HERE + "/run_case.py", n],
        capture_output=True,
        text=True,
        env=dict(os.environ, NO_PUBLISH="1", TAIL="3"),
    )
    line = r.stdout.strip().splitlines()
    timed = {}
    for l in open(f"{LAB}/logs/{n}/rank0.log", errors="ignore"):
        m = re.match(r"TIMED (\S+) (\S+)", l)
        if m:
            timed[m[1]] = m[2]
    ok = " OK" in line[0]
    cmp_ = ""
    if ok:
        cmp_ = subprocess.run(
            [
                sys.executable,
                HERE + "/compare_truth.py",
                f"{CORPUS}/{c['src']}/truth.safetensors",
                f"{LAB}/out/{n}/truth.safetensors",
            ],
            capture_output=True,
            text=True,
        ).stdout.strip()
    print(n, "|", line[0], "|", timed, "|", cmp_ if ok else " // ".join(line[1:])[-300:], flush=True)
