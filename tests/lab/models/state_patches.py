"""what train_states.py adds to train_moe.py: LoRA, dense families, optimizers, forward patches.  Nothing here names, cuts or writes a tensor."""

import json, os, sys
import numpy as np
import paddle
import paddle.distributed as dist


def want(A, name):
    return name in A.patch.split(",")


def early(A):
    for n in filter(None, A.patch.split(",")):
        f = globals().get("patch_" + n)
        if f:
            f(A)


def get_family(family, seq):
    base = dict(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=seq,
        use_cache=False,
        dtype="bfloat16",
    )
    if family == "llama":
        from paddleformers.transformers import (
            LlamaConfig as F,
            LlamaForCausalLM as C,
            LlamaForCausalLMPipe as Q,
        )

        return base, F, C, Q
    if family == "qwen2":
        import paddleformers.transformers.qwen2.modeling as m
        from paddleformers.transformers import Qwen2Config as F

        C = getattr(m, "Qwen2ForCausalLMDeprecated", None) or m.Qwen2ForCausalLM
        Q = getattr(m, "Qwen2ForCausalLMPipeDeprecated", None) or m.Qwen2ForCausalLMPipe
        return base, F, C, Q
    return None


# ---------------------------------------------------------------- MTP
def patch_dsv3_mtp_pipe(A):
    """paddleformers 1.2.0: GeneralModelForCausalLMPipe puts model.norm BEFORE the MTP layer while DeepseekV3RMSNormLayerPipe hands on a
    list -> AttributeError in DeepseekV3MTPLayerPipe.  Forward only: order of layers, names, segmentation stay the library's."""
    import paddleformers.transformers.deepseek_v3.modeling as m

    R = m.DeepseekV3RMSNormLayerPipe
    base = R.__mro__[1].forward

    def norm(self, args):
        h, rest = (args[0], tuple(args[1:])) if isinstance(args, (tuple, list)) else (args, ())
        n = self.config.num_nextn_predict_layers
        parts = [base(self, x) for x in paddle.split(h, n + 1, axis=-1)]
        return (paddle.concat(parts, axis=-1),) + rest

    R.forward = norm
    Hbase = m.DeepseekV3LMHeadPipe.__mro__[1].forward

    def head(self, args):
        h = args[0] if isinstance(args, (tuple, list)) else args
        return [Hbase(self, x) for x in paddle.split(h, self.config.num_nextn_predict_layers + 1, axis=-1)]

    m.DeepseekV3LMHeadPipe.forward = head


def patch_dsv3_mtp_sp(A):
    """paddleformers 1.2.0: under sequence_parallel DeepseekV3Model gathers the hidden state for the MTP layer and never scatters it
    again -> shape error in apply_rotary_pos_emb.  Forward only."""
    import paddleformers.transformers.deepseek_v3.modeling as m

    dec = m.DeepseekV3DecoderLayer.forward

    def fwd(self, hidden_states, nextn_hidden_state, *a, **k):
        x = self.eh_proj(paddle.concat([self.hnorm(hidden_states), self.enorm(nextn_hidden_state)], axis=-1))
        if self.config.sequence_parallel and x.ndim == 3:
            x = m.ScatterOp.apply(x.reshape([-1, x.shape[-1]]))
        out = dec(self, x, *a, **k)
        return out[0] if type(out) is tuple else out

    m.DeepseekV3MTPLayer.forward = fwd


def patch_nbatch(A):
    """paddleformers 1.2.0: Ernie4_5_MoeModel calls its MTP block without position_embeddings, so that every later argument lands one
    place too early -> "cannot unpack non-iterable bool object".  Forward only."""
    import paddleformers.transformers.ernie4_5_moe.modeling as m

    f, last = m.Ernie4_5_MoeDecoderLayer.forward, {}

    def fwd(
        self,
        hidden_states,
        attention_mask=None,
        attn_mask_startend_row_indices=None,
        position_ids=None,
        position_embeddings=None,
        output_attentions=False,
        past_key_values=None,
        use_cache=False,
        **k,
    ):
        if isinstance(position_embeddings, bool):
            output_attentions, past_key_values, use_cache = (
                position_embeddings,
                output_attentions,
                past_key_values,
            )
            position_embeddings = last["pe"]
        last["pe"] = position_embeddings
        return f(
            self,
            hidden_states,
            attention_mask,
            attn_mask_startend_row_indices,
            position_ids,
            position_embeddings,
            output_attentions,
            past_key_values,
            use_cache,
            **k,
        )

    m.Ernie4_5_MoeDecoderLayer.forward = fwd
    g = (
        m.Ernie4_5_MoeForCausalLM.forward
    )  # return_dict=True (its default) hands no mtp_logits to the criterion

    def fwd2(self, *a, **k):
        k["return_dict"] = False
        return g(self, *a, **k)

    m.Ernie4_5_MoeForCausalLM.forward = fwd2


