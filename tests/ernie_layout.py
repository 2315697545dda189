"""Write a model of ERNIE 4.5 as its ``-Paddle`` repositories have it, from an export; with nothing but NumPy.

As ``tools/paddle2torch/tran_4_5t.py`` of PaddlePaddle/ERNIE (f46ea04) reads such a repository. FastDeploy's own loader
fills the same parameters from it as from the export (``tests/serving/fastdeploy.json``).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

DTYPES = {"BF16": np.uint16, "F32": np.float32}
"""bfloat16 as its bits."""
TRANSPOSED = re.compile(r".*(down_proj|o_proj|gate)\.weight|lm_head\.weight|.*mtp_linear_proj\..*weight")


def read(path: Path) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """Key → tag of the dtype, and array."""
    return {
        key: (entry["dtype"], np.frombuffer(entry["data"], DTYPES[entry["dtype"]]).reshape(entry["shape"]))
        for key, entry in safetensors.deserialize(path.read_bytes())
    }


def in_ernie_layout(
    tensors: dict[str, tuple[str, np.ndarray[Any, Any]]],
) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
    """The tensors of an export in the other layout."""
    found = {}
    for key, (tag, array) in tensors.items():
        name = re.sub(r"^model\.", "ernie.", key)
        for fused, parts in (
            ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("up_gate_proj", ("gate_proj", "up_proj")),
        ):
            if f".{parts[0]}." in key:
                joined = [tensors[key.replace(parts[0], part)][1].T for part in parts]
                found[name.replace(parts[0], fused)] = tag, np.concatenate(joined, -1)
        if not re.search(r"\.(q|k|v|up|gate)_proj\.", key):
            found[name] = tag, array.T if TRANSPOSED.fullmatch(key) else array
    return found


def write_ernie_layout(export: Path, target: Path, metadata: dict[str, str]) -> None:
    """A folder with the model of an export, and its ``config.json``."""
    target.mkdir(parents=True)
    config = json.loads((export / "config.json").read_text())
    if config["tie_word_embeddings"]:
        raise ValueError("how a tied head is stored is not known")
    tensors = in_ernie_layout(read(export / "model.safetensors"))
    _save(tensors, target / "model.safetensors", metadata)
    config["dtype"] = config.pop("torch_dtype")
    if config["architectures"] == ["Ernie4_5ForCausalLM"]:
        config["architectures"] = ["Ernie4_5_ForCausalLM"]
    (target / "config.json").write_text(json.dumps(config))


def _save(tensors: dict[str, tuple[str, np.ndarray[Any, Any]]], path: Path, metadata: dict[str, str]) -> None:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    content = b""
    for key, (tag, array) in tensors.items():
        data = np.ascontiguousarray(array).tobytes()
        header[key] = {
            "dtype": tag,
            "shape": array.shape,
            "data_offsets": [len(content), len(content) + len(data)],
        }
        content += data
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content)
