"""Check that the small files of a checkpoint agree, and compare those of two checkpoints.

Every small file and every entry of ``config.json`` is compared, or listed here under the reason why it may differ.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from paddle_reshard.pipeline.checkpoint.checkpoint import DONOR
from paddle_reshard.pipeline.checkpoint.reading import (
    OF_TOPOLOGY,
    index_tensor_file,
    read_json,
    read_lr_scheduler,
)
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.file_names import CONFIG, LORA_CONFIG, SCHEDULER
from paddle_reshard.pipeline.core.limits import MAX_CONFIG_BYTES
from paddle_reshard.pipeline.core.trainer_files import is_steering, may_name_code
from paddle_reshard.pipeline.model.transformers_config import agreed_config, without_code, without_own_classes
from paddle_reshard.storage.files.paddle_pickle import ArrayRef
from paddle_reshard.storage.files.trainer_state import encode_trainer_state, parse_trainer_state
from paddle_reshard.storage.store import Source

SCALER = "scaler.pdparams"
TRAINER_STATES = ("trainer_state.bin", "trainer_state.json")
TRAINING_ARGS = "training_args.bin"
_PEFT = ("adapter_config.json", "adapter_model.safetensors")
"""The configuration of an adapter of PEFT, and what it describes."""
NONE, FALSE, FLOAT = b"N", b"\x89", b"G"
"""Opcodes of the values of attributes in ``training_args.bin``; the file is searched, never unpickled."""

MAY_DIFFER_IN_CONFIG: Final = frozenset({
    *OF_TOPOLOGY,
    # dtype of the stored tensors, which is compared directly
    "torch_dtype", "dtype",
    # the library that wrote it, or whose layout the weights have
    "paddleformers_version", "paddlenlp_version", "transformers_version", "source",
})  # fmt: skip
"""Entries of ``config.json``, at any depth, that may differ between checkpoints of one model."""

MAY_DIFFER_IN_LORA_CONFIG: Final = frozenset({"tensor_model_parallel_size"})
"""The same for entries of ``lora_config.json``."""

MAY_DIFFER_IN_SERIES: Final = MAY_DIFFER_IN_CONFIG | {
    # how the model runs, not what it computes
    "use_cache", "output_router_logits",
    # only while or before training
    "attention_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "embd_pdrop", "resid_pdrop",
    "initializer_range", "seq_length", "max_sequence_length",
    # weights of losses
    "aux_loss_alpha", "router_aux_loss_coef",
}  # fmt: skip
"""The same for checkpoints that are averaged."""

_COMPARED: Final = (
    r"trainer_state\.(json|bin)|scheduler\.pdparams|scaler\.pdparams|ema\.json|generation_config\.json|"
    r"lora_config\.json|(added_tokens|special_tokens_map|tokenizer\w*|vocab|chat_template|"
    r"(video_)?(pre)?processor(_config)?)\.(json|jinja|txt)|merges\.txt|\S+\.(model|spm|tiktoken|vocab)"
)
"""Small files, except ``config.json``, that a trainer or an inference engine reads."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A file, or an entry of one, in which two sides differ, with both values in words."""

    what: str
    a: str
    b: str


# ---------------------------------------------------------------------------------------- of one checkpoint


def check_steps(store: Source, in_optimizer_files: Any, ahead: int | None = 0) -> None:
    """Refuse a checkpoint whose small files are of different steps.

    ``in_optimizer_files`` is the state of the learning-rate schedule in the optimizer files, ``None`` if there is none.
    In a checkpoint of the trainers, the schedule in ``scheduler.pdparams`` equals that in the optimizer files. The step
    of the schedule equals ``global_step``, except that only the latter counts skipped steps: fp16 steps whose gradients
    overflowed, and ``skip_data_intervals`` (PaddleNLP 3 ``trainer/trainer.py``). Some recipes begin their schedule one
    step ``ahead``, which is ``None`` where the model, and with it the recipe, is not known.
    """
    sizes = store.sizes()
    holder = next((path for path in sorted(sizes) if path.startswith("optimizer.")), "the optimizer files")
    schedule, where = in_optimizer_files, f"LR_Scheduler in {holder}"
    if sizes.get(SCHEDULER):
        in_own_file = read_lr_scheduler(store, sizes)
        if schedule is not None:
            for entry in differences(in_own_file, schedule):
                raise CheckpointError(
                    f"{SCHEDULER}: {entry.what or 'the state'} is {entry.a}, {where} says {entry.b}: they are of "
                    "different steps or runs; use the files of a single checkpoint"
                )
        schedule, where = in_own_file, SCHEDULER
    step = scheduled_step(schedule)
    for path, state in read_trainer_states(store).items():
        global_step = state.get("global_step")
        if type(global_step) is not int or step is None or global_step <= step <= global_step + (ahead or 0):
            continue
        skips = SCALER in sizes or training_argument(store, "skip_data_intervals") != NONE
        if step > global_step or not skips:
            recipe = ""
            if ahead is None and step == global_step + 1:
                recipe = ", or, if the schedule of the recipe begins a step ahead, name the model with --config FILE"
            raise CheckpointError(
                f"{path}: global_step is {global_step}, last_epoch in {where} is {step}: they are of different steps "
                f"or runs; use the files of a single checkpoint{recipe}"
            )


