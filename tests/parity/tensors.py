"""Files of tensors as raw bytes, and how two of them differ. Shares no code with the package."""

import io
import json
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

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


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file."""
    header, stop = {}, 0
    for key, tensor in tensors.items():
        start, stop = stop, stop + len(tensor.data)
        header[key] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, stop)}
    header_bytes = json.dumps(header).encode()
    payload = b"".join(tensor.data for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(header_bytes)) + header_bytes + payload)


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


class _Metadata(pickle.Unpickler):
    """Reads the metadata of a dist checkpoint without Paddle's classes."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (), {}) if module.startswith("paddle.") else super().find_class(module, name)


def read_metadata(path: Path) -> Any:
    """The attributes of a ``.metadata`` that this run has made."""
    return _Metadata(io.BytesIO(path.read_bytes())).load()


def read_flex_ema(checkpoint: Path) -> dict[str, np.ndarray]:
    """The arrays of an ``ema_state`` folder that this run has made, by key and place, as its metadata tell."""
    folder = checkpoint / "ema_state"
    metadata = read_metadata(folder / "0.metadata")
    files: dict[str, dict[str, np.ndarray]] = {}
    found = {}
    for index, name in metadata.storage_metadata.items():
        if name not in files:
            files[name] = pickle.loads((folder / name).read_bytes())
        key = index.tensor_key
        (piece,) = [p for p in metadata.state_dict_metadata[key] if _place(p)[:-1] == _place(index)[:-1]]
        found[f"{key} {_place(piece)}"] = files[name][key]
    stored = {key for arrays in files.values() for key in arrays if "@@" not in key}
    if stored != set(metadata.state_dict_metadata) or set(files) != {p.name for p in folder.glob("*.distcp")}:
        raise ValueError(f"{folder}: the metadata and the files do not hold the same tensors")
    return dict(sorted(found.items()))


def _place(piece: Any) -> tuple[tuple[int, ...], ...]:
    """Offset, local shape, flattened range, global shape."""
    ranges = (
        piece.global_offset,
        piece.local_shape,
        piece.flattened_range,
        getattr(piece, "global_shape", ()),
    )
    return tuple(tuple(int(number) for number in of or ()) for of in ranges)
