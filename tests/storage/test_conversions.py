"""A conversion gives the same bytes wherever its ends are, and refuses targets it may not write."""

from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError, TargetError, UsageError
from paddle_reshard.pipeline.core.events import Event, StepEnded
from paddle_reshard.pipeline.request.options import TargetOptions
from paddle_reshard.storage.remote.source import FsspecSource
from paddle_reshard.storage.s3 import target as s3
from tests.storage.contents import (
    ONE_CARD,
    SMALL,
    TARGET,
    assert_same_checkpoint,
    convert_locally,
    fill_bucket,
    in_bucket,
    in_folder,
    looks_finished,
    put_in_bucket,
    uploads,
    visible,
)
from tests.storage.servers import Store

# ---------------------------------------------------------------------------------- targets that are replaced


def test_overwrite_leaves_nothing_of_the_old_checkpoint(
    store: Store, bucket: str, tmp_path: Path, for_one_card: dict[str, bytes]
) -> None:
    old = tmp_path / "old"
    convert_locally(SMALL, old, **TARGET)
    fill_bucket(store, bucket, "c/", old)
    seen = {}

    def look(event: Event) -> None:
        if isinstance(event, StepEnded) and event.step in ("move", "verify"):
            seen[event.step] = in_bucket(store, bucket, "c/")

    paddle_reshard.convert(
        SMALL, f"s3://{bucket}/c", storage_options=store.options, overwrite=True, observe=look, **ONE_CARD
    )
    assert_same_checkpoint(in_bucket(store, bucket, "c/"), for_one_card)
    # While it is made, the old one stays whole; once it is replaced, nothing says that it is finished.
    assert visible(seen["move"]) == in_folder(old)
    assert looks_finished(seen["verify"]) == []


@pytest.mark.full  # as kills are in `test_kills_on_s3.py`
def test_a_refusal_while_a_checkpoint_is_replaced_keeps_all_of_the_new_one(
    store: Store, bucket: str, for_one_card: dict[str, bytes], for_four: dict[str, bytes]
) -> None:
    put_in_bucket(store, bucket, "c/", for_four)

    def fail(event: Event) -> None:
        if isinstance(event, StepEnded) and event.step == "verify":
            raise CheckpointError("not what was planned")

    request = {"storage_options": store.options, "overwrite": True, **ONE_CARD}
    with pytest.raises(CheckpointError, match="planned"):
        paddle_reshard.convert(SMALL, f"s3://{bucket}/c", observe=fail, **request)
    assert looks_finished(in_bucket(store, bucket, "c/")) == []
    paddle_reshard.convert(SMALL, f"s3://{bucket}/c", resume=True, **request)
    assert_same_checkpoint(in_bucket(store, bucket, "c/"), for_one_card)


def test_a_manifest_of_another_conversion_is_not_replaced(store: Store, bucket: str) -> None:
    def intrude(event: Event) -> None:
        if isinstance(event, StepEnded) and event.step == "verify":
            store.client.put_object(Bucket=bucket, Key="c/paddle_reshard.json", Body=b"{}")

    with pytest.raises(TargetError, match="a second conversion"):
        paddle_reshard.convert(
            SMALL, f"s3://{bucket}/c", storage_options=store.options, observe=intrude, **ONE_CARD
        )
    assert in_bucket(store, bucket, "c/")["paddle_reshard.json"] == b"{}"


# ----------------------------------------------------------------------------------------- keys, buckets, sources


def test_a_wrong_secret_fails_at_once_and_is_not_shown(store: Store, bucket: str) -> None:
    wrong = "wr0ng" * 8
    for options, reason in (
        ({**store.options, "secret": wrong}, "the secret does not belong"),
        ({**store.options, "key": "AKIA" + wrong[:16]}, "does not know this access key"),
    ):
        with pytest.raises(TargetError, match=reason) as failure:
            paddle_reshard.convert(SMALL, f"s3://{bucket}/c", storage_options=options, **TARGET)
        assert "gave up" not in str(failure.value)
        for secret in (options["key"], options["secret"], store.key, store.secret):
            assert secret not in str(failure.value)
            assert secret not in repr(failure.value)
        with pytest.raises(CheckpointError, match=reason):
            paddle_reshard.inspect(f"s3://{bucket}/c", storage_options=options)


