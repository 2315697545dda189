"""emit the README matrix from what is on disk"""

import json, os, glob

C = os.environ.get("CORPUS", ".")
rows = []
for d in sorted(os.listdir(C)):
    p = f"{C}/{d}/case.json"
    if not os.path.exists(p):
        continue
    c = json.load(open(p))
    rep = {}
    if os.path.exists(f"{C}/{d}/truth_report.json"):
        rep = json.load(open(f"{C}/{d}/truth_report.json"))
    ck = glob.glob(f"{C}/{d}/checkpoint-*")[0]
    names = []
    for r, _, fs in os.walk(ck):
        for f in fs:
            names.append(os.path.relpath(os.path.join(r, f), ck))
    import re

    pat = sorted(
        {
            re.sub(r"\d+", "#", n)
            for n in names
            if not n.startswith(
                ("rng_", "saved_", "training_args", "trainer_state", "config.json", "scheduler")
            )
        }
    )
    ch = "/".join(
        x.replace("DygraphSharding", "DS")
        .replace("HybridParallelOptimizer", "HPO")
        .replace("MixPrecisionOptimizer", "MPO")
        for x in rep.get("chain", [])
    )
    rows.append(
        f"| {d} | {c['env']} | {c['n']} | {json.dumps(c.get('args') or {})}{' model=' + json.dumps(c['model']) if c.get('model') else ''} | {', '.join(pat)} | {ch} | {rep.get('replicas_checked', '-')}/{len(rep.get('replica_mismatch', []))} | {c['seconds']} |"
    )
print(
    "| case | env | ranks | Trainer args (over the defaults of train_*.py) | files (digits -> #) | optimizer chain | replicas checked/mismatch | s |\n|---|---|---|---|---|---|---|---|"
)
print("\n".join(rows))
