"""Ground truth from LIVE objects (never from the checkpoint files).

Every rank dumps what it holds in memory (parameter tensors, Adam accumulators, master
weights, EMA buffers) plus where each piece sits (tp split axis, flat interval of the
stage1-v2 comm buffer / stage3 slice) to a private npz; rank 0 joins them to full
logical tensors, checks that replicas agree bit for bit, and writes safetensors:
    <struct>                     parameter, in training dtype (bf16)
    <struct>.w_0                 fp32 master weight
    <struct>.moment1_0 / .moment2_0 / .beta1_pow_acc_0 / .beta2_pow_acc_0
    <struct>.ema_w_0             fp32 EMA of the master weight (if EMA ran)
"""

import json, os, pickle, re
import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed import fleet

KIND = {
    "moment1": "moment1_0",
    "moment2": "moment2_0",
    "beta1_pow_acc": "beta1_pow_acc_0",
    "beta2_pow_acc": "beta2_pow_acc_0",
}


FUSED = ("gate_up_fused_proj", "up_gate_proj", "gate_up_proj", ".w1")  # one tp rank holds [gate_r | up_r]
QKV = ("qkv_proj", "fused_rms_norm_linear.linear_weight")  # one tp rank holds [q_r | k_r | v_r]
EP = dict(rank=0, world=1, heads=None, kv=None, single=lambda k: k)


def glob_key(k, n):
    """experts carry ids local to a rank: global = ep rank * experts of a rank + local"""
    if EP.get("local_ids") is False:
        return k
    if EP["world"] > 1 and re.search(
        r"\.experts\.(up_gate_proj|down_proj)\.", k
    ):  # one 3-D parameter: this rank's part of axis 0
        return f"{k}@ep{EP['rank']}"
    return re.sub(r"(\.experts\.)(\d+)(?=\.)", lambda m: f"{m[1]}{int(m[2]) + EP['rank'] * n}", k)


def local_experts(sd):
    ids = [int(m[1]) for k in sd if (m := re.search(r"\.mlp\.experts\.(\d+)\.", k))]
    return max(ids) + 1 if ids else 0


