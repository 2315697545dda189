#!/usr/bin/env python
"""Peer baseline: the real CheckpointConverter (trainer/utils/ckpt_converter.py), single process,
loading a hybrid checkpoint into a single-card model+optimizer; compares with truth.safetensors.
usage: peer_ckptconv.py [--unpatched] [--model JSON] CKPT_DIR TRUTH"""

import argparse, json, os, sys, time, types, traceback

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
ap = argparse.ArgumentParser()
ap.add_argument("--unpatched", action="store_true")
ap.add_argument("--model", default="{}")
ap.add_argument("ckpt")
ap.add_argument("truth")
A = ap.parse_args()
import numpy as np, paddle

paddle.set_device("cpu")
paddle.Tensor.cuda = lambda self, *a, **k: self  # the only GPU call in the converter
try:
    from paddlenlp.trainer.utils.ckpt_converter import CheckpointConverter
    import paddlenlp

    VER = "paddlenlp " + paddlenlp.__version__ + " / paddle " + paddle.__version__
except ImportError:
    from paddleformers.trainer.utils.ckpt_converter import CheckpointConverter
    import paddleformers

    VER = "paddleformers " + paddleformers.__version__ + " / paddle " + paddle.__version__
from compare_truth import load

if A.truth == "meta":  # timing only: global shapes from model_meta.json, no comparison
    m = json.load(open(A.ckpt + "/model_meta.json"))

    class Z:
        def __init__(s, sh):
            s.shape = tuple(sh)

    T = {}
    for blk in m["sharding_metas"].values():
        for k, (sh, _, dist_, _) in blk["param_meta"].items():
            sh = list(sh)
            if dist_:
                ax = 1 if k.split(".")[-2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj") else 0
                sh[ax] *= m["parallel_config"]["mp_degree"]
            T[k] = Z(sh)
else:
    T = load(A.truth)
SUF = ("w_0", "moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0", "ema_w_0")
names = [k for k in T if k.rsplit(".", 1)[1] not in SUF]


class M:
    """a bag of single-card bf16 parameters with the structured names of the checkpoint"""

    def __init__(s):
        s.p = {}
        for k in names:
            t = paddle.create_parameter(
                list(T[k].shape), "float32", default_initializer=paddle.nn.initializer.Constant(0.5)
            )
            s.p[k] = paddle.base.framework.EagerParamBase.from_tensor(t.astype("bfloat16"), trainable=True)
            s.p[k].name = "linear_%d.w_0" % len(s.p)  # paddle-like: no name is a prefix of another

    def parameters(s):
        return list(s.p.values())

    def state_dict(s):
        return dict(s.p)


model = M()
opt = paddle.optimizer.AdamW(learning_rate=1e-3, parameters=model.parameters(), multi_precision=True)
opt._create_accumulators(paddle.base.framework.default_main_program().global_block(), model.parameters())
if not A.unpatched:
    # upstream bug: single process branch is `all_rank_objects = [all_rank_objects]` (== [[]])
    def g(self, cur):
        if isinstance(cur, (list, dict)):
            return cur
        raise ValueError

    CheckpointConverter.gather_global_object = g
osd = opt.state_dict()
osd.pop("LR_Scheduler", None)
sd = {"model": model.state_dict(), "optimizer": osd}
p2s = {p.name: k for k, p in model.state_dict().items()}
t0 = time.time()
try:
    c = CheckpointConverter(A.ckpt, sd, p2s, types.SimpleNamespace(ignore_load_lr_and_optim=False))
    c.load_from_hybrid_parallel_checkpoint()
except BaseException as e:
    tb = traceback.extract_tb(e.__traceback__)[-1]
    print(
        "PEER_FAIL",
        VER,
        os.path.basename(os.path.dirname(A.ckpt.rstrip("/"))),
        type(e).__name__,
        str(e)[:160].replace("\n", " "),
        f"@{os.path.basename(tb.filename)}:{tb.lineno}",
        "sec",
        round(time.time() - t0, 2),
    )
    sys.exit(0)
dt = time.time() - t0
if A.truth == "meta":
    print(
        "PEER",
        VER,
        A.ckpt,
        "params M",
        round(sum(int(np.prod(T[k].shape)) for k in names) / 1e6, 1),
        "sec",
        round(dt, 2),
        "(not compared)",
    )
    sys.exit(0)
bad = []
n = 0


def cmp(key, t):
    global n
    if key not in T:
        bad.append((key, "absent in truth"))
        return
    n += 1
    a = t.astype("float32").numpy()
    if a.shape != T[key].shape or not np.array_equal(a, T[key]):
        bad.append((key, "shape" if a.shape != T[key].shape else float(np.abs(a - T[key]).max())))


for k, p in model.state_dict().items():
    cmp(k, p)
    cmp(k + ".w_0", opt._master_weights[p.name])
    for a in ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc"):
        cmp(f"{k}.{a}_0", opt._accumulators[a][opt._master_weights[p.name].name])
print(
    "PEER",
    VER,
    os.path.basename(os.path.dirname(A.ckpt.rstrip("/"))),
    "sec",
    round(dt, 2),
    "compared",
    n,
    "bad",
    len(bad),
    bad[:3],
)
