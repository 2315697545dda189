"""Paddle's own loader reads the metadata we write, and puts every piece where it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paddle_reshard.storage.files.dist_metadata import (
    LOCATION_COLUMNS,
    PIECE_COLUMNS,
    DistMetadata,
    encode_dist_metadata,
)
from paddle_reshard.storage.files.paddle_pickle import STRUCTURED_NAMES
from paddle_reshard.storage.files.paddle_pickle_writer import ArraySlot, encode_pickle
from tests.conftest import REPO

LOAD = """
import sys
import numpy as np
import paddle
wanted = np.load(sys.argv[2])
state = {name: paddle.zeros(wanted[name].shape, str(wanted[name].dtype)) for name in wanted.files}
paddle.distributed.load_state_dict(state, sys.argv[1])
for name, tensor in state.items():
    found = tensor.numpy()
    assert found.dtype == wanted[name].dtype and found.shape == wanted[name].shape, name
    assert found.tobytes() == wanted[name].tobytes(), name
print("equal", len(wanted.files))
"""


def write_file(path: Path, arrays: dict[str, np.ndarray]) -> None:
    slots = {
        name: ArraySlot(i, array.dtype.str[1:], array.shape, None)
        for i, (name, array) in enumerate(arrays.items())
    }
    encoded = encode_pickle({**slots, STRUCTURED_NAMES: {name: name for name in arrays}})
    data = bytearray(encoded.size_bytes)
    for byte_offset, literal in encoded.literals:
        data[byte_offset : byte_offset + len(literal)] = literal
    for array, (_, byte_offset, nbytes) in zip(arrays.values(), encoded.slots, strict=True):
        data[byte_offset : byte_offset + nbytes] = array.tobytes()
    path.write_bytes(data)


class Writer:
    """Collects pieces and cuts the arrays for them."""

    def __init__(self) -> None:
        self.shapes, self.pieces, self.locations, self.files = [], [], [], {}
        self.keys, self.dtypes = [], ["float32", "int64"]

    def shape(self, shape: tuple[int, ...]) -> int:
        if shape not in self.shapes:
            self.shapes.append(shape)
        return self.shapes.index(shape)

    def add(
        self, key: str, whole: np.ndarray, offset, local, file: str, flat=None, again: str | None = None
    ) -> None:
        if key not in self.keys:
            self.keys.append(key)
        box = whole[tuple(slice(o, o + n) for o, n in zip(offset, local, strict=True))]
        array = np.array(box, order="C") if flat is None else box.ravel()[flat[0] : flat[1]]
        row = (
            self.keys.index(key),
            self.dtypes.index(whole.dtype.name),
            *(self.shape(tuple(s)) for s in (offset, local, whole.shape)),
            -1 if flat is None else self.shape(flat),
        )
        self.pieces.append(row)
        for replica, name in enumerate([file] if again is None else [file, again]):
            self.files.setdefault(name, {})[key] = array
            self.locations.append((len(self.pieces) - 1, name, -1 if again is None else replica))

    def write(self, folder: Path) -> None:
        files = sorted(self.files)
        metadata = DistMetadata(
            tuple(self.keys),
            tuple(self.dtypes),
            tuple(self.shapes),
            tuple(files),
            np.array(self.pieces, dtype=PIECE_COLUMNS),
            np.array([(p, files.index(name), r) for p, name, r in self.locations], dtype=LOCATION_COLUMNS),
            {key: ("model", key[6:]) if key.startswith("model.") else (key,) for key in self.keys},
        )
        folder.mkdir()
        (folder / "0.metadata").write_bytes(encode_dist_metadata(metadata))
        for name, arrays in self.files.items():
            write_file(folder / name, arrays)


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"model.a.w": (6, 4), "model.b": (5,), "c.moment1_0": (4, 6), "d": (2, 3, 4), "power": (1,)}
    found = {key: rng.standard_normal(shape).astype("f4") for key, shape in shapes.items()}
    return {**found, "count": np.array([7], dtype="i8"), "scalar": np.array(2.5, dtype="f4")}


def test_paddle_loads_boxes_ranges_replicas_and_scalars(tensors, tmp_path):
    writer = Writer()
    writer.add("model.a.w", tensors["model.a.w"], (0, 0), (6, 2), "0_0.distcp")
    writer.add("model.a.w", tensors["model.a.w"], (0, 2), (6, 2), "1_0.distcp")
    writer.add("model.b", tensors["model.b"], (0,), (5,), "1_0.distcp", again="0_0.distcp")
    # A tensor-parallel block, cut once more in its flattening, as sharding does.
    for half, (first, second) in enumerate((("0_0.distcp", "1_0.distcp"), ("2_0.distcp", "3_0.distcp"))):
        writer.add("c.moment1_0", tensors["c.moment1_0"], (0, 3 * half), (4, 3), first, (0, 7))
        writer.add("c.moment1_0", tensors["c.moment1_0"], (0, 3 * half), (4, 3), second, (7, 12))
    # Cut at a whole row: of a ragged range in three dims Paddle 3.3.1 loads other elements (``dcp/utils.py``
    # ``minimal_nd_slice`` compares one dim back, not all), whoever wrote it.
    writer.add("d", tensors["d"], (0, 0, 0), (2, 3, 4), "0_0.distcp", (0, 12))
    writer.add("d", tensors["d"], (0, 0, 0), (2, 3, 4), "1_0.distcp", (12, 24))
    writer.add("power", tensors["power"], (0,), (1,), "0_0.distcp")
    writer.add("count", tensors["count"], (0,), (1,), "1_0.distcp")
    writer.add("scalar", tensors["scalar"], (), (), "1_0.distcp")
    writer.write(tmp_path / "checkpoint")
    np.savez(tmp_path / "wanted.npz", **tensors)
    command = [sys.executable, "-c", LOAD, str(tmp_path / "checkpoint"), str(tmp_path / "wanted.npz")]
    done = subprocess.run(
        command,
        cwd=REPO,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip().endswith("equal 7"), done.stdout + done.stderr
