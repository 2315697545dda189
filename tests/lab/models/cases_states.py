"""MTP, LoRA, Muon, pickle protocol 5, other optimizers and checkpoint options.  Merged with the others by run_case.py"""

from cases import A, FC, SIO, UC, TP2, PP2, SH2, SH4, V1, V2, EMA, SP, EP2

C = {}
MD = dict(
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    v_head_dim=8,
    vocab_size=96,
    num_nextn_predict_layers=1,
)  # small: a case stays under 3 MB
M = lambda **k: dict(MD, **k)
D = lambda n, init="init_mtp_d3.npz", args=None, **k: dict(
    n=n, family="deepseek_v3", args=args or {}, model=M(**k), **({"init": init} if init else {})
)
C.update(
    {
        "dsv3_mtp_small_single": dict(D(1, None), opts={"dump_init": "init_mtp_d3.npz"}),
        "dsv3_mtp_mp2": D(2, args=A(TP2, SP)),
        "dsv3_mtp_pp2": D(2, args=A(PP2)),
        "dsv3_mtp_sh2_s1v1_meta": D(2, args=A(V1, SH2, SIO)),
        "dsv3_mtp_sh2_s1v2_meta": D(2, args=A(V2, SH2, SIO)),
        "dsv3_mtp_sh2_s1v2_meta_ema": D(2, args=A(V2, SH2, SIO, EMA)),
        "dsv3_mtp_fc_sh2_s1v2_ema": D(2, args=A(V2, SH2, FC, EMA)),
        "dsv3_mtp_fc_pp2": D(2, args=A(PP2, FC)),
        "dsv3_mtp_fc_mp2pp2": D(4, args=A(TP2, SP, PP2, FC)),
        "dsv3_mtp_single_tohf": D(1, args=dict(save_to_hf=True)),
        "dsv3_mtp2_single": dict(D(1, None, num_nextn_predict_layers=2)),
        "dsv3_mtp2_pp2": dict(D(2, None, args=A(PP2), num_nextn_predict_layers=2)),
        "dsv3_mtp_pp2sh2_s1v2_meta_ema": D(4, args=A(PP2, V2, SH2, SIO, EMA)),
        "dsv3_mtp_ep2_sh2_s1v2_meta": D(2, args=A(EP2, V2, SH2, SIO)),
    }
)

# sequence one token longer: the MTP model cuts num_nextn_predict_layers tokens, the rest must divide by tp under sequence_parallel
L = dict(script="train_states.py")
for k in (
    "dsv3_mtp_mp2",
    "dsv3_mtp_fc_mp2pp2",
    "dsv3_mtp_pp2",
    "dsv3_mtp_fc_pp2",
    "dsv3_mtp_pp2sh2_s1v2_meta_ema",
):
    C[k].update(L)
    C[k]["opts"] = dict(seq=17, patch="dsv3_mtp_pipe" if "pp2" in k else "dsv3_mtp_sp")
