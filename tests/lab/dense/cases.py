SIO = dict(save_checkpoint_format="sharding_io")  # = the legacy save_sharded_model
FC = dict(save_checkpoint_format="flex_checkpoint", load_checkpoint_format="flex_checkpoint")
UC = dict(
    save_checkpoint_format="unified_checkpoint",
    load_checkpoint_format="unified_checkpoint",
    convert_from_hf=False,
)
TP2 = dict(tensor_model_parallel_size=2)
PP2 = dict(pipeline_model_parallel_size=2)
SH2 = dict(sharding_parallel_size=2)
S1 = dict(sharding="stage1")
V1 = dict(**S1, split_param=False)  # paddleformers 1.2.0 default is split_param=True (v2)!
V2 = dict(**S1, split_param=True)
PP4 = dict(pipeline_model_parallel_size=4)
VPP = dict(_vpp=2)
import os

LAB = os.environ.get("LAB", os.path.abspath("lab"))
CORPUS = os.environ.get("CORPUS", os.path.abspath("."))
L8 = LAB + "/out/init_l8.npz"


def A(*ds, **kw):
    r = {}
    for d in ds:
        r.update(d)
    r.update(kw)
    return r


CASES = {
    # ---- legacy pdparams/pdopt layouts
    "single": dict(n=1, args=A(), opts={"dump_init": "init.npz"}),
    "dp2": dict(n=2, args=A(sharding="")),  # paddleformers 1.2.0 default is sharding="stage1"!
    "mp2": dict(n=2, args=A(TP2)),
    "pp2": dict(n=2, args=A(PP2)),
    "mp2pp2": dict(n=4, args=A(TP2, PP2)),
    # real fleet asserts pp > 2 for interleave, and accumulate_steps >= 2 * pp
    "single_l8": dict(
        n=1, init=False, model=dict(num_hidden_layers=8), opts=dict(dump_init="init_l8.npz", global_batch=8)
    ),
    "pp4vpp2": dict(
        n=4, args=A(PP4, VPP), model=dict(num_hidden_layers=8), opts=dict(global_batch=8, init=L8)
    ),
    "sh2_s1v1": dict(n=2, args=A(V1, SH2)),
    "sh2_s1v1_meta": dict(n=2, args=A(V1, SH2, SIO)),
    "sh2_s1v2": dict(n=2, args=A(V2, SH2)),
    "sh2_s1v2_meta": dict(n=2, args=A(V2, SH2, SIO)),
    "sh2_s2": dict(n=2, args=A(SH2, sharding="stage2")),
    "sh2_s3": dict(n=2, args=A(SH2, sharding="stage3")),
    "mp2sh2_s1v1": dict(n=4, args=A(TP2, V1, SH2)),
    "mp2sh2_s1v1_meta": dict(n=4, args=A(TP2, V1, SH2, SIO)),
    "mp2pp2sh2_s1v1": dict(n=8, args=A(TP2, PP2, V1, SH2)),
    "mp2pp2sh2_s1v1_meta": dict(n=8, args=A(TP2, PP2, V1, SH2, SIO)),
    "mp2pp2sh2_s1v2_meta": dict(n=8, args=A(TP2, PP2, V2, SH2, SIO)),
}

