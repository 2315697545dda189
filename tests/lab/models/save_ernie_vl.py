#!/usr/bin/env python
"""ernie4_5_moe_vl: the model is built and saved by the library's own save functions (not trained); truth from live memory"""

import json, os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import numpy as np, paddle

paddle.set_device("cpu")
import cpu_gloo_shim, moe_models as MM, truth as T

MM._no_deepep()
from paddleformers.transformers.ernie4_5_moe_vl.model.configuration import Ernie4_5_VLMoeConfig as C
from paddleformers.transformers.ernie4_5_moe_vl.modeling import Ernie4_5_VLMoeForConditionalGeneration as M

OUT = os.environ["CORPUS"] + "/ernie4_5_moe_vl_saved"
c = C(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    moe_num_experts=[4, 4],
    moe_intermediate_size=[16, 8],
    moe_k=2,
    moe_num_shared_experts=1,
    moe_layer_start_index=[1, 1],
    moe_layer_end_index=[2, 2],
    moe_layer_interval=1,
    moe_group="dummy",
    moe_use_aux_free=True,
    max_position_embeddings=64,
    pixel_hidden_size=16,
    im_patch_id=120,
    vision_config=dict(
        depth=2,
        embed_dim=16,
        hidden_size=16,
        mlp_ratio=2,
        num_heads=2,
        patch_size=4,
        spatial_merge_size=2,
        in_channels=3,
    ),
    spatial_conv_size=2,
    temporal_conv_size=2,
    rope_3d=True,
    freq_allocation=2,
)
c._attn_implementation = "eager"
paddle.seed(20)
m = M._from_config(c, dtype="bfloat16") if hasattr(M, "_from_config") else M(c)
os.makedirs(OUT, exist_ok=True)
live = {k: v for k, v in m.state_dict().items()}
T.write_safetensors({k: v for k, v in live.items()}, OUT + "/truth.safetensors")
json.dump(
    dict(
        names={k: [v.name] for k, v in live.items()},
        trained=False,
        attrs={
            k: [bool(getattr(v, "is_distributed", False)), getattr(v, "split_axis", None)]
            for k, v in live.items()
        },
    ),
    open(OUT + "/truth_report.json", "w"),
    indent=1,
)
json.dump(
    dict(
        case="ernie4_5_moe_vl_saved",
        n=1,
        env="pf",
        family="ernie4_5_moe_vl",
        args={},
        model={},
        trained=False,
    ),
    open(OUT + "/case.json", "w"),
    indent=1,
)
for name, kw in (
    ("checkpoint-0", dict(save_checkpoint_format=None, save_to_hf=False, safe_serialization=False)),
    ("hf-export", dict(save_checkpoint_format="flex_checkpoint")),
):
    try:
        m.save_pretrained(OUT + "/" + name, **kw)
        print("SAVED", name, os.listdir(OUT + "/" + name), flush=True)
    except BaseException as e:
        import traceback

        traceback.print_exc()
        print("SAVE_FAIL", name, type(e).__name__, str(e)[:300], flush=True)
os._exit(0)
