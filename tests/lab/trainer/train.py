"""One rank of a job: the real trainer on a tiny model, and then the truth of what it holds.

``run`` is what every job goes through, asked for by a :class:`Asked`: of a description (``server.py``), or of a command
line (``python train.py --case NAME --out FOLDER …``, a process per rank; ``CASE_OK NAME`` is said in the end).
"""

import argparse
import json
import os
import re
import resource
import sys
import time
import zlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

sys.path[:0] = [folder for folder in (str(Path(__file__).resolve().parent),) if folder not in sys.path]

import numpy as np
import paddle

paddle.set_device("cpu")
import cpu_gloo_shim  # noqa: F401  before what it patches is used
import models
import paddle.distributed as dist
import patches
import truth
from paddle.distributed import fleet
from paddleformers.trainer import Trainer, TrainerCallback, TrainingArguments
from paddleformers.trainer.utils.zero_cost_checkpoint import EMABufferFcBased

EVERY_JOB: dict[str, Any] = {
    "per_device_train_batch_size": 1, "bf16": True, "fp16_opt_level": "O2", "amp_master_grad": True,
    "learning_rate": 2e-3, "weight_decay": 0.1, "max_grad_norm": 1.0, "warmup_steps": 0,
    "lr_scheduler_type": "linear", "save_strategy": "steps", "logging_steps": 1, "device": "cpu",
    "report_to": "none", "save_tokenizer": False, "save_to_hf": False, "save_checkpoint_format": None,
    "load_checkpoint_format": None, "dataloader_shuffle": False, "skip_memory_metrics": True, "seed": 42,
    "partial_send_recv": False, "stage1_reduce_avg": True, "disable_tqdm": True, "adam_beta2": 0.95,
    "skip_profile_timer": True, "fuse_sequence_parallel_allreduce": False,
}  # fmt: skip
RECIPES = {"ernie": "ernie_pretrain", "dsv3": "deepseek_v3_pretrain"}
"""Short names of the two recipes, which their own entry functions run."""
WORDS_OF_IMAGES = 112
"""Tokens of a model of images from this one on are not words."""


@dataclass
class Asked:
    """What a job is to be; names are those of the command line."""

    out: str
    case: str = "job"
    args: dict[str, Any] = field(default_factory=dict)
    """Of the trainer, beyond those of every job; ``_vpp`` and ``_tie`` are of the model."""
    model: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    head: str = ""
    init: str = ""
    """A file of the values to begin with, or ``truth.BY_KEY``; otherwise those of the model, drawn with one seed."""
    dump_init: str = ""
    """Where to put the values at the start."""
    global_batch: int = 4
    seq: int = 16
    steps: int = 3
    """0: the job ends when it has its values at the start."""
    truth: int = 1
    resume: str = ""
    """A checkpoint to load; the job then tells what it holds, and ends."""
    lora: str = ""
    patch: str = ""
    freeze: str = ""
    optimizer: str = ""
    export: int = 0
    """Whether the library also exports the trained model."""
    names: int = 0
    """Whether a resuming job first compares its parameters' names with the checkpoint's."""

    @property
    def dtype(self) -> str:
        """Of the parameters."""
        given = EVERY_JOB | self.args
        return "bfloat16" if given["bf16"] else "float16" if given.get("fp16") else "float32"


def asked_of_command_line() -> Asked:
    parser = argparse.ArgumentParser()
    for one in fields(Asked):
        kind = json.loads if one.name in ("args", "model") else int if isinstance(one.default, int) else str
        parser.add_argument(f"--{one.name}", type=kind, required=one.name == "out", default=argparse.SUPPRESS)
    return Asked(**vars(parser.parse_args()))


def copy_to_host() -> None:
    """Have a loaded average survive: the trainer copies it to the host and clears the card's; here both are one."""
    convert, to_host = EMABufferFcBased._fc_to_buffer_format, paddle.Tensor.cpu

    def convert_copies(buffer: Any, loaded: Any) -> None:
        paddle.Tensor.cpu = lambda tensor: tensor.clone()
        try:
            convert(buffer, loaded)
        finally:
            paddle.Tensor.cpu = to_host

    EMABufferFcBased._fc_to_buffer_format = convert_copies


