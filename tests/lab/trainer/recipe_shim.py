"""What the recipes need on a CPU beside ``cpu_gloo_shim``: stubs of CUDA modules, and plain forward passes.

Nothing here names, cuts, orders or writes a tensor.
"""

import importlib
import os
import sys
import types

import models
import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle.autograd import PyLayer

FP8 = (
    "paddle.incubate.fp8",
    "paddle.incubate.fp8.deep_gemm",
    "deep_gemm",
    "TokenDispatcherUtils",
    "FusedQuantOps",
)


class Absent:
    """Anything of a module that needs CUDA: it can be imported, and not called."""

    def __init__(self, name):
        self.name = name

    def __call__(self, *_, **__):
        raise RuntimeError(f"a stub of a CUDA module was called: {self.name}")

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.name}.{name}")


def stub_missing(*names):
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:
            module = types.ModuleType(name)
            module.__path__ = []
            module.__getattr__ = Absent(name).__getattr__
            sys.modules[name] = module
            parent, _, leaf = name.rpartition(".")
            if parent in sys.modules:
                setattr(sys.modules[parent], leaf, module)


class _AddLoss(PyLayer):  # gradient 1 for the router loss, the value passes
    @staticmethod
    def forward(ctx, x, loss):
        ctx.s = loss.shape
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy, paddle.ones(ctx.s, "float32") * 0.01


def rms(x, w, eps):
    x = x.astype("float32")
    return x * paddle.rsqrt((x * x).mean(-1, keepdim=True) + eps) * w.astype("float32")


def experts_all(x, w, experts, g, call):
    """x [n, h], w [n, E] combine weights (0 where not routed) -> [n, h]"""
    multi = g is not None and getattr(g, "nranks", 1) > 1
    L = len(experts)
    if not isinstance(experts, list | paddle.nn.LayerList):  # one 3-D parameter for all experts of a rank
        fused = experts

        def call(j, t):
            u, v = paddle.split(paddle.matmul(t, fused.up_gate_proj.weight[j]), 2, axis=-1)
            return paddle.matmul(F.silu(u) * v, fused.down_proj.weight[j])

        experts = list(range(L))
    r = g.rank if multi else 0
    if multi:
        x, w = models.GatherTokens.apply(x, g), models.GatherTokens.apply(w, g)
    out = paddle.zeros_like(x)
    for j in range(L):
        out = out + call(experts[j], x) * w[:, r * L + j : r * L + j + 1]
    return models.ScatterTokens.apply(out, g) if multi else out


def fused_linear_forward():
    import paddle.incubate.nn as inn
    import paddle.incubate.nn.functional as IF

    def fl(x, weight, bias=None, transpose_weight=False, name=None):
        y = paddle.matmul(x, weight, transpose_y=transpose_weight)
        return y if bias is None else y + bias.astype("float32")

    IF.fused_linear = fl
    inn.functional.fused_linear = fl
    inn.FusedLinear.forward = lambda self, x: fl(x, self.weight, self.bias, self.transpose_weight)


