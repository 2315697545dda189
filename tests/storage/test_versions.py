"""Versions on S3: each object is an upload that appears when it is whole, and the pointer comes last."""

from __future__ import annotations

from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.events import Event, Progress, StepStarted
from tests.storage.servers import Store
from tests.versions.receiver import receive, tensors_of
from tests.versions.test_versions import step


class Stop(Exception):
    """Whatever may end a run."""


def test_versions_on_s3_are_what_direct_exports_hold(
    store: Store, bucket: str, small_source: str, tmp_path: Path
) -> None:
    versions = f"s3://{bucket}/versions"
    paddle_reshard.publish(small_source, versions, storage_options=store.options)
    paddle_reshard.convert(
        small_source, tmp_path / "one", format="huggingface", storage_options=store.options
    )
    new = step(tmp_path / "one", tmp_path / "new", 1)
    seen: list[str] = []

    def stop(event: Event) -> None:
        if isinstance(event, StepStarted):
            seen.append(event.step)
        elif isinstance(event, Progress) and seen[-1] == "write" and not event.before:
            raise Stop

    with pytest.raises(Stop):
        paddle_reshard.publish(new, versions, storage_options=store.options, observe=stop)
    keys = [
        e["Key"]
        for e in store.client.list_objects_v2(Bucket=bucket, Prefix="versions/weight_v000002")["Contents"]
    ]
    assert all("/.paddle_reshard" in key for key in keys)
    assert store.client.get_object(Bucket=bucket, Key="versions/latest")["Body"].read() == b"weight_v000001"
    report = paddle_reshard.publish(new, versions, storage_options=store.options)
    assert (report.version, report.reason) == (2, "")
    assert store.client.get_object(Bucket=bucket, Key="versions/latest")["Body"].read() == b"weight_v000002"

    for entry in store.client.list_objects_v2(Bucket=bucket, Prefix="versions/")["Contents"]:
        path = tmp_path / entry["Key"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read())
    receive(tmp_path / "versions", tmp_path / "engine", 1, 2)
    assert tensors_of(tmp_path / "engine") == tensors_of(new)
    paddle_reshard.pull(versions, tmp_path / "local", storage_options=store.options)
    assert tensors_of(tmp_path / "local") == tensors_of(new)