def patch_p5(A):
    """paddle.save as of 3.4 (Paddle #79660, cherry-pick #79675): default protocol 5.  The installed functions, with the two numbers changed;
    P5_READONLY=1: float32 arrays are handed to pickle as read-only views (what a zero-copy view of the tensor may be)."""
    import inspect, re, textwrap
    import paddle.framework.io as io

    for n in ("_build_saved_state_dict", "_pickle_save", "_legacy_save", "save"):
        src = textwrap.dedent(inspect.getsource(getattr(io, n)))
        src = src.replace("protocol > 4", "protocol > 5").replace("1<'protocol'<5", "1<'protocol'<6")
        if n == "save":
            src = re.sub(r"protocol: Literal\[2, 3, 4\] = 4", "protocol=5", src)
            src = re.sub(r"\) -> None:", "):", src, 1)
            src = re.sub(r"^(@.*\n)+", "", src)
        if os.environ.get("P5_READONLY"):
            src = (
                src.replace("data = np.array(self.cpu())", "data = _p5_view(self)")
                .replace("np.array(value.cpu())", "_p5_view(value)")
                .replace("np.array(value)", "_p5_view(value)")
            )
        exec(compile("from __future__ import annotations\n" + src, io.__file__, "exec"), io.__dict__)

    def _p5_view(t):
        a = np.array(t.cpu())
        if a.dtype == np.float32:
            a.flags.writeable = False
        return a

    io._p5_view = _p5_view
    paddle.save = io.save
    paddle.framework.save = io.save
    assert inspect.signature(io.save).parameters["protocol"].default == 5


def patch_fp16(A):
    """paddle.amp.AmpScaler switches itself off on a CPU place: the same constructor without that test, so that loss scaling really runs"""
    import inspect, textwrap
    import paddle.amp.grad_scaler as gs

    src = textwrap.dedent(inspect.getsource(gs.AmpScaler.__init__)).replace(
        "if enable and not (", "if False and not ("
    )
    exec(compile("from __future__ import annotations\n" + src, gs.__file__, "exec"), gs.__dict__)
    gs.AmpScaler.__init__ = gs.__dict__.pop("__init__")
    from paddle import _legacy_C_ops as L

    def check_finite_and_unscale(xs, scale, outs, found, *a):  # no CPU kernel
        bad = False
        with paddle.no_grad():
            for x, o in zip(xs, outs):
                y = x.astype("float32") / scale
                bad |= not bool(paddle.isfinite(y).all())
                paddle.assign(y.astype(o.dtype), o)
            paddle.assign(paddle.to_tensor(np.array([bad])), found)

    L.check_finite_and_unscale = check_finite_and_unscale


def sample(d, A, mcfg):
    if want(A, "nbatch"):  # ernie MTP asks for it: no packing here
        d["nbatch_pack_offset"] = np.zeros_like(d["input_ids"])
    return d


# ---------------------------------------------------------------- LoRA
def make_lora(model, A, args, DT):
    from paddleformers.peft import LoRAConfig, LoRAModel
    from paddleformers.cli.utils.llm_utils import get_lora_target_modules

    kw = json.loads(A.lora)
    kw.setdefault("target_modules", get_lora_target_modules(model))
    r = kw.setdefault("r", 4)
    kw.setdefault("lora_alpha", 2 * r)
    cfg = LoRAConfig(
        merge_weights=False,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        dtype=DT,
        base_model_name_or_path="base",
        **kw,
    )
    if dist.get_world_size() == 1:
        base = os.path.join(A.out, "base")
        os.makedirs(base, exist_ok=True)
        model.save_pretrained(base, save_checkpoint_format=None, save_to_hf=False, safe_serialization=False)
    m = LoRAModel(model, cfg)
    if hasattr(m, "_set_pipeline_name_mapping"):
        m._set_pipeline_name_mapping()
    # same start in every topology: A from the key's checksum, B small and not zero (zero at birth: then A gets no gradient in step 1)
    import zlib, truth as T

    with paddle.no_grad():
        for k, p in m.model.state_dict().items():
            if "lora_" in k:
                tp = T.is_tp(k, p, args)
                shape = list(p.shape)
                ax = T.tp_axis(k, p)
                if tp:
                    shape[ax] *= T.tpdeg(args)
                a = np.random.RandomState(zlib.crc32(k.encode()) & 0xFFFF).randn(*shape).astype("float32") * (
                    0.1 if "lora_A" in k else 0.02
                )
                if tp:
                    a = np.split(a, T.tpdeg(args), axis=ax)[args.tensor_parallel_rank]
                paddle.assign(paddle.to_tensor(a).astype(p.dtype), p)
    return m


class _Proxy:
    pass