def scheduled_step(schedule: Any) -> int | None:
    """The step in the state of a learning-rate schedule, if it is one of the trainers'."""
    step = schedule.get("last_epoch") if isinstance(schedule, dict) else None
    return step if type(step) is int else None


def training_argument(store: Source, name: str) -> bytes | None:
    """The opcode of an argument's value in ``training_args.bin``; ``None`` if the file or the argument is missing."""
    sizes = store.sizes()
    if not 0 < sizes.get(TRAINING_ARGS, 0) <= MAX_CONFIG_BYTES:
        return None
    attribute = b"\x8c" + bytes([len(name)]) + name.encode() + b"\x94"
    rest = store.read(TRAINING_ARGS, 0, sizes[TRAINING_ARGS]).partition(attribute)[2]
    return rest[:1] or None


def read_trainer_states(store: Source) -> dict[str, Mapping[str, Any]]:
    """File → fields of the trainer's state, for files that can be parsed."""
    sizes = store.sizes()
    states = {
        path: parse_trainer_state(partial(store.read, path), sizes[path], path)
        for path in TRAINER_STATES
        if path in sizes
    }
    return {path: state for path, state in states.items() if state is not None}


def trainer_state_for(store: Source, library: str) -> dict[str, tuple[str, bytes]]:
    """File of the trainer's state → name and content of the one from which another library's trainer goes on.

    A file that cannot be parsed stays as it is. So does one that holds no plain values, of which no trainer is known.
    """
    states = read_trainer_states(store)
    if not states:
        return {}
    try:
        written = encode_trainer_state(next(iter(states.values())), library)
    except TypeError:
        return {}
    return dict.fromkeys(states, written)


# ------------------------------------------------------------------------------------------ of two or more


def compare_small_files(a: Source, b: Source, subset: bool = False) -> list[Disagreement]:
    """Differences between the small files of two checkpoints that a trainer reads, or for which a loader leaves the
    weights of ``b``.

    With ``subset``, ``b`` may lack files. The schedule in ``scheduler.pdparams`` is only compared if both have it.
    """
    disagreements = []
    sizes = a.sizes(), b.sizes()
    if CONFIG in sizes[0] and CONFIG in sizes[1]:
        configs = read_json(a, CONFIG, sizes[0]), read_json(b, CONFIG, sizes[1])
        disagreements += compare_configs(*_both_without_code(*configs), MAY_DIFFER_IN_CONFIG)
    for path in sorted(sizes[0].keys() | sizes[1].keys()):
        if is_steering(path) and path not in sizes[0] and not (path == _PEFT[0] and _PEFT[1] in sizes[1]):
            disagreements.append(
                Disagreement(path, "missing", "present, where a loader takes it for the weights")
            )
        if not re.fullmatch(_COMPARED, path):
            continue
        if path in sizes[0] and path in sizes[1]:
            content_a, content_b = _content(a, path), _content(b, path)
            if path == LORA_CONFIG:
                content_a, content_b = (
                    _of_model(content, MAY_DIFFER_IN_LORA_CONFIG) for content in (content_a, content_b)
                )
            contents = _both_without_code(content_a, content_b)
            disagreements += [_within(path, entry) for entry in differences(*contents)]
        elif path != SCHEDULER and not (subset and path in sizes[0]):
            disagreements.append(
                Disagreement(path, *("present" if path in side else "missing" for side in sizes))
            )
    return disagreements


def _both_without_code(a: Any, b: Any) -> tuple[Any, Any]:
    """Both contents; without the entries of ``a`` that name code if ``b``, as an export, has none."""
    return (without_code(a), b) if without_code(b) == b else (a, b)


