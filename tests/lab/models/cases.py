import os

CORPUS = os.environ.get("CORPUS", os.path.abspath("."))
SIO = dict(save_checkpoint_format="sharding_io")
FC = dict(save_checkpoint_format="flex_checkpoint", load_checkpoint_format="flex_checkpoint")
UC = dict(
    save_checkpoint_format="unified_checkpoint",
    load_checkpoint_format="unified_checkpoint",
    convert_from_hf=False,
)
TP2 = dict(tensor_model_parallel_size=2)
PP2 = dict(pipeline_model_parallel_size=2)
SH2 = dict(sharding_parallel_size=2)
SH4 = dict(sharding_parallel_size=4)
S1 = dict(sharding="stage1")
V1 = dict(**S1, split_param=False)
V2 = dict(**S1, split_param=True)
EMA = dict(zcc_save_ema_coef=0.9)
SP = dict(sequence_parallel=True)  # the real router asserts sequence_parallel when tp > 1 under EP
EP2 = dict(use_expert_parallel=True, expert_model_parallel_size=2)
EP4 = dict(use_expert_parallel=True, expert_model_parallel_size=4)
I = "init_q3.npz"


def A(*ds, **kw):
    r = {}
    for d in ds:
        r.update(d)
    r.update(kw)
    return r


CASES = {
    "moe_single": dict(n=1, args=A(), opts={"dump_init": I}),
    "moe_fc_single": dict(n=1, args=A(FC), init=I),
    "moe_mp2": dict(n=2, args=A(TP2), init=I),
    "moe_pp2": dict(n=2, args=A(PP2), init=I),
    "moe_mp2pp2": dict(n=4, args=A(TP2, PP2), init=I),
    "moe_sh2_s1v1_meta": dict(n=2, args=A(V1, SH2, SIO), init=I),
    "moe_sh2_s1v2_meta": dict(n=2, args=A(V2, SH2, SIO), init=I),
    "moe_sh2_s1v1": dict(n=2, args=A(V1, SH2), init=I),
    "moe_sh2_s1v2": dict(n=2, args=A(V2, SH2), init=I),
    "moe_fc_sh2_s1v2": dict(n=2, args=A(V2, SH2, FC), init=I),
    # real expert parallel
    "ep2_sh2_s1v1_meta": dict(n=2, args=A(EP2, V1, SH2, SIO), init=I),
    "ep2_sh2_s1v2_meta": dict(n=2, args=A(EP2, V2, SH2, SIO), init=I),
    "ep2_sh2_s1v1_meta_ema": dict(n=2, args=A(EP2, V1, SH2, SIO, EMA), init=I),
    "ep2_sh2_s1v2_meta_ema": dict(n=2, args=A(EP2, V2, SH2, SIO, EMA), init=I),
    "ep2_sh4_s1v1_meta": dict(n=4, args=A(EP2, V1, SH4, SIO), init=I),
    "ep2_sh4_s1v2_meta": dict(n=4, args=A(EP2, V2, SH4, SIO), init=I),
    "ep2_sh2_s1v1": dict(n=2, args=A(EP2, V1, SH2), init=I),
    "ep2_sh2_s1v2": dict(n=2, args=A(EP2, V2, SH2), init=I),
    "ep2_sh4_s1v2": dict(n=4, args=A(EP2, V2, SH4), init=I),
    "ep2_mp2": dict(n=2, args=A(EP2, SP, TP2), init=I),
    "ep2_mp2sh2_s1v1_meta": dict(n=4, args=A(EP2, SP, TP2, V1, SH2, SIO), init=I),
    "ep2_mp2sh2_s1v2_meta": dict(n=4, args=A(EP2, SP, TP2, V2, SH2, SIO), init=I),
    "ep4_mp2sh2_s1v2_meta": dict(n=4, args=A(EP4, SP, TP2, V2, SH2, SIO), init=I),
    "ep2_pp2sh2_s1v1_meta": dict(n=4, args=A(EP2, PP2, V1, SH2, SIO), init=I),
    "ep2_pp2sh2_s1v2_meta": dict(n=4, args=A(EP2, PP2, V2, SH2, SIO), init=I),
    "ep2_mp2pp2sh2_s1v2_meta": dict(n=8, args=A(EP2, SP, TP2, PP2, V2, SH2, SIO), init=I),
    "ep4_mp2pp2sh2_s1v2_meta_ema": dict(n=8, args=A(EP4, SP, TP2, PP2, V2, SH2, SIO, EMA), init=I),
    "ep2_fc_sh2_s1v1": dict(n=2, args=A(EP2, V1, SH2, FC), init=I),
    "ep2_fc_sh2_s1v2": dict(n=2, args=A(EP2, V2, SH2, FC), init=I),
    "ep2_fc_sh4_s1v2_ema": dict(n=4, args=A(EP2, V2, SH4, FC, EMA), init=I),
    "ep2_fc_mp2sh2_s1v2": dict(n=4, args=A(EP2, SP, TP2, V2, SH2, FC), init=I),
}

