"""Checkpoints of one model with other values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle


def scale_master_weights(checkpoint: Path, scale: float) -> None:
    """Multiply all master weights in the files of a checkpoint; padding stays zero."""
    for path in checkpoint.glob("optimizer*.pdopt"):
        content = path.read_bytes()
        for tensor in paddle.load(str(path))["master_weights"].values():
            values = tensor.numpy()
            if values.size:
                content = content.replace(values.tobytes(), (values * np.float32(scale)).tobytes())
        path.write_bytes(content)