def run(asked: Asked) -> None:
    """Train, tell the truth, and end the process."""
    copy_to_host()
    if (recipe := RECIPES.get(asked.family, asked.family)) in RECIPES.values():
        import recipes

        recipes.run(recipe, asked)
    patches.early(asked.patch)
    given = dict(asked.args)
    vpp, tied = given.pop("_vpp", 1), given.pop("_tie", False)
    steps = max(asked.steps, 1)
    common = {"output_dir": asked.out, "max_steps": steps, "save_steps": steps, **EVERY_JOB}
    args = TrainingArguments(**(common | given))
    args.decay_steps = 100  # what the command line adds; the learning rate stays above zero
    shares = args.dataset_world_size if args.world_size > 1 else 1
    assert asked.global_batch % shares == 0
    args.gradient_accumulation_steps = asked.global_batch // shares
    pipe = args.pipeline_model_parallel_size > 1
    if pipe:
        accumulate_in_stages(asked.global_batch // shares)
    entries, config, model = models.build(
        asked.family, asked.model, args, asked.seq, tied, vpp, pipe, asked.dtype, asked.head
    )
    if asked.head:  # as a model that was loaded has it, also below adapters
        config.architectures = [type(model).__name__]
    start(asked, config, model, args)
    freeze(model, asked.freeze)
    if asked.lora:
        model = patches.make_lora(model, asked, args, asked.dtype)
    if "muon" in asked.patch:
        patches.know_matrices(model)
    data, collate = samples(asked, entries, pipe)
    trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=collate)
    if asked.family == "own":
        import own

        own.describe(trainer, Path(asked.out))
    if asked.optimizer:
        use_optimizer(trainer, asked.optimizer)
    if dist.get_rank() == 0:
        config.save_pretrained(asked.out)  # a FlexCheckpoint has none
    if asked.resume:
        end_after_loading(trainer, asked)
        if dist.get_world_size() == 1:  # the loader of FlexCheckpoints asks for groups even then
            fleet.init(is_collective=True, strategy=fleet.DistributedStrategy())
        if asked.names:
            check_names()
    paddle.seed(20)
    np.random.seed(20)
    trainer.train(resume_from_checkpoint=asked.resume or None)
    sys.stdout.write(f"TRAIN_DONE {asked.case}\n")
    tell(trainer, asked)
    if asked.export:
        export(model, Path(asked.out))
    leave(asked.case)


def accumulate_in_stages(micro_batches: int) -> None:
    strategy = fleet.fleet._user_defined_strategy
    strategy.pipeline_configs = {**strategy.pipeline_configs, "accumulate_steps": micro_batches}


