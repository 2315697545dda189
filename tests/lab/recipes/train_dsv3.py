#!/usr/bin/env python
"""One rank of the DeepSeek-V3 pre-training recipe: run_dsv3_pretrain itself, on a tiny model and random tokens; truth after trainer.train."""

import argparse, json, os, sys, time, types

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
ap = argparse.ArgumentParser()
ap.add_argument("--case", required=True)
ap.add_argument("--out", required=True)
ap.add_argument("--args", default="{}")
ap.add_argument("--model", default="{}")
ap.add_argument("--init", default="")
ap.add_argument("--dump_init", default="")
ap.add_argument("--global_batch", type=int, default=4)
ap.add_argument("--seq", type=int, default=16)
ap.add_argument("--steps", type=int, default=3)
ap.add_argument("--family", default="dsv3")
ap.add_argument("--export", default="0")
A = ap.parse_args()

import numpy as np
import paddle

paddle.set_device("cpu")
import recipe_shim as R

shim = R.shim
R.dsv3()
import paddle.distributed as dist
from paddle.distributed import fleet
import paddleformers.cli.train.deepseek_v3_pretrain.workflow as W
import truth_recipe as T

T.EP["local_ids"] = False
VOCAB = 128
cfg = dict(
    architectures=["DeepseekV3ForCausalLM"],
    model_type="deepseek_v3",
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=3,
    num_nextn_predict_layers=0,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_shared_experts=1,
    n_routed_experts=4,
    routed_scaling_factor=1.0,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=4,
    v_head_dim=8,
    qk_nope_head_dim=8,
    topk_method="noaux_tc",
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    moe_layer_freq=1,
    first_k_dense_replace=1,
    norm_topk_prob=True,
    scoring_func="sigmoid",
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    tie_word_embeddings=False,
    using_flex_token=False,
    send_mtp_embed=True,
    using_post_norm_recompute=True,
    router_aux_loss_coef=0.0,
    token_drop_steps=0,
    use_cache=False,
)
cfg.update(json.loads(A.model))
mdir = A.out + "_model"
os.makedirs(mdir, exist_ok=True)
with open(f"{mdir}/config.json.{os.getpid()}", "w") as f:
    json.dump(cfg, f)
os.replace(f"{mdir}/config.json.{os.getpid()}", mdir + "/config.json")

targs = dict(
    output_dir=A.out,
    do_train=True,
    max_steps=A.steps,
    save_steps=A.steps,
    per_device_train_batch_size=1,
    per_device_eval_batch_size=1,
    bf16=True,
    fp16_opt_level="O2",
    amp_master_grad=True,
    learning_rate=2e-3,
    min_lr=1e-5,
    weight_decay=0.1,
    max_grad_norm=1.0,
    warmup_steps=0,
    lr_scheduler_type="linear",
    decay_steps=100,
    save_strategy="steps",
    logging_steps=1,
    device="cpu",
    report_to="none",
    overwrite_output_dir=True,
    skip_memory_metrics=True,
    seed=42,
    partial_send_recv=False,
    disable_tqdm=True,
    adam_beta2=0.95,
    skip_profile_timer=True,
    save_tokenizer=False,
    dataloader_shuffle=False,
    sharding="",
    stage1_reduce_avg=True,
    fuse_sequence_parallel_allreduce=False,
    save_to_hf=False,
    unified_checkpoint=False,
    offload_fp8_expert_master_weight=False,
    save_checkpoint_format="sharding_io",
    load_checkpoint_format=None,
)
targs.update(json.loads(A.args))
gb = A.global_batch
dsz = max(targs.get("sharding_parallel_size", 1), 1)
targs["gradient_accumulation_steps"] = gb // dsz
import dataclasses

names = {f.name for f in dataclasses.fields(W.PreTrainingArguments)}
extra = {k: targs.pop(k) for k in list(targs) if k not in names}
ta = W.PreTrainingArguments(**targs)
for k, v in dict(pre_alloc_memory=0, no_recompute_layers=None, **extra).items():
    if not hasattr(ta, k) or k in extra:
        setattr(ta, k, v)
if ta.use_hybrid_parallel and ta.pipeline_model_parallel_size > 1:
    fleet.fleet._user_defined_strategy.pipeline_configs = dict(
        fleet.fleet._user_defined_strategy.pipeline_configs, accumulate_steps=gb // dsz
    )


class Tok:
    pad_token_id, eos_token_id, vocab_size = 0, 2, VOCAB


W.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda *a, **k: Tok())
mtp = cfg["num_nextn_predict_layers"]
pipe = ta.pipeline_model_parallel_size > 1


class DS(paddle.io.Dataset):
    def __init__(self):
        self.x = (
            np.random.RandomState(7)
            .randint(3, 96, size=(gb * (A.steps + 1), A.seq + mtp + 1))
            .astype("int64")
        )

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


W.get_train_data_file = lambda a: None
W.create_pretrained_dataset = lambda *a, **k: (
    DS(),
    None,
    None,
    lambda it: {"input_ids": np.stack(it)[:, :-1], "labels": np.stack(it)[:, 1:]},
)
R.PATCHES.append(
    "data: random tokens and a tokenizer stub instead of create_pretrained_dataset and AutoTokenizer"
)
_init = W.PretrainingTrainer.__init__


def init(self, *a, model=None, args=None, **k):
    T.start_values(model, args, A, fleet)
    _init(self, *a, model=model, args=args, **k)


W.PretrainingTrainer.__init__ = init
_train = W.Trainer.train


def train(self, *a, **k):
    r = _train(self, *a, **k)
    print("TRAIN_DONE", flush=True)
    T.gather(self, A, self.args)
    leave()


W.PretrainingTrainer.train = train


def leave():
    if dist.get_world_size() > 1:
        dist.barrier()
    print("SHIM_CALLS", json.dumps(dict(calls=shim.CALLS, patches=R.PATCHES), sort_keys=True), flush=True)
    print("CASE_OK", A.case, flush=True)
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.get_world_size() > 1 and dist.get_rank() == 0:
        time.sleep(1)
    os._exit(0)


ma = types.SimpleNamespace(
    model_name_or_path=mdir,
    tokenizer_name_or_path=mdir,
    use_fast_layer_norm=False,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    continue_training=False,
)
da = types.SimpleNamespace(input_dir="none", split="1,0,0", max_seq_len=A.seq + mtp, data_cache=None)
W.PreTrainingArguments.print_config = lambda *a, **k: None
W.run_dsv3_pretrain(ma, da, None, ta)
leave()
