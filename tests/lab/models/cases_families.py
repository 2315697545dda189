import os

CORPUS = os.environ.get("CORPUS", os.path.abspath("."))
SIO = dict(save_checkpoint_format="sharding_io")
FC = dict(save_checkpoint_format="flex_checkpoint", load_checkpoint_format="flex_checkpoint")
TP2 = dict(tensor_model_parallel_size=2)
PP2 = dict(pipeline_model_parallel_size=2)
SH2 = dict(sharding_parallel_size=2)
V2 = dict(sharding="stage1", split_param=True)
SP = dict(sequence_parallel=True)
TOHF = dict(save_to_hf=True)


def A(*ds, **kw):
    r = {}
    for d in ds:
        r.update(d)
    r.update(kw)
    return r


CASES = {}
FAMS = [
    "llama",
    "qwen2",
    "qwen3",
    "ernie4_5",
    "qwen3_moe",
    "qwen2_moe",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "ernie4_5_moe",
    "phi3",
    "gemma3_text",
    "qwen3_next",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "glm4v_moe",
    "glm_ocr",
    "paddleocr_vl",
]
for f in FAMS:
    I = f"init_{f}.npz"
    CASES[f"{f}_single"] = dict(family=f, n=1, opts=dict(dump_init=I, export=1))
    CASES[f"{f}_single_tohf"] = dict(family=f, n=1, args=A(TOHF), init=I)
    CASES[f"{f}_mp2"] = dict(family=f, n=2, args=A(TP2), init=I)
    CASES[f"{f}_pp2"] = dict(family=f, n=2, args=A(PP2), init=I)
    CASES[f"{f}_sh2_s1v2_meta"] = dict(family=f, n=2, args=A(V2, SH2, SIO), init=I)
    CASES[f"{f}_fc_sh2_s1v2"] = dict(family=f, n=2, args=A(V2, SH2, FC), init=I)
    CASES[f"{f}_mp2pp2sh2_s1v2_meta"] = dict(family=f, n=8, args=A(TP2, PP2, V2, SH2, SIO), init=I)

# rope factor consistent with max_position_embeddings / original_max_position_embeddings (corpus-moe's tiny deepseek_v3 says factor 2 with 16 / 16)
CASES["deepseek_v3_yarn_single"] = dict(
    family="deepseek_v3", n=1, model=dict(max_position_embeddings=32), opts=dict(export=1)
)
# vision tower of these two does not run under tp (reshape error upstream): text only, so vision parameters have no optimizer state
for f in ("glm4v_moe", "glm_ocr"):
    CASES[f"{f}_mp2"]["environ"] = dict(TEXT_ONLY="1")
EP2 = dict(use_expert_parallel=True, expert_model_parallel_size=2)
CASES["qwen3_next_ep2_sh2_s1v2_meta"] = dict(
    family="qwen3_next", n=2, args=A(EP2, V2, SH2, SIO), init="init_qwen3_next.npz"
)
CASES["qwen3_moe_fused_single"] = dict(
    family="qwen3_moe", n=1, model=dict(fd_fallback=True), opts=dict(export=1)
)
CASES["deepseek_v3_mtp_single"] = dict(
    family="deepseek_v3",
    n=1,
    model=dict(
        max_position_embeddings=32,
        num_nextn_predict_layers=1,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
    ),
    opts=dict(export=1),
)

for case in CASES.values():
    case.setdefault("script", "train_new.py")
