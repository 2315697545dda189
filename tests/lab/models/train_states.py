#!/usr/bin/env python
"""Train a tiny Llama with the REAL paddleformers Trainer on CPU/gloo and let the Trainer
write its own checkpoint; then gather ground truth from the live objects.

usage (one process per rank, see run_case.py):
  train_pf.py --case NAME --out DIR --args '{"tensor_model_parallel_size":2, ...}'
"""

import argparse, json, os, sys, time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
ap = argparse.ArgumentParser()
ap.add_argument("--case", required=True)
ap.add_argument("--out", required=True)
ap.add_argument("--args", default="{}")
ap.add_argument("--model", default="{}")
ap.add_argument("--init", default="")  # npz with full initial weights (structured names)
ap.add_argument("--global_batch", type=int, default=4)
ap.add_argument("--seq", type=int, default=16)
ap.add_argument("--truth", default="1")
ap.add_argument("--steps", type=int, default=3)
ap.add_argument("--dump_init", default="")
ap.add_argument("--resume", default="")
ap.add_argument("--family", default="qwen3_moe")
ap.add_argument("--lora", default="")  # json: fields of LoRAConfig
ap.add_argument("--patch", default="")  # comma list of functions of state_patches.py
A = ap.parse_args()

import numpy as np
import paddle

paddle.set_device("cpu")
if int(os.environ.get("PADDLE_TRAINERS_NUM", "1")) > 1 or True:
    import cpu_gloo_shim as shim
import paddle.distributed as dist
from paddle.distributed import fleet
from paddleformers.transformers import LlamaConfig, LlamaForCausalLM, LlamaForCausalLMPipe
from paddleformers.transformers.configuration_utils import LlmMetaConfig
from paddleformers.trainer import Trainer, TrainingArguments, TrainerCallback
import truth as T
import moe_models as MM
import state_patches as P

P.early(A)

targs = dict(
    output_dir=A.out,
    max_steps=A.steps,
    save_steps=A.steps,
    per_device_train_batch_size=1,
    bf16=True,
    fp16_opt_level="O2",
    amp_master_grad=True,
    learning_rate=2e-3,
    weight_decay=0.1,
    max_grad_norm=1.0,
    warmup_steps=0,
    lr_scheduler_type="linear",
    save_strategy="steps",
    logging_steps=1,
    device="cpu",
    report_to="none",
    save_tokenizer=False,
    save_to_hf=False,
    save_checkpoint_format=None,
    load_checkpoint_format=None,
    dataloader_shuffle=False,
    skip_memory_metrics=True,
    seed=42,
    partial_send_recv=False,
    stage1_reduce_avg=True,
    disable_tqdm=True,
    adam_beta2=0.95,
    skip_profile_timer=True,
    fuse_sequence_parallel_allreduce=False,
)
targs.update(json.loads(A.args))
vpp = targs.pop("_vpp", 1)
tie = targs.pop("_tie", False)
args = TrainingArguments(**targs)
args.decay_steps = 100  # what the pretrain CLI adds; keeps lr > 0
gb = A.global_batch
dsz = args.dataset_world_size if args.world_size > 1 else 1
assert gb % dsz == 0
args.gradient_accumulation_steps = gb // dsz
if args.use_hybrid_parallel and args.pipeline_model_parallel_size > 1:
    fleet.fleet._user_defined_strategy.pipeline_configs = dict(
        fleet.fleet._user_defined_strategy.pipeline_configs, accumulate_steps=gb // dsz
    )

mcfg, CFG, CLS, PIPE = P.get_family(A.family, A.seq) or MM.get(A.family, A.seq)
mcfg.update(tie_word_embeddings=tie)
mcfg.update(json.loads(A.model))
config = CFG(**mcfg)
DT = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
config.dtype = DT
LlmMetaConfig.set_llm_config(config, args)
config.tensor_model_parallel_size = max(args.tensor_model_parallel_size, 1)
config.tensor_parallel_rank = args.tensor_parallel_rank
config.virtual_pipeline_model_parallel_size = vpp
config.use_cache = False
config._attn_implementation = "eager"
config.seq_length = A.seq
MM.finish(config, args, mcfg)