# fused experts (one 3-D parameter [E, in, out] instead of E linears)
I3 = "init_q3f.npz"
FD = dict(fd_fallback=True)
CASES.update(
    {
        "moe_fused_single": dict(n=1, model=FD, opts={"dump_init": I3}),
        "moe_fused_fc_single": dict(n=1, args=A(FC), model=FD, init=I3),
        "moe_fused_sh2_s1v2_meta": dict(n=2, args=A(V2, SH2, SIO), model=FD, init=I3),
        "moe_fused_sh2_s1v1_meta": dict(n=2, args=A(V1, SH2, SIO), model=FD, init=I3),
        "moe_fused_fc_sh2_s1v2": dict(n=2, args=A(V2, SH2, FC), model=FD, init=I3),
        "moe_fused_mp2": dict(n=2, args=A(TP2), model=FD, init=I3),
    }
)
# other families
G4 = dict(family="glm4_moe")
IG = "init_glm4.npz"
Q2 = dict(family="qwen2_moe")
IQ = "init_q2.npz"
D3 = dict(family="deepseek_v3")
ID = "init_ds3.npz"
E4 = dict(family="ernie4_5_moe")
IE = "init_e4.npz"
GO = dict(family="gpt_oss")
IO = "init_go.npz"
CASES.update(
    {
        "glm4moe_single": dict(G4, n=1, opts={"dump_init": IG}),
        "glm4moe_mp2sh2_s1v2_meta": dict(G4, n=4, args=A(TP2, V2, SH2, SIO), init=IG),
        "glm4moe_ep2_sh2_s1v2_meta_ema": dict(
            G4, n=2, args=A(EP2, V2, SH2, SIO, EMA), model=dict(use_unified_moe=True), init=IG
        ),
        "qwen2moe_single": dict(Q2, n=1, opts={"dump_init": IQ}),
        "qwen2moe_mp2sh2_s1v2_meta": dict(Q2, n=4, args=A(TP2, V2, SH2, SIO), init=IQ),
        "dsv3_single": dict(D3, n=1, opts={"dump_init": ID}),
        "dsv3_mp2sh2_s1v1_meta": dict(D3, n=4, args=A(SP, TP2, V1, SH2, SIO), init=ID),
        "ernie45moe_single": dict(E4, n=1, opts={"dump_init": IE}),
        "ernie45moe_sh2_s1v2_meta": dict(E4, n=2, args=A(V2, SH2, SIO), init=IE),
        "gptoss_single": dict(GO, n=1, opts={"dump_init": IO}),
        "gptoss_sh2_s1v2_meta": dict(GO, n=2, args=A(V2, SH2, SIO), init=IO),
    }
)
# ---- paddlenlp 3.0.0b4: use_expert_parallel spreads experts over the DATA parallel group (moeNN files)
N = dict(env="nlp", script="train_nlp_moe.py", family="nlp_deepseek_v2")
NI = "init_nlp_ds2.npz"
nTP2, nPP2, nSH2 = (
    dict(tensor_parallel_degree=2),
    dict(pipeline_parallel_degree=2),
    dict(sharding_parallel_degree=2),
)
nV1, nV2 = dict(sharding="stage1"), dict(sharding="stage1", sharding_parallel_config="split_param")
nSM, nEP = dict(save_sharded_model=True), dict(use_expert_parallel=True)
CASES.update(
    {
        "nlp_dsv2_single": dict(N, n=1, opts=dict(dump_init=NI)),
        "nlp_dsv2_ep_dp2mp2": dict(N, n=4, args=A(nTP2, nEP), init=NI),
        "nlp_dsv2_ep_dp2sh2_s1v1_meta": dict(N, n=4, args=A(nSH2, nV1, nEP, nSM), init=NI),
        "nlp_dsv2_ep_dp2sh2_s1v2_meta": dict(N, n=4, args=A(nSH2, nV2, nEP, nSM), init=NI),
        "nlp_dsv2_ep_dp2sh2_s1v1": dict(N, n=4, args=A(nSH2, nV1, nEP), init=NI),
        "nlp_dsv2_ep_dp2pp2": dict(N, n=4, args=A(nPP2, nEP), init=NI),
        "nlp_dsv2_ep_dp2": dict(N, n=2, args=A(nEP), init=NI),
        "nlp_dsv2_ep_dp2mp2sh2_s1v2_meta": dict(N, n=8, args=A(nTP2, nSH2, nV2, nEP, nSM), init=NI),
        "nlp_qwen2moe_single": dict(N, n=1, opts=dict(dump_init="init_nlp_q2.npz")),
    }
)
CASES["nlp_qwen2moe_single"]["family"] = "nlp_qwen2_moe"
CASES["nlp_qwen2moe_mp2"] = dict(N, n=2, args=A(nTP2), init="init_nlp_q2.npz")
CASES["nlp_qwen2moe_mp2"]["family"] = "nlp_qwen2_moe"
NMTP = dict(N, model=dict(num_nextn_predict_layers=1, hidden_size=32, vocab_size=96))
NIM = "init_nlp_ds2_mtp.npz"
CASES.update(
    {
        "nlp_dsv2_mtp_single": dict(NMTP, n=1, opts=dict(dump_init=NIM)),
        "nlp_dsv2_mtp_pp2": dict(NMTP, n=2, args=A(nPP2), init=NIM),
        "nlp_dsv2_mtp_sh2_s1v2_meta": dict(NMTP, n=2, args=A(nSH2, nV2, nSM), init=NIM),
        "nlp_dsv2_mtp_mp2": dict(NMTP, n=2, args=A(nTP2), init=NIM),
    }
)

