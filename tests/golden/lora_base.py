"""The base model of a LoRA case as a checkpoint of its own, written without the package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tests import oracle
from tests.conftest import case_directory

FILES = {"np": "model-00001-of-00001.safetensors", "pt": "model.safetensors"}
"""Layout → how the library calls the only file of such a model."""
_TAGS = {"<u2": "BF16", "<f4": "F32"}


def write_base(case: str, folder: Path, layout: str, change: dict[str, np.ndarray] | None = None) -> Path:
    """In Paddle's layout (``np``), or in that of transformers (``pt``): linear layers transposed."""
    folder.mkdir()
    place = case_directory(f"states/{case}")
    truth = oracle.read_truth(place / "truth_base.safetensors")
    tensors = {**{key: truth[key] for key in oracle.shapes_of(truth)}, **(change or {})}
    header: dict[str, Any] = {"__metadata__": {"format": layout}}
    content = b""
    for key, array in tensors.items():
        if layout == "pt" and array.ndim == 2 and not key.startswith(("model.embed", "lm_head")):
            array = np.ascontiguousarray(array.T)
        end = len(content) + array.nbytes
        header[key] = {
            "dtype": _TAGS[array.dtype.str],
            "shape": list(array.shape),
            "data_offsets": [len(content), end],
        }
        content += array.tobytes()
    text = json.dumps(header).encode()
    (folder / FILES[layout]).write_bytes(len(text).to_bytes(8, "little") + text + content)
    if layout == "np":
        index = {
            "metadata": {"total_size": len(content)},
            "weight_map": dict.fromkeys(tensors, FILES[layout]),
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(place / "checkpoint-3/config.json", folder)
    return folder
