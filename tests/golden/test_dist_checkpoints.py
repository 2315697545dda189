"""Real dist checkpoints, read by the format alone, are what the trainer had in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import deserialize

from paddle_reshard import inspect
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.errors import CheckpointError, ReshardError
from paddle_reshard.pipeline.core.tensors import DTYPES, EMA_MASTER_WEIGHT, MASTER_WEIGHT, PARAM
from paddle_reshard.pipeline.formats.flex.source import DataFile, catalog_flex, not_fused, read_names
from paddle_reshard.storage.files.dist_metadata import encode_dist_metadata, parse_dist_metadata
from paddle_reshard.storage.files.paddle_pickle import ArrayRef, parse_pickle
from paddle_reshard.storage.files.safetensors import is_safetensors, parse_safetensors
from tests.conftest import case_directory
from tests.oracle import read_truth

CASES = (
    "dense/fc_single",
    "dense/fc_mp2pp2",
    "dense/fc_sh2_s1v2",
    "dense/fc_mp2pp2sh2_s1v2",
    "dense/fc_sh2_s3_seg512",
    "dense/defaults_2ranks",
    "dense/auto_dp2mp2",
    "moe/moe_fc_single",
    "moe/ep2_fc_sh2_s1v2",
    "moe/ep2_fc_mp2",
    "small-safetensors/st_distcp_2ranks",
    "small-safetensors/st_distcp_2ranks_as34",
)
IN_TRUTH = {PARAM: "", MASTER_WEIGHT: ".w_0", EMA_MASTER_WEIGHT: ".ema_w_0"}


def checkpoint(case: str) -> Path:
    (found,) = (case_directory(case)).glob("checkpoint-*")
    return found


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


def assembled(catalog: Catalog, folder: Path, tensor: int) -> np.ndarray:
    """The values of a tensor, put together from its fragments; every copy must agree."""
    wanted = catalog.tensors[tensor]
    dims = len(wanted.global_shape)
    out = np.zeros(wanted.global_shape, wanted.dtype.code)
    for row in sorted(catalog.stored(tensor), key=lambda row: -row["replica"]):
        data = (folder / catalog.files[row["file"]].path).read_bytes()
        box = np.ndarray(
            row["extents"][:dims],
            DTYPES[row["dtype"]].code,
            data,
            int(row["byte_base"]),
            tuple(int(v) for v in row["strides"][:dims]),
        )
        out[
            tuple(slice(o, o + n) for o, n in zip(row["offset"][:dims], row["extents"][:dims], strict=True))
        ] = box
    return out


def truth_name(case: str, key: str, state: str) -> str:
    if not case.endswith("auto_dp2mp2"):
        return key + IN_TRUTH.get(state, f".{state}_0")
    return f"model/{key}" if state == PARAM else f"optimizer/{key}.dist_{state}_0"


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_the_one_in_memory(case):
    folder = checkpoint(case)
    catalog = read(*index(folder))
    truth = read_truth(folder.parent / "truth.safetensors")
    # Copies of replicated tensors drift between tp ranks in some models; the format keeps any rank's.
    other = folder.parent / "truth_alt.safetensors"
    drifted = (
        {key.partition("@")[0]: value for key, value in read_truth(other).items()} if other.exists() else {}
    )
    names = set()
    for i, tensor in enumerate(catalog.tensors):
        name = truth_name(case, tensor.key, tensor.state)
        value = assembled(catalog, folder, i)
        assert value.shape == truth[name].shape, name
        same = value.tobytes() == truth[name].tobytes()
        assert same or value.tobytes() == drifted.get(name, np.empty(0)).tobytes(), name
        names.add(name)
    assert names == set(truth)


@pytest.mark.parametrize("case", [case for case in CASES if "st_distcp" in case])
def test_arrays_of_no_known_model_are_listed_whatever_their_files_are_called(case: str) -> None:
    """Paddle 3.4 calls data files ``.distcp`` that hold safetensors."""
    folder = checkpoint(case)
    found = inspect(folder)
    held = {(one.file, one.key): one.shape for one in found.stored}
    for path in sorted((folder / "model_state").glob("[01]_0.*")):
        for key, entry in deserialize(path.read_bytes()):
            assert held.pop((f"model_state/{path.name}", key)) == tuple(entry["shape"])
    assert not held


@pytest.mark.parametrize("case", ["dense/fc_mp2pp2sh2_s1v2", "dense/auto_dp2mp2"])
def test_older_metadata_say_the_same_where_they_can(case):
    """Without ranges, the older forms describe the same checkpoint; shapes and dtypes come from the pieces."""
    sizes, metadata, arrays = index(checkpoint(case))
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


def _missing(sizes, metadata, arrays):
    del sizes["model_state/1_0.distcp"], arrays["model_state/1_0.distcp"]


def _unnamed(sizes, metadata, arrays):
    sizes["model_state/9_0.distcp"] = sizes["model_state/1_0.distcp"]
    arrays["model_state/9_0.distcp"] = arrays["model_state/1_0.distcp"]


def _undescribed(sizes, metadata, arrays):
    del metadata["model_state/0.metadata"]


def _stale(sizes, metadata, arrays):
    metadata["model_state/1.metadata"] = metadata["model_state/0.metadata"]


def _mixed(sizes, metadata, arrays):
    sizes["model_state/9_0.safetensors"], arrays["model_state/9_0.safetensors"] = 8, {}


def _lost_array(sizes, metadata, arrays):
    arrays["model_state/0_0.distcp"].popitem()


def _extra_array(sizes, metadata, arrays):
    arrays["model_state/0_0.distcp"]["x"] = next(iter(arrays["model_state/0_0.distcp"].values()))


def _other_shape(sizes, metadata, arrays):
    found = arrays["model_state/0_0.distcp"]
    key = next(key for key, array in found.items() if len(array.shape) == 2)
    found[key] = ArrayRef(0, "u2", (2, 3), False, None)


def _other_dtype(sizes, metadata, arrays):
    found = arrays["model_state/0_0.distcp"]
    for key, array in found.items():
        found[key] = ArrayRef(array.byte_offset, "f2", array.shape, False, None)


def _unknown_state(sizes, metadata, arrays):
    metadata["master_weight/0.metadata"] = metadata["model_state/0.metadata"]


def _cut_short(sizes, metadata, arrays):
    sizes["model_state/0_0.distcp"] = 1000


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_missing, "names 1_0.distcp, which is missing"),
        (_unnamed, "9_0.distcp.*does not name it"),
        (_undescribed, "without a .metadata file"),
        (_stale, "1.metadata: model_state/0.metadata describes the same folder"),
        (_mixed, "distcp, safetensors"),
        (_lost_array, "in a file that does not hold it"),
        (_extra_array, "^x: a file holds it"),
        (_other_shape, r"shape \(2, 3\), its metadata say"),
        (_other_dtype, "stored as f2, its metadata say bfloat16"),
        (_unknown_state, "not a known parameter or optimizer state"),
        (_cut_short, "outside the file of 1000 bytes"),
    ],
)
def test_what_does_not_fit_together_is_refused(damage, told):
    parts = index(checkpoint("dense/fc_mp2pp2"))
    assert len(read(*parts).tensors) == 234
    damage(*parts)
    with pytest.raises(CheckpointError, match=told) as caught:
        read(*parts)
    assert isinstance(caught.value, ReshardError)


def test_blocks_that_are_no_parts_are_refused():
    parts = index(checkpoint("dense/fc_mp2pp2"))
    fused = {"model.layers.1.mlp.up_proj.weight": (1, (2, 3))}
    with pytest.raises(
        CheckpointError, match=r"model.layers.1.mlp.up_proj.weight .*not 2 equal blocks of these parts"
    ):
        read(*parts, fused.get)
