"""What checkpoints hold, byte for byte, wherever they are."""

import json
from pathlib import Path
from typing import Any

import fsspec

import paddle_reshard
from paddle_reshard.pipeline.core.file_names import MANIFEST
from tests.conftest import COMMITTED, case_directory
from tests.storage.servers import Store

SMALL = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
TARGET = {"to": "tp=2,sharding=2", "sharding_strategy": "stage1v2"}
ONE_CARD = {"to": "tp=1"}


def middle() -> Path:
    """A checkpoint whose optimizer file, for one card, has more than one part of the smallest size."""
    return case_directory("mp2sh2_s1v2_meta_mid") / "checkpoint-3"


def convert_locally(source: Path, target: Path, **request: Any) -> dict[str, bytes]:
    """What the same conversion makes on a disk."""
    paddle_reshard.convert(source, target, **request)
    return in_folder(target)


def in_folder(folder: Path) -> dict[str, bytes]:
    """Path → bytes of every file below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def in_bucket(store: Store, bucket: str, prefix: str = "") -> dict[str, bytes]:
    """Key below a prefix → bytes of every object."""
    pages = store.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    return {
        key.removeprefix(prefix): store.client.get_object(Bucket=bucket, Key=key)["Body"].read()
        for key in keys
    }


def in_memory(folder: str) -> dict[str, bytes]:
    """Name → bytes of every file of a folder of fsspec's memory."""
    memory = fsspec.filesystem("memory")
    return {path.rsplit("/", 1)[-1]: memory.cat_file(path) for path in memory.ls(folder, detail=False)}


def fill_bucket(store: Store, bucket: str, prefix: str, folder: Path) -> None:
    """Copy a folder into a bucket."""
    put_in_bucket(store, bucket, prefix, in_folder(folder))


def put_in_bucket(store: Store, bucket: str, prefix: str, files: dict[str, bytes]) -> None:
    """Put files of these contents into a bucket."""
    for name, content in files.items():
        store.client.put_object(Bucket=bucket, Key=prefix + name, Body=content)


def fill_memory(root: str, folder: Path) -> None:
    """Copy a folder into fsspec's memory."""
    for name, content in in_folder(folder).items():
        fsspec.filesystem("memory").pipe_file(f"{root}/{name}", content)


def uploads(store: Store, bucket: str) -> list[str]:
    """Keys of uploads that are neither completed nor aborted."""
    return [entry["Key"] for entry in store.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]


def assert_same_checkpoint(
    found: dict[str, bytes], wanted: dict[str, bytes], *, asked_alike: bool = True
) -> None:
    """The same files with the same bytes; the manifests say where from, and how it was cut, on their own.

    What was asked is the same too, unless one of them was made together with other targets.
    """
    own = {"source", "plan_id", "limits", "parts", "etags", "digest"}
    own |= set() if asked_alike else {"request", "target_number"}
    assert found.keys() == wanted.keys()
    different = [name for name in wanted if found[name] != wanted[name] and name != MANIFEST]
    assert different == []
    one, two = (
        {k: v for k, v in json.loads(side[MANIFEST]).items() if k not in own} for side in (found, wanted)
    )
    assert one == two


def visible(found: dict[str, bytes]) -> dict[str, bytes]:
    """Without what an unfinished conversion keeps for itself."""
    return {
        name: content
        for name, content in found.items()
        if not name.split("/")[-1].startswith(".paddle_reshard_")
    }


def looks_finished(names: dict[str, bytes]) -> list[str]:
    """The files that would make the trainer or this package take a checkpoint for a finished one."""
    return sorted(name for name in names if name == MANIFEST or name.startswith("saved_signal"))
