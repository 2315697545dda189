"""Runs in the laboratory's Python: imports the trainer once, and forks the ranks of one job after the other.

A line on stdin is a request, ``{"job": …, "out": folder, "resume": checkpoint or null, "seconds": …}``; a line on
stdout is its answer, the words with which the trainer refused, or none. A job leaves its checkpoint in the folder, and
``truth.safetensors``, which its ranks took from memory. Nothing here names, cuts or writes what the trainer writes.
"""

import json
import os
import re
import runpy
import shutil
import sys
import time
import types
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "GLOG_v": "0"}
TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS / folder) for folder in ("lab/draws", "lab/models", "lab", "parity", "../src")]
RECIPES = {"ernie_pretrain": "train_ernie.py", "deepseek_v3_pretrain": "train_dsv3.py"}
SEQUENCE = 12
VOCABULARY_OF_IMAGES = 112
EVERY_JOB: dict[str, Any] = {
    "per_device_train_batch_size": 1,
    "bf16": True,
    "fp16_opt_level": "O2",
    "amp_master_grad": True,
    "learning_rate": 2e-3,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
    "warmup_steps": 0,
    "lr_scheduler_type": "linear",
    "save_strategy": "steps",
    "logging_steps": 1,
    "device": "cpu",
    "report_to": "none",
    "save_tokenizer": False,
    "save_to_hf": False,
    "save_checkpoint_format": None,
    "load_checkpoint_format": None,
    "dataloader_shuffle": False,
    "skip_memory_metrics": True,
    "seed": 42,
    "partial_send_recv": False,
    "stage1_reduce_avg": True,
    "disable_tqdm": True,
    "adam_beta2": 0.95,
    "skip_profile_timer": True,
    "fuse_sequence_parallel_allreduce": False,
}


def main() -> int:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_the_library()
    from ranks import fork_ranks

    for line in sys.stdin:
        request = json.loads(line)
        job, out = request["job"], Path(request["out"])
        prepare(job["family"])
        for _ in range(2):
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
            count = ranks_of(job)
            ends = fork_ranks(
                count,
                lambda _, r=request: be_rank(r["job"], Path(r["out"]), r["resume"]),
                out,
                request["seconds"],
            )
            words = "" if not any(ends) else words_of(out, ends)
            if -6 not in ends and "gloo" not in words:  # two groups that met at one port
                break
        answers.write(json.dumps({"refused": words}) + "\n")
        answers.flush()
    return 0


def import_the_library() -> None:
    import paddle

    paddle.set_device("cpu")
    import cpu_gloo_shim  # noqa: F401
    import moe_models
    import paddle.distributed.fleet
    import paddleformers.cli.utils.llm_utils
    import paddleformers.peft
    import paddleformers.trainer  # noqa: F401

    moe_models._no_deepep()


def prepare(family: str) -> None:
    """Import the family's module before the ranks are forked."""
    import new_models

    if family not in RECIPES:
        new_models.get(family, SEQUENCE)


def ranks_of(job: Mapping[str, Any]) -> int:
    from job import job_of

    return job_of(job).topology.ranks


def words_of(out: Path, ends: list[int]) -> str:
    """The error of the rank that failed by itself rather than by another's end, and where it was raised."""
    found = []
    for rank in range(len(ends)):
        lines = (out / f"rank{rank}.log").read_text(errors="replace").splitlines()
        starts = [number for number, line in enumerate(lines) if line.startswith("Traceback")]
        last = [line for line in lines[starts[-1] + 1 :] if line.strip()] if starts else []
        error = next((line for line in last if not line.startswith(" ")), "")
        places = [Path(line.split('"')[1]).name for line in last if line.strip().startswith('File "')]
        if error:
            found.append(f"{error[:300]} ({places[-1] if places else ''})")
    return min(found, key=lambda words: "gloo" in words, default=f"exit statuses {ends}")


# ---- in a rank


