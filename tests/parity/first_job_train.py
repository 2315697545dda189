"""A training script as users write one: PaddleFormers' trainer, whose arguments come from the command line.

Every rank runs it with the same arguments. What only the CPU needs is the first line of ``main``.
"""

import os
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import paddle

SEQUENCE, VOCABULARY, GLOBAL_BATCH, SAMPLES = 16, 128, 4, 64


@dataclass
class Job:
    """What this script needs besides the trainer's arguments."""

    name: str = field(metadata={"help": "said when the job is done"})
    shim: str = field(metadata={"help": "folder of the laboratory's shim, which lets ranks run on CPUs"})
    fine_tuning: str = field(
        default="Full", metadata={"help": "of the library's command line; this script knows no LoRA"}
    )


class Samples(paddle.io.Dataset):
    """The same random tokens for every job."""

    def __init__(self) -> None:
        shape = (SAMPLES, SEQUENCE + 1)
        self.tokens = np.random.RandomState(7).randint(3, VOCABULARY, size=shape).astype("int64")

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"input_ids": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


def collate(items: list[dict[str, np.ndarray]]) -> dict[str, paddle.Tensor]:
    """Return a batch; a pipeline's stages are handed the mask of attention with it."""
    batch = {key: paddle.to_tensor(np.stack([item[key] for item in items])) for key in items[0]}
    mask = np.tril(np.ones((SEQUENCE, SEQUENCE), "float32"))[None, None].repeat(len(items), 0)
    return batch | {"attention_mask": paddle.to_tensor(mask)}


def main() -> None:
    """Train as the command line says."""
    paddle.set_device("cpu")
    sys.path.insert(0, sys.argv[sys.argv.index("--shim") + 1])
    import cpu_gloo_shim  # noqa: F401
    import paddle.distributed as dist
    from paddleformers.trainer import PdArgumentParser, Trainer, TrainingArguments
    from paddleformers.transformers import LlamaConfig, LlamaForCausalLM, LlamaForCausalLMPipe
    from paddleformers.transformers.configuration_utils import LlmMetaConfig

    args, job = PdArgumentParser((TrainingArguments, Job)).parse_args_into_dataclasses()
    # The trainer's own command line adds this one.
    args.decay_steps = 100
    if args.world_size > 1:
        assert args.dataset_world_size * args.gradient_accumulation_steps == GLOBAL_BATCH
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
        dtype="bfloat16",
    )
    LlmMetaConfig.set_llm_config(config, args)
    config.tensor_model_parallel_size = max(args.tensor_model_parallel_size, 1)
    config.tensor_parallel_rank = args.tensor_parallel_rank
    config._attn_implementation = "eager"
    config.seq_length = SEQUENCE
    stages = args.pipeline_model_parallel_size > 1
    model = (LlamaForCausalLMPipe if stages else LlamaForCausalLM).from_config(config, dtype="bfloat16")
    trainer = Trainer(model=model, args=args, train_dataset=Samples(), data_collator=collate)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if dist.get_world_size() > 1:
        dist.barrier()
    sys.stdout.write(f"CASE_OK {job.name}\n")
    sys.stdout.flush()
    if dist.get_rank() == 0:
        time.sleep(1)  # the others leave before their meeting point goes
    os._exit(0)  # gloo sometimes aborts at exit after a clean run


main()