def unfuse(opt, model):
    """stage1_tensor_fusion: optimizer state belongs to fused buffers; a parameter is a view into one, found by its address"""
    chain = []
    while opt is not None:
        chain.append(opt)
        d = opt.__dict__
        opt = d.get("_inner_opt") or d.get("_optim") or d.get("_inner_optimizer")
    fo = [o for o in chain if o.__dict__.get("_rank2fused")]
    if not fo:
        return
    inner = chain[-1]
    mws, accs = dict(inner._master_weights), {k: dict(v) for k, v in inner._accumulators.items()}
    for f in fo[0]._rank2fused[fo[0]._sharding_rank]:
        m = mws[f.name]
        a, n = f.data_ptr(), int(np.prod(f.shape))
        for k, p in model.state_dict().items():
            off = (p.data_ptr() - a) // 2
            if 0 <= off < n:
                e = off + int(np.prod(p.shape))
                w = m[off:e].reshape(p.shape)
                w.name = p.name + "_fp32_master_0"
                inner._master_weights[p.name] = w
                for an, d in accs.items():
                    t = d[m.name]
                    inner._accumulators[an][w.name] = (
                        t.clone() if t.shape == [1] else t[off:e].reshape(p.shape)
                    )
                print("FUSED", f.name, k, off, flush=True)


def gather(T, trainer, A, args):
    if want(A, "wait"):  # use_async_save writes from another process; our driver leaves by os._exit
        import time

        time.sleep(12)
    if want(A, "unfuse"):
        unfuse(trainer.optimizer, trainer.model)
    if not A.lora:
        return T.gather(trainer, A, args)
    q = _Proxy()
    q.model, q.optimizer, q.model_wrapped, q.callback_handler = (
        trainer.model.model,
        trainer.optimizer,
        trainer.model_wrapped,
        trainer.callback_handler,
    )
    T.gather(q, A, args)
    if dist.get_rank() == 0:
        split_lora_truth(A.out)


def split_lora_truth(out):
    """truth.safetensors: what is trained; truth_base.safetensors: the parameters of the base (in no file of the checkpoint, but for those that are trained too)"""
    from compare_raw import read, write

    t = read(out + "/truth.safetensors")
    state = lambda k: k.endswith((".w_0", ".moment1_0", ".moment2_0", ".beta1_pow_acc_0", ".beta2_pow_acc_0"))
    base = {k: v for k, v in t.items() if "lora_" not in k and not state(k)}
    trained = lambda k: f"{k.rpartition('.')[0] if state(k) else k}.w_0" in t
    write({k: v for k, v in t.items() if trained(k)}, out + "/truth.safetensors")
    write(base, out + "/truth_base.safetensors")


def before_model(A, args, config):
    n = getattr(config, "num_nextn_predict_layers", 0) or 0
    if n:
        config.max_sequence_length = (
            A.seq - n
        )  # what the main model sees after the cut; the LM head reshapes to it under sequence_parallel


def after_model(A, args, model):
    f = globals().get("muon_model")
    if want(A, "muon"):
        f(A, args, model)


def late(A, args, model):
    pass


def after_trainer(A, args, trainer):
    pass


# ---------------------------------------------------------------- Muon (paddle >= 3.4 overlaid on 3.3.1; the two upstream files lie in $MUON_OVERLAY)
def patch_muon(A):
    import importlib, paddle.optimizer

    sys.path.insert(0, os.environ["MUON_OVERLAY"])
    mu, ms = importlib.import_module("muon_up"), importlib.import_module("muon_sharding_up")
    sys.modules["paddle.optimizer.muon"] = mu
    paddle.optimizer.muon, paddle.optimizer.Muon = mu, mu.Muon
    sys.modules["paddle.distributed.fleet.meta_optimizers.muon_sharding_optimizer"] = ms
    from paddle.distributed.fleet.base.distributed_strategy import DistributedStrategy

    DistributedStrategy.use_muon_sharding = False  # a field of newer Paddle's strategy
    import paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.hybrid_parallel_optimizer as h

    h.DygraphShardingOptimizerV2 = (
        ms.MuonShardingOptimizer
    )  # what newer HybridParallelOptimizer does when strategy.use_muon_sharding
    import paddleformers.trainer.trainer_utils as tu, paddleformers.trainer.utils.reshard.common as rc, paddleformers.utils.moe_hybrid_parallel_optimizer as mh

    for m in (tu, rc, mh):
        m.MuonShardingOptimizer = ms.MuonShardingOptimizer


def muon_model(A, args, model):
    """1.2.0 has build_muon_param_info_map only in paddlefleet models: the same rule (deepseek_v4), no slicing, for an eager model"""
    from paddle.optimizer.muon import MuonParamInfo, _default_should_use_muon as use

    pp = getattr(model, "_pp_to_single_mapping", None) or {}
    if hasattr(model, "_set_pipeline_name_mapping"):
        pp = {v: k for k, v in (model._set_pipeline_name_mapping() or {}).items()} or pp

    def build(m, config):
        ex = config.muon_configs["muon_exclude_patterns"]
        return {
            p.name: MuonParamInfo(use_muon=use(pp.get(n, n), p.shape, ex) and use(p.name, p.shape, ex))
            for n, p in m.named_parameters()
        }

    object.__setattr__(model, "build_muon_param_info_map", build)
