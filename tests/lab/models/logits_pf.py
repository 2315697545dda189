#!/usr/bin/env python
"""logits_pf.py OUTDIR CASE_DIR... -- fp32 forward of the Paddle model on a fixed input, weights from truth.safetensors of each case (bf16 values, widened)."""

import json, os, sys, time

os.environ.setdefault("OMP_NUM_THREADS", "2")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import numpy as np
import paddle

paddle.set_device("cpu")
import cpu_gloo_shim as shim
from paddleformers.trainer import TrainingArguments
import new_models as NM

SEQ = 16


def read_st(path):
    import struct

    b = open(path, "rb").read()
    n = struct.unpack("<Q", b[:8])[0]
    h = json.loads(b[8 : 8 + n])
    o = 8 + n
    out = {}
    for k, v in h.items():
        if k == "__metadata__":
            continue
        raw = b[o + v["data_offsets"][0] : o + v["data_offsets"][1]]
        if v["dtype"] == "BF16":
            a = (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")
        else:
            a = np.frombuffer(raw, {"F32": "<f4", "I64": "<i8"}[v["dtype"]])
        out[k] = a.reshape(v["shape"])
    return out


def main():
    out = sys.argv[1]
    os.makedirs(out, exist_ok=True)
    all_ids = np.random.RandomState(11).randint(3, 128, size=(2, SEQ)).astype("int64")
    for d in sys.argv[2:]:
        case = os.path.basename(d.rstrip("/"))
        try:
            c = json.load(open(d + "/case.json"))
            fam = c.get("family") or "llama"
            args = TrainingArguments(
                output_dir=out + "/_x",
                bf16=True,
                fp16_opt_level="O2",
                device="cpu",
                save_tokenizer=False,
                report_to="none",
                split_param=False,
                sharding="",
            )
            tie = (c.get("args") or {}).get("_tie", False)
            mcfg, config, model = NM.build(fam, c.get("model") or {}, args, SEQ, tie, dtype="float32")
            t = read_st(d + "/truth.safetensors")
            miss = []
            with paddle.no_grad():
                for k, p in model.state_dict().items():
                    if k not in t:
                        miss.append(k)
                        continue
                    a = t[k]
                    assert list(a.shape) == list(p.shape), (k, a.shape, p.shape)
                    paddle.assign(paddle.to_tensor(a.astype("float32")), p)
            # gpt_oss: the eval branch of GptOssExperts is wrong upstream (paddle's transpose([0, 1]) is the identity), the training branch is right
            model.train() if fam == "gpt_oss" and not os.environ.get("EVAL") else model.eval()
            rec = {}
            if os.environ.get("LAYERS"):  # outputs of every sub layer, for finding where two models part

                def hook(name):
                    def f(layer, inp, o):
                        o = o[0] if isinstance(o, (tuple, list)) else o
                        if isinstance(o, paddle.Tensor):
                            rec[name] = o.astype("float32").numpy()

                    return f

                for n, l in model.named_sublayers():
                    l.register_forward_post_hook(hook(n))
            with paddle.no_grad():
                ids = all_ids % config.vocab_size  # the small families have fewer words
                r = model(input_ids=paddle.to_tensor(ids))
            lg = lambda r: (
                (r[0] if isinstance(r, (tuple, list)) else getattr(r, "logits", r)).astype("float32").numpy()
            )
            r = lg(r)
            extra = {}
            rec = dict(rec)  # of the text-only forward
            v = NM.VISION.get(fam) if not os.environ.get("LAYERS") else None
            if v:  # the same with one image in every sequence
                iid = np.stack([NM.with_image(x.copy() % 112, v) for x in ids])
                im = NM.images(v, iid)
                with paddle.no_grad():
                    extra = dict(
                        image_ids=iid,
                        image_logits=lg(model(input_ids=paddle.to_tensor(iid), **im)),
                        **{k: t.numpy() for k, t in im.items()},
                    )
            np.savez(f"{out}/{case}.npz", ids=ids, logits=r, **extra)
            if rec:
                np.savez(f"{out}/{case}.layers.npz", **rec)
            print("LOGITS", case, r.shape, float(np.abs(r).max()), "missing in truth:", miss, flush=True)
        except BaseException as e:
            import traceback

            traceback.print_exc()
            print("LOGITS_FAIL", case, type(e).__name__, str(e)[:300], flush=True)
    os._exit(0)


main()
