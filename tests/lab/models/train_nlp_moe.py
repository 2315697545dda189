#!/usr/bin/env python
"""Same as train_pf.py but with paddlenlp 3.0.0b4 / paddle 3.0.0 (older trainer, fused qkv/ffn Llama,
unified checkpoint with tensor parallel)."""

import argparse, json, os, sys, time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
ap = argparse.ArgumentParser()
ap.add_argument("--case", required=True)
ap.add_argument("--out", required=True)
ap.add_argument("--args", default="{}")
ap.add_argument("--model", default="{}")
ap.add_argument("--init", default="")
ap.add_argument("--dump_init", default="")
ap.add_argument("--resume", default="")
ap.add_argument("--family", default="nlp_deepseek_v2")
ap.add_argument("--global_batch", type=int, default=4)
ap.add_argument("--seq", type=int, default=16)
ap.add_argument("--truth", default="1")
ap.add_argument("--steps", type=int, default=3)
A = ap.parse_args()
import numpy as np
import paddle

paddle.set_device("cpu")
import cpu_gloo_shim as shim
import paddle.distributed as dist
from paddle.distributed import fleet
from paddlenlp.trainer import Trainer, TrainingArguments
import truth as T
import moe_models as MM

if json.loads(A.model).get(
    "num_nextn_predict_layers"
):  # concat has no bfloat16 gradient on CPUs; forward only
    import paddlenlp.transformers.deepseek_v2.modeling as ds

    norm = ds.DeepseekV2RMSNorm.forward
    ds.DeepseekV2RMSNorm.forward = lambda self, x: norm(self, x).astype("float32")

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
    skip_memory_metrics=True,
    seed=42,
    disable_tqdm=True,
    adam_beta2=0.95,
    skip_profile_timer=True,
    do_train=True,
)
targs.update(json.loads(A.args))
vpp = targs.pop("_vpp", 1)
gb = A.global_batch
ws = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
mp, pp = targs.get("tensor_parallel_degree", 1), targs.get("pipeline_parallel_degree", 1)
targs["gradient_accumulation_steps"] = gb // (ws // (mp * pp))
args = TrainingArguments(**targs)
args.decay_steps = 100
pipe = args.pipeline_parallel_degree > 1
mcfg, CFG, CLS, PIPE = MM.get(A.family, A.seq)
mcfg.update(json.loads(A.model))
config = CFG(**mcfg)
config.tensor_parallel_degree = max(args.tensor_parallel_degree, 1)
config.tensor_parallel_rank = args.tensor_parallel_rank
config.virtual_pp_degree = vpp
config.tensor_parallel_output = True
config.pipeline_parallel_degree = max(args.pipeline_parallel_degree, 1)
cls = PIPE if pipe else CLS
paddle.seed(20)
np.random.seed(20)
model = cls.from_config(config, dtype="bfloat16")
if A.dump_init:
    T.dump_init(model, os.path.join(os.path.dirname(A.out), A.dump_init))
if A.init:
    T.load_init(model, A.init, args)


class DS(paddle.io.Dataset):
    def __init__(self):
        rng = np.random.RandomState(7)
        self.x = rng.randint(3, mcfg["vocab_size"], size=(gb * (A.steps + 1), A.seq + 1)).astype("int64")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"input_ids": self.x[i, :-1], "labels": self.x[i, 1:]}


def collate(items):
    return {k: paddle.to_tensor(np.stack([i[k] for i in items])) for k in items[0]}


class Tr(Trainer):
    def _get_train_sampler(self):
        from paddle.io import DistributedBatchSampler, BatchSampler

        if self.args.world_size <= 1:
            return BatchSampler(self.train_dataset, shuffle=False, batch_size=1, drop_last=True)
        return DistributedBatchSampler(
            self.train_dataset,
            batch_size=1,
            shuffle=False,
            num_replicas=self.args.dataset_world_size,
            rank=self.args.dataset_rank,
            drop_last=True,
        )


trainer = Tr(model=model, args=args, train_dataset=DS(), data_collator=collate)
t0 = time.time()
trainer.train(resume_from_checkpoint=A.resume or None)
print("TRAIN_DONE", A.case, "sec", round(time.time() - t0, 2), flush=True)
if A.truth == "1":
    T.gather(trainer, A, args)
if dist.get_world_size() > 1:
    dist.barrier()
print("SHIM_CALLS", json.dumps(shim.CALLS, sort_keys=True), flush=True)
print("CASE_OK", A.case, flush=True)
sys.stdout.flush()
sys.stderr.flush()
if dist.get_world_size() > 1 and dist.get_rank() == 0:
    time.sleep(1)  # let the others leave before the TCPStore master goes
os._exit(0)  # gloo's teardown sometimes aborts (SIGABRT) after a clean run
