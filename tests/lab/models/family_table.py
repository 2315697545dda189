#!/usr/bin/env python
"""family_table.py -- every config type of paddleformers: can its classes be imported / built without paddlefleet, which name maps they have"""

import os, sys, importlib, traceback, inspect

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import paddle

paddle.set_device("cpu")
STUB = os.environ.get("STUB") == "1"
if STUB:
    import cpu_gloo_shim
from paddleformers.transformers.auto.configuration import CONFIG_MAPPING_NAMES

X = "paddleformers.transformers."
for mt, cn in CONFIG_MAPPING_NAMES.items():
    mod = {
        "qwen2_5_vl_text": "qwen2_5_vl",
        "qwen3_vl_text": "qwen3_vl",
        "qwen3_vl_moe_text": "qwen3_vl_moe",
    }.get(mt, mt)
    try:
        m = importlib.import_module(X + mod + ".modeling")
    except BaseException as e:
        print(f"{mt} | import FAILS: {type(e).__name__}: {str(e)[:90]!r}")
        continue
    cl = [
        n
        for n, c in vars(m).items()
        if inspect.isclass(c)
        and c.__module__.startswith(m.__name__.rsplit(".", 1)[0])
        and ("ForCausalLM" in n or "ForConditional" in n)
    ]
    rows = []
    for n in cl:
        c = getattr(m, n)
        has = [
            a
            for a in (
                "_gen_aoa_config",
                "_gen_inv_aoa_config",
                "_get_tensor_parallel_mappings",
                "_checkpoint_conversion_mapping",
                "transpose_weight_keys",
            )
            if any(
                a in k.__dict__
                for k in c.__mro__
                if k.__name__ not in ("PretrainedModel", "PipelinePretrainedModel", "object")
                and k.__module__.startswith(X)
            )
        ]
        fleet = "__new__" in c.__dict__
        rows.append(f"{n}{'(fleet)' if fleet else ''}: {','.join(has)}")
    print(mt, "|", " ; ".join(rows))
