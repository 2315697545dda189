#!/usr/bin/env python
"""hf_check.py LOGITS.npz DIR...  -- load each DIR with transformers (real reader), report keys and logits against the Paddle model's"""

import json, os, sys, warnings, traceback

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = os.environ.get("TRANSFORMERS_VERBOSITY", "error")
import numpy as np, torch, transformers
from transformers import AutoModelForCausalLM, AutoConfig

torch.manual_seed(0)


def check(d, z, cls=None):
    if cls is None:
        cls = transformers.AutoModelForImageTextToText if "image_ids" in z.files else AutoModelForCausalLM
    r = dict(dir=d)
    try:
        cfg = AutoConfig.from_pretrained(d)
        r["config_class"] = type(cfg).__name__
    except BaseException as e:
        return dict(r, error="config: " + type(e).__name__ + ": " + str(e)[:400])
    try:
        m, info = cls.from_pretrained(
            d, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    except BaseException as e:
        if os.environ.get("TB"):
            traceback.print_exc()
        return dict(r, error="load: " + type(e).__name__ + ": " + str(e)[:600])
    r["class"] = type(m).__name__
    for k in ("missing_keys", "unexpected_keys", "mismatched_keys", "conversion_errors", "error_msgs"):
        v = info.get(k)
        if v:
            r[k] = (
                sorted(map(str, v))
                if not isinstance(v, dict)
                else {str(a): str(b)[:200] for a, b in v.items()}
            )
    m.eval()
    if "image_ids" in z.files:
        try:
            iid = torch.from_numpy(z["image_ids"])
            kw = dict(
                input_ids=iid,
                pixel_values=torch.from_numpy(z["pixel_values"]),
                image_grid_thw=torch.from_numpy(z["image_grid_thw"]),
            )
            import inspect

            kw["mm_token_type_ids"] = (iid == 120).int()
            with torch.no_grad():
                o = m(**kw).logits.float().numpy()
            r["image_max_diff"] = float(np.abs(o - z["image_logits"]).max())
        except BaseException as e:
            if os.environ.get("TB"):
                traceback.print_exc()
            r["image_error"] = type(e).__name__ + ": " + str(e)[:300]
    try:
        with torch.no_grad():
            o = m(input_ids=torch.from_numpy(z["ids"])).logits.float().numpy()
        ref = z["logits"]
        r["max_abs_ref"] = float(np.abs(ref).max())
        r["max_diff"] = float(np.abs(o - ref).max())
        r["equal_1e-4"] = bool(np.allclose(o, ref, atol=1e-4, rtol=1e-4))
        r["argmax_agree"] = float((o.argmax(-1) == ref.argmax(-1)).mean())
    except BaseException as e:
        if os.environ.get("TB"):
            traceback.print_exc()
        r["error"] = "forward: " + type(e).__name__ + ": " + str(e)[:400]
    r["dtype_if_auto"] = str(getattr(cfg, "dtype", None))
    return r


if __name__ == "__main__":
    z = np.load(sys.argv[1])
    for d in sys.argv[2:]:
        r = check(d, z)
        for k in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if k in r:
                r["n_" + k] = len(r[k])
                r[k] = r[k][:6]
        print(json.dumps(r), flush=True)
