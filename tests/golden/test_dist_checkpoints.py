"""Dist checkpoints as the format alone has them: older metadata, and what does not fit together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import deserialize

from paddle_reshard import inspect
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.formats.flex.source import DataFile, catalog_flex, not_fused, read_names
from paddle_reshard.storage.files.dist_metadata import encode_dist_metadata, parse_dist_metadata
from paddle_reshard.storage.files.paddle_pickle import ArrayRef, parse_pickle
from paddle_reshard.storage.files.safetensors import is_safetensors, parse_safetensors
from tests.conftest import checkpoint_of

ZERO, ONE, NINE = (f"model_state/{number}_0.distcp" for number in (0, 1, 9))


def read(sizes: dict, metadata: dict, arrays: dict, fused: Callable = not_fused) -> Catalog:
    """The tensors as the format has them."""
    files = {path: DataFile(sizes.get(path, 0), found, {}) for path, found in arrays.items()}
    return catalog_flex(metadata, files, read_names(metadata), fused)[0]


def index(folder: Path) -> tuple[dict, dict, dict]:
    """Sizes, metadata and arrays of a checkpoint, as ``read`` wants them."""
    sizes, metadata, arrays = {}, {}, {}
    for path in sorted(folder.rglob("*")):
        name, data = path.relative_to(folder).as_posix(), path.read_bytes() if path.is_file() else b""

        def read(byte_offset: int, nbytes: int, data: bytes = data) -> bytes:
            return data[byte_offset : byte_offset + nbytes]

        if path.suffix == ".metadata":
            metadata[name] = parse_dist_metadata(read, len(data), name)
        elif path.suffix in (".distcp", ".safetensors"):
            sizes[name] = len(data)
            if is_safetensors(data, len(data)):
                arrays[name] = parse_safetensors(read, len(data), name).tensors
                continue
            root = parse_pickle(read, len(data), name).root
            arrays[name] = {key: value for key, value in root.items() if isinstance(value, ArrayRef)}
    return sizes, metadata, arrays


@pytest.mark.parametrize("case", ["st_distcp_2ranks", "st_distcp_2ranks_as34"])
def test_arrays_of_no_known_model_are_listed_whatever_their_files_are_called(case: str) -> None:
    """Paddle 3.4 calls data files ``.distcp`` that hold safetensors."""
    folder = checkpoint_of(f"small-safetensors/{case}")
    found = inspect(folder)
    held = {(one.file, one.key): one.shape for one in found.stored}
    for path in sorted((folder / "model_state").glob("[01]_0.*")):
        for key, entry in deserialize(path.read_bytes()):
            assert held.pop((f"model_state/{path.name}", key)) == tuple(entry["shape"])
    assert not held


@pytest.mark.parametrize("case", ["dense/fc_mp2pp2sh2_s1v2", "dense/auto_dp2mp2"])
def test_older_metadata_say_the_same_where_they_can(case):
    """Without ranges, the older forms describe the same checkpoint; shapes and dtypes come from the pieces."""
    sizes, metadata, arrays = index(checkpoint_of(case))
    for name in [name for name, found in metadata.items() if (found.pieces["flattened_range"] >= 0).any()]:
        folder = name.rpartition("/")[0]
        del metadata[name]
        sizes = {path: size for path, size in sizes.items() if not path.startswith(folder)}
        arrays = {path: found for path, found in arrays.items() if not path.startswith(folder)}
    assert metadata
    wanted = read(sizes, metadata, arrays)
    for generation in ("3.0", "3.2"):
        older = {}
        for name, found in metadata.items():
            data = encode_dist_metadata(found, generation)
            older[name] = parse_dist_metadata(lambda at, n, data=data: data[at : at + n], len(data), name)
        catalog = read(sizes, older, arrays)
        assert catalog.tensors == wanted.tensors
        assert (catalog.fragments.rows() == wanted.fragments.rows()).all()


def _lost(sizes, _, arrays):
    del sizes[ONE], arrays[ONE]


def _mixed(sizes, metadata, arrays):
    sizes["model_state/9_0.safetensors"], arrays["model_state/9_0.safetensors"] = 8, {}


def _unnamed(sizes, _, arrays):
    sizes[NINE], arrays[NINE] = sizes[ONE], arrays[ONE]


def _other_shape(_, __, arrays):
    key = next(key for key, array in arrays[ZERO].items() if len(array.shape) == 2)
    arrays[ZERO][key] = ArrayRef(0, "u2", (2, 3), False, None)


def _other_dtype(_, __, arrays):
    for key, array in arrays[ZERO].items():
        arrays[ZERO][key] = ArrayRef(array.byte_offset, "f2", array.shape, False, None)


def _copy(index: int, old: str, new: str) -> Callable:
    return lambda *parts: parts[index].update({new: parts[index][old]})


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_lost, "names 1_0.distcp, which is missing"),
        (_unnamed, "9_0.distcp.*does not name it"),
        (lambda _, metadata, __: metadata.pop("model_state/0.metadata"), "without a .metadata file"),
        (_copy(1, "model_state/0.metadata", "model_state/1.metadata"), "0.metadata describes the same folder"),
        (_mixed, "distcp, safetensors"),
        (lambda _, __, arrays: arrays[ZERO].popitem(), "in a file that does not hold it"),
        (lambda _, __, arrays: arrays[ZERO].update(x=next(iter(arrays[ZERO].values()))), "^x: a file holds it"),
        (_other_shape, r"shape \(2, 3\), its metadata say"),
        (_other_dtype, "stored as f2, its metadata say bfloat16"),
        (_copy(1, "model_state/0.metadata", "master_weight/0.metadata"), "not a known parameter or optimizer state"),
        (lambda sizes, _, __: sizes.update({ZERO: 1000}), "outside the file of 1000 bytes"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(damage, told):
    parts = index(checkpoint_of("dense/fc_mp2pp2"))
    assert len(read(*parts).tensors) == 234
    damage(*parts)
    with pytest.raises(CheckpointError, match=told):
        read(*parts)


def test_blocks_that_are_no_parts_are_refused():
    parts = index(checkpoint_of("dense/fc_mp2pp2"))
    fused = {"model.layers.1.mlp.up_proj.weight": (1, (2, 3))}
    with pytest.raises(CheckpointError, match=r"1.mlp.up_proj.weight .*not 2 equal blocks of these parts"):
        read(*parts, fused.get)
