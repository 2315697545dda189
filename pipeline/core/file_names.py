"""Names inside a checkpoint that more than one room knows."""

from __future__ import annotations

CONFIG = "config.json"
LORA_CONFIG = "lora_config.json"
"""Rank, scaling and base of an adapter."""
MODEL_META = "model_meta.json"
"""What the ranks of a sharded job hold; beside averages also in other formats."""
SCHEDULER = "scheduler.pdparams"
"""State of the learning-rate schedule: what optimizer files of a hybrid-parallel job hold as ``LR_Scheduler``."""
MANIFEST = "paddle_reshard.json"
MANIFEST_FORMAT = "paddle-reshard manifest"
SIGNAL_PREFIX = "saved_signal_"
"""Prefix of the files with which a trainer marks that a rank has finished."""
AVERAGE = "ema.json"
"""The description of an average made beside training."""
TENSOR_FOLDERS = ("model_state", "master_weight", "optimizer_state", "ema_state", "dist_ckpt")
"""Folders inside a checkpoint whose files are its own (PaddleFormers 1.2 ``utils/env.py:166-169``; auto-parallel)."""
