"""Small real checkpoints that hold safetensors files, unpacked on first use, and how to open such files."""

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from paddle_reshard.pipeline.indexing.opening import open_checkpoint
from paddle_reshard.storage.locate import Access
from paddle_reshard.storage.store import Read
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


INDEX = "model.safetensors.index.json"


def write_model(folder: Path, files: Sequence[Entries], config: Mapping[str, Any]) -> Path:
    """A Hugging Face model in files with an index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for number, tensors in enumerate(files, 1):
        path = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
        write_safetensors(path, tensors)
        weight_map |= dict.fromkeys(tensors, path.name)
    total = sum(len(data) for tensors in files for _, _, data in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return folder


def opened(folder: Path) -> Any:
    """What a conversion reads of a model, as another process has it."""
    return pickle.loads(pickle.dumps(open_checkpoint(str(folder), Access({}))))


def check_ranges(source: Any, path: str) -> bytes:
    """A whole file, of which ranges that cut elements, headers and tensors were read too, many at once."""
    rng, size = np.random.default_rng(8), source.sizes()[path]
    whole: bytes = source.read(path, 0, size)
    starts = [*map(int, rng.integers(0, size, 200)), 0, 1, size - 1]
    lengths = rng.choice([1, 2, 3, 7, 99, 999, 20_000, 200_000], len(starts))
    pieces = [(s, min(size - s, int(n))) for s, n in zip(starts, lengths, strict=True)]
    buffers = [bytearray(nbytes) for _, nbytes in pieces]
    source.read_many([Read(path, s, memoryview(b)) for (s, _), b in zip(pieces, buffers, strict=True)])
    assert [bytes(b) for b in buffers] == [whole[s : s + n] for s, n in pieces]
    return whole


def check_stands_for(folder: Path, expected: Entries) -> None:
    """A model in one file is read as if it held these tensors, and its index says so."""
    source, path = opened(folder), "model-00001-of-00001.safetensors"
    held = safetensors.deserialize(check_ranges(source, path))
    assert {k: (e["dtype"], tuple(e["shape"]), bytes(e["data"])) for k, e in held} == expected
    total = sum(len(data) for _, _, data in expected.values())
    index = json.loads(source.read(INDEX, 0, source.sizes()[INDEX]))
    assert index == {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(expected, path)}
