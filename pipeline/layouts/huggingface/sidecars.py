"""What becomes of the small files around the tensors in a Hugging Face checkpoint?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paddle_reshard.pipeline.core.tensors import DType
from paddle_reshard.pipeline.core.trainer_files import is_training_state
from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint
from paddle_reshard.pipeline.layouts.files import Sidecars
from paddle_reshard.pipeline.layouts.huggingface.config import exported_config
from paddle_reshard.pipeline.layouts.sidecars import classify_sidecars


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

    config, remarks = exported_config(wanted.model.config, dtype)
    sidecars = classify_sidecars(paths, folders, wanted.own_files, reason, source_config, config)
    return replace(sidecars, remarks=remarks)