def end_after_loading(trainer: Any, asked: Asked) -> None:
    """Have a job tell what it has loaded, in how many seconds, and end before its first step."""
    began = time.monotonic()

    class AfterLoading(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            sys.stdout.write(f"LOADED {time.monotonic() - began:.2f} s {peak} MiB\n")
            tell(trainer, asked)
            leave(asked.case)

    trainer.add_callback(AfterLoading())


def tell(trainer: Any, asked: Asked) -> None:
    if asked.truth:
        truth.gather(trainer, asked, trainer.args)


def leave(case: str) -> None:
    """End the process once all ranks are here: gloo sometimes aborts as it takes itself down.

    In a barrier of gloo, the first rank to leave would break the connections of the others.
    """
    box, ranks = Path(os.environ["SHIM_BOX"]), dist.get_world_size()
    (box / f"left{dist.get_rank()}").touch()
    while len([*box.glob("left*")]) < ranks:
        time.sleep(0.02)
    sys.stdout.write(f"CASE_OK {case}\n")
    sys.stdout.flush()
    os._exit(0)


def check_names() -> None:
    """Have every rank compare its names with those of the checkpoint, where it stores states by them."""
    import logging

    from paddle_reshard import names_callback

    said = logging.getLogger("paddle_reshard")
    said.setLevel(logging.INFO)
    said.addHandler(logging.StreamHandler())
    train = Trainer.train

    def train_if_names_fit(trainer: Any, resume_from_checkpoint: Any = None, **options: Any) -> Any:
        # The job's own callback, which was added before, ends the process.
        callback = names_callback(trainer, checkpoint=resume_from_checkpoint)
        trainer.callback_handler.callbacks.insert(0, callback)
        return train(trainer, resume_from_checkpoint=resume_from_checkpoint, **options)

    Trainer.train = train_if_names_fit


def freeze(model: Any, pattern: str) -> None:
    """Leave the parameters untrained whose keys, those of a model without stages, match."""
    of_single = getattr(model, "_pp_to_single_mapping", None) or {}
    for key, parameter in model.named_parameters():
        if pattern and re.search(pattern, of_single.get(key, key)):
            parameter.stop_gradient = True


def start(asked: Asked, config: Any, model: Any, args: Any) -> None:
    """Give the parameters the values to begin with."""
    if asked.init == truth.BY_KEY:
        start_by_key(asked.family, config, model, args)
        return
    with paddle.no_grad():  # zero at birth, and some steps do not change them
        for key, tensor in model.state_dict().items():
            if key.endswith("e_score_correction_bias"):
                numbers = np.random.RandomState(zlib.crc32(key.encode()) & 0xFFFF)
                value = numbers.randn(*tensor.shape).astype("float32") * 0.01
                paddle.assign(paddle.to_tensor(value), tensor)
    if asked.dump_init:
        truth.dump_init(model, asked.dump_init)
        if not asked.steps:
            leave(asked.case)
    if asked.init:
        truth.load_init(model, asked.init, args)


def start_by_key(family: str, config: Any, model: Any, args: Any) -> None:
    """Values that are a function of the key: the same in every topology."""
    degree, state = truth.tpdeg(args), model.state_dict()
    words = next((key for key in state if key.endswith("embed_tokens.weight")), "model.embed_tokens.weight")
    words = "model.embed.words.weight" if family == "own" else words
    with paddle.no_grad():
        for key, tensor in state.items():
            if "int" in str(tensor.dtype):
                continue
            head = key in ("lm_head.weight", "answer.words.weight")
            named = words if head and config.tie_word_embeddings else key
            named, _, share = truth.global_key(named, truth.local_experts(state)).partition("@ep")
            shape = [int(size) for size in tensor.shape]
            if share:  # of one tensor of all experts
                whole = value_of(named, [shape[0] * truth.RECIPE["world"], *shape[1:]])
                value = np.split(whole, truth.RECIPE["world"])[int(share)]
            elif truth.is_tp(key, tensor, args):
                axis = truth.tp_axis(key, tensor)
                shape[axis] *= degree
                value = truth.cut_by_key(value_of(named, shape), key, axis, config, args)
            else:
                value = value_of(named, shape)
            paddle.assign(paddle.to_tensor(value).astype(tensor.dtype), tensor)


def value_of(key: str, shape: list[int]) -> Any:
    """Values of a whole tensor; gate and up of an expert are halves of what a job without ep keeps as one."""
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


def samples(asked: Asked, entries: dict[str, Any], pipe: bool) -> Any:
    """The data of a job, the same in every topology, and what makes a batch of it."""
    has_images = asked.family in models.VISION
    words = WORDS_OF_IMAGES if has_images else entries.get("vocab_size", WORDS_OF_IMAGES)
    tokens = np.random.RandomState(7).randint(
        3, words, (asked.global_batch * (asked.steps + 1), asked.seq + 1)
    )
    tokens = tokens.astype("int64")

    class Data(paddle.io.Dataset):
        def __len__(self) -> int:
            return len(tokens)

        def __getitem__(self, i: int) -> Any:
            x = models.with_image(tokens[i].copy()) if has_images else tokens[i]
            labels = np.where(x[1:] >= WORDS_OF_IMAGES, -100, x[1:]) if has_images else x[1:]
            sample = {"input_ids": x[:-1], "labels": labels}
            if asked.head:
                return _with_labels(x, asked.head, entries)
            if "nbatch" in asked.patch:  # Ernie's multi-token prediction asks for it: nothing is packed here
                sample["nbatch_pack_offset"] = np.zeros_like(sample["input_ids"])
            return sample

    def collate(items: list[Any]) -> Any:
        if asked.head == "SentenceEmbedding":
            [item] = items
            return {part: {k: paddle.to_tensor(v) for k, v in of.items()} for part, of in item.items()}
        batch = {key: paddle.to_tensor(np.stack([item[key] for item in items])) for key in items[0]}
        if has_images:
            batch |= models.images(asked.family, batch["input_ids"].numpy())
        if pipe:
            mask = np.tril(np.ones((asked.seq, asked.seq), "float32"))[None, None]
            batch["attention_mask"] = paddle.to_tensor(mask.repeat(len(items), 0))
        return batch

    return Data(), collate


def _with_labels(tokens: Any, head: str, entries: dict[str, Any]) -> dict[str, Any]:
    """A sample for a head; of embeddings, those of the last token, two questions and their answers."""
    x, count = tokens[:-1], entries.get("num_labels", 2)
    if head == "SentenceEmbedding":
        asked, last = np.stack([x, x[::-1]]), np.array([[0, len(x) - 1], [1, len(x) - 1]])
        answers = np.roll(asked, 1, axis=1)
        both = {"query": asked, "passages": answers}
        return {part: {"input_ids": of, "embedding_indices": last} for part, of in both.items()}
    if head == "TokenClassification":
        return {"input_ids": x, "labels": x % count}
    return {"input_ids": x, "labels": x[0] % count if count > 1 else (x[0] / 10).astype("float32")}


def use_optimizer(trainer: Any, name: str) -> None:
    """Replace ``Trainer.create_optimizer`` by the same call with another class."""
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


def export(model: Any, out: Path) -> None:
    """The library's export, as its command line makes it, and again with the inverse map that it derives itself."""
    model.save_pretrained(str(out / "hf-export"), save_checkpoint_format="flex_checkpoint")
    for kind in type(model).__mro__:
        if "_gen_inv_aoa_config" in kind.__dict__:
            delattr(kind, "_gen_inv_aoa_config")
    model.save_pretrained(str(out / "hf-export-derived"), save_checkpoint_format="flex_checkpoint")


if __name__ == "__main__":
    run(asked_of_command_line())
