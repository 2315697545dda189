"""Small real checkpoints that hold safetensors files, unpacked on first use, and how to open such files."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from tests.conftest import CORPUS, case_directory
from tests.oracle import Tensors, read_truth

PACKED = CORPUS / "small-unified"
NUMPY = {"BF16": np.uint16, "U16": np.uint16, "F16": np.float16, "F32": np.float32}


def small_cases() -> list[str]:
    """Names of all small cases."""
    return sorted(path.name.removesuffix(".tar.xz") for path in PACKED.glob("*.tar.xz"))


def small_case(name: str) -> Path:
    """Folder with ``checkpoint-3/`` and ``truth.safetensors``; not to be changed."""
    return case_directory(f"small-unified/{name}")


def truth_of(name: str) -> Tensors:
    """What the trainer had in memory."""
    return read_truth(small_case(name) / "truth.safetensors")


def read_safetensors(folder: Path, pattern: str = "*.safetensors") -> Tensors:
    """All tensors of the files, by the safetensors library; no key may be there twice."""
    found: Tensors = {}
    for path in sorted(folder.glob(pattern)):
        for key, entry in safetensors.deserialize(path.read_bytes()):
            assert key not in found, f"{key} is in two files"
            found[key] = np.frombuffer(entry["data"], NUMPY[entry["dtype"]]).reshape(entry["shape"])
    return found


def read_unified(folder: Path) -> Tensors:
    """The tensors of a merged unified checkpoint, keyed as in the truth."""
    found = read_safetensors(folder, "model-*.safetensors")
    masters = read_safetensors(folder, "master_weights-*.safetensors")
    found |= {f"{key}.w_0": array for key, array in masters.items() if found[key].dtype == np.uint16}
    copies = {key: array for key, array in masters.items() if found[key].dtype != np.uint16}
    assert all(found[key].tobytes() == array.tobytes() for key, array in copies.items())
    states = read_safetensors(folder, "optimizer-*.safetensors")
    return found | {key.replace("/", "."): array for key, array in states.items()}


Entry = tuple[str, tuple[int, ...], bytes]
Entries = dict[str, Entry]


def read_file(path: Path) -> Entries:
    """Key → dtype, shape and bytes of every tensor in a safetensors file."""
    held = safetensors.deserialize(path.read_bytes())
    return {key: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for key, entry in held}


def read(folder: Path) -> Entries:
    """The same of all safetensors files of a folder; no key may be there twice."""
    found: Entries = {}
    for path in sorted(folder.glob("*.safetensors")):
        held = read_file(path)
        assert not held.keys() & found.keys()
        found |= held
    return found


def write_safetensors(
    path: Path, tensors: Mapping[str, tuple[str, Sequence[int], bytes]], layout: str | None = "pt"
) -> None:
    """Write tensors (dtype tag, shape, bytes) as ``transformers`` does; bfloat16 too, which NumPy does not know."""
    header: dict[str, Any] = {} if layout is None else {"__metadata__": {"format": layout}}
    at = 0
    for key, (tag, shape, data) in tensors.items():
        header[key] = {"dtype": tag, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for *_, data in tensors.values()))
