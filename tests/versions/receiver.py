"""An engine's receiver of published versions, written from the specification; shares no code with the package."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import blake3
import numpy as np
import xxhash
import zstandard

CHECKSUMS: dict[str, Callable[[bytes], str]] = {
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
    "xxh3-128": lambda data: xxhash.xxh3_128_hexdigest(data),
    "blake3": lambda data: blake3.blake3(data).hexdigest(),
}


def header_of(path: Path) -> tuple[dict[str, dict], dict[str, str], int]:
    """Entries and ``__metadata__`` of a safetensors file, and where its data begin."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(size))
    return entries, entries.pop("__metadata__", {}), 8 + size


def tensors_of(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor of a folder."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        entries, _, start = header_of(path)
        data = path.read_bytes()
        for key, entry in entries.items():
            first, last = entry["data_offsets"]
            found[key] = data[start + first : start + last]
    return found


def receive(versions: Path, local: Path, first: int, last: int) -> None:
    """Copy the full version ``first``, and apply the deltas up to ``last``."""
    shutil.copytree(
        versions / f"weight_v{first:06}", local, ignore=shutil.ignore_patterns("paddle_reshard.json")
    )
    for number in range(first + 1, last + 1):
        apply(versions / f"weight_v{number:06}", local, number)


def apply(delta: Path, local: Path, number: int) -> None:
    """Apply one delta in place."""
    index = json.loads((delta / "model.safetensors.index.json").read_text())
    head = index["metadata"]
    assert head["version"] == f"{number:06}"
    assert head["base_version"] == f"{number - 1:06}"
    assert head["compression_format"] == "zstd"
    for name in sorted(set(index["weight_map"].values())):
        entries, checksums, start = header_of(delta / name)
        data = (delta / name).read_bytes()
        assert entries.keys() == {key for key, file in index["weight_map"].items() if file == name}
        for key, entry in entries.items():
            first, last = entry["data_offsets"]
            assert (entry["dtype"], entry["shape"]) == ("U8", [last - first])
            frame = zstandard.ZstdDecompressor().decompress(data[start + first : start + last])
            _change(local, key, frame, head, checksums[key])


def _change(local: Path, key: str, frame: bytes, head: dict[str, str], checksum: str) -> None:
    (path,) = [path for path in local.glob("*.safetensors") if key in header_of(path)[0]]
    entries, _, start = header_of(path)
    first, last = entries[key]["data_offsets"]
    content = bytearray(path.read_bytes())
    tensor = np.frombuffer(content, np.uint8)[start + first : start + last]
    if head["delta_encoding"] == "xor":
        assert len(frame) == len(tensor)
        tensor ^= np.frombuffer(frame, np.uint8)
    else:
        count = int.from_bytes(frame[:4], "little")
        positions = np.frombuffer(frame, "<u4", count, 4)
        tensor[positions] = np.frombuffer(frame, np.uint8, count, 4 + 4 * count)
        assert len(frame) == 4 + 5 * count
    assert CHECKSUMS[head["checksum_format"]](tensor.tobytes()) == checksum
    path.write_bytes(content)
