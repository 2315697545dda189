#!/usr/bin/env python
"""auto-parallel (DTensor) dist checkpoint: dist.shard_tensor + dist.shard_optimizer + dist.save_state_dict,
mesh [dp=2, mp=2] on CPU/gloo, fp32, 3 AdamW steps of a 2-layer MLP with embedding."""

import argparse, json, os, sys, time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
ap = argparse.ArgumentParser()
ap.add_argument("--case")
ap.add_argument("--out")
ap.add_argument("--args", default="{}")
ap.add_argument("--model", default="{}")
A = ap.parse_args()
import numpy as np, paddle

paddle.set_device("cpu")
import cpu_gloo_shim as shim
import paddle.distributed as dist
import truth as T

dist.init_parallel_env()
mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])
R, S = dist.Replicate, dist.Shard
# CPU has no reduce_scatter kernel: Partial->Shard goes Partial->Replicate->Shard
import paddle.distributed.auto_parallel.api as _api

_orig_reshard = _api.reshard


def _reshard(t, m, pls):
    if t.is_dist() and any(x.is_partial() for x in t.placements):
        mid = [R() if x.is_partial() else x for x in t.placements]
        t = _orig_reshard(t, m, mid)
    return _orig_reshard(t, m, pls)


dist.reshard = _api.reshard = _reshard
paddle.seed(7)
cfg = json.loads(A.args)


class Net(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.embed = paddle.nn.Embedding(64, 32)
        self.up = paddle.nn.Linear(32, 48)
        self.down = paddle.nn.Linear(48, 32, bias_attr=False)
        self.norm = paddle.nn.LayerNorm(32)
        self.head = paddle.nn.Linear(32, 64, bias_attr=False)

    def forward(self, x):
        h = self.embed(x)
        return self.head(self.norm(h + self.down(paddle.nn.functional.relu(self.up(h)))))


net = Net()
pl = {
    "embed.weight": [R(), S(0)],
    "up.weight": [R(), S(1)],
    "up.bias": [R(), S(0)],
    "down.weight": [R(), S(0)],
    "head.weight": [R(), S(1)],
}
for n, p in list(net.named_parameters()):
    sub, attr = n.rsplit(".", 1)
    layer = dict(net.named_sublayers())[sub]
    setattr(layer, attr, dist.shard_tensor(p, mesh, pl.get(n, [R(), R()])))
opt = paddle.optimizer.AdamW(learning_rate=1e-2, parameters=net.parameters())
opt = (
    dist.shard_optimizer(opt, dist.ShardingStage1("dp", mesh))
    if cfg.get("stage1", True)
    else dist.shard_optimizer(opt)
)
rng = np.random.RandomState(3)
for step in range(3):
    x = dist.shard_tensor(paddle.to_tensor(rng.randint(0, 64, (4, 8))), mesh, [S(0), R()])
    y = dist.shard_tensor(paddle.to_tensor(rng.randint(0, 64, (4, 8))), mesh, [S(0), R()])
    logit = net(x)
    loss = paddle.nn.functional.cross_entropy(logit, y).mean()
    loss.backward()
    opt.step()
    opt.clear_grad()
    print("loss", float(loss), flush=True)
os.makedirs(A.out, exist_ok=True)
osd = opt.state_dict()
osd.pop("LR_Scheduler", None)
sd = {"model": net.state_dict(), "optimizer": osd}
path = os.path.join(A.out, "checkpoint-3", "dist_ckpt")
dist.save_state_dict(sd, path)
full = {}
for grp, d in sd.items():
    for k, v in d.items():
        if isinstance(v, dict):
            continue
        w = dist.unshard_dtensor(v) if v.is_dist() else v
        full[f"{grp}/{k}"] = paddle.to_tensor(w.numpy())
if dist.get_rank() == 0:
    T.write_safetensors(full, os.path.join(A.out, "truth.safetensors"))
    json.dump(
        {
            "names": {k: p.name for k, p in net.state_dict().items()},
            "placements": {k: str(p.placements) for k, p in net.state_dict().items()},
            "opt_placements": {
                k: str(v.placements) for k, v in osd.items() if not isinstance(v, dict) and v.is_dist()
            },
        },
        open(os.path.join(A.out, "truth_report.json"), "w"),
        indent=1,
    )
dist.barrier()
print("SHIM_CALLS", json.dumps(shim.CALLS))
print("CASE_OK", A.case, flush=True)
sys.stdout.flush()
time.sleep(1 if dist.get_rank() == 0 else 0)
os._exit(0)