def test_a_key_that_may_only_read_is_refused_before_anything_is_read(
    store: Store, bucket: str, small_source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert paddle_reshard.inspect(small_source, storage_options=store.read_only).topology.pp == 2
    monkeypatch.setattr(FsspecSource, "read_into", None)
    with pytest.raises(TargetError, match=f"s3://{bucket}/there: access denied"):
        paddle_reshard.convert(
            small_source, f"s3://{bucket}/there", storage_options=store.read_only, **TARGET
        )


def test_a_permission_that_is_missing_is_named(store: Store, bucket: str) -> None:
    with pytest.raises(TargetError, match=r"the key may not do this \(CreateMultipartUpload\)"):
        paddle_reshard.convert(SMALL, f"s3://{bucket}/c", storage_options=store.read_only, **TARGET)
    fill_bucket(store, bucket, "here/", SMALL)
    with pytest.raises(CheckpointError, match=r"/here/\S+\.json: .* \(GetObject\)"):
        paddle_reshard.inspect(f"s3://{bucket}/here", storage_options=store.may_list)
    with pytest.raises(CheckpointError, match=r"s3://\S+/here: .* \(ListObjectsV2\)"):
        paddle_reshard.inspect(f"s3://{bucket}/here", storage_options=store.may_nothing)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"profile": "nobody"}, "profile .nobody. could not be found"),
        ({"key": "AKIA"}, "missing: aws_secret_access_key"),
        ({"key": "AKIA", "secret": "s", "endpoint_url": "127.0.0.1:9000"}, "Invalid endpoint"),
        ({"client_kwargs": {"region_name": "mars central"}}, "mars central"),
    ],
)
def test_options_that_make_no_sense_are_a_wrong_request(options: dict[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=f"s3://bucket/c: storage options: .*{reason}"):
        paddle_reshard.inspect("s3://bucket/c", storage_options=options)


def test_no_bucket_and_no_server(store: Store, bucket: str) -> None:
    with pytest.raises(TargetError, match="no such bucket"):
        paddle_reshard.plan(SMALL, "s3://not-there-at-all/c", storage_options=store.options, **TARGET)
    with pytest.raises(UsageError, match="s3://bucket/prefix"):
        paddle_reshard.inspect("s3://", storage_options=store.options)
    nowhere = {**store.options, "endpoint_url": "http://127.0.0.1:1"}
    with pytest.raises(CheckpointError, match=r"cannot be reached.*gave up after 4 attempts"):
        paddle_reshard.inspect(f"s3://{bucket}/c", storage_options=nowhere)


@pytest.mark.parametrize(
    ("step", "pinned", "told"),
    [
        ("plan", True, "changed while it was read"),
        ("plan", False, "changed while it was read"),
        ("move", True, "changed while it was read"),
        ("plan", True, "not found"),
        ("move", True, "disappeared"),
    ],
)
def test_a_source_that_changes_or_vanishes_is_refused(
    step: str, pinned: bool, told: str, store: Store, bucket: str
) -> None:
    fill_bucket(store, bucket, "here/", SMALL)
    name = "optimizer.tp00_pp00_shard00.pdopt"
    victim = {"Bucket": bucket, "Key": f"here/{name}"}

    def change(event: Event) -> None:
        if isinstance(event, StepEnded) and event.step == step:
            if told.startswith("changed"):
                store.client.put_object(**victim, Body=bytes((SMALL / name).stat().st_size))
            else:
                store.client.delete_object(**victim)

    options = {**store.options, "local_expiry_check": not pinned}
    here, there = f"s3://{bucket}/here", f"s3://{bucket}/there"
    with pytest.raises(CheckpointError, match=told):
        paddle_reshard.convert(here, there, storage_options=options, observe=change, **TARGET)
    assert in_bucket(store, bucket, "there/") == {}
    assert uploads(store, bucket) == []


def test_what_s3_cannot_hold_is_refused_before_anything_is_written(
    store: Store, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, message in (
        ("LARGEST_OBJECT_BYTES", "an S3 object may have 0"),
        ("LARGEST_PART_BYTES", "an S3 upload may have parts of"),
        ("MOST_PARTS", "an S3 upload may have 0"),
    ):
        with monkeypatch.context() as patch, pytest.raises(TargetError, match=message):
            patch.setattr(s3, limit, 0)
            paddle_reshard.convert(SMALL, f"s3://{bucket}/c", storage_options=store.options, **TARGET)
    assert in_bucket(store, bucket) == {}
    assert uploads(store, bucket) == []


@pytest.mark.full
def test_targets_on_a_disk_and_on_s3_together(
    store: Store, bucket: str, tmp_path: Path, for_four: dict[str, bytes]
) -> None:
    """Killed when the first of them is there: the other one is made later, and what is left of it can be removed."""
    disk, far = tmp_path / "far", f"s3://{bucket}/flex"
    asked: dict[Any, TargetOptions] = {disk: TARGET, far: {"format": "flex", "max_shard_size": "200KB"}}
    paddle_reshard.convert(SMALL, tmp_path / "alone", format="flex", max_shard_size="200KB")
    alone = in_folder(tmp_path / "alone")

    def kill(event: Event) -> None:
        if isinstance(event, StepEnded) and event.step == "move":
            raise KeyboardInterrupt

    for goes_on in (False, True):
        with pytest.raises(KeyboardInterrupt):
            paddle_reshard.convert(SMALL, asked, storage_options=store.options, observe=kill)
        assert not disk.exists()
        assert uploads(store, bucket)
        if goes_on:
            report = paddle_reshard.convert(SMALL, asked, storage_options=store.options, resume=True)
            assert report.moved.written_bytes == 0
        else:
            paddle_reshard.clean(disk)
            paddle_reshard.clean(far, storage_options=store.options)
            assert in_bucket(store, bucket) == {}
        assert uploads(store, bucket) == []
    assert_same_checkpoint(in_folder(disk), for_four, asked_alike=False)
    found = in_bucket(store, bucket, "flex/")
    assert_same_checkpoint(found, alone, asked_alike=False)
