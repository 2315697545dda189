"""Deltas in object stores are resumed, too."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import TargetError
from tests.delta.test_deltas import Stop, stopping
from tests.storage.servers import Store


def test_a_stopped_delta_in_a_store_is_resumed(
    store: Store, bucket: str, source: Path, tmp_path: Path
) -> None:
    new = tmp_path / "new"
    shutil.copytree(source, new, copy_function=shutil.copyfile)
    path = next(new.glob("*.pdparams"))
    data = bytearray(path.read_bytes())
    data[-4096:] = bytes(4096)
    path.write_bytes(data)
    for name, act, inputs in (
        ("delta", paddle_reshard.delta, (source, new)),
        ("made", paddle_reshard.apply_delta, (source, f"s3://{bucket}/delta")),
    ):
        target = f"s3://{bucket}/{name}"
        with pytest.raises(Stop):
            act(*inputs, target, observe=stopping(after=1), storage_options=store.options)
        listed = store.client.list_objects_v2(Bucket=bucket, Prefix=f"{name}/")["Contents"]
        assert all(entry["Key"].startswith(f"{name}/.paddle_reshard") for entry in listed)
        with pytest.raises(TargetError, match="unfinished conversion"):
            act(*inputs, target, storage_options=store.options)
        assert act(*inputs, target, resume=True, storage_options=store.options).resumed_bytes > 0
    made = {path.name: path.read_bytes() for path in new.iterdir() if path.name != "paddle_reshard.json"}
    for name, content in made.items():
        found = store.client.get_object(Bucket=bucket, Key=f"made/{name}")["Body"].read()
        assert found == content, name
