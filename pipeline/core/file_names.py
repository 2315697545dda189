"""File names that several packages use."""

from __future__ import annotations

CONFIG = "config.json"
LORA_CONFIG = "lora_config.json"
"""Rank, scaling and base of an adapter."""
WEIGHT_INDEX = "model.safetensors.index.json"
"""The index of safetensors files in a Hugging Face checkpoint."""
MODEL_META = "model_meta.json"
"""Names and shapes of the tensors of every rank of a sharded job; with averages also in other formats."""
SCHEDULER = "scheduler.pdparams"
"""State of the learning-rate schedule, as in ``LR_Scheduler`` of the optimizer files of a hybrid-parallel job."""
MANIFEST = "paddle_reshard.json"
MANIFEST_FORMAT = "paddle-reshard manifest"
SEEN = ".paddle_reshard/seen"
"""Folder beside targets with what watchers remember of conversions."""
SIGNAL_PREFIX = "saved_signal_"
"""Prefix of the files with which a trainer marks that a rank has finished."""
AVERAGE = "ema.json"
"""The description of an average made next to training."""
TENSOR_FOLDERS = ("model_state", "master_weight", "optimizer_state", "ema_state", "dist_ckpt")
"""Folders inside a checkpoint whose files are its own (PaddleFormers 1.2 ``utils/env.py:166-169``; auto-parallel)."""
