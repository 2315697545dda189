#!/usr/bin/env python
"""Generate a LARGE real checkpoint on demand (for performance work), same code path as the corpus.

  gen_large.py OUT --topo mp2pp2sh2v2 --params 80   # ~80M parameters -> ~1 GB of optimizer shards

topologies: single, mp2, sh2v1, sh2v2, mp2pp2, mp2pp2sh2v1, mp2pp2sh2v2, fc_* (FlexCheckpoint of the same)
needs RAM of roughly 24 bytes x params (+0.45 GB per rank); 1 step, seq 8.
"""

import argparse, json, os, shutil, sys, time, glob

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from run_case import launch, PY
from cases import A as mix, TP2, PP2, SH2, V1, V2, SIO, FC

ap = argparse.ArgumentParser()
ap.add_argument("out")
ap.add_argument("--topo", default="mp2pp2sh2v2")
ap.add_argument("--params", type=float, default=80, help="millions")
ap.add_argument("--truth", default="1")
ap.add_argument("--steps", type=int, default=1)
ap.add_argument("--port", type=int, default=15000)
ap.add_argument(
    "--resume", default="", help="load this checkpoint instead (peer timing); then no training step is done"
)
a = ap.parse_args()
fc = a.topo.startswith("fc_")
t = a.topo[3:] if fc else a.topo
base = {
    "single": (1, {}),
    "mp2": (2, mix(TP2)),
    "sh2v1": (2, mix(V1, SH2)),
    "sh2v2": (2, mix(V2, SH2)),
    "mp2pp2": (4, mix(TP2, PP2)),
    "mp2pp2sh2v1": (8, mix(TP2, PP2, V1, SH2)),
    "mp2pp2sh2v2": (8, mix(TP2, PP2, V2, SH2)),
    "sh4v2": (4, mix(V2, sharding_parallel_size=4)),
    "mp2sh2v2": (4, mix(TP2, V2, SH2)),
}[t]
n, args = base
args = mix(args, FC if fc else (SIO if "sh" in t else {}))
if a.resume and not fc:
    args = mix(args, load_checkpoint_format="sharding_io", load_sharded_model=True)
# llama-ish shape with the wanted size: vocab 8192, inter = 2.75 h, 4 layers
P = a.params * 1e6
h = 128


def size(h, L=4, V=8192):
    return 2 * V * h + L * (h * h * 3 + 3 * h * int(2.75 * h)) + 9 * h


while size(h + 64) < P:
    h += 64
model = dict(
    hidden_size=h,
    intermediate_size=int(2.75 * h),
    vocab_size=8192,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
)
print("params", size(h) / 1e6, "M", model)
shutil.rmtree(a.out, ignore_errors=True)
os.makedirs(a.out)
cmd = [
    PY["pf"],
    HERE + "/train_pf.py",
    "--case",
    "large",
    "--out",
    a.out,
    "--args",
    json.dumps(args),
    "--model",
    json.dumps(model),
    "--seq",
    "8",
    "--steps",
    str(a.steps),
    "--truth",
    a.truth,
]
if a.resume:
    cmd += ["--resume", a.resume]
rcs, dt = launch(n, cmd, a.out + "/logs", a.port, 580)
print("rc", rcs, "sec", round(dt, 1))
os.system(
    f"grep -h '^TIMED\\|^TRAIN_DONE\\|^TRUTH' {a.out}/logs/rank0.log; du -sm {a.out}/checkpoint-* 2>/dev/null"
)