EMA = dict(zcc_save_ema_coef=0.9)
CASES.update(
    {
        # ---- EMA through the real (non zero-cost) EMA callback
        "sh2_s1v1_meta_ema": dict(n=2, args=A(V1, SH2, SIO, EMA)),
        "mp2pp2sh2_s1v1_meta_ema": dict(n=8, args=A(TP2, PP2, V1, SH2, SIO, EMA)),
        "mp2pp2sh2_s1v2_meta_ema": dict(n=8, args=A(TP2, PP2, V2, SH2, SIO, EMA)),
        # ---- awkward shapes of the split
        "sh4_s1v2_meta_odd": dict(
            n=4,
            init=False,
            args=A(V2, SIO, sharding_parallel_size=4),
            model=dict(num_hidden_layers=2, intermediate_size=88, vocab_size=126),
        ),
        "sh4_s1v2_meta": dict(n=4, args=A(V2, SIO, sharding_parallel_size=4)),
        "pp4vpp2sh2_s1v2_meta": dict(
            n=8,
            args=A(PP4, VPP, V2, SH2, SIO),
            model=dict(num_hidden_layers=8),
            opts=dict(global_batch=16, init=L8),
        ),
        "pp4vpp2sh2_s1v1_meta": dict(
            n=8,
            args=A(PP4, VPP, V1, SH2, SIO),
            model=dict(num_hidden_layers=8),
            opts=dict(global_batch=16, init=L8),
        ),
        "pp2_tied": dict(n=2, args=A(PP2, _tie=True), init=False),
        "pp2sh2_s1v2_meta_overlap": dict(n=4, args=A(PP2, V2, SH2, SIO, pp_sharding_comm_overlap=True)),
        "mp2sh2_s1v2_meta": dict(n=4, args=A(TP2, V2, SH2, SIO)),
        "mp2sh2_s2": dict(n=4, args=A(TP2, SH2, sharding="stage2")),
        "dp2sh2_s1v1_meta": dict(n=4, args=A(V1, SH2, SIO)),
        "dp2sh2_s1v2_meta": dict(n=4, args=A(V2, SH2, SIO)),
        # ---- FlexCheckpoint
        "fc_single": dict(n=1, args=A(FC)),
        "fc_dp2": dict(n=2, args=A(FC, sharding="")),
        "dp2mp2": dict(n=4, args=A(TP2, sharding="")),
        "fc_dp2mp2": dict(n=4, args=A(TP2, FC, sharding="")),
        "defaults_2ranks": dict(
            n=2,
            args=dict(
                save_to_hf=True,
                save_checkpoint_format="flex_checkpoint",
                load_checkpoint_format="flex_checkpoint",
            ),
        ),
        "fc_mp2pp2": dict(n=4, args=A(TP2, PP2, FC)),
        "fc_sh2_s1v1": dict(n=2, args=A(V1, SH2, FC)),
        "fc_sh2_s1v2": dict(n=2, args=A(V2, SH2, FC)),
        "fc_sh2_s2": dict(n=2, args=A(SH2, FC, sharding="stage2")),
        "fc_sh2_s3": dict(n=2, args=A(SH2, FC, sharding="stage3")),
        "fc_mp2pp2sh2_s1v1": dict(n=8, args=A(TP2, PP2, V1, SH2, FC)),
        "fc_mp2pp2sh2_s1v2": dict(n=8, args=A(TP2, PP2, V2, SH2, FC)),
        "fc_mp2pp2sh2_s1v2_ema": dict(n=8, args=A(TP2, PP2, V2, SH2, FC, EMA)),
        # ---- unified checkpoint
        "uc_single": dict(n=1, args=A(UC)),
        "uc_mp2": dict(n=2, args=A(TP2, UC)),
        "uc_mp2pp2": dict(n=4, args=A(TP2, PP2, UC)),
        "uc_sh2_s1v1": dict(n=2, args=A(V1, SH2, UC)),
        "uc_sh2_s1v2": dict(n=2, args=A(V2, SH2, UC)),
        "uc_mp2pp2sh2_s1v1": dict(n=8, args=A(TP2, PP2, V1, SH2, UC)),
        "uc_mp2pp2sh2_s1v2": dict(n=8, args=A(TP2, PP2, V2, SH2, UC)),
        "uc_mp2pp2sh2_s1v1_ignoremerge": dict(
            n=8, args=A(TP2, PP2, V1, SH2, UC, unified_checkpoint_config="ignore_merge_optimizer")
        ),
    }
)
CASES["sh2_s3_seg512"] = dict(n=2, args=A(SH2, sharding="stage3"), environ={"SHIM_SEGMENT": "512"})
CASES["sh4_s3_seg512"] = dict(
    n=4, args=A(sharding="stage3", sharding_parallel_size=4), environ={"SHIM_SEGMENT": "512"}
)

