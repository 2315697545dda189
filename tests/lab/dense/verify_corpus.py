#!/usr/bin/env python
"""Independent reader (numpy + pickle only, no paddle) of every case; compares the FILES with truth.safetensors.
Doubles as executable documentation of the formats.   verify_corpus.py [case...]"""

import glob, json, os, pickle, re, struct, sys
import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from compare_truth import load

C = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class Stub:
    def __init__(s, *a, **k):
        pass

    def __setstate__(s, st):
        s.__dict__.update(st)

    def __hash__(s):
        return hash(str(s.__dict__))

    def __eq__(s, o):
        return s.__dict__ == o.__dict__


class U(pickle.Unpickler):
    def find_class(s, m, n):
        return type(n, (Stub,), {}) if m.startswith("paddle") else super().find_class(m, n)


NOTE = []


def unp(p):
    return U(open(p, "rb")).load()


def f32(a):
    return (a.astype("uint32") << 16).view("float32") if a.dtype == np.uint16 else np.asarray(a, "float32")


def val(v):
    return v[1] if isinstance(v, tuple) else v


def tp_join(parts, shape, key):
    if len(parts) == 1 or parts[0].shape == tuple(shape):
        return parts[0]
    ax = [i for i in range(len(shape)) if parts[0].shape[i] != shape[i]][0]
    if "gate_up_fused_proj" in key:
        h = [np.split(p, 2, axis=ax) for p in parts]
        return np.concatenate([x[0] for x in h] + [x[1] for x in h], axis=ax)
    return np.concatenate(parts, axis=ax)


def legacy(ck, T):
    idx = lambda f: tuple(
        int(m[1]) if (m := re.search(k + r"(\d+)", os.path.basename(f))) else 0 for k in ("tp", "pp", "shard")
    )
    meta = json.load(open(ck + "/model_meta.json")) if os.path.exists(ck + "/model_meta.json") else None
    par, smap, lshape = {}, {}, {}
    for f in glob.glob(ck + "/model_state*.pdparams"):
        o = unp(f)
        tp, pp, sh = idx(f)
        m = o.pop("StructuredToParameterName@@", {})
        for k, v in o.items():
            par.setdefault((tp, pp), {})[k] = f32(val(v))
            lshape.setdefault((tp, pp), {})[k] = val(v).shape
        smap.setdefault((tp, pp), {}).update(m)
    if meta:
        for k, v in meta["sharding_metas"].items():
            tp, pp = (
                map(int, re.findall(r"(\d+)", k))[:2]
                if False
                else [int(x) for x in re.findall(r"\d+", k)][:2]
            )
            smap[(tp, pp)] = v["structure_name_mapping"]
            lshape[(tp, pp)] = {a: tuple(b[0]) for a, b in v["param_meta"].items()}
    NOTE.clear()
    if not smap:
        # save_to_hf=True: no .pdparams, hence no name mapping ANYWHERE in the checkpoint; taken from truth_report.json here
        NOTE.append("no name mapping in files")
        smap[(0, 0)] = {
            k: v[0] for k, v in json.load(open(os.path.dirname(ck) + "/truth_report.json"))["names"].items()
        }
        lshape[(0, 0)] = {k: T[k].shape for k in smap[(0, 0)]}
    for f in glob.glob(ck + "/model*.safetensors"):
        par.setdefault((0, 0), {}).update(load(f))
    kinds = {
        "w_0": None,
        "moment1_0": "_moment1_0",
        "moment2_0": "_moment2_0",
        "beta1_pow_acc_0": "_beta1_pow_acc_0",
        "beta2_pow_acc_0": "_beta2_pow_acc_0",
    }
    out = {}

    def put(key, tp, arr):
        out.setdefault(key, {})[tp] = arr

    def gather(files, kindset, suffix_key):
        by = {}
        for f in files:
            by.setdefault(idx(f)[:2], []).append((idx(f)[2], unp(f)))
        for (tp, pp), L in by.items():
            L.sort(key=lambda x: x[0])
            for st, pn in smap[(tp, pp)].items():
                shp = lshape[(tp, pp)][st]
                for kind, suf in kindset.items():
                    got = []
                    for _, o in L:
                        if suf is None:
                            mw = o.get("master_weights", {})
                            v = mw.get(pn, mw.get("slice@" + pn))
                        else:
                            v = o.get(pn + "_fp32_master_0" + suf, o.get(pn + suf))
                        if v is not None:
                            got.append(np.asarray(val(v)))
                    if not got:
                        continue
                    if "pow" in kind:
                        a = got[0]
                    elif got[0].shape == shp and not (
                        len(shp) == 1 and len(got) > 1 and sum(g.size for g in got) <= shp[0]
                    ):
                        a = got[0]  # whole tensor (v1, stage2, unsliced stage3)
                    else:
                        a = np.concatenate([g.reshape(-1) for g in got])[: int(np.prod(shp))].reshape(
                            shp
                        )  # v2 / stage3 slices
                    put(f"{st}.{suffix_key.get(kind, kind)}", tp, a)

    gather(glob.glob(ck + "/optimizer*.pdopt"), kinds, {})
    if glob.glob(ck + "/ema*.pdopt"):
        gather(glob.glob(ck + "/ema*.pdopt"), {"w_0": None}, {"w_0": "ema_w_0"})
    for (tp, pp), d in par.items():
        for k, v in d.items():
            put(k, tp, v)
    res = {}
    for k, d in out.items():
        if k in T:
            res[k] = tp_join([d[t] for t in sorted(d)], T[k].shape, k)
        else:
            res[k] = d[0]
    bf16 = {k.rsplit(".", 1)[0] for k in res if k.endswith(".w_0")}
    for k in bf16:  # sharding_io drops bf16 params: cast from master
        if k not in res:
            u = res[k + ".w_0"].astype("float32").view("uint32")
            res[k] = (((u + 0x7FFF + ((u >> 16) & 1)) >> 16) << 16).astype("uint32").view("float32")
    return res