C.pop("dsv3_mtp2_pp2")
E = lambda n, init="init_mtp_e4.npz", args=None, opts=None, **k: dict(
    L,
    n=n,
    family="ernie4_5_moe",
    args=args or {},
    opts=dict(opts or {}, seq=17, patch="nbatch"),
    model=dict(
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        head_dim=8,
        vocab_size=96,
        num_nextn_predict_layers=1,
        **k,
    ),
    **({"init": init} if init else {}),
)
C.update(
    {
        "ernie45_mtp_single": E(1, None, opts={"dump_init": "init_mtp_e4.npz"}),
        "ernie45_mtp_mp2": E(2, args=A(TP2)),
        "ernie45_mtp_sh2_s1v2_meta_ema": E(2, args=A(V2, SH2, SIO, EMA)),
        "ernie45_mtp_sh2_s1v1_meta": E(2, args=A(V1, SH2, SIO)),
        "ernie45_mtp_fc_sh2_s1v2": E(2, args=A(V2, SH2, FC)),
        "ernie45_mtp_single_tohf": E(1, args=dict(save_to_hf=True)),
        "ernie45_mtp_pp2": E(2, None, args=A(PP2)),
    }
)
# ---- LoRA
LO = lambda n, args=None, family="llama", init=True, lora="{}", opts=None, **k: dict(
    L,
    n=n,
    family=family,
    args=args or {},
    model=k,
    opts=dict(opts or {}, lora=lora),
    **({"init": f"init_lora_{family}.npz"} if init else {}),
)
C.update(
    {
        "lora_llama_base": dict(L, n=1, family="llama", opts={"dump_init": "init_lora_llama.npz"}),
        "lora_qwen2_base": dict(L, n=1, family="qwen2", opts={"dump_init": "init_lora_qwen2.npz"}),
        "lora_single": LO(1),
        "lora_qwen2_single": LO(1, family="qwen2"),
        "lora_mp2": LO(2, args=A(TP2)),
        "lora_pp2": LO(2, args=A(PP2)),
        "lora_mp2pp2": LO(4, args=A(TP2, PP2)),
        "lora_mp2pp2_sp": LO(4, args=A(TP2, PP2, sequence_parallel=True)),
        "lora_qwen2_full_single": LO(
            1,
            family="qwen2",
            lora='{"trainable_bias": "all", "trainable_modules": [".*input_layernorm.*", "lm_head.*"]}',
        ),
        "lora_qwen2_full_pp2": LO(
            2,
            family="qwen2",
            args=A(PP2),
            lora='{"trainable_bias": "all", "trainable_modules": [".*input_layernorm.*", "lm_head.*"]}',
        ),
        "lora_sh2_s1v1": LO(2, args=A(V1, SH2)),
        "lora_sh2_s1v2": LO(2, args=A(V2, SH2)),
        "lora_sh2_s1v2_meta": LO(2, args=A(V2, SH2, SIO)),
        "lora_sh2_s1v1_meta": LO(2, args=A(V1, SH2, SIO)),
        "lora_fc_single": LO(1, args=A(FC)),
        "lora_fc_mp2": LO(2, args=A(TP2, FC)),
        "lora_fc_mp2_tohf": LO(2, args=A(TP2, FC, save_to_hf=True)),
        "lora_fc_single_tohf": LO(1, args=A(FC, save_to_hf=True)),
        "lora_fc_sh2_s1v2": LO(2, args=A(V2, SH2, FC)),
        "lora_rslora_single": LO(1, lora='{"rslora": true, "r": 8, "lora_alpha": 4, "lora_plus_scale": 4}'),
    }
)
# ---- other optimizers, fp16, options
O = lambda n, args=None, opts=None, init="init_lora_llama.npz", **k: dict(
    L, n=n, family="llama", args=args or {}, model=k, opts=opts or {}, **({"init": init} if init else {})
)
C.update(
    {
        "opt_mini_single": O(1, args=A(optim="adamw_mini")),
        "opt_mini_sh2_s1v1": O(2, args=A(V1, SH2, optim="adamw_mini")),
        "opt_mini_sh2_s1v2_meta": O(2, args=A(V2, SH2, SIO, optim="adamw_mini")),
        "opt_mini_mp2": O(2, args=A(TP2, optim="adamw_mini")),
        "opt_custom_single": O(1, args=A(optim="adamw_custom")),
        "opt_custom_lowp_single": O(1, args=A(optim="adamw_custom", use_lowprecision_moment=True)),
        "opt_custom_lowp_sh2_s1v2_meta": O(
            2, args=A(V2, SH2, SIO, optim="adamw_custom", use_lowprecision_moment=True)
        ),
        "opt_adafactor_single": O(1, args=A(optim="adafactor")),
        "fp16_single": O(1, args=A(bf16=False, fp16=True), opts=dict(patch="fp16")),
        "fp16_mp2": O(2, args=A(TP2, bf16=False, fp16=True), opts=dict(patch="fp16")),
        "fp16_sh2_s1v2_meta": O(2, args=A(V2, SH2, SIO, bf16=False, fp16=True), opts=dict(patch="fp16")),
        "uc_optimshard3_single": O(1, args=A(UC, optim_shard_num=3)),
        "uc_optimshard2_sh2_s1v1": O(2, args=A(V1, SH2, UC, optim_shard_num=2)),
        "uc_optimshard2_sh2_s1v2": O(2, args=A(V2, SH2, UC, optim_shard_num=2)),
    }
)

# ---- pickle protocol 5 (paddle.save of 3.4)
P5 = lambda n, args=None, **e: dict(O(n, args=args, opts=dict(patch="p5")), **({"environ": e} if e else {}))
C.update(
    {
        "p5_single": P5(1),
        "p5_ro_single": P5(1, P5_READONLY="1"),
        "p5_mp2pp2": P5(4, A(TP2, PP2)),
        "p5_sh2_s1v2_meta": P5(2, A(V2, SH2, SIO)),
        "p5_sh2_s1v1_meta_ema": P5(2, A(V1, SH2, SIO, EMA)),
        "p5_fc_mp2sh2_s1v2_ema": P5(4, A(TP2, V2, SH2, FC, EMA)),
        "p5_fp32_single": P5(1, dict(bf16=False, fp16_opt_level="O1", amp_master_grad=False)),
        "p5_mid_single": dict(
            O(1, opts=dict(patch="p5"), init=None, hidden_size=96, intermediate_size=176, num_hidden_layers=1)
        ),
        "p5_lora_single": LO(1, opts=dict(patch="p5")),
    }
)

