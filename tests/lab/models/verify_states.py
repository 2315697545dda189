#!/usr/bin/env python
"""verify.py [CASE...]: independent reader (numpy + pickle) of the laboratory's cases against truth.safetensors, bit for bit.
Extends verify_corpus.py: LoRA files (lora_model_state*), pickle protocol 5, float16, AdamWMini's moment2 of one element, optimizer shards of unified
checkpoints, layers of MTP exported to HuggingFace layout."""

import glob, json, os, re, sys
import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import verify_corpus as V
from compare_raw import read

C = os.environ["CORPUS"]


DT = {"F32": "<f4", "BF16": "<u2", "F16": "<f2", "I64": "<i8", "U16": "<u2"}


def truth(path):
    out = {}
    for k, (dt, sh, b) in read(path).items():
        if dt not in DT:
            raise ValueError("dtype " + dt)
        a = np.frombuffer(b, DT[dt]).reshape(sh)
        out[k] = (a.astype("uint32") << 16).view("float32") if dt in ("BF16", "U16") else a.astype("float32")
    return out


V.load = truth
_glob = glob.glob


def lora_glob(p, *a, **k):
    r = _glob(p, *a, **k)
    if "/model_state*.pdparams" in p:
        r += _glob(p.replace("/model_state", "/lora_model_state"), *a, **k)
    if p.endswith("/*.safetensors"):  # unified checkpoint, optim_shard_num > 1 (ignore_merge_optimizer)
        r += _glob(p + "_shard_*", *a, **k)
    return r


V.glob.glob = lora_glob
_val = V.val


def val(v):  # moments of 16 bits (use_lowprecision_moment)
    v = _val(v)
    return V.f32(v) if isinstance(v, np.ndarray) and v.dtype == np.uint16 else v


V.val = val


class Mini(np.ndarray):
    """AdamWMini: moment2 has one element for the whole tensor"""


_conc = np.concatenate