# ernie 4.5: experts over the TENSOR parallel group (moe_group="mp", the config default)
CASES.update(
    {
        "ernie45moe_mpmoe_mp2": dict(E4, n=2, args=A(TP2), model=dict(moe_group="mp"), init=IE),
        "ernie45moe_mpmoe_mp2sh2_s1v2_meta": dict(
            E4, n=4, args=A(TP2, V2, SH2, SIO), model=dict(moe_group="mp"), init=IE
        ),
        "ernie45moe_mtp_single": dict(E4, n=1, model=dict(num_nextn_predict_layers=1)),
        "dsv3_mtp_single": dict(D3, n=1, model=dict(num_nextn_predict_layers=1)),
        "dsv3_fc_single": dict(D3, n=1, args=A(FC), init=ID),
        "glm4moe_fc_ep2_sh2_s1v2": dict(
            G4, n=2, args=A(EP2, V2, SH2, FC), model=dict(use_unified_moe=True), init=IG
        ),
        "moe_fused_uc_single": dict(n=1, args=A(UC), model=FD, init=I3),
        "ep2_uc_sh2_s1v2": dict(n=2, args=A(EP2, V2, SH2, UC), init=I),
        "moe_uc_single": dict(n=1, args=A(UC), init=I),
        "ep2_sh4_s1v2_meta_ema": dict(n=4, args=A(EP2, V2, SH4, SIO, EMA), init=I),
    }
)

CASES.update(
    {
        "glm4moe_ep2flex_sh2_s1v2_meta": dict(G4, n=2, args=A(EP2, V2, SH2, SIO), init=IG),
        "dsv3_ep2_sh2_s1v2_meta_ema": dict(D3, n=2, args=A(EP2, V2, SH2, SIO, EMA), init=ID),
        "dsv3_ep2_sh2_s1v2": dict(D3, n=2, args=A(EP2, V2, SH2), init=ID),
        "dsv3_fc_ep2_sh2_s1v2": dict(D3, n=2, args=A(EP2, V2, SH2, FC), init=ID),
    }
)

INC = dict(save_sharding_stage1_model_include_freeze_params=True)
CASES.update(
    {
        "dsv3_ep2_sh2_s1v2_meta_incfreeze": dict(D3, n=2, args=A(EP2, V2, SH2, SIO, INC), init=ID),
        "dsv3_sh2_s1v1_meta": dict(D3, n=2, args=A(V1, SH2, SIO), init=ID),
        "glm4moe_sh2_s1v2_meta_incfreeze": dict(G4, n=2, args=A(V2, SH2, SIO, INC), init=IG),
    }
)

