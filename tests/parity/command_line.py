"""The whole line that ``launch`` prints, in the real ``paddleformers-cli``: it goes on as the job before did.

``python -m tests.parity.command_line [row ...]``: one job trains six steps without a stop. Its checkpoint of step 3 is
converted for every row, and continues with exactly the printed arguments; data and batch are added, as a user does.
``names_callback`` finds nothing wrong, before the trainer loads and after. Right after loading, every tensor that the
ranks hold equals what the first job held after step 3, and the losses of steps 4 to 6 are its own.
"""

import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.lab.laboratory import Laboratory
from tests.parity.lab import PARITY, LabError, say
from tests.parity.tensors import differences, read_tensors

WORK = PARITY / "command-line"
RANK = Path(__file__).with_name("command_line_rank.py")
TIMEOUT_SECONDS = 400
STOP, END = 3, 6
GLOBAL_BATCH = 4
WORDS = 120
CLOSE = 5e-3
"""Largest difference of losses: sums in another order, in bfloat16."""
LOSS = re.compile(r"(?<![a-z_])loss: ([0-9.]+).*?global_step: ([0-9]+)")
BEFORE = "--save_checkpoint_format sharding_io --bf16 true --fp16_opt_level O2"
# The library's llama has no mappings with which it could save an adapter under tp.
OF_TUNING = {"Full": (2, "--tensor_model_parallel_size 2"), "LoRA": (1, "")}
"""Ranks and topology of the job before."""
ALWAYS = (
    "--stage PT --train_dataset_type erniekit --eval_dataset_type erniekit --train_dataset_prob 1.0 "
    "--continue_training false --_attn_implementation eager --max_seq_len 32 --device cpu --do_train true "
    "--warmup_steps 0 --per_device_train_batch_size 1 --logging_steps 1 --report_to none --disable_tqdm true"
)


class Row(NamedTuple):
    """A conversion, and the topology that ``launch`` is told where the format fits any."""

    options: str
    ranks: int
    to: str = ""
    accumulation: int = GLOBAL_BATCH
    tuning: str = "Full"
    nodes: bool = False
    """Every rank makes a portion for itself."""


ROWS = {
    "hybrid": Row("--to sharding=2", 2, accumulation=2),
    "plain": Row("--to pp=2 --format hybrid-plain", 2),
    "flex": Row("--format flex", 2, to="sharding=2", accumulation=2),
    "flex-by-rank": Row("--format flex --to sharding=2", 2, accumulation=2),
    # Of unified checkpoints the library's llama reads none under tp: it has no mappings of them.
    "unified": Row("--format unified", 2, to="sharding=2", accumulation=2),
    "portion": Row("--format flex --to pp=2", 2, nodes=True),
    # Its base is in no checkpoint: it is the same here because both jobs draw it with one seed, in one order.
    "lora": Row("--to sharding=2 --format hybrid-plain", 2, accumulation=2, tuning="LoRA"),
}


def main(wanted: Sequence[str]) -> int:
    """Run the rows; 0 if every job continued where it was stopped."""
    rows = {name: ROWS[name] for name in wanted or ROWS}
    shutil.rmtree(WORK, ignore_errors=True)
    write_inputs(WORK / "in")
    equal = 0
    with Laboratory() as lab:
        for tuning in dict.fromkeys(row.tuning for row in rows.values()):
            undisturbed = f"before-{tuning}"
            ranks, topology = OF_TUNING[tuning]
            arguments = f"{BEFORE} {topology} --fine_tuning {tuning}"
            arguments += f" --gradient_accumulation_steps {GLOBAL_BATCH}"
            losses = _train(lab, undisturbed, arguments.split(), ranks, after=str(STOP))
            say(f"{undisturbed}: losses {losses}")
            equal += sum(_check(lab, name, row, losses) for name, row in rows.items() if row.tuning == tuning)
    say(f"{equal} of {len(rows)} rows equal")
    return 1 if equal < len(rows) else 0