def tfusion(ck, T):
    """stage1_tensor_fusion: v1's greedy partition (by size, largest first, to the least loaded rank); a rank's parameters in that order,
    those with weight decay in the first buffer, the others in the second; every parameter padded to 256 bytes of its own dtype"""
    r, names = {}, {}
    for f in V.glob.glob(ck + "/model_state*.pdparams"):
        o = V.unp(f)
        names.update(o.pop("StructuredToParameterName@@"))
        r.update({k: V.f32(_val(a)) for k, a in o.items()})
    files = sorted(_glob(ck + "/optimizer*.pdopt"))
    load, own = [0] * len(files), [[] for _ in files]
    for k in sorted(names, key=lambda k: -r[k].size):
        i = load.index(min(load))
        own[i].append(k)
        load[i] += r[k].size
    for i, f in enumerate(files):
        o = V.unp(f)
        mw = o["master_weights"]
        groups = [
            [k for k in own[i] if not ("bias" in k or "norm" in k)],
            [k for k in own[i] if "bias" in k or "norm" in k],
        ]
        for g, b in zip([g for g in groups if g], mw):
            off = 0
            for k in g:
                n, sh = r[k].size, r[k].shape
                r[k + ".w_0"] = _val(mw[b])[off : off + n].reshape(sh)
                for s in ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0"):
                    a = _val(o[f"{b}_fp32_master_0_{s}"])
                    r[f"{k}.{s}"] = a if "pow" in s else a[off : off + n].reshape(sh)
                off += -(-n // 128) * 128
            assert off == _val(mw[b]).size, (f, b, off)
    return r


def legacy(ck, T):
    if "tfusion" in ck:
        return tfusion(ck, T)
    if "mini" not in ck:
        return V.legacy(ck, T)
    # one file per parameter, whole tensors only (single card, stage 1 v1)
    r = {}
    names = {}
    for f in V.glob.glob(ck + "/model_state*.pdparams"):
        o = V.unp(f)
        names.update(o.pop("StructuredToParameterName@@"))
        r.update({k: V.f32(_val(a)) for k, a in o.items()})
    for f in _glob(ck + "/optimizer*.pdopt"):
        o = V.unp(f)
        mw = o["master_weights"]
        for st, pn in names.items():
            if pn in mw:
                r[st + ".w_0"] = _val(mw[pn])
                for k in ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0"):
                    r[f"{st}.{k}"] = _val(o[f"{pn}_fp32_master_0_{k}"])
    return r


def one(n):
    V.NOTE.clear()
    ck = _glob(f"{C}/{n}/checkpoint-*")[0]
    T = truth(f"{C}/{n}/truth.safetensors")
    mini = "mini" in n
    if _glob(ck + "/*.pdopt"):
        r = legacy(ck, T)
    elif _glob(ck + "/model_state/*.metadata"):
        r = V.flex(
            [
                ck + "/" + x
                for x in ("model_state", "optimizer_state", "master_weight")
                if _glob(f"{ck}/{x}/*.metadata")
            ],
            T,
        )
        if _glob(ck + "/ema_state/*.metadata"):
            e = V.flex([ck + "/ema_state"], T)
            r.update({(k[:-4] + ".ema_w_0" if k.endswith(".w_0") else k + ".ema"): v for k, v in e.items()})
    else:
        r = V.unified(ck, T)
    rep = json.load(open(f"{C}/{n}/truth_report.json"))
    at = rep.get("attrs_is_distributed_tpsplit_nosync_stopgradient", {})
    if "lora" in n:
        # LoRAModel.state_dict() prefixes its own attribute: model_meta.json speaks of model.model.layers..., every other file of model.layers...
        r = {re.sub(r"^model\.model\.", "model.", k): v for k, v in r.items()}
        base = f"{C}/{n}/truth_base.safetensors"
        if _glob(ck + "/model_state/*.metadata") and os.path.exists(
            base
        ):  # FlexCheckpoint holds the frozen base too
            T.update(truth(base))
    lost = [
        k for k in T if k not in r and (at.get(k, [0, 0, 0, 0])[3] or k.endswith("e_score_correction_bias"))
    ]
    T = {k: v for k, v in T.items() if k not in lost}
    alt = {}
    if os.path.exists(f"{C}/{n}/truth_alt.safetensors"):
        for k, a in truth(f"{C}/{n}/truth_alt.safetensors").items():
            alt.setdefault(k.split("@")[0], []).append(a)
    miss, extra, bad, other = (
        [k for k in T if k not in r],
        [k for k in r if k not in T and k not in lost],
        [],
        0,
    )
    for k in T:
        if k not in r:
            continue
        a = r[k]
        if a.shape != T[k].shape and a.size == T[k].size:
            a = a.reshape(T[k].shape)
        if a.shape != T[k].shape:
            bad.append((k, a.shape, T[k].shape))
            continue
        eq = a == T[k]
        if eq.all():
            continue
        for b in alt.get(k, []):
            eq |= a == b
        if eq.all():
            other += 1
        else:
            bad.append((k, float(np.nanmax(np.abs(a - T[k])))))
    notes = list(V.NOTE)
    if lost:
        notes.append(f"in no file: {lost[:2]} ({len(lost)})")
    if other:
        notes.append(f"{other} from another tp rank's drifted copy")
    return f"{n} tensors {len(T)} {'OK' if not miss and not bad else 'DIFF'} missing {len(miss)} {miss[:2]} extra {len(extra)} {extra[:2]} bad {len(bad)} {bad[:3]} {notes}"


if __name__ == "__main__":
    for n in sys.argv[1:] or sorted(os.path.basename(os.path.dirname(p)) for p in _glob(C + "/*/case.json")):
        try:
            print(one(n), flush=True)
        except Exception as e:
            import traceback

            tb = traceback.extract_tb(e.__traceback__)[-1]
            print(
                n,
                "READER FAILED",
                type(e).__name__,
                str(e)[:150],
                os.path.basename(tb.filename),
                tb.lineno,
                flush=True,
            )