def flex(dirs, T):
    res = {}
    for d in dirs:
        m = unp(glob.glob(d + "/*.metadata")[0])
        cache = {}
        fm = m.flat_mapping or {}
        for key, metas in m.state_dict_metadata.items():
            gs = tuple(metas[0].__dict__.get("global_shape") or ())
            if not gs:
                gs = tuple(
                    max(mm.global_offset[i] + mm.local_shape[i] for mm in metas)
                    for i in range(len(metas[0].local_shape))
                )
            full = np.full(gs, np.nan, "float32")
            blocks = {}
            for ix, fn in m.storage_metadata.items():
                if ix.tensor_key != key:
                    continue
                if fn not in cache:
                    cache[fn] = unp(d + "/" + fn)
                a = f32(np.asarray(val(cache[fn][key])))
                ls = None
                for mm in metas:
                    if tuple(mm.global_offset) == tuple(ix.global_offset):
                        ls = tuple(mm.local_shape)
                blk = blocks.setdefault(
                    tuple(int(x) for x in ix.global_offset),
                    np.full(int(np.prod(ls)) if ls else 1, np.nan, "float32"),
                )
                if ix.__dict__.get("is_flattened"):
                    s, e = [int(x) for x in ix.flattened_range]
                    blk[s:e] = a.reshape(-1)[: e - s]
                else:
                    blk[:] = a.reshape(-1)
                blocks[(tuple(int(x) for x in ix.global_offset), "s")] = ls
            for off, b in blocks.items():
                if isinstance(off[-1] if off else 0, str):
                    continue
                ls = blocks[(off, "s")]
                full[tuple(slice(o, o + l) for o, l in zip(off, ls))] = b.reshape(ls)
            res[key] = full
    return res


def unified(ck, T):
    res, parts = {}, {}
    for f in sorted(glob.glob(ck + "/*.safetensors")):
        b = os.path.basename(f)
        for k, a in load(f).items():
            if b.startswith("model"):
                key = k
            elif b.startswith("master"):
                key = k + ".w_0"
            else:
                key = "%s.%s" % tuple(k.rsplit("/", 1))
            parts.setdefault(key, []).append(a)
    for k, L in parts.items():
        if k in T and L[0].shape != T[k].shape and L[0].ndim == 1:
            # paddleformers 1.2.0 + split_param: every rank's file holds its own flat padded slice under the SAME key
            # (the index json names only one of the files!); file number order == sharding rank order
            res[k] = np.concatenate(L)[: T[k].size].reshape(T[k].shape)
        else:
            res[k] = L[0]
    return res


def main():
    names = sys.argv[1:] or sorted(
        os.path.basename(os.path.dirname(p)) for p in glob.glob(C + "/*/case.json")
    )
    for n in names:
        NOTE.clear()
        ck = glob.glob(f"{C}/{n}/checkpoint-*")[0]
        T = load(f"{C}/{n}/truth.safetensors")
        try:
            if glob.glob(ck + "/*.pdopt"):
                r = legacy(ck, T)
            elif glob.glob(ck + "/dist_ckpt"):
                r = flex([ck + "/dist_ckpt"], T)
            elif glob.glob(ck + "/model_state/*.metadata"):
                r = flex(
                    [
                        ck + "/" + x
                        for x in ("model_state", "optimizer_state", "master_weight")
                        if glob.glob(f"{ck}/{x}/*.metadata")
                    ],
                    T,
                )
                if glob.glob(ck + "/ema_state/*.metadata"):
                    e = flex([ck + "/ema_state"], T)
                    r.update(
                        {(k[:-4] + ".ema_w_0" if k.endswith(".w_0") else k + ".ema"): v for k, v in e.items()}
                    )
            else:
                r = unified(ck, T)
        except Exception as e:
            import traceback

            print(
                n,
                "READER FAILED",
                type(e).__name__,
                str(e)[:150],
                traceback.extract_tb(e.__traceback__)[-1].lineno,
            )
            continue
        for k in list(r):  # HF layout (save_to_hf=True): linears transposed
            if k in T and T[k].ndim == 2 and "_tohf" in n and k.endswith("_proj.weight"):
                r[k] = r[k].T
        if n.startswith("auto_"):
            T = {k.replace("/", "."): v for k, v in T.items()}
        miss = [k for k in T if k not in r]
        extra = [k for k in r if k not in T]
        bad = [
            (k, r[k].shape, T[k].shape)
            if r[k].shape != T[k].shape
            else (k, float(np.nanmax(np.abs(r[k] - T[k]))))
            for k in T
            if k in r and (r[k].shape != T[k].shape or not np.array_equal(r[k], T[k]))
        ]
        print(
            n,
            "tensors",
            len(T),
            "OK" if not miss and not bad else "DIFF",
            "missing",
            len(miss),
            miss[:2],
            "extra",
            len(extra),
            extra[:2],
            "bad",
            len(bad),
            bad[:3],
            *NOTE,
        )


if __name__ == "__main__":
    main()
