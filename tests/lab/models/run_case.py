#!/usr/bin/env python
"""run_case.py CASE [CASE...]   -- launches N local ranks (gloo) per case, see cases.py, cases_states.py, cases_families.py"""

import json, os, shutil, subprocess, sys, time, glob

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import cases, cases_families, cases_states

CASES = {**cases.CASES, **cases_states.C, **cases_families.CASES}
CORPUS = os.environ.get("CORPUS", os.path.abspath("."))
LAB = os.environ.get("LAB", os.path.abspath("lab"))
VENV = os.environ.get("VENV", LAB)
PY = {"pf": VENV + "/venv-pf/bin/python", "nlp": VENV + "/venv-nlp/bin/python"}


PB = int(os.environ.get("PORT_BASE", "10000"))


def launch(n, cmd, logdir, port, timeout=300, extra=None):
    os.makedirs(logdir, exist_ok=True)
    box = f"/dev/shm/shim_box_{port}"
    shutil.rmtree(box, ignore_errors=True)
    eps = ",".join(f"127.0.0.1:{port + i}" for i in range(n))
    procs = []
    for i in range(n):
        e = dict(os.environ)
        if n > 1:
            e.update(
                PADDLE_TRAINER_ID=str(i),
                PADDLE_TRAINERS_NUM=str(n),
                PADDLE_TRAINER_ENDPOINTS=eps,
                PADDLE_CURRENT_ENDPOINT=f"127.0.0.1:{port + i}",
                PADDLE_RANK_IN_NODE=str(i),
                PADDLE_LOCAL_SIZE=str(n),
                PADDLE_GLOBAL_RANK=str(i),
                PADDLE_GLOBAL_SIZE=str(n),
                PADDLE_LOCAL_RANK=str(i),
                PADDLE_MASTER=f"127.0.0.1:{port + 500}",
                PADDLE_DISTRI_BACKEND="gloo",
            )
        e.update(
            SHIM_BOX=box,
            SHIM_STORE_PORT=str(port + 1000),
            OMP_NUM_THREADS="1",
            FLAGS_selected_gpus=str(i),
            GLOG_v="0",
            **(extra or {}),
        )
        f = open(f"{logdir}/rank{i}.log", "w")
        procs.append(subprocess.Popen(cmd, stdout=f, stderr=subprocess.STDOUT, env=e))
    t0 = time.time()
    rcs = [None] * n
    while any(r is None for r in rcs):
        for i, p in enumerate(procs):
            if rcs[i] is None:
                rcs[i] = p.poll()
        bad = any(r not in (None, 0) for r in rcs)
        if bad or time.time() - t0 > timeout:
            time.sleep(3)
            for p in procs:
                if p.poll() is None:
                    p.kill()
            rcs = [p.wait() for p in procs]
            break
        time.sleep(0.1)
    shutil.rmtree(box, ignore_errors=True)
    return rcs, time.time() - t0


def main():
    import random

    for name in sys.argv[1:]:
        c = CASES[name]
        port = random.randrange(PB, PB + 900, 20) if "PORT" not in os.environ else int(os.environ["PORT"])
        out = f"{LAB}/out/{name}"
        shutil.rmtree(out, ignore_errors=True)
        cmd = [
            PY[c.get("env", "pf")],
            f"{HERE}/{c.get('script', 'train_moe.py')}",
            "--case",
            name,
            "--out",
            out,
            "--args",
            json.dumps(c.get("args", {})),
            "--model",
            json.dumps(c.get("model", {})),
            "--family",
            c.get("family", "qwen3_moe"),
        ]
        if "init" in c:
            cmd += ["--init", f"{LAB}/out/{c['init']}"]
        for k, v in c.get("opts", {}).items():
            cmd += [f"--{k}", str(v)]
        logdir = f"{LAB}/logs/{name}"
        shutil.rmtree(logdir, ignore_errors=True)
        rcs, dt = launch(c["n"], cmd, logdir, port, c.get("timeout", 240), c.get("environ"))
        if -6 in rcs:  # libuv assertion of TCPStore when a random port is taken: try once more
            rcs, dt = launch(
                c["n"],
                cmd,
                logdir,
                random.randrange(PB, PB + 900, 20),
                c.get("timeout", 240),
                c.get("environ"),
            )
        ok = all(r == 0 for r in rcs)
        print(f"{name}: rc={rcs} {dt:.1f}s {'OK' if ok else 'FAIL'}", flush=True)
        if not ok:
            os.system(
                f"grep -h -v 'INFO\\|DEBUG\\|WARN' {logdir}/rank0.log | tail -{os.environ.get('TAIL', '14')}"
            )
        ck = sorted(glob.glob(out + "/checkpoint-*"))
        if ok and ck and not os.environ.get("NO_PUBLISH"):
            dst = f"{CORPUS}/{name}"
            shutil.rmtree(dst, ignore_errors=True)
            os.makedirs(dst)
            shutil.copytree(ck[-1], dst + "/" + os.path.basename(ck[-1]))
            for f in ("truth.safetensors", "truth_alt.safetensors", "truth_report.json"):
                if os.path.exists(out + "/" + f):
                    shutil.copy(out + "/" + f, dst)
            for f in ("hf-export", "hf-export-derived"):
                if os.path.isdir(out + "/" + f):
                    shutil.copytree(out + "/" + f, dst + "/" + f)
            calls = {}
            for l in open(f"{logdir}/rank0.log"):
                if l.startswith("SHIM_CALLS"):
                    calls = json.loads(l.split(" ", 1)[1])
            cmd = [x.replace(HERE, "gen").replace(LAB, "$LAB").replace(VENV, "$VENV") for x in cmd]
            json.dump(
                dict(
                    case=name,
                    n=c["n"],
                    cmd=cmd,
                    env=c.get("env", "pf"),
                    args=c.get("args"),
                    model=c.get("model"),
                    family=c.get("family", "qwen3_moe"),
                    seconds=round(dt, 1),
                    shim_calls_rank0=calls,
                ),
                open(dst + "/case.json", "w"),
                indent=1,
            )


if __name__ == "__main__":
    main()
