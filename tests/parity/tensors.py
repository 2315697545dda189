"""Files of tensors as raw bytes, and how two of them differ. Shares no code with the package."""

import json
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8}


class Tensor(NamedTuple):
    """A tensor as its file spells it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file without interpreting a single value."""
    content = path.read_bytes()
    (header_bytes,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + header_bytes])
    payload = memoryview(content)[8 + header_bytes :]
    tensors = {}
    for key, entry in header.items():
        if key != "__metadata__":
            start, stop = entry["data_offsets"]
            tensors[key] = Tensor(entry["dtype"], tuple(entry["shape"]), bytes(payload[start:stop]))
    return tensors


def differences(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Name every tensor that is missing, surplus, or not the same in dtype, shape and every bit."""
    found = [f"{key}: not loaded" for key in sorted(expected.keys() - actual.keys())]
    found += [f"{key}: not expected" for key in sorted(actual.keys() - expected.keys())]
    for key in sorted(expected.keys() & actual.keys()):
        mine, real = actual[key], expected[key]
        if (mine.dtype, mine.shape) != (real.dtype, real.shape):
            found.append(f"{key}: {mine.dtype}{list(mine.shape)}, not {real.dtype}{list(real.shape)}")
        elif mine.data != real.data:
            size = ITEM_BYTES[real.dtype]
            items = range(0, len(real.data), size)
            wrong = [i // size for i in items if mine.data[i : i + size] != real.data[i : i + size]]
            found.append(f"{key}: {len(wrong)} of {len(items)} elements, the first at {wrong[0]}")
    return found


def read_ema_file(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an ``ema.*.pdopt`` that this run has made, in the order of the file."""
    root = pickle.loads(path.read_bytes())
    arrays = {**root.pop("master_weights"), **root}
    return {key: value[1] if isinstance(value, tuple) else value for key, value in arrays.items()}