pipe = args.pipeline_model_parallel_size > 1
paddle.set_default_dtype("float32")
cls = PIPE if pipe else CLS
paddle.seed(20)
np.random.seed(20)
P.before_model(A, args, config)
model = cls.from_config(config, dtype=DT)
if os.environ.get("DEBUG_DTYPE"):
    print({k: (v.shape, v.dtype) for k, v in model.state_dict().items()})
import zlib

with (
    paddle.no_grad()
):  # zero at birth and never updated in 3 steps: give the router correction bias a recognisable value
    for k, p in model.state_dict().items():
        if k.endswith("e_score_correction_bias"):
            v = (
                np.random.RandomState(zlib.crc32(k.encode()) & 0xFFFF).randn(*p.shape).astype("float32")
                * 0.01
            )
            paddle.assign(paddle.to_tensor(v), p)
if A.dump_init:
    T.dump_init(model, os.path.join(os.path.dirname(A.out), A.dump_init))
if A.init:
    T.load_init(model, A.init, args)

if A.lora:
    model = P.make_lora(model, A, args, DT)
P.after_model(A, args, model)


class DS(paddle.io.Dataset):
    def __init__(self):
        rng = np.random.RandomState(7)
        self.x = rng.randint(3, mcfg["vocab_size"], size=(gb * (A.steps + 1), A.seq + 1)).astype("int64")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return P.sample({"input_ids": self.x[i, :-1], "labels": self.x[i, 1:]}, A, mcfg)


def collate(items):
    b = {k: paddle.to_tensor(np.stack([i[k] for i in items])) for k in items[0]}
    if pipe:
        m = np.tril(np.ones((A.seq, A.seq), "float32"))[None, None].repeat(len(items), 0)
        b["attention_mask"] = paddle.to_tensor(m)
    return b


P.late(A, args, model)
trainer = Trainer(model=model, args=args, train_dataset=DS(), data_collator=collate)
P.after_trainer(A, args, trainer)
if args.zcc_save_ema_coef is not None and not args.enable_zero_cost_checkpoint:
    # what cli/train/*/workflow.py does for the non-ZCC EMA
    pass


def timed(obj, name):
    f = getattr(obj, name, None)
    if f is None:
        return

    def g(*a, **k):
        t = time.time()
        r = f(*a, **k)
        print("TIMED", name, round(time.time() - t, 3), flush=True)
        return r

    setattr(obj, name, g)


for _n in (
    "_load_flex_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_from_checkpoint",
    "_save_checkpoint",
):
    timed(trainer, _n)


class AfterLoad(TrainerCallback):
    """peer runs: gather what has been loaded, before any further step, and leave"""

    def on_train_begin(self, *a, **k):
        if A.truth == "1":
            T.gather(trainer, A, args)
        print("CASE_OK", A.case, flush=True)
        sys.stdout.flush()
        if dist.get_world_size() > 1:
            dist.barrier()
            time.sleep(1 if dist.get_rank() == 0 else 0)
        os._exit(0)


if A.resume:
    trainer.add_callback(AfterLoad())
    if dist.get_world_size() == 1 and not os.environ.get("NO_FLEET_INIT"):
        # the FlexCheckpoint loader calls get_hybrid_communicate_group() even on one card
        fleet.init(is_collective=True, strategy=fleet.DistributedStrategy())
t0 = time.time()
trainer.train(resume_from_checkpoint=A.resume or None)
t1 = time.time()
print("TRAIN_DONE", A.case, "sec", round(t1 - t0, 2), flush=True)
if A.truth == "1":
    P.gather(T, trainer, A, args)
if dist.get_world_size() > 1:
    try:
        dist.barrier()
    except RuntimeError as e:  # everything is on disk: a rank that left early
        print("late barrier", e)
print("SHIM_CALLS", json.dumps(shim.CALLS, sort_keys=True), flush=True)
print("CASE_OK", A.case, flush=True)
sys.stdout.flush()
sys.stderr.flush()
if dist.get_world_size() > 1 and dist.get_rank() == 0:
    time.sleep(1)  # let the others leave before the TCPStore master goes
os._exit(0)  # gloo's teardown sometimes aborts (SIGABRT) after a clean run
