"""Reads checkpoints with NumPy and pickle alone, by the rules of the trainers and not by our code."""

import glob
import json
import os
import pickle
import re
import struct

import numpy as np

FUSED = ("gate_up_fused_proj", "up_gate_proj", "gate_up_proj")


def load(path):
    """The tensors of a safetensors file, bfloat16 as float32."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        content = file.read()
    header.pop("__metadata__", None)
    tensors = {}
    for key, entry in header.items():
        raw = content[slice(*entry["data_offsets"])]
        if entry["dtype"] in ("BF16", "U16"):  # PaddleNLP calls it U16
            array = (np.frombuffer(raw, "uint16").astype("uint32") << 16).view("float32")
        else:
            kind = {"F32": "float32", "F16": "float16", "I64": "int64"}[entry["dtype"]]
            array = np.frombuffer(raw, kind)
        tensors[key] = array.reshape(entry["shape"])
    return tensors


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


def unp(p):
    with open(p, "rb") as f:
        return U(f).load()


def f32(a):
    return (a.astype("uint32") << 16).view("float32") if a.dtype == np.uint16 else np.asarray(a, "float32")


def val(v):
    return v[1] if isinstance(v, tuple) else v


def to_global(k, ep, n):
    """The key of an expert in the model, of its key on an expert rank with n experts."""
    return re.sub(r"(\.experts\.)(\d+)(?=\.)", lambda m: f"{m[1]}{int(m[2]) + ep * n}", k)


def tp_join(parts, shape, key):
    if len(parts) == 1 or parts[0].shape == tuple(shape):
        return parts[0]
    ax = next(i for i in range(len(shape)) if parts[0].shape[i] != shape[i])
    if any(f in key for f in FUSED):
        h = [np.split(p, 2, axis=ax) for p in parts]
        return np.concatenate([x[0] for x in h] + [x[1] for x in h], axis=ax)
    return np.concatenate(parts, axis=ax)


def num(f, k):
    """A rank in a file's name."""
    m = re.search(r"[._]" + k + r"(\d+)", os.path.basename(f))
    return int(m[1]) if m else None


def deg(k, fs):
    """As many ranks as the names of files have."""
    return max([num(f, k) or 0 for f in fs] + [0]) + 1


