"""What becomes of the small files around the tensors in a Hugging Face checkpoint?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paddle_reshard.pipeline.core.tensors import DType
from paddle_reshard.pipeline.core.trainer_files import is_training_state
from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint
from paddle_reshard.pipeline.layouts.files import Sidecars
from paddle_reshard.pipeline.layouts.sidecars import classify_sidecars

_DTYPE_ENTRIES = ("torch_dtype", "dtype")
_OF_PADDLE = ("source", "tensor_model_parallel_size", "tensor_parallel_degree", "tensor_parallel_rank")
"""Entries of ``config.json`` that speak of Paddle's layout of the weights or of the job that wrote them."""
_OWN_CLASS = re.compile(r"(Deprecated)?(Pipe)?(Deprecated)?$")


def plan_huggingface_sidecars(
    paths: Mapping[str, int],
    folders: Sequence[str],
    wanted: Checkpoint,
    source_config: Mapping[str, Any],
    dtype: DType | None,
) -> Sidecars:
    """Carry what belongs to the model (tokenizer, generation config, …); name what belongs to training.

    ``wanted`` is the source as the target holds it, ``dtype`` the one that was asked for.
    """

    def reason(path: str) -> str | None:
        return "state of the training job, not of the model" if is_training_state(path) else None

    config = exported_config(wanted.model.config, dtype)
    return classify_sidecars(paths, folders, wanted.own_files, reason, source_config, config)


def exported_config(config: Mapping[str, Any], dtype: DType | None) -> dict[str, Any]:
    """``config.json`` as the model is called and stored there.

    Without the entries about Paddle's own layout, with the dtype that was asked for, and with the class names that
    ``transformers`` knows: ``…Pipe`` and ``…Deprecated`` are PaddleFormers' variants of the same models.
    """
    found = {key: value for key, value in config.items() if key not in _OF_PADDLE}
    if dtype is not None:
        entries = [entry for entry in _DTYPE_ENTRIES if entry in found] or [_DTYPE_ENTRIES[0]]
        found |= dict.fromkeys(entries, dtype.name)
    classes = found.get("architectures")
    if isinstance(classes, list):
        found["architectures"] = [
            _OWN_CLASS.sub("", name) if isinstance(name, str) else name for name in classes
        ]
    return found
