"""The files that a trainer writes into a checkpoint, by their names.

The only home of these patterns, read off real checkpoints and the trainers that wrote them (PaddleNLP 2 and 3.0
``trainer/trainer.py``, ``utils/env.py``; PaddleFormers 1.2 ``trainer/trainer.py``, ``utils/env.py``; Paddle 3.3
``distributed/checkpoint``). A name that is only *like* one of them, ``optimizer.py``, is none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from paddle_reshard.pipeline.core.file_names import SIGNAL_PREFIX, TENSOR_FOLDERS

CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,18})")
"""A folder of a run with its step."""
# Patterns stay texts: `re` compiles each when it is first asked for, and keeps it.
_FOLDER = rf"(?:{'|'.join(TENSOR_FOLDERS)})/"
_RANK = r"(?:\.(?:tp|pp|shard|moe|moe_sharding)\d{2,}(?:_(?:tp|pp|shard|moe|moe_sharding)\d{2,})*)?"
_NUMBER = r"-\d{5,}-of-\d{5,}"
_TENSORS = (
    rf"(?:lora_|prefix_)?model_state(?:{_RANK}|{_NUMBER})\.pdparams|(?:optimizer|ema){_RANK}\.pdopt|"
    rf"(?:model|optimizer|master_weights|peft_model)(?:{_NUMBER}|{_RANK})\.safetensors(?:_shard_\d{{4}})?|"
    rf"(?:{_FOLDER})?(?:\d+_\d+\.distcp|\d+\.metadata)|"
    rf"{_FOLDER}\d+_\d+\.safetensors"
)
_INDEX = (
    r"(?:model|optimizer|master_weights|peft_model)\.safetensors\.index\.json|"
    r"model_state\.pdparams\.index\.json|model_meta\.json|shard_meta\.tp\d{2,}_pp\d{2,}\.json"
)
_RANDOM_STATE = r"rng_state(?:_\d+)?\.pth"
_TRAINING = (
    r"(?:scheduler|scaler)\.pdparams|trainer_state\.(?:json|bin)|training_args\.bin|"
    r"static_name_to_dyg_name\.json|ema\.json|paddle_reshard_rules\.json"
)
_MARKER = (
    rf"{SIGNAL_PREFIX}\d+|save_signal_TMP_\d+|\.(?:model|optimizer|checkpoint)_done|"
    r"\.(?:model|optimizer|master)_weight\.done\.\d+|\.saving_info|async_save_info\.json"
)
_OPTIMIZER = (
    rf"(?:optimizer|ema){_RANK}\.pdopt|optimizer{_NUMBER}\.pdopt|"
    rf"master_weights(?:{_NUMBER})?\.(?:pdopt|pdparams)|master_weights\.pdparams\.index\.json|"
    rf"(?:optimizer|master_weights)\.pdopt\.index\.json|(?:optimizer|master_weights)(?:{_NUMBER}|{_RANK})\.safetensors(?:_shard_\d{{4}})?|"
    r"(?:optimizer|master_weights)\.safetensors\.index\.json|(?:optimizer_state|master_weight|ema_state)/.+|"
    r"(?:scheduler|scaler)\.pdparams|ema\.json"
)
"""Files of the optimizer, of what is kept beside it, and of averages."""
_MODEL = {
    "configuration": r"(?:config|generation_config)\.json",
    "tokenizer": (
        r"(?:tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|tekken)\.json|"
        r"vocab\.txt|merges\.txt|bpe\.codes|[\w.-]+\.(?:model|spm|tiktoken)"
    ),
    "chat template": r"chat_template\.(?:json|jinja)",
    "processor": r"(?:preprocessor|processor|image_processor|video_preprocessor|audio_tokenizer)_config\.json",
}
"""Role of a small file → names of the files with which a trainer or ``transformers`` loads a model (``transformers``
5.3 ``utils/__init__.py``, ``vocab_files_names`` of the tokenizers; PaddleFormers 1.2 ``utils/env.py``)."""
_ADAPTER = r"(?:lora|prefix|prefix_model)_config\.json"
"""What an adapter of the trainers is; ``transformers`` and PEFT do not read it."""
_ABOUT = r"README\.md|(?:LICENSE|LICENCE|NOTICE|COPYING|USE_POLICY)(?:\.(?:md|txt))?"
"""What people read; a licence goes with the weights."""
_STEERING = r"adapter_config\.json|(?:hf_quant|quantize|quant)_config\.json|params\.json"
"""With these beside the weights, ``transformers`` (``models/auto/auto_factory.py``), vLLM and others load other
weights, or read them as quantised."""
_BY_PRODUCT = rf"flex-ckpt\.auto_generated\.metadata|(?:{_FOLDER})?\d+\.metadata\.lock"
"""Files that Paddle leaves beside those that it loads or saves, and can make again."""
_STRAY = (
    r"\._.*|\.nfs[0-9a-f]+|\.fuse_hidden[0-9a-f]+|\.DS_Store|Thumbs\.db|desktop\.ini|"
    r"@eaDir|\.ipynb_checkpoints|__MACOSX"
)
"""Files and folders that operating systems, network file systems, NAS and notebooks leave behind, named after the files
beside them: ``._model.safetensors`` holds what macOS knows of ``model.safetensors`` and no tensor."""
_CODE = (".py", ".pyc", ".so")
_OTHER_LIBRARY = (
    r".*_model(?:-\d+-of-\d+)?\.bin(?:\.index\.json)?|.*\.(?:pt|pth|ckpt|h5|msgpack|gguf|ggml|onnx|pdiparams)"
)
"""Weights and states as PyTorch, TensorFlow, Flax, GGML, ONNX and Paddle's inference save them."""