def be_rank(entries: Mapping[str, Any], out: Path, resume: str | None) -> None:
    """Train and dump what is in memory, or resume, dump, and leave."""
    import numpy as np
    import paddle
    import paddle.distributed as dist
    import state_patches
    from job import BATCH, job_of
    from paddle.distributed import fleet
    from paddleformers.trainer import Trainer, TrainerCallback, TrainingArguments

    job = job_of(entries)
    if job.family in RECIPES:
        run_recipe(job, out, resume)
    # Multi-token prediction takes a sample's last tokens for itself.
    length = SEQUENCE + (job.model.get("num_nextn_predict_layers") or 0)
    asked = types.SimpleNamespace(out=str(out), seq=length, lora="", patch=job.patches())
    asked.lora = json.dumps({"r": job.lora}) if job.lora else ""
    if job.segment:
        cut_from(job.segment)
    state_patches.early(asked)
    given = {**EVERY_JOB, "output_dir": str(out), "max_steps": job.steps, "save_steps": job.steps}
    given |= job.trainer_arguments()
    if resume and job.format == "hybrid":
        given |= {"load_checkpoint_format": "sharding_io", "load_sharded_model": True}
    args = TrainingArguments(**given)
    args.decay_steps = 100
    shares = args.dataset_world_size if args.world_size > 1 else 1
    args.gradient_accumulation_steps = BATCH // shares
    pipe = args.pipeline_model_parallel_size > 1
    if pipe:
        strategy = fleet.fleet._user_defined_strategy
        strategy.pipeline_configs = {**strategy.pipeline_configs, "accumulate_steps": BATCH // shares}
    config, model = build(job, args, pipe, asked)
    start_values(job, config, model, args)
    freeze(model, job.frozen)
    if job.lora:
        model = state_patches.make_lora(model, asked, args, str(config.dtype).removeprefix("paddle."))
    data, collate = samples(job, config, pipe, asked)
    trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=collate)
    if job.optimizer:
        use_optimizer(trainer, job.optimizer)
    if dist.get_rank() == 0:
        config.save_pretrained(str(out))  # a FlexCheckpoint has none

    class AfterLoading(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            leave(job, trainer, asked, args)

    if resume:
        trainer.add_callback(AfterLoading())
        if dist.get_world_size() == 1:
            fleet.init(is_collective=True, strategy=fleet.DistributedStrategy())
        if job.format.startswith("hybrid"):
            import driver

            driver.check_names()
    paddle.seed(20)
    np.random.seed(20)
    trainer.train(resume_from_checkpoint=resume)
    leave(job, trainer, asked, args)


def freeze(model: Any, pattern: str) -> None:
    """Leave the parameters untrained whose keys, those of a model without stages, match."""
    of_single = getattr(model, "_pp_to_single_mapping", None) or {}
    for key, parameter in model.named_parameters():
        if pattern and re.search(pattern, of_single.get(key, key)):
            parameter.stop_gradient = True


def run_recipe(job: Any, out: Path, resume: str | None) -> None:
    """Let the recipe's own entry function run, under the laboratory's script for it, which ends the process."""
    import driver
    from job import BATCH

    script = TESTS / "lab" / "recipes" / RECIPES[job.family]
    given = {
        k: v for k, v in job.trainer_arguments().items() if v != "" and not k.endswith("checkpoint_format")
    }
    options: dict[str, Any] = {"case": "draw", "out": out, "args": json.dumps(given)}
    options |= {"model": json.dumps(job.model), "global_batch": BATCH, "seq": SEQUENCE, "steps": job.steps}
    sys.argv = [str(script), *(str(part) for name, of in options.items() for part in (f"--{name}", of))]
    sys.argv += ["--export", "0"]
    sys.path.insert(0, str(script.parent))
    if resume:
        sys.argv += ["--resume", resume]
        driver.resume_recipe()
    runpy.run_path(str(script), run_name="__main__")


def leave(job: Any, trainer: Any, asked: Any, args: Any) -> None:
    """Dump the state and end the process: gloo sometimes aborts as it takes itself down."""
    import driver
    import paddle.distributed as dist
    import state_patches
    import truth

    if job.family == "gpt_oss":
        driver.join_sinks(truth)
    if "unfuse" in asked.patch:
        state_patches.unfuse(trainer.optimizer, trainer.model)
    driver.show_and_gather(truth, truth.gather, trainer, asked, args)
    if dist.get_world_size() > 1:
        dist.barrier()
        time.sleep(0.5 if dist.get_rank() == 0 else 0)
    sys.stdout.flush()
    os._exit(0)


def build(job: Any, args: Any, pipe: bool, asked: Any) -> Any:
    import moe_models
    import new_models
    import state_patches

    finish = moe_models.finish

    def finish_and_patch(config: Any, *more: Any) -> None:
        finish(config, *more)
        state_patches.before_model(asked, args, config)

    moe_models.finish = finish_and_patch
    return new_models.build(
        job.family, dict(job.model), args, asked.seq, job.tied, job.topology.vpp, pipe, dtype=job.precision
    )[1:]


def start_values(job: Any, config: Any, model: Any, args: Any) -> None:
    """Give every parameter values that are a function of its key: the same in every topology."""
    import numpy as np
    import paddle
    import truth

    degree, rank = truth.tpdeg(args), args.tensor_parallel_rank
    state = model.state_dict()
    words = next((key for key in state if key.endswith("embed_tokens.weight")), "model.embed_tokens.weight")

    def cut(key: str, whole: Any, axis: int) -> Any:
        parts = [whole]
        if any(fused in key for fused in truth.FUSED):
            parts = np.split(whole, 2, axis=axis)
        elif job.family == "phi3" and "qkv_proj" in key:
            q, k, _ = qkv_widths(config)
            parts = np.split(whole, [q, q + k], axis=axis)
        return np.concatenate([np.split(part, degree, axis=axis)[rank] for part in parts], axis=axis)

    with paddle.no_grad():
        for key, tensor in state.items():
            if "int" in str(tensor.dtype):
                continue
            named = words if key == "lm_head.weight" and config.tie_word_embeddings else key
            shape = [int(size) for size in tensor.shape]
            if truth.is_tp(key, tensor, args):
                axis = truth.tp_axis(key, tensor)
                shape[axis] *= degree
                value = cut(key, value_of(named, shape), axis)
            else:
                value = value_of(named, shape)
            paddle.assign(paddle.to_tensor(value).astype(tensor.dtype), tensor)


def value_of(key: str, shape: list[int]) -> Any:
    """Values of a whole tensor; gate and up of an expert are halves of what a job without ep keeps as one."""
    import numpy as np

    for half, name in enumerate((".gate_proj.", ".up_proj.")):
        if ".experts." in key and name in key:
            both = value_of(key.replace(name, ".up_gate_proj."), [*shape[:-1], 2 * shape[-1]])
            return np.split(both, 2, axis=-1)[half]
    numbers = np.random.RandomState(zlib.crc32(key.encode()) & 0x7FFFFFFF)
    if key.endswith("norm.weight") or "layernorm" in key or re.search(r"\.norm[12]\.weight$", key):
        return (1 + 0.1 * numbers.randn(*shape)).astype("float32")
    if key.endswith("A_log"):
        return (0.5 + 0.2 * numbers.rand(*shape)).astype("float32")
    return (0.05 * numbers.randn(*shape)).astype("float32")


def qkv_widths(config: Any) -> tuple[int, int, int]:
    each = config.hidden_size // config.num_attention_heads
    return config.num_attention_heads * each, *(2 * (config.num_key_value_heads * each,))


def samples(job: Any, config: Any, pipe: bool, asked: Any) -> Any:
    """The data of a job, the same in every topology, and what makes a batch of it."""
    import new_models
    import numpy as np
    import paddle
    import state_patches
    from job import BATCH

    images = new_models.VISION.get(job.family)
    words = VOCABULARY_OF_IMAGES if images else config.vocab_size
    tokens = np.random.RandomState(7).randint(3, words, (BATCH * (job.steps + 1), asked.seq + 1))
    tokens = tokens.astype("int64")

    class Data(paddle.io.Dataset):
        def __len__(self) -> int:
            return len(tokens)

        def __getitem__(self, i: int) -> Any:
            x = new_models.with_image(tokens[i].copy(), images) if images else tokens[i]
            labels = np.where(x[1:] >= VOCABULARY_OF_IMAGES, -100, x[1:]) if images else x[1:]
            return state_patches.sample({"input_ids": x[:-1], "labels": labels}, asked, {})

    def collate(items: list[Any]) -> Any:
        batch = {key: paddle.to_tensor(np.stack([item[key] for item in items])) for key in items[0]}
        if images:
            batch |= new_models.images(images, batch["input_ids"].numpy())
        if pipe:
            mask = np.tril(np.ones((asked.seq, asked.seq), "float32"))[None, None]
            batch["attention_mask"] = paddle.to_tensor(mask.repeat(len(items), 0))
        return batch

    return Data(), collate


def use_optimizer(trainer: Any, name: str) -> None:
    """Replace ``Trainer.create_optimizer`` by the same call with another class."""
    import paddle

    kind, *flags = name.split()

    def create_optimizer(lr_scheduler: Any = None) -> Any:
        if trainer.optimizer is None:
            trainer.optimizer = getattr(paddle.optimizer, kind)(
                learning_rate=lr_scheduler or trainer.lr_scheduler,
                parameters=[p for p in trainer.model.parameters() if not p.stop_gradient],
                grad_clip=paddle.nn.ClipGradByGlobalNorm(1.0),
                multi_precision=True,
                **dict.fromkeys(flags, True),
            )
        return trainer.optimizer

    trainer.create_optimizer = create_optimizer


def cut_from(elements: int) -> None:
    """Set from how many elements on stage 3 cuts a parameter, which the trainer's arguments cannot."""
    import paddle.distributed.sharding as sharding

    shard = sharding.group_sharded_parallel
    sharding.group_sharded_parallel = lambda *given, **more: shard(
        *given, **{**more, "segment_size": elements}
    )


if __name__ == "__main__":
    sys.exit(main())