def parts_of(key, width):
    """widths of the logical parts of a fused tensor (whole tensor or one tp rank's)"""
    if any(f in key for f in QKV) and EP["kv"] and EP["kv"] != EP["heads"]:
        u = width // (EP["heads"] + 2 * EP["kv"])
        return [u * EP["heads"], u * EP["kv"], u * EP["kv"]]
    if any(f in key for f in FUSED) and "shared_layers" not in key:
        return [width // 2] * 2
    return [width]


def cut_parts(a, key, ax):
    w = parts_of(key, a.shape[ax])
    return np.split(a, list(np.cumsum(w))[:-1], axis=ax)


def start_values(model, args, A, fleet):
    """the same start for every topology: values are a function of the tensor's global single-card name"""
    import zlib

    cfg = model.config
    EP.update(heads=cfg.num_attention_heads, kv=getattr(cfg, "num_key_value_heads", None))
    if getattr(cfg, "moe_world_size", 1) and getattr(cfg, "moe_world_size", 1) > 1:
        EP.update(rank=cfg.moe_rank, world=cfg.moe_world_size)
    elif getattr(args, "expert_model_parallel_size", 1) > 1:
        EP.update(rank=args.expert_parallel_rank, world=args.expert_model_parallel_size)
    if "deepseek" in type(model).__module__:
        EP["kv"] = None
    sd = model.state_dict()
    n = local_experts(sd)
    with paddle.no_grad():
        for k, p in sd.items():
            if str(p.dtype).endswith("int64"):
                continue
            g = re.sub(r"^(ernie\.embed|embed_share)\.embed_tokens", "ernie.embed_tokens", glob_key(k, n))
            g = re.sub(r"^(deepseek_v2|model)\.", "", g)
            shape = [int(x) for x in p.shape]
            tpd = is_tp(k, p, args)
            if tpd:
                shape[tp_axis(k, p)] *= tpdeg(args)
            rng = np.random.RandomState(zlib.crc32(g.encode()))
            a = rng.randn(*shape).astype("float32")
            if len(shape) == 1 and ("norm" in k or "ln_weight" in k):
                a = 1 + 0.1 * a
            elif "e_score_correction_bias" in k:
                a = 0.01 * a
            else:
                a = 0.1 * a
            if tpd:
                ax, D, r = tp_axis(k, p), tpdeg(args), args.tensor_parallel_rank
                a = np.concatenate([np.split(x, D, axis=ax)[r] for x in cut_parts(a, k, ax)], axis=ax)
            assert list(a.shape) == [int(x) for x in p.shape], (k, a.shape, p.shape)
            paddle.assign(paddle.to_tensor(a).astype(p.dtype), p)


def is_ep(p, args):
    """expert under REAL expert parallel: a whole expert on one EP rank; the library sets is_distributed=True without a tp split"""
    return bool(getattr(p, "no_sync", False)) and EP["world"] > 1


def tp_axis(k, p):
    ax = getattr(p, "split_axis", None)
    if ax is None and k == "lm_head.weight" and getattr(p, "is_distributed", False):
        ax = 1  # paddlenlp DeepseekV2LMHead: [hidden, vocab/tp], split_axis is not set
    return ax


def is_tp(k, p, args):
    """is_distributed alone is no sign of a tp split (EP experts, e_score_correction_bias); split_axis is"""
    return (
        bool(getattr(p, "is_distributed", False))
        and tp_axis(k, p) is not None
        and tpdeg(args) > 1
        and not is_ep(p, args)
    )


def tpdeg(args):
    return max(
        getattr(args, "tensor_model_parallel_size", None) or getattr(args, "tensor_parallel_degree", 1), 1
    )


def _np(t):
    with paddle.no_grad():
        return t.detach().astype("float32").cpu().numpy().copy()


def load_init(model, path, args):
    full = np.load(path)
    with paddle.no_grad():
        for k, p in model.state_dict().items():
            if (
                k not in full and "proj.weight" in k
            ):  # dsv3: single card has up_gate_proj, under EP gate_proj + up_proj
                g, u = np.split(
                    full[k.replace(".gate_proj.", ".up_gate_proj.").replace(".up_proj.", ".up_gate_proj.")],
                    2,
                    axis=-1,
                )
                a = g if ".gate_proj." in k else u
            else:
                a = full[k]
            if is_tp(k, p, args):
                ax, D, r = tp_axis(k, p), tpdeg(args), args.tensor_parallel_rank
                cut = lambda x: np.split(x, D, axis=ax)[r]
                if any(f in k for f in FUSED) and list(a.shape)[ax] != list(p.shape)[ax]:
                    g, u = np.split(a, 2, axis=ax)
                    a = np.concatenate([cut(g), cut(u)], axis=ax)
                else:
                    a = cut(a)
            assert list(a.shape) == list(p.shape), (k, a.shape, p.shape)
            paddle.assign(paddle.to_tensor(a).astype(p.dtype), p)


def dump_init(model, path):
    np.savez(path, **{k: _np(v) for k, v in model.state_dict().items()})


def _chain(opt):
    seen = []
    while opt is not None and opt not in seen:
        seen.append(opt)
        d = opt.__dict__
        opt = d.get("_inner_opt") or d.get("_optim") or d.get("_inner_optimizer")
    return seen


def gather(trainer, A, args, stage3=None):
    model, opt = trainer.model, trainer.optimizer
    ws, rank = dist.get_world_size(), dist.get_rank()
    chain = _chain(opt)
    inner = chain[-1]
    hy = args.use_hybrid_parallel
    coord = dict(
        tp=args.tensor_parallel_rank if hy else 0,
        pp=args.pipeline_parallel_rank if hy else 0,
        sh=args.sharding_parallel_rank if hy else 0,
        dp=args.data_parallel_rank if ws > 1 else 0,
        rank=rank,
        ep=EP["rank"],
        msh=getattr(args, "moe_sharding_parallel_rank", 0) if hy else 0,
    )
    views = {}
    for o in chain:
        for b in o.__dict__.get("_comm_buffer_list", []) or []:
            for n, v in b._sharding_param_grad_view.items():
                views[n] = dict(index=v._index, padded=v._padded_size, begin=v._param_begin, end=v._param_end)
    s3 = {}
    wrapped = trainer.model_wrapped
    if "GroupShardedStage3" in type(wrapped).__name__:
        for n, iv in wrapped._param2buffer.items():
            s3[n] = [list(map(int, x)) for x in iv]
    pieces = []
    ema, emap = {}, {}
    for cb in trainer.callback_handler.callbacks:
        if type(cb).__name__ == "NonZCCEMACallback":
            ema = dict(cb.buffer.master_weights)
            emap = dict(cb.buffer.model_params)
    sd = model.state_dict()
    n_local = local_experts(sd)
    for k, p in sd.items():
        if str(p.dtype).endswith("int64"):
            continue
        tpd = hy and is_tp(k, p, args)
        base = dict(
            struct=glob_key(k, n_local),
            local=k,
            name=p.name,
            dtype=str(p.dtype).split(".")[-1],
            tpd=tpd,
            isd=bool(getattr(p, "is_distributed", False)),
            nosync=bool(getattr(p, "no_sync", False)),
            sg=bool(p.stop_gradient),
            axis=tp_axis(k, p) if tpd else None,
            shape=[int(x) for x in p.shape],
        )
        pieces.append(dict(base, kind="param", arr=_np(p), flat=None))
        mws = inner._master_weights or {}
        mw = mws.get(p.name, mws.get("slice@" + p.name))  # stage3 keys slices "slice@<param>"

        def emit(kind, t):
            a = _np(t)
            flat = None
            if "pow_acc" not in kind:
                if p.name in views:
                    v = views[p.name]
                    if v["begin"] >= v["end"]:
                        return
                    flat = [v["begin"] - v["index"], v["end"] - v["index"]]
                    assert a.size == flat[1] - flat[0], (k, a.shape, v)
                elif p.name in s3 and list(a.shape) != base["shape"]:
                    flat = s3[p.name][coord["sh"]]
                    assert a.size == flat[1] - flat[0], (k, a.shape, flat)
            pieces.append(dict(base, kind=kind, arr=a, flat=flat))

        if mw is not None:
            emit("w_0", mw)
        for an, d in inner._accumulators.items():
            for key in ([mw.name] if mw is not None else []) + [p.name]:
                if key in d:
                    emit(KIND.get(an, an), d[key])
                    break
        if not any((mw is not None and mw.name in d) or p.name in d for d in inner._accumulators.values()):
            # right after a load: states wait in _accumulators_holder until the first step
            for an, kind in KIND.items():
                for key in ([f"{mw.name}_{an}_0"] if mw is not None else []) + [f"{p.name}_{an}_0"]:
                    t = getattr(inner, "_accumulators_holder", {}).get(key)
                    if t is not None:
                        emit(kind, t)
                        break
        if p.name in ema:
            emit("ema_w_0", ema[p.name])
        if (
            k in emap and p.dtype == paddle.float32
        ):  # (FlexCheckpoint's buffer also averages every bf16 parameter in memory; it is not saved)
            #                   # fp32 tensors without a master weight (router): EMA of the tensor itself, full shape
            pieces.append(dict(base, kind="ema", arr=_np(emap[k]), flat=None))
    os.makedirs(A.out, exist_ok=True)
    with open(os.path.join(A.out, f"_pieces_{rank}.pkl"), "wb") as f:
        pickle.dump(
            dict(coord=coord, pieces=pieces, chain=[type(o).__name__ for o in chain], lr=float(opt.get_lr())),
            f,
            4,
        )
    if ws > 1:
        dist.barrier()
    if rank == 0:
        merge(A.out, ws)
    if ws > 1:
        dist.barrier()


def merge(out, ws):
    import collections

    db = collections.defaultdict(list)
    info = None
    for r in range(ws):
        d = pickle.load(open(os.path.join(out, f"_pieces_{r}.pkl"), "rb"))
        info = info or dict(
            chain=d["chain"],
            lr=d["lr"],
            holders_columns="rank,tp,pp,sh,ep,msh",
            slices_columns="rank,tp,sh,ep,msh,begin,end",
        )
        for p in d["pieces"]:
            p["coord"] = d["coord"]
            db[(p["struct"], p["kind"])].append(p)
    alt = {}
    full, rep = (
        {},
        dict(
            info, world=ws, replicas_checked=0, replica_mismatch=[], names={}, v2_slices=0, padding_nonzero=[]
        ),
    )
    for (k, kind), ps in sorted(db.items()):
        key0 = f"{k}:{kind}"
        rep["names"].setdefault(k, sorted({p["name"] for p in ps}))
        if kind == "param":
            if any(p["local"] != k for p in ps):
                rep.setdefault("local_keys", {})[k] = sorted({p["local"] for p in ps})
            rep.setdefault("split_axis", {})[k] = ps[0]["axis"]
            rep.setdefault("attrs_is_distributed_tpsplit_nosync_stopgradient", {})[k] = [
                ps[0]["isd"],
                ps[0]["tpd"],
                ps[0]["nosync"],
                ps[0]["sg"],
            ]
            rep.setdefault("holders", {})[k] = [
                [
                    p["coord"]["rank"],
                    p["coord"]["tp"],
                    p["coord"]["pp"],
                    p["coord"]["sh"],
                    p["coord"]["ep"],
                    p["coord"]["msh"],
                ]
                for p in ps
            ]
        if ps[0]["flat"] is not None and kind == "moment1_0":
            rep.setdefault("slices", {})[k] = [
                [p["coord"]["rank"], p["coord"]["tp"], p["coord"]["sh"], p["coord"]["ep"], p["coord"]["msh"]]
                + [int(z) for z in p["flat"]]
                for p in ps
            ]
        by_tp = collections.defaultdict(list)
        for p in ps:
            by_tp[p["coord"]["tp"]].append(p)
        parts = []
        for tp in sorted(by_tp):
            grp = by_tp[tp]
            if grp[0]["flat"] is None:
                a = grp[0]["arr"]
                for q in grp[1:]:
                    rep["replicas_checked"] += 1
                    if not np.array_equal(a, q["arr"]):
                        rep["replica_mismatch"].append(
                            [k, kind, q["coord"], float(np.abs(a - q["arr"]).max())]
                        )
            else:
                n = int(np.prod(grp[0]["shape"]))
                end = max(p["flat"][1] for p in grp)
                buf = np.full(max(end, n), np.nan, "float32")
                for q in grp:
                    s, e = q["flat"]
                    rep["v2_slices"] += 1
                    cur = buf[s:e]
                    m = ~np.isnan(cur)
                    if m.any():
                        rep["replicas_checked"] += 1
                        if not np.array_equal(cur[m], q["arr"].reshape(-1)[m]):
                            rep["replica_mismatch"].append(
                                [k, kind, q["coord"], float(np.abs(cur[m] - q["arr"].reshape(-1)[m]).max())]
                            )
                    cur[~m] = q["arr"].reshape(-1)[~m]  # the lowest rank's copy wins (view of buf)
                assert not np.isnan(buf[:n]).any(), ("hole", k, kind)
                if buf.size > n and np.nanmax(np.abs(buf[n:])) != 0:
                    rep["padding_nonzero"].append([k, kind])
                a = buf[:n].reshape(grp[0]["shape"])
            if parts and not (ps[0]["tpd"] and "pow_acc" not in kind):
                # replicated over tp: tp 0 is the truth, the others are compared with it (see tp_drift)
                rep["replicas_checked"] += 1
                if not np.array_equal(parts[0], a):
                    rep["replica_mismatch"].append(
                        [k, kind, grp[0]["coord"], float(np.abs(parts[0] - a).max())]
                    )
                    alt[f"{k if kind == 'param' else k + '.' + kind}@tp{tp}"] = paddle.to_tensor(a).astype(
                        ps[0]["dtype"] if kind == "param" else "float32"
                    )
                    rep.setdefault("tp_drift", []).append(
                        [k, kind, tp, float(np.abs(parts[0] - a).max() / max(np.abs(a).max(), 1e-30))]
                    )
                continue
            parts.append(a)
        if ps[0]["tpd"] and "pow_acc" not in kind:
            if any(f in k for f in FUSED + QKV):
                # tp rank r holds [gate_r | up_r]; the logical tensor is [gate | up]
                h = [cut_parts(q, k, ps[0]["axis"]) for q in parts]
                a = np.concatenate(
                    [np.concatenate([x[i] for x in h], axis=ps[0]["axis"]) for i in range(len(h[0]))],
                    axis=ps[0]["axis"],
                )
                rep.setdefault("interleaved_tp_merge", []).append(key0)
            else:
                a = np.concatenate(parts, axis=ps[0]["axis"])
        else:
            a = parts[0]
        key = k if kind == "param" else f"{k}.{kind}"
        t = paddle.to_tensor(a)
        if kind == "param" and ps[0]["dtype"] != "float32":
            t = t.astype(ps[0]["dtype"])
        full[key] = t
    for k in sorted(
        x for x in full if "@ep0" in x
    ):  # fused experts: [E/ep, ...] of every expert rank make [E, ...]
        parts = [
            full.pop(k.replace("@ep0", f"@ep{e}"))
            for e in range(sum(1 for x in list(full) if re.sub(r"@ep\d+", "@ep0", x) == k))
        ]
        full[k.replace("@ep0", "")] = parts[0] if "pow_acc" in k else paddle.concat(parts, axis=0)
    import struct as S

    write_safetensors(full, os.path.join(out, "truth.safetensors"))
    if alt:  # replicated tensors whose copies on tp rank > 0 differ from tp rank 0's in live memory
        write_safetensors(alt, os.path.join(out, "truth_alt.safetensors"))
    json.dump(rep, open(os.path.join(out, "truth_report.json"), "w"), indent=0, default=lambda o: o.item())
    for r in range(ws):
        os.unlink(os.path.join(out, f"_pieces_{r}.pkl"))
    print(
        "TRUTH",
        len(full),
        "tensors; replicas checked",
        rep["replicas_checked"],
        "mismatch",
        len(rep["replica_mismatch"]),
        "flat slices",
        rep["v2_slices"],
        "chain",
        rep["chain"],
        flush=True,
    )


def write_safetensors(d, path):
    """minimal writer: keeps bf16 as BF16 without any framework round trip"""
    hdr, off, blobs = {}, 0, []
    for k in sorted(d):
        t = d[k].detach().contiguous()
        a = t.numpy()
        dt = {"bfloat16": "BF16", "float32": "F32", "float16": "F16", "int64": "I64"}[
            str(t.dtype).split(".")[-1]
        ]
        b = a.tobytes()
        hdr[k] = {"dtype": dt, "shape": [int(x) for x in t.shape], "data_offsets": [off, off + len(b)]}
        off += len(b)
        blobs.append(b)
    import struct

    h = json.dumps(hdr).encode()
    h += b" " * (-len(h) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(h)))
        f.write(h)
        for b in blobs:
            f.write(b)