CASES.update(
    {
        "ep2_sh2_s1v2_meta_fp32": dict(
            n=2,
            args=A(
                EP2, V2, SH2, SIO, max_grad_norm=0.0, bf16=False, fp16_opt_level="O1", amp_master_grad=False
            ),
            init=I,
        ),
    }
)

CASES.update(
    {
        "ep2_fc_mp2": dict(n=2, args=A(EP2, SP, TP2, FC), init=I),
        "moe_fc_mp2": dict(n=2, args=A(TP2, FC), init=I),
        "ep2_sh4_s1v2_meta_odd": dict(
            n=4, args=A(EP2, V2, SH4, SIO), model=dict(moe_intermediate_size=18, num_experts=6)
        ),
        "ep4_sh4_s1v2_meta_e8": dict(n=4, args=A(EP4, V2, SH4, SIO), model=dict(num_experts=8)),
        "ep2_pp2sh4_s1v2_meta": dict(n=8, args=A(EP2, PP2, V2, SH4, SIO), model=dict(num_hidden_layers=4)),
        "ep2_fc_pp2sh2_s1v2": dict(n=4, args=A(EP2, PP2, V2, SH2, FC), init=I),
    }
)


# ---- peer: real Trainer resume in another topology (run_peers.py compares the loaded live state with the source truth)
def RS(src, **kw):
    d = dict(kw)
    d["opts"] = dict(resume=f"{CORPUS}/{src}/checkpoint-3")
    d["src"] = src
    return d


LSIO = dict(
    save_checkpoint_format="sharding_io", load_checkpoint_format="sharding_io", load_sharded_model=True
)
CASES.update(
    {
        "rs_fc_ep2sh2_to_1": RS("ep2_fc_sh2_s1v2", n=1, args=A(FC)),
        "rs_fc_1_to_ep2sh2": RS("moe_fc_single", n=2, args=A(EP2, V2, SH2, FC)),
        "rs_fc_ep2sh4_to_ep2sh2": RS("ep2_fc_sh4_s1v2_ema", n=2, args=A(EP2, V2, SH2, FC)),
        "rs_fc_ep2sh2_to_mp2": RS("ep2_fc_sh2_s1v2", n=2, args=A(TP2, FC)),
        "rs_sio_ep2sh2_to_ep2sh2": RS("ep2_sh2_s1v2_meta", n=2, args=A(EP2, V2, SH2, LSIO)),
        "rs_sio_ep2sh4_to_ep2sh2": RS("ep2_sh4_s1v2_meta", n=2, args=A(EP2, V2, SH2, LSIO)),
        "rs_sio_ep2sh4_to_ep4sh4": RS("ep2_sh4_s1v2_meta", n=4, args=A(EP4, V2, SH4, LSIO)),
        "rs_sio_ep2sh2_to_sh2": RS("ep2_sh2_s1v2_meta", n=2, args=A(V2, SH2, LSIO)),
    }
)

CASES.update(
    {
        "moe_mp2pp2sh2_s1v2_meta_ema": dict(n=8, args=A(TP2, PP2, V2, SH2, SIO, EMA), init=I),
        "moe_sh2_s1v1_meta_ema": dict(n=2, args=A(V1, SH2, SIO, EMA), init=I),
        "glm4moe_ep2_pp2sh2_s1v2_meta": dict(
            G4, n=4, args=A(EP2, PP2, V2, SH2, SIO), model=dict(use_unified_moe=True, num_hidden_layers=4)
        ),
        "ep2_pp2sh2_s1v2_meta_ppfirst": dict(
            n=4, args=A(EP2, PP2, V2, SH2, SIO, hybrid_parallel_topo_order="pp_first"), init=I
        ),
        "ep2_pp2sh4_s1v2_meta_ppfirst": dict(
            n=8,
            args=A(EP2, PP2, V2, SH4, SIO, hybrid_parallel_topo_order="pp_first"),
            model=dict(num_hidden_layers=4),
        ),
        "ep4_fc_mp2pp2sh2_s1v2_ema": dict(n=8, args=A(EP4, SP, TP2, PP2, V2, SH2, FC, EMA), init=I),
        "ep4_mp2pp2sh2_s1v2_meta": dict(n=8, args=A(EP4, SP, TP2, PP2, V2, SH2, SIO), init=I),
    }
)