def ernie():
    stub_missing(*FP8)
    import paddleformers.cli.train.ernie_pretrain.models.ernie.modeling as m
    import paddleformers.cli.train.ernie_pretrain.models.ernie.modeling_moe as mm
    import paddleformers.cli.train.ernie_pretrain.models.moe.moe_layer as ml

    fused_linear_forward()
    m.RMSNorm.forward = lambda self, x: rms(x, self.weight, self.variance_epsilon)
    mm.FusedRMSLinear.forward = lambda self, x: paddle.matmul(
        rms(x, self.rms_norm_weight, self.eps), self.linear_weight
    )
    mm.FusedLinearAddNorm.forward = lambda self, x, residual: (
        lambda a: (rms(a, self.rms_norm_weight, self.eps), a)
    )(paddle.matmul(x, self.linear_weight) + residual)

    def forward(self, input, token_type_ids=None):
        shp = input.shape
        x = input.reshape([-1, shp[-1]]).astype("float32")
        logits = F.linear(x, self.gate.weight)
        prob = self.gate.act(logits)
        sel = prob.detach()
        if self.use_correction_bias:
            sel = sel + self.moe_statics.e_score_correction_bias.detach()[0]
        mask = F.one_hot(paddle.topk(sel, self.k, axis=-1)[1], self.gate.num_experts).sum(1)
        if self.use_correction_bias:
            with paddle.no_grad():
                self.moe_statics.expert_usage[0] += mask.sum(0).astype("int64")
        w = prob * mask
        w = w / paddle.clip(w.sum(-1, keepdim=True), min=1e-12)
        out = experts_all(x, w, self.experts, self.group, lambda e, t: e(t))
        if self.shared_experts is not None:
            out = out + self.shared_experts(x if input.ndim == 3 else input)
        out = _AddLoss.apply(out, (prob.mean(0) ** 2).sum().reshape([1]))
        return out.reshape(shp), None, paddle.zeros([1]), logits

    ml.MOELayer.forward = forward
    if dist.get_world_size() == 1 or os.environ.get("MOE_WITHOUT_EP"):
        ml.MOELayer.config = types.SimpleNamespace(offline_quant_expert_weight=False)


