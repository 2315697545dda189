"""Read the recipes' rank files with NumPy and pickle alone, by the rules of the recipes, not by our code.

Each rank of ERNIE numbers its own experts from 0 on; the file's expert rank makes them the numbers of the model.
"""

import collections
import glob
import json
import os
import re

import numpy as np

from tests.lab import reader as V
from tests.lab.reader import deg, num, to_global

FUSED = ("up_gate_proj", "gate_up_fused_proj")
QKV = ("qkv_proj", "fused_rms_norm_linear.linear_weight")


def join_tp(parts, key, whole, cfg):
    if len(parts) == 1 or parts[0].shape == whole:
        return parts[0]
    ax = next(i for i in range(len(whole)) if parts[0].shape[i] != whole[i])
    w = parts[0].shape[ax]
    h, kv = cfg["num_attention_heads"], cfg.get("num_key_value_heads")
    if any(x in key for x in QKV) and kv and kv != h:
        u = w // (h + 2 * kv)
        cut = [u * h, u * h + u * kv]
    elif any(x in key for x in FUSED):
        cut = [w // 2]
    else:
        cut = []
    s = [np.split(p, cut, axis=ax) for p in parts]
    return np.concatenate([np.concatenate([x[i] for x in s], axis=ax) for i in range(len(cut) + 1)], axis=ax)


def legacy(ck, T, cfg, local_ids):
    meta = None
    if os.path.exists(ck + "/model_meta.json"):
        with open(ck + "/model_meta.json") as f:
            meta = json.load(f)
    mfiles, ofiles, efiles = (
        sorted(glob.glob(ck + p)) for p in ("/model_state*.pdparams", "/optimizer*.pdopt", "/ema*.pdopt")
    )
    tpd = deg("tp", ofiles)
    epd = meta["parallel_config"].get("ep_degree", 1) if meta else deg("moe_sharding", mfiles)
    D = max(epd // tpd, 1)

    def cell(f):
        tp, pp, sh = num(f, "tp") or 0, num(f, "pp") or 0, num(f, "shard") or 0
        ep = num(f, "moe_sharding")
        if ep is None:
            ep = (sh % D) * tpd + tp if epd > 1 else 0
        return (tp, pp, ep), sh

    names, shapes, found = {}, {}, collections.defaultdict(dict)
    n_local = 0
    objs = {f: V.unp(f) for f in mfiles + ofiles + efiles}
    for f in mfiles:
        c, _ = cell(f)
        names.setdefault(c, {}).update(objs[f].pop("StructuredToParameterName@@", {}))
        for k, v in objs[f].items():
            shapes.setdefault(c, {})[k] = V.val(v).shape
    if meta:
        for k, v in meta["sharding_metas"].items():
            c = tuple([int(x) for x in re.findall(r"\d+", k)] + [0])[:3]
            names[c] = v["structure_name_mapping"]
            shapes[c] = {a: tuple(b[0]) for a, b in v["param_meta"].items()}
    ids = [int(m[1]) for c in names for k in names[c] if (m := re.search(r"\.mlp\.experts\.(\d+)\.", k))]
    n_local = (max(ids) + 1) if ids else 0

    def G(k, c):
        if local_ids and epd > 1 and re.search(r"\.experts\.(up_gate_proj|down_proj)\.", k):
            return f"{k}@ep{c[2]}"
        return to_global(k, c[2] if local_ids else 0, n_local)

    for f in mfiles:
        c, _ = cell(f)
        for k, v in objs[f].items():
            found[G(k, c)].setdefault(c[0], np.asarray(V.val(v)))

    kinds = {
        "w_0": None,
        "moment1_0": "_moment1_0",
        "moment2_0": "_moment2_0",
        "beta1_pow_acc_0": "_beta1_pow_acc_0",
        "beta2_pow_acc_0": "_beta2_pow_acc_0",
    }

    def gather(files, kindset, rename):
        pieces = collections.defaultdict(list)
        for f in files:
            c, sh = cell(f)
            o = objs[f]
            for k, pn in names.get(c, {}).items():
                for kind, suf in kindset.items():
                    v = (
                        o.get("master_weights", {}).get(pn)
                        if suf is None
                        else o.get(pn + "_fp32_master_0" + suf, o.get(pn + suf))
                    )
                    if v is not None:
                        pieces[(G(k, c), rename.get(kind, kind), c[0])].append(
                            (sh, np.asarray(V.val(v)), shapes[c][k])
                        )
        for (k, kind, tp), L in pieces.items():
            L.sort(key=lambda x: x[0])
            shp, size = tuple(L[0][2]), int(np.prod(L[0][2]))
            if "pow" in kind:
                a = L[0][1]
                assert all(np.array_equal(a, x[1]) for x in L), (k, kind)
            elif L[0][1].shape == shp and sum(x[1].size for x in L) != size:
                a = L[0][1]
            else:
                flat = np.concatenate([x[1].reshape(-1) for x in L])
                assert flat.size >= size, (k, kind, flat.size, size)
                assert not flat[size:].any(), ("padding", k, kind)
                a = flat[:size].reshape(shp)
            found[f"{k}.{kind}"].setdefault(tp, a)

    gather(ofiles, kinds, {})
    gather(efiles, {"w_0": None}, {"w_0": "ema_w_0"})
    for f in efiles:
        c, _ = cell(f)
        for k, v in objs[f].items():
            if k not in ("master_weights", "StructuredToParameterName@@"):
                found[G(k, c) + ".ema"].setdefault(c[0], np.asarray(V.val(v)))
    for k in sorted(x for x in found if "@ep0" in x):  # fused experts: axis 0 over the expert ranks
        parts = [found.pop(k.replace("@ep0", f"@ep{e}")) for e in range(epd)]
        found[k.replace("@ep0", "")] = {
            t: parts[0][t] if "pow" in k else np.concatenate([p[t] for p in parts], axis=0) for t in parts[0]
        }
    res = {
        k: join_tp([d[t] for t in sorted(d)], k, T[k][1].shape if k in T else None, cfg)
        for k, d in found.items()
        if k in T or len(d) == 1
    }
    for k in [
        k[:-4] for k in res if k.endswith(".w_0")
    ]:  # sharding_io drops bf16 parameters that have a master: cast from the master
        if k not in res:
            u = res[k + ".w_0"].view("uint32")
            res[k] = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype("uint16")
    return res
