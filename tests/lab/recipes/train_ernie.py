#!/usr/bin/env python
"""One rank of the ERNIE-4.5 pre-training recipe: run_ernie_pretrain itself (its own arguments, model, trainer, optimizer, callbacks, checkpoint
and final export), on a tiny model and random tokens; the truth is taken after trainer.train and before the export."""

import argparse, json, os, sys, time, dataclasses, re

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
ap.add_argument("--family", default="ernie")
ap.add_argument("--export", default="1")
ap.add_argument("--format", default="")  # laboratory: another save format than the workflow's fixed one
A = ap.parse_args()

import numpy as np
import paddle

paddle.set_device("cpu")
import recipe_shim as R

shim = R.shim
R.ernie()
import paddle.distributed as dist
from paddle.distributed import fleet
import paddleformers.cli.train.ernie_pretrain.workflow as W
import paddleformers.cli.train.ernie_pretrain.src.trainers.pretraining_trainer as PT
import truth_recipe as T

VOCAB = 96
cfg = dict(
    architectures=["ErnieForCausalLM"],
    model_type="ernie",
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=0,
    hidden_act="silu",
    hidden_size=32,
    intermediate_size=48,
    max_position_embeddings=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=3,
    rms_norm_eps=1e-5,
    use_cache=False,
    vocab_size=VOCAB,
    rope_theta=10000,
    use_rmsnorm=True,
    fuse_rms_norm=True,
    use_bias=False,
    use_fast_ln=True,
    fuse_attn_ffn=True,
    fuse_linear=True,
    rope_reorder=False,
    apply_rope_fusion=False,
    fuse_swiglu=True,
    fuse_gate_detach_matmul=True,
    use_flash_attn=False,
    use_mem_eff_attn=False,
    tie_word_embeddings=False,
    use_recompute=False,
    moe_num_experts=4,
    moe_num_shared_experts=2,
    moe_layer_start_index=1,
    moe_group_experts=False,
    moe_intermediate_size=24,
    moe_capacity=[4, 4, 4],
    moe_gate="top2_fused",
    moe_k=2,
    router_aux_loss_coef=1e-5,
    moe_orthogonal_loss_lambda=0.0,
    moe_layer_interval=1,
    moe_use_aux_free=True,
    use_ep_comm_overlap=False,
    use_combine_before_a2a=False,
)
over = json.loads(A.model)
yaml_cfg = over.pop("ernie_model_config", {})
cfg.update(over)
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
    weight_decay=0.1,
    max_grad_norm=1.0,
    warmup_steps=0,
    lr_scheduler="wsd:100",
    decay_function="1-sqrt",
    min_lr=1e-5,
    save_strategy="steps",
    logging_steps=1000,
    device="cpu",
    report_to="none",
    overwrite_output_dir=True,
    skip_memory_metrics=True,
    seed=42,
    partial_send_recv=False,
    disable_tqdm=True,
    adam_beta2=0.95,
    skip_profile_timer=True,
    max_seq_len=A.seq,
    base_seq_length=A.seq,
    from_scratch=1,
    save_tokenizer=False,
    dataloader_shuffle=False,
    sharding="",
    stage1_reduce_avg=True,
    fuse_sequence_parallel_allreduce=False,
    ignore_data_skip=False,
    moe_with_send_router_loss=False,
    pp_delay_scale_loss=True,
)
targs.update(json.loads(A.args))
margs = dict(
    model_name_or_path=mdir,
    tokenizer_name_or_path=mdir,
    moe_group=targs.pop("moe_group", "dummy"),
    ernie_model_config=yaml_cfg,
)
gb = A.global_batch
dsz = max(targs.get("sharding_parallel_size", 1), 1) * max(targs.get("data_parallel_size", 1), 1)
targs["gradient_accumulation_steps"] = gb // dsz


def as_dataclass(name, d):
    return dataclasses.make_dataclass(
        name, [(k, object, dataclasses.field(default_factory=lambda v=v: v)) for k, v in d.items()]
    )()


class Tok:
    ignored_index = -100
    bos_token_id, eos_token_id, pad_token_id = 0, 1, 0


W.ErnieBotTokenizer.from_pretrained = classmethod(lambda cls, *a, **k: Tok())
mtp = cfg.get("num_nextn_predict_layers", 0) or yaml_cfg.get("num_nextn_predict_layers", 0)


class DS(paddle.io.Dataset):
    def __init__(self):
        self.x = (
            np.random.RandomState(7)
            .randint(3, VOCAB, size=(gb * (A.steps + 1), A.seq + mtp + 1))
            .astype("int64")
        )

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


W.create_pretrained_dataset = lambda args: (
    DS(),
    None,
    None,
    lambda it: {"input_ids": np.stack(it)[:, :-1], "labels": np.stack(it)[:, 1:]},
)
R.PATCHES.append(
    "data: random tokens and a tokenizer stub instead of create_pretrained_dataset and ErnieBotTokenizer"
)


class NoBoard(PT.LoggingCallback):
    def __init__(self, *a, **k):
        super().__init__()


PT.TensorBoardCallback = NoBoard
R.PATCHES.append("TensorBoardCallback left out (no tensorboard here)")
_init = PT.PretrainingTrainer.__init__


def init(self, args=None, model=None, callbacks=[], **k):
    if A.format:
        args.save_checkpoint_format = None if A.format == "none" else A.format
        R.PATCHES.append(
            f"laboratory: save_checkpoint_format {A.format} instead of the workflow's fixed sharding_io"
        )
    T.start_values(model, args, A, W.fleet)
    _init(self, args=args, model=model, callbacks=callbacks, **k)


PT.PretrainingTrainer.__init__ = init
_train = PT.PretrainingTrainer.train


def train(self, *a, **k):
    r = _train(self, *a, **k)
    print("TRAIN_DONE", flush=True)
    T.gather(self, A, self.args)
    if A.export != "1":
        leave()
    if dist.get_world_size() == 1:
        fleet.init(is_collective=True, strategy=fleet.DistributedStrategy())
    return r


PT.PretrainingTrainer.train = train


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


if dist.get_world_size() == 1:  # the workflow's trainer calls a barrier after saving, its exporter asks fleet
    import paddle.distributed

    dist.barrier = lambda *a, **k: None
    dist.all_reduce = lambda *a, **k: None
    R.PATCHES.append(
        "single card: barrier and all_reduce do nothing (the global group does not exist); fleet.init before the export, which asks it for the expert group"
    )
ma = as_dataclass("ModelArgs", margs)
if "sharding" in targs and targs["sharding"]:
    from paddleformers.trainer.trainer_utils import ShardingOption

    targs["sharding"] = [ShardingOption(s) for s in targs["sharding"].split()]
ta = as_dataclass("TrainArgs", targs)
W.run_ernie_pretrain(ma, as_dataclass("DataArgs", dict(input_dir="none")), None, ta)
leave()