def legacy(ck, T):
    """Files of ranks. Cells are (tp, pp, ep), and ep is in a file's name ("moe_shardingNN", "moeNN") or follows from
    the others: with D = sharding / moe_sharding, ep = (shard mod D) * tp degree + tp."""
    meta = None
    if os.path.exists(ck + "/model_meta.json"):
        with open(ck + "/model_meta.json") as f:
            meta = json.load(f)
    mfiles, ofiles = (
        sorted(glob.glob(ck + "/model_state*.pdparams") + glob.glob(ck + "/lora_model_state*.pdparams")),
        sorted(glob.glob(ck + "/optimizer*.pdopt")),
    )
    tpd, shd = deg("tp", ofiles), deg("shard", ofiles)
    epd = meta["parallel_config"].get("ep_degree", 1) if meta else deg("moe_sharding", mfiles)
    real_ep = epd > 1
    D = max(epd // tpd, 1)
    if real_ep and meta:
        assert shd // max(meta["parallel_config"]["moe_sharding_degree"], 1) == D, (
            D,
            meta["parallel_config"],
        )

    def cell(f):
        tp, pp, sh = num(f, "tp") or 0, num(f, "pp") or 0, num(f, "shard") or 0
        ep = num(f, "moe_sharding")
        if ep is None:
            ep = num(f, "moe")  # use_expert_parallel over dp
        if ep is None:
            ep = (sh % D) * tpd + tp if real_ep else 0
        return (tp, pp, ep), sh

    par, smap, lshape = {}, {}, {}
    for f in mfiles:
        o = unp(f)
        c, _ = cell(f)
        m = o.pop("StructuredToParameterName@@", {})
        for k, v in o.items():
            par.setdefault(c, {})[k] = f32(val(v))
            lshape.setdefault(c, {})[k] = val(v).shape
        smap.setdefault(c, {}).update(m)
    if meta:
        for k, v in meta["sharding_metas"].items():
            c = tuple([int(x) for x in re.findall(r"\d+", k)] + [0])[:3]
            smap[c] = v["structure_name_mapping"]
            lshape[c] = {a: tuple(b[0]) for a, b in v["param_meta"].items()}
    # PaddleNLP, save_sharded_model, experts over dp: model_meta.json describes dp rank 0 only, model_state files are
    # empty. No file has the names of other ranks' experts: they are those of rank 0 with later numbers.
    for f in ofiles:
        c, _ = cell(f)
        c0 = (*c[:2], 0)
        if num(f, "moe") and not smap.get(c) and smap.get(c0):
            per = 1 + max(int(m[1]) for k in smap[c0] if (m := re.search(r"\.experts\.(\d+)\.", k)))
            smap[c] = {to_global(k, c[2], per): v for k, v in smap[c0].items()}
            lshape[c] = {to_global(k, c[2], per): v for k, v in lshape[c0].items()}
    kinds = {
        "w_0": None,
        "moment1_0": "_moment1_0",
        "moment2_0": "_moment2_0",
        "beta1_pow_acc_0": "_beta1_pow_acc_0",
        "beta2_pow_acc_0": "_beta2_pow_acc_0",
    }
    out = {}

    def put(key, c, arr):
        out.setdefault(key, {}).setdefault(c[0], arr)

    def gather(files, kindset, suffix_key):
        by = {}
        for f in files:
            c, sh = cell(f)
            by.setdefault(c[:2], []).append((sh, c, unp(f)))
        for (tp, _), L in by.items():
            L.sort(key=lambda x: x[0])
            for st in dict.fromkeys(s for _, c, _ in L for s in smap.get(c, {})):
                # names are resolved in the cell of EACH file: an expert is absent from the cells of other ep ranks
                for kind, suf in kindset.items():
                    got, shp = [], None
                    for _, c, o in L:
                        if st not in smap.get(c, {}):
                            continue
                        pn = smap[c][st]
                        shp = lshape[c][st]
                        if suf is None:
                            mw = o.get("master_weights", {})
                            v = mw.get(pn, mw.get("slice@" + pn))
                        else:
                            v = o.get(pn + "_fp32_master_0" + suf, o.get(pn + suf))
                        if v is not None:
                            got.append(np.asarray(val(v)))
                    if not got:
                        continue
                    if "pow" in kind or (
                        got[0].shape == shp
                        and not (len(shp) == 1 and len(got) > 1 and sum(g.size for g in got) <= shp[0])
                    ):
                        a = got[0]
                    else:
                        a = np.concatenate([g.reshape(-1) for g in got])[: int(np.prod(shp))].reshape(shp)
                    put(f"{st}.{suffix_key.get(kind, kind)}", (tp,), a)

    gather(ofiles, kinds, {})
    ef = glob.glob(ck + "/ema*.pdopt")
    if ef:
        gather(ef, {"w_0": None}, {"w_0": "ema_w_0"})
        for f in ef:
            c, _ = cell(f)
            for k, v in unp(f).items():
                if k not in ("master_weights", "StructuredToParameterName@@"):
                    put(k + ".ema", c, f32(np.asarray(val(v))))
    for c, d in par.items():
        for k, v in d.items():
            put(k, c, v)
    res = {}
    for k, d in out.items():
        if k in T:
            res[k] = tp_join([d[t] for t in sorted(d)], T[k].shape, k)
        else:
            res[k] = d[min(d)]
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
                full[tuple(slice(o, o + n) for o, n in zip(off, ls, strict=True))] = b.reshape(ls)
            n = len({o[-1] for o in blocks if o and not isinstance(o[-1], str)})
            if n > 1 and any(f in key for f in FUSED):  # global tensor is [g0|u0|g1|u1..], tp dependent
                h = [np.split(p, 2, axis=-1) for p in np.split(full, n, axis=-1)]
                full = np.concatenate([x[0] for x in h] + [x[1] for x in h], axis=-1)
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
                key = ".".join(k.rsplit("/", 1))
            parts.setdefault(key, []).append(a)
    for k, L in parts.items():
        if k in T and L[0].shape != T[k].shape and L[0].ndim == 1:
            # paddleformers 1.2.0 + split_param: every rank's file holds its own flat padded slice under the SAME key
            # (the index json names only one of the files!); file number order == sharding rank order
            res[k] = np.concatenate(L)[: T[k].size].reshape(T[k].shape)
        else:
            res[k] = L[0]
    return res