# ------------------------------------------------------------------ paddlenlp 3.0.0b4 / paddle 3.0.0
NI = LAB + "/out/init_nlp.npz"
NIF = LAB + "/out/init_nlp_fused.npz"
FUSED = dict(fuse_attention_qkv=True, fuse_attention_ffn=True)
nTP2, nPP2, nSH2 = (
    dict(tensor_parallel_degree=2),
    dict(pipeline_parallel_degree=2),
    dict(sharding_parallel_degree=2),
)
nV1, nV2 = dict(sharding="stage1"), dict(sharding="stage1", sharding_parallel_config="split_param")
nSM, nUC = dict(save_sharded_model=True), dict(unified_checkpoint=True)
N = dict(env="nlp", script="train_nlp.py")
CASES.update(
    {
        "nlp_single": dict(N, n=1, init=False, opts=dict(dump_init="init_nlp.npz")),
        "nlp_fused_single": dict(N, n=1, init=False, model=FUSED, opts=dict(dump_init="init_nlp_fused.npz")),
        "nlp_mp2": dict(N, n=2, args=A(nTP2), opts=dict(init=NI)),
        "nlp_fused_mp2": dict(N, n=2, args=A(nTP2), model=FUSED, init=False),
        "nlp_uc_mp2": dict(N, n=2, args=A(nTP2, nUC), opts=dict(init=NI)),
        "nlp_uc_mp2pp2": dict(N, n=4, args=A(nTP2, nPP2, nUC), opts=dict(init=NI)),
        "nlp_uc_mp2pp2sh2_s1v1": dict(N, n=8, args=A(nTP2, nPP2, nV1, nSH2, nUC), opts=dict(init=NI)),
        "nlp_uc_mp2pp2sh2_s1v2": dict(N, n=8, args=A(nTP2, nPP2, nV2, nSH2, nUC), opts=dict(init=NI)),
        "nlp_fused_mp2pp2sh2_s1v1_meta": dict(
            N, n=8, args=A(nTP2, nPP2, nV1, nSH2, nSM), model=FUSED, init=False
        ),
        "nlp_fused_mp2pp2sh2_s1v2_meta": dict(
            N, n=8, args=A(nTP2, nPP2, nV2, nSH2, nSM), model=FUSED, init=False
        ),
    }
)


# ------------------------------------------------------------------ peer conversions (resume in another topology)
def RS(src, **kw):
    d = dict(kw)
    d["opts"] = dict(kw.get("opts", {}), resume=f"{CORPUS}/{src}/checkpoint-3")
    d["src"] = src
    d["init"] = False
    return d


LSIO = dict(
    save_checkpoint_format="sharding_io", load_checkpoint_format="sharding_io", load_sharded_model=True
)
CASES.update(
    {
        "rs_fc_8v2_to_1": RS("fc_mp2pp2sh2_s1v2", n=1, args=A(FC)),
        "rs_fc_8v2_to_sh2v1": RS("fc_mp2pp2sh2_s1v2", n=2, args=A(V1, SH2, FC)),
        "rs_fc_8v2_to_sh2v2": RS("fc_mp2pp2sh2_s1v2", n=2, args=A(V2, SH2, FC)),
        "rs_fc_8v2_to_mp2": RS("fc_mp2pp2sh2_s1v2", n=2, args=A(TP2, FC)),
        "rs_fc_8v2_to_pp2": RS("fc_mp2pp2sh2_s1v2", n=2, args=A(PP2, FC)),
        "rs_fc_8v1_to_1": RS("fc_mp2pp2sh2_s1v1", n=1, args=A(FC)),
        "rs_fc_1_to_mp2sh2v2": RS("fc_single", n=4, args=A(TP2, V2, SH2, FC)),
        "rs_fc_sh2s2_to_1": RS("fc_sh2_s2", n=1, args=A(FC)),
        "rs_fc_sh2s3_to_1": RS("fc_sh2_s3", n=1, args=A(FC)),
        "rs_sio_sh2v1_to_sh4v2": RS("sh2_s1v1_meta", n=4, args=A(V2, LSIO, sharding_parallel_size=4)),
        "rs_sio_sh2v2_to_sh4v1": RS("sh2_s1v2_meta", n=4, args=A(V1, LSIO, sharding_parallel_size=4)),
        "rs_sio_sh2v2_to_sh2v2": RS("sh2_s1v2_meta", n=2, args=A(V2, LSIO, SH2)),
        "rs_sio_8v2_to_8v1": RS("mp2pp2sh2_s1v2_meta", n=8, args=A(TP2, PP2, V1, SH2, LSIO)),
        "rs_uc_sh2v1_to_1": RS("uc_sh2_s1v1", n=1, args=A(UC)),
        "rs_uc_sh2v2_to_mp2": RS("uc_sh2_s1v2", n=2, args=A(TP2, UC)),
    }
)

