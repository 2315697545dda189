"""What is done to a copy of a checkpoint before it is read: each returns the change of a folder."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from paddle_reshard.pipeline.convert.manifest import describe_parts, format_manifest, manifest_head
from paddle_reshard.storage.local.source import LocalSource
from paddle_reshard.storage.store import Receipt
from tests.conftest import case_directory

Change = Callable[[Path], object]
REMOVED = object()
Arrays = dict[str, np.ndarray]


def sound(case: str) -> Path:
    """The checkpoint of a case; not to be changed."""
    folder = case_directory(case)
    [checkpoint] = (*folder.glob("checkpoint-*"), *folder.glob("hf-export"))
    return checkpoint


def copied(case: str, folder: Path) -> Path:
    """A copy of it to be changed, at a folder that is not there yet."""
    return Path(shutil.copytree(sound(case), folder, copy_function=shutil.copyfile))


def copied_by_its_store(
    folder: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None
) -> Path:
    """A target of one file, which its storage has copied from ``source`` beside it; its manifest may be changed."""
    source, target = folder / "source", folder / "t"
    source.mkdir()
    (source / "a").write_bytes(bytes(range(250)))
    target.mkdir()
    (target / "b").write_bytes(bytes(range(100, 200)))
    seen = LocalSource(source)
    manifest = {
        **manifest_head("1"),
        "files": {"b": 100},
        "source": {"location": str(source), "files": seen.sizes(), "versions": seen.versions()},
        "parts": describe_parts([Receipt("b", 0, 100)], {("b", 0): ("a", 100)}),
    }
    change(manifest)
    (target / "paddle_reshard.json").write_bytes(format_manifest(manifest))
    return target


def edited(values: Any, at: tuple[Any, ...], value: Any = REMOVED) -> Any:
    """A copy in which the entry at a path is another one, or gone."""
    values = deepcopy(values)
    inner = values
    for key in at[:-1]:
        inner = inner[key]
    if value is REMOVED:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return values


def edit_json(folder: Path, name: str, change: Callable[[dict], object]) -> None:
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data))


def edit_pickle(folder: Path, name: str, change: Callable[[dict], object]) -> None:
    """Load one file of a trusted test case, change it, write it back in the shape it had."""
    path = folder / name
    with path.open("rb") as file:
        data = pickle.load(file)
    change(data)
    with path.open("wb") as file:
        pickle.dump(data, file, protocol=4)


def edit_arrays(path: Path, change: Callable[[Arrays], object]) -> None:
    """The same with a file of safetensors, by their own library."""
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    arrays = safetensors.numpy.load_file(path)
    change(arrays)
    safetensors.numpy.save_file(arrays, path, metadata)


def remove(pattern: str) -> Change:
    """Every file whose path fits; one at least."""

    def change(folder: Path) -> None:
        found = [*folder.glob(pattern)]
        assert found
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def copy(name: str, to: str) -> Change:
    return lambda folder: shutil.copy(folder / name, folder / to)


def rename(name: str, to: str) -> Change:
    return lambda folder: (folder / name).rename(folder / to)


def put(name: str, content: bytes = b"") -> Change:
    return lambda folder: (folder / name).write_bytes(content)


def truncate(name: str, nbytes: int) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-nbytes])


def added(name: str, entry: str) -> Change:
    """One entry more in a file of JSON, as it is spelled."""
    return lambda folder: (folder / name).write_text(
        f"{(folder / name).read_text().rstrip()[:-1]}, {entry}}}"
    )


def config(**values: object) -> Change:
    return lambda folder: edit_json(folder, "config.json", lambda data: data.update(values))


def meta(change: Callable[[dict], object]) -> Change:
    return lambda folder: edit_json(folder, "model_meta.json", change)


def in_cell(cell: str, change: Callable[[dict], object]) -> Change:
    return meta(lambda data: change(data["sharding_metas"][cell]))


def in_pickle(name: str, change: Callable[[dict], object]) -> Change:
    return lambda folder: edit_pickle(folder, name, change)


def in_arrays(name: str, change: Callable[[Arrays], object]) -> Change:
    return lambda folder: edit_arrays(folder / name, change)


def in_index(kind: str, change: Callable[[dict], object]) -> Change:
    """The index of a kind of files of a unified checkpoint."""
    return lambda folder: edit_json(folder, f"{kind}.safetensors.index.json", change)


def in_weight_map(kind: str, change: Callable[[dict], object]) -> Change:
    return in_index(kind, lambda index: change(index["weight_map"]))


def holder(folder: Path, kind: str, key: str) -> Path:
    """The file that an index says holds a tensor."""
    return folder / json.loads((folder / f"{kind}.safetensors.index.json").read_text())["weight_map"][key]


def in_array(kind: str, key: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """One tensor of a unified checkpoint."""
    return lambda folder: edit_arrays(
        holder(folder, kind, key), lambda arrays: arrays.update({key: change(arrays[key])})
    )


def drop(kind: str, *keys: str) -> Change:
    """Take tensors out of the files and the index of a unified checkpoint."""

    def change(folder: Path) -> None:
        for path in folder.glob(f"{kind}-*.safetensors"):
            edit_arrays(path, lambda arrays: [arrays.pop(key, None) for key in keys])
        in_weight_map(kind, lambda names: [names.pop(key) for key in keys])(folder)

    return change


def every(*changes: Change) -> Change:
    """One after the other."""
    return lambda folder: [change(folder) for change in changes]


def rename_entry(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        data[new] = data.pop(old)

    return change