def dsv3():
    stub_missing(*FP8, "paddlefleet_ops.deep_gemm")
    import paddleformers.cli.train.deepseek_v3_pretrain.modeling as m
    import paddleformers.cli.train.deepseek_v3_pretrain.modeling_pp as mp
    import paddleformers.transformers.fp8_utils as f8

    models.no_deepep()

    class LinFn:
        @staticmethod
        def apply(x, layer, keep_x=False):
            return paddle.matmul(x, layer.weight)

    import paddleformers.cli.train.deepseek_v3_pretrain.token_dispatcher as td

    td._DeepepManager = type("NoDeepEP", (), {"__init__": lambda self, *a, **k: None})
    from paddle.distributed.fleet.base.topology import EPHybridCommunicateGroup as G

    if not hasattr(G, "expert_parallel_group"):
        G.expert_parallel_group = property(lambda g: g.get_expert_parallel_group())
        G.expert_grad_comm_group = property(lambda g: g.get_moe_sharding_parallel_group())
    m.FP8LinearFunction = mp.FP8LinearFunction = f8.FP8LinearFunction = LinFn
    f8.FP8KeepXLinear.forward = f8.FP8Linear.forward = lambda self, x: paddle.matmul(x, self.weight)

    def mlp(self, x):
        if self.using_post_norm_recompute:
            x = rms(x, self.norm_weight, self.norm_eps)
        g, u = paddle.split(paddle.matmul(x, self.w1), 2, axis=-1)
        return paddle.matmul(F.silu(g) * u, self.w2)

    f8.FP8Mlp.forward = mlp
    m.DeepseekV2RMSNorm.forward = lambda self, x: rms(x, self.weight, self.variance_epsilon)

    def fused_rms_linear(self, x):
        h = rms(x, self.rms_norm_weight, self.eps)
        return paddle.matmul(h, self.q_down_weight), paddle.matmul(h, self.kv_down_weight)

    m.FusedRMSLinear.forward = fused_rms_linear

    def attn(self, q_init, kv_init, position_ids):
        q = paddle.matmul(rms(q_init, self.q_ln_weight, self.eps), self.q_up_weight)
        ckv, k_pe = paddle.split(kv_init, [self.kv_lora_rank, self.qk_rope_head_dim], axis=-1)
        kv = paddle.matmul(rms(ckv, self.kv_ln_weight, self.eps), self.kv_up_weight)
        n, d = q_init.shape[1], self.qk_rope_head_dim
        q = q.reshape([0, n, self.num_heads, self.q_head_dim])
        kv = kv.reshape([0, n, self.num_heads, self.qk_nope_head_dim + self.v_head_dim])
        f = paddle.outer(
            paddle.arange(n, dtype="float32"), 10000.0 ** (-paddle.arange(0, d, 2, dtype="float32") / d)
        )
        c, z = [paddle.concat([t, t], -1).reshape([1, n, 1, d]) for t in (paddle.cos(f), paddle.sin(f))]

        def rope(t):
            x, y = paddle.split(t, 2, axis=-1)
            return t * c + paddle.concat([-y, x], -1) * z

        q = paddle.concat([q[..., : self.qk_nope_head_dim], rope(q[..., self.qk_nope_head_dim :])], -1)
        k_pe = rope(k_pe.reshape([0, n, 1, d])).expand([q.shape[0], n, self.num_heads, d])
        k = paddle.concat([kv[..., : self.qk_nope_head_dim], k_pe], -1)
        v = kv[..., self.qk_nope_head_dim :]
        q, k, v = [t.transpose([0, 2, 1, 3]) for t in (q, k, v)]
        a = paddle.matmul(q * self.softmax_scale, k, transpose_y=True)
        s = a.shape[-1]
        a = F.softmax(a + paddle.triu(paddle.full([s, s], -1e9), 1), axis=-1)
        return paddle.matmul(a, v).transpose([0, 2, 1, 3]).reshape([q.shape[0], s, -1])

    m.MemroyRecomputeAttn.forward = attn

    def moe(self, x):
        shp = x.shape
        h = rms(x, self.gate.norm_weight, self.gate.norm_eps) if self.using_post_norm_recompute else x
        h = h.reshape([-1, shp[-1]]).astype("float32")
        logits = F.linear(h, self.gate.weight)
        prob = F.sigmoid(logits) if self.config.scoring_func == "sigmoid" else F.softmax(logits, axis=-1)
        sel = prob.detach()
        if hasattr(self.gate, "e_score_correction_bias"):
            sel = sel + self.gate.e_score_correction_bias.detach()
        mask = F.one_hot(paddle.topk(sel, self.gate.top_k, axis=-1)[1], self.n_routed_experts).sum(1)
        if hasattr(self.gate, "expert_usage"):
            with paddle.no_grad():
                self.gate.expert_usage += mask.sum(0).astype("int64")
        w_ = prob * mask
        w_ = w_ / paddle.clip(w_.sum(-1, keepdim=True), min=1e-12)
        mine = [e for e in self.experts if e is not None]
        out = experts_all(h, w_, mine, self.moe_group, lambda e, t: e(t)).reshape(shp)
        out = _AddLoss.apply(out, (prob.mean(0) ** 2).sum().reshape([1]))
        if self.config.n_shared_experts is not None:
            out = out + self.shared_experts(x)
        return out

    m.DeepseekV2MoE.forward = moe
    m.DeepseekV2MoE.fp8_quant_weight = lambda self, *a, **k: None

    m.LMHeadFunction = type(
        "Head",
        (),
        {"apply": staticmethod(lambda x, w, transpose_y=False: paddle.matmul(x, w, transpose_y=transpose_y))},
    )

    class Emb:
        @staticmethod
        def apply(x, weight):
            return F.embedding(x, weight=weight)

    mp.EmbeddingFunction = Emb

    class CE:
        @staticmethod
        def apply(preds, labels):
            return F.cross_entropy(preds.astype("float32"), labels.squeeze(-1), reduction="none").reshape(
                list(labels.shape[:-1])
            )

    m.FastCrossEntropyFunction = CE
    m.DeepseekV2DecoderLayer.fp8_quant_weight = lambda self, *a, **k: None
    from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.dygraph_sharding_optimizer import (
        DygraphShardingOptimizerV2 as V2,
    )

    def clear_param_storage(
        self, color
    ):  # the original's loop without freeing: master weights are made here, in this order
        self.clear_color.add(color)
        for buffer in self._color_to_comm_buffer_list.get(color, []):
            for param in buffer.params:
                view = buffer._sharding_param_grad_view[param.name]
                piece = self._slice_params[param.name]
                if view._param_begin < view._param_end:
                    view.fill_slice_param(piece)
                    self._create_master_weight(piece)

    V2.clear_param_storage = clear_param_storage
    V2.reset_param_storage = lambda self: None