def small_files_naming_code(store: Source) -> dict[str, bytes | None]:
    """Small JSON file with an entry that names code → its contents without; ``None``: it cannot be read.

    Files of another model, which a conversion takes with those of the source, are among them.
    """
    sizes, found = store.sizes(), dict[str, bytes | None]()
    for path in sorted(path for path in sizes if may_name_code(path.removeprefix(DONOR))):
        try:
            content = read_json(store, path, sizes)
        except CheckpointError:
            found[path] = None
            continue
        if (kept := without_code(content)) != content:
            found[path] = (json.dumps(kept, indent=2) + "\n").encode()
    return found


def check_one_model(stores: Sequence[Source]) -> None:
    """Refuse to average checkpoints whose configurations describe different models.

    Checkpoints without ``config.json`` are ignored: the one given with ``--config`` applies to them.
    """
    having = [store for store in stores if CONFIG in store.sizes()]
    configs = [read_json(store, CONFIG, store.sizes()) for store in having]
    for store, config in zip(having[1:], configs[1:], strict=True):
        for entry in compare_configs(configs[0], config, MAY_DIFFER_IN_SERIES):
            raise CheckpointError(
                f"{entry.what} is {entry.a} in {having[0].location} and {entry.b} in {store.location}: only "
                "checkpoints of one model can be averaged"
            )


def compare_configs(
    config_a: Mapping[str, Any], config_b: Mapping[str, Any], may_differ: Set[str]
) -> list[Disagreement]:
    """Differences between two ``config.json``, without the entries that may differ.

    An export may have other entries than the trainer, with which ``transformers`` computes the same.
    """
    models = (_of_model(agreed_config(config), may_differ) for config in (config_a, config_b))
    return [_within(CONFIG, entry) for entry in differences(*models)]


def _of_model(value: Any, may_differ: Set[str]) -> Any:
    """A configuration without the entries that may differ; ``…Pipe`` and ``…Deprecated`` classes count as the same."""
    if isinstance(value, dict):
        kept = {key: _of_model(entry, may_differ) for key, entry in value.items() if key not in may_differ}
        if "architectures" in kept:
            kept["architectures"] = without_own_classes(kept["architectures"])
        return kept
    return [_of_model(entry, may_differ) for entry in value] if isinstance(value, list) else value


def _within(path: str, entry: Disagreement) -> Disagreement:
    return Disagreement(f"{path}: {entry.what}" if entry.what else path, entry.a, entry.b)


def _content(store: Source, path: str) -> Any:
    """The content of a small file: parsed values if possible, otherwise its bytes."""
    sizes = store.sizes()
    if path in TRAINER_STATES:
        state = parse_trainer_state(partial(store.read, path), sizes[path], path)
        return store.read(path, 0, sizes[path]) if state is None else state
    if path.endswith(".pdparams") and sizes[path]:
        return _with_arrays(index_tensor_file(store, path, sizes[path]), store, path)
    if path.endswith(".json") and sizes[path] and store.read(path, 0, 1) == b"{":
        return read_json(store, path, sizes)
    return store.read(path, 0, sizes[path])


def _with_arrays(value: Any, store: Source, path: str) -> Any:
    """The value with arrays replaced by their bytes."""
    if isinstance(value, ArrayRef):
        return (value.dtype, value.shape, value.axes, store.read(path, value.byte_offset, value.nbytes))
    if isinstance(value, dict):
        return {key: _with_arrays(entry, store, path) for key, entry in value.items()}
    return value


def differences(a: Any, b: Any, at: str = "") -> Iterator[Disagreement]:
    """Differences between two trees of plain values; floats are compared by their bits, and 1 differs from 1.0.

    >>> [entry.what for entry in differences({"a": [1, 2.0], "b": 0.0}, {"a": [1, 3.0], "b": -0.0, "c": None})]
    ['a[1]', 'b', 'c']
    """
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys(), key=str):
            inner = f"{at}.{key}" if at else str(key)
            if key in a and key in b:
                yield from differences(a[key], b[key], inner)
            else:
                yield Disagreement(
                    inner, *(_shown(side[key]) if key in side else "missing" for side in (a, b))
                )
    elif isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
        for number, (item_a, item_b) in enumerate(zip(a, b, strict=True)):
            yield from differences(item_a, item_b, f"{at}[{number}]")
    elif not _same(a, b):
        yield Disagreement(at, _shown(a), _shown(b))


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    return bool(a == b)


def _shown(value: Any) -> str:
    if isinstance(value, bytes) and len(value) > 16:
        return f"{len(value)} bytes"
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}…"