CASES.update(
    {
        "auto_dp2mp2": dict(n=4, script="auto_ckpt.py", init=False, args=dict(stage1=False)),
        "auto_dp2mp2_stage1": dict(n=4, script="auto_ckpt.py", init=False, args=dict(stage1=True)),
        "sh2_s1v2_meta_multibuf": dict(
            n=2,
            init=False,
            args=A(V2, SH2, SIO, sharding_comm_buffer_size_MB=1),
            model=dict(hidden_size=128, intermediate_size=256, vocab_size=256, num_hidden_layers=4),
        ),
        "single_fp32": dict(n=1, args=dict(bf16=False, fp16_opt_level="O1", amp_master_grad=False)),
        "sh2_s1v1_meta_fp32": dict(
            n=2,
            args=A(V1, SH2, SIO, max_grad_norm=0.0, bf16=False, fp16_opt_level="O1", amp_master_grad=False),
        ),
        "mp2pp2sh2_s1v1_meta_fp32": dict(
            n=8,
            args=A(
                TP2,
                PP2,
                V1,
                SH2,
                SIO,
                max_grad_norm=0.0,
                bf16=False,
                fp16_opt_level="O1",
                amp_master_grad=False,
            ),
        ),
    }
)

# save_to_hf=True is the DEFAULT of paddleformers 1.2.0 (the other cases set it to False)
CASES.update(
    {
        "uc_sh2_s1v1_tohf": dict(n=2, args=A(V1, SH2, UC, save_to_hf=True)),
        "single_tohf": dict(n=1, args=dict(save_to_hf=True)),
    }
)
CASES["fc_sh2_s3_seg512"] = dict(n=2, args=A(SH2, FC, sharding="stage3"), environ={"SHIM_SEGMENT": "512"})
CASES["rs_fc_sh2s3seg_to_1"] = RS("fc_sh2_s3_seg512", n=1, args=A(FC))
CASES["rs_fc_8v2_to_pp4vpp2"] = None
del CASES["rs_fc_8v2_to_pp4vpp2"]

# tied, larger tensors, sequence parallel
SHM = dict(hidden_size=192, intermediate_size=256, num_hidden_layers=2)
CASES.update(
    {
        "single_l8": dict(
            n=1,
            init=False,
            model=dict(num_hidden_layers=8),
            opts=dict(dump_init="init_l8.npz", global_batch=8),
        ),
        "single_tied": dict(n=1, args=A(_tie=True), init=False),
        "mp2_tied": dict(n=2, args=A(TP2, _tie=True), init=False),
        "single_kv1": dict(n=1, args=A(), model=dict(num_key_value_heads=1), init=False),
        "mp2_kv1": dict(n=2, args=A(TP2), model=dict(num_key_value_heads=1), init=False),
        "mp2pp2_sp": dict(n=4, args=A(TP2, PP2, sequence_parallel=True)),
        "mp2sh2_s1v2_meta_mid": dict(n=4, args=A(TP2, V2, SH2, SIO, EMA), model=SHM, init=False),
        "single_mid": dict(n=1, args=A(), model=SHM, init=False),
        "mp2sh2_s3_seg512": dict(n=4, args=A(TP2, SH2, sharding="stage3"), environ={"SHIM_SEGMENT": "512"}),
    }
)
CASES.update(
    {
        "mp2pp2_sp": dict(n=4, args=A(TP2, PP2, sequence_parallel=True), model=dict(max_sequence_length=16)),
        "mp2_sp_v2_meta": dict(
            n=4, args=A(TP2, V2, SH2, SIO, sequence_parallel=True), model=dict(max_sequence_length=16)
        ),
        "nlp_kv1_single": dict(N, n=1, init=False, model=dict(num_key_value_heads=1)),
        "nlp_kv1_mp2": dict(N, n=2, args=A(nTP2), model=dict(num_key_value_heads=1), init=False),
        "nlp_sp_mp2pp2": dict(N, n=4, args=A(nTP2, nPP2, sequence_parallel=True), init=False),
    }
)