def _check(lab: Laboratory, name: str, row: Row, before: dict[int, float]) -> bool:
    """Convert, start as ``launch`` says, and compare."""
    source, target = WORK / f"before-{row.tuning}" / f"checkpoint-{STOP}", WORK / name / "converted"
    try:
        for node in range(row.ranks if row.nodes else 1):
            ranks = f"-{node} {row.options} --ranks {node}" if row.nodes else f" {row.options}"
            _reshard(*f"convert {source} {target}{ranks}".split())
        printed = _launch(f"{target}-0" if row.nodes else str(target), row.to)
        say(f"{name}: {shlex.join(printed)}")
        if row.nodes:
            printed = [word.replace(f"{target}-0", f"{target}-{{node}}") for word in printed]
        batch = ["--gradient_accumulation_steps", str(row.accumulation)]
        after = _train(lab, name, [*printed, *batch], row.ranks)
    except (LabError, subprocess.CalledProcessError) as error:
        say(f"{name}: FAILED: {error}\n{getattr(error, 'stderr', None) or ''}")
        return False
    truths = [
        read_tensors(WORK / job / "state" / str(STOP) / "truth.safetensors")
        for job in (name, f"before-{row.tuning}")
    ]
    found = differences(*truths)
    far = [step for step in range(STOP + 1, END + 1) if abs(after.get(step, 0) - before[step]) > CLOSE]
    equal = not found and not far and len(after) == END - STOP
    verdict = "equal" if equal else f"DIFFERS: {'; '.join(found[:3])}, losses of steps {far}"
    say(f"{name}: {len(truths[1])} tensors, losses {after}: {verdict}")
    return equal


def _launch(target: str, to: str) -> list[str]:
    """The arguments as a shell understands the line that ``launch`` prints."""
    told = _reshard("launch", target, *(["--to", to] if to else []))
    [line] = [line for line in told.splitlines() if line.startswith("arguments")]
    return shlex.split(line.removeprefix("arguments"))


def _reshard(*arguments: str) -> str:
    command = [sys.executable, "-m", "paddle_reshard", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=WORK).stdout


def _train(
    lab: Laboratory, name: str, arguments: Sequence[str], ranks: int, after: str = ""
) -> dict[int, float]:
    """Start the command line's ranks; step → loss, from the trainer's own lines."""
    out = WORK / name
    given = (
        f"--model_name_or_path {WORK / 'in' / 'model'} --train_dataset_path {WORK / 'in' / 'train.jsonl'} "
    )
    given += (
        f"--eval_dataset_path {WORK / 'in' / 'eval.jsonl'} --output_dir {out} --max_steps {END} {ALWAYS} "
    )
    given += f"--learning_rate 2e-3 --save_steps {STOP}"
    logs = WORK / f"{name}-logs"
    environment = {"RUN_NAME": name, "RUN_OUT": str(out / "state"), "DUMP_AFTER": after}
    command = [str(RANK), *given.split(), *arguments]
    texts = lab.script(command, name, logs, ranks=ranks, seconds=TIMEOUT_SECONDS, environment=environment)
    return {int(step): float(loss) for loss, step in LOSS.findall("".join(texts))}


def write_inputs(folder: Path, **sizes: int) -> None:
    """A small model, a tokenizer and some sentences."""
    model = folder / "model"
    model.mkdir(parents=True)
    special = ["<unk>", "<s>", "</s>", "<pad>"]
    vocabulary = [*special, *(f"w{number}" for number in range(WORDS))]
    added = [
        {"id": number, "content": word, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, word in enumerate(special)
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(vocabulary)},
            "unk_token": "<unk>",
        },
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
    }
    names = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), special, strict=True))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(vocabulary),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "torch_dtype": "bfloat16",
        "rope_theta": 10000.0,
        "use_cache": False,
        **sizes,
    }
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 32, **names}
    for path, content in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", settings),
        ("config.json", config),
    ):
        (model / path).write_text(json.dumps(content))
    chosen = random.Random(5)
    for name in ("train", "eval"):
        lines = [" ".join(f"w{chosen.randrange(WORDS)}" for _ in range(40)) for _ in range(200)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