def is_tensor_file(path: str) -> bool:
    """Whether a file holds tensors of a checkpoint, or says where they lie.

    >>> is_tensor_file("model_state.tp00.pdparams"), is_tensor_file("model_state/0_0.distcp"), is_tensor_file("a.txt")
    (True, True, False)
    """
    return re.fullmatch(_TENSORS, path) is not None


def is_index(path: str) -> bool:
    """Whether a file says which file holds which tensor.

    >>> is_index("model.safetensors.index.json"), is_index("model_meta.json"), is_index("config.json")
    (True, True, False)
    """
    return re.fullmatch(_INDEX, path) is not None


def is_of_other_library(path: str) -> bool:
    """Whether a file holds tensors in a form that only other libraries read; random states of the trainers do not.

    >>> [is_of_other_library(path) for path in ("pytorch_model.bin", "adapter_model.bin", "rng_state_0.pth", "a.txt")]
    [True, True, False, False]
    """
    return re.fullmatch(_OTHER_LIBRARY, path) is not None and not is_random_state(path)


def is_random_state(path: str) -> bool:
    """Whether a file holds the random state of one rank, or of all."""
    return re.fullmatch(_RANDOM_STATE, path) is not None


def is_marker(path: str) -> bool:
    """Whether a file records the progress of its own job."""
    return re.fullmatch(_MARKER, path) is not None


def is_training_state(path: str) -> bool:
    """Whether a file is about the training job and not about the model."""
    return re.fullmatch(_TRAINING, path) is not None or is_random_state(path)


def is_of_training(path: str) -> bool:
    """Whether a file is of the training job: tensors, an index, a marker or a state, not a small file of the model."""
    return any(re.fullmatch(p, path) for p in (_TENSORS, _INDEX, _MARKER)) or is_training_state(path)


def kind_of(path: str) -> str:
    """The name of a file without the numbers of ranks and parts: what a job of any topology would call it.

    >>> kind_of("optimizer.tp00_pp01.pdopt"), kind_of("rng_state_3.pth"), kind_of("model-00001-of-00002.safetensors")
    ('optimizer.pdopt', 'rng_state.pth', 'model.safetensors')
    """
    return re.sub(rf"{_NUMBER}|{_RANK.removesuffix('?')}|_shard_\d{{4}}|_?\d+", "", path)