# ---- Muon (needs MUON_OVERLAY)
MU = lambda n, args=None, **e: dict(
    O(n, args=A(FC, args or {}, optim="muon"), opts=dict(patch="muon")), **({"environ": e} if e else {})
)
C.update(
    {
        "muon_single": MU(1),
        "muon_fc_pp2": MU(2, A(PP2)),
        "muon_fc_sh2": MU(2, A(V2, SH2)),
        "muon_fc_sh2_split": MU(2, A(V2, SH2), SHIM_MUON_BUF_MB="0.05"),
        "muon_fc_sh2_ema": MU(2, A(V2, SH2, EMA), SHIM_MUON_BUF_MB="0.02"),
        "muon_fc_pp2sh2": MU(4, A(PP2, V2, SH2), SHIM_MUON_BUF_MB="0.02"),
        "muon_fc_mp2": MU(2, A(TP2)),
        # two expert ranks with two sharding ranks each: an expert's matrices are owned within its own group
        "muon_moe_fc_ep2_sh4_ema": dict(
            MU(4, A(EP2, V2, SH4, EMA), SHIM_MUON_BUF_MB="0.02"),
            family="qwen3_moe",
            model=dict(hidden_size=32, vocab_size=96),
        ),
    }
)
C["muon_moe_fc_ep2_sh4_ema"].pop("init")

for k, kw in (
    ("fp16_single", dict(scale_loss=256)),
    ("fp16_mp2", dict(scale_loss=256)),
    ("fp16_sh2_s1v2_meta", dict(scale_loss=256)),
):
    C[k]["args"] = A(C[k]["args"], kw)
IM = dict(unified_checkpoint_config="ignore_merge_optimizer")
C.pop("uc_optimshard3_single")
for k in ("uc_optimshard2_sh2_s1v1", "uc_optimshard2_sh2_s1v2"):
    C[k]["args"] = A(C[k]["args"], IM)
C["uc_nomerge_sh2_s1v1"] = O(2, args=A(V1, SH2, UC, IM))
C["uc_mwcompat_sh2_s1v1"] = O(2, args=A(V1, SH2, UC, unified_checkpoint_config="master_weight_compatible"))
C["uc_rmmaster_sh2_s1v1"] = O(2, args=A(V1, SH2, UC, unified_checkpoint_config="remove_master_weight"))
C["uc_skipmodel_sh2_s1v1"] = O(2, args=A(V1, SH2, UC, unified_checkpoint_config="skip_save_model_weight"))
# ---- options that change files
C.update(
    {
        "fc_replicas_sh2_s1v2": O(2, args=A(V2, SH2, FC, replicate_saved_into_local=True)),
        "fc_replicas_mp2": O(2, args=A(TP2, FC, replicate_saved_into_local=True)),
        "uc_quantO1_single": O(1, args=A(UC, ckpt_quant_stage="O1")),
        "uc_quantO2_single": O(1, args=A(UC, ckpt_quant_stage="O2")),
        "uc_quantO1_sh2_s1v1": O(
            2, args=A(V1, SH2, UC, ckpt_quant_stage="O1", unified_checkpoint_config="remove_master_weight")
        ),
        "noopt_single": O(1, args=A(ignore_save_lr_and_optim=True)),
        "tfusion_sh2_s1v1": O(2, args=A(V1, SH2, stage1_tensor_fusion=True)),
        "tfusion_sh2_s1v1_meta": O(2, args=A(V1, SH2, SIO, stage1_tensor_fusion=True)),
        "tfusion_sh2_s1v2_meta": O(2, args=A(V2, SH2, SIO, stage1_tensor_fusion=True)),
        "fusestates_sh2_s1v2_meta": O(2, args=A(V2, SH2, SIO, fuse_optimizer_states=True)),
        "asyncsave_sh2_s1v1": O(2, args=A(V1, SH2, use_async_save=True)),
        "hfsteps_fc_single": O(1, args=A(FC, save_hf_steps=3)),
        "hfsteps_fc_sh2_s1v2_ema": O(2, args=A(V2, SH2, FC, EMA, save_hf_steps=3)),
    }
)

C.pop("tfusion_sh2_s1v2_meta")
C.pop("fusestates_sh2_s1v2_meta")
for k in ("tfusion_sh2_s1v1", "tfusion_sh2_s1v1_meta"):
    C[k]["opts"] = dict(patch="unfuse")

C["asyncsave_sh2_s1v1"]["opts"] = dict(patch="wait")
C.pop("hfsteps_fc_sh2_s1v2_ema")  # AssertionError: with EMA save_hf_steps needs the ZCC callback's assembler