def is_model_file(path: str) -> bool:
    """Whether a file is one of the model's small files: its configuration, tokenizer or chat template.

    >>> [is_model_file(path) for path in ("tokenizer.json", "modeling_deepseek.py", "pytorch_model.bin")]
    [True, False, False]
    """
    return any(re.fullmatch(p, path) for p in (*_MODEL.values(), _ADAPTER))


def may_name_code(path: str) -> bool:
    """Whether ``transformers`` looks into a file, other than ``config.json``, for classes that are code.

    >>> [may_name_code(path) for path in ("tokenizer_config.json", "tokenizer.json", "lora_config.json")]
    [True, False, False]
    """
    return path.endswith("_config.json") and is_model_file(path) and not is_of_adapter(path)


def is_of_adapter(path: str) -> bool:
    """Whether a file describes an adapter as the trainers read it."""
    return re.fullmatch(_ADAPTER, path) is not None


def is_steering(path: str) -> bool:
    """Whether a file beside the weights makes a loader take others, read them otherwise, or run code.

    >>> [is_steering(path) for path in ("adapter_config.json", "modeling_x.py", "pytorch_model.bin", "config.json")]
    [True, True, True, False]
    """
    return path.endswith(_CODE) or re.fullmatch(_STEERING, path) is not None or is_of_other_library(path)


def without_role(path: str) -> str | None:
    """Why no target has a file; ``None``: it is known what a trainer, a loader or a reader does with it.

    >>> without_role("tokenizer.json"), without_role("modeling_deepseek.py")
    (None, 'code, which is never carried')
    """
    if path.endswith(_CODE):
        return "code, which is never carried"
    if is_of_other_library(path):
        return "tensors in the form of another library, which are not converted"
    if is_steering(path):
        return "says that the weights are others, or quantised: loaders would not take those of this target"
    if is_model_file(path) or is_training_state(path) or re.fullmatch(_ABOUT, path):
        return None
    return (
        "neither a trainer nor a loader of models is known to read it; copy it yourself if it belongs there"
    )


def is_of_optimizer(path: str) -> bool:
    """Whether a file is of the optimizer or of an average, so that parameters can be read without it.

    >>> [is_of_optimizer(path) for path in ("optimizer.tp00.pdopt", "master_weight/0.metadata", "model_state.pdparams")]
    [True, True, False]
    """
    return re.fullmatch(_OPTIMIZER, path) is not None


def is_of_average(path: str) -> bool:
    """Whether a file is of an average.

    >>> [is_of_average(path) for path in ("ema.tp00_pp00.pdopt", "ema_state/0.metadata", "ema.json", "optimizer.pdopt")]
    [True, True, True, False]
    """
    return path.startswith(("ema.", "ema_state/"))


def is_stray(path: str) -> bool:
    """Whether a name is one that a system leaves beside anybody's files: nobody's, wherever it lies.

    >>> [is_stray(path) for path in ("._model.safetensors", "model_state/.nfs00a1", "@eaDir", ".model_done")]
    [True, True, True, False]
    """
    return re.fullmatch(_STRAY, path.rpartition("/")[2]) is not None


def is_by_product(path: str) -> bool:
    """Whether Paddle makes a file by itself beside those of a checkpoint."""
    return re.fullmatch(_BY_PRODUCT, path) is not None


def is_by_trainer(path: str) -> bool:
    """Whether a file has a name that a trainer gives.

    >>> [is_by_trainer(path) for path in ("optimizer.tp00.pdopt", "optimizer.py", "vocab.txt", "notes.txt")]
    [True, False, True, False]
    """
    return is_of_training(path) or is_by_product(path) or is_model_file(path)


def steps_of(folders: Sequence[str]) -> list[tuple[int, str]]:
    """The checkpoints among folder names, ascending by step.

    >>> steps_of(["checkpoint-20", "runs", "checkpoint-3", "checkpoint-x"])
    [(3, 'checkpoint-3'), (20, 'checkpoint-20')]
    """
    return sorted((int(match[1]), name) for name in folders if (match := CHECKPOINT.fullmatch(name)))
