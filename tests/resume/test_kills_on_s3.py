"""Kills at the effects of a conversion to S3; each is resumed to the very same objects, and nothing else stays."""

from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from tests.resume.conftest import Driver
from tests.sampling import exhaustive
from tests.storage.contents import fill_bucket, in_bucket, in_folder, looks_finished, uploads, visible
from tests.storage.servers import DIALECTS, Proxy, Store, first

KILLED = {"killed": 9}
SESSION = r"put_object \.paddle_reshard_session"
LEDGER = r"\w+_object \.paddle_reshard_ledger"
BOUNDARIES = [
    exhaustive("create_multipart_upload .*probe", 1, True),
    exhaustive(SESSION, 1, True),
    exhaustive("create_multipart_upload [^.]", 3, True),
    exhaustive(LEDGER, 1, True),
    ("upload_part", 4, True),
    exhaustive(SESSION, 3, False),  # all parts are there
    exhaustive("complete_multipart_upload", 1, True),
    exhaustive(SESSION, 4, False),  # all files are there
    (SESSION, 4, True),
    ("complete_multipart_upload saved_signal", 1, True),
    exhaustive("put_object paddle_reshard", 1, True),
    exhaustive("delete_object .*ledger", 2, False),
    exhaustive("delete_object .*session", 1, True),
]
SOME_DIALECTS = ["ceph", *(exhaustive(name) for name in DIALECTS if name != "ceph")]
"""Ceph says the most that is not S3's own answer; `make exhaustive` hears all of them."""


def _kill_and_resume(
    driver: Driver, store: Store, source: Path, place: str, wanted: dict[str, bytes], **order: Any
) -> dict[str, bytes]:
    """What was visible after the kill."""
    bucket, prefix = place.split("/", 1)
    request = {"storage_options": store.options, **order.pop("request", {})}
    assert driver.convert(source, f"s3://{place}", request=request, **order) == KILLED
    left = visible(in_bucket(store, bucket, f"{prefix}/"))
    again = driver.convert(source, f"s3://{place}", request={**request, "resume": True})
    assert "error" not in again
    assert again["groups"] + again["resumed"] == again["planned"]
    assert in_bucket(store, bucket, f"{prefix}/") == wanted
    assert uploads(store, bucket) == []
    return left


@pytest.fixture(scope="module")
def wanted(driver: Driver, store: Store, source: Path) -> dict[str, bytes]:
    """The result of an undisturbed run."""
    store.client.create_bucket(Bucket="undisturbed")
    driver.convert(source, "s3://undisturbed/whole", request={"storage_options": store.options})
    return in_bucket(store, "undisturbed", "whole/")


@pytest.fixture(scope="module")
def old(driver: Driver, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished conversion to two ranks, with two signals, that is to be replaced."""
    folder = tmp_path_factory.mktemp("old") / "t"
    driver.convert(source, folder, request={"to": "tp=2"})
    return folder


@pytest.mark.parametrize(("of", "nth", "after"), BOUNDARIES)
def test_a_kill_at_an_effect_is_made_good(
    of: str,
    nth: int,
    after: bool,
    driver: Driver,
    store: Store,
    bucket: str,
    source: Path,
    wanted: dict[str, bytes],
) -> None:
    left = _kill_and_resume(driver, store, source, f"{bucket}/t", wanted, of=of, kill_at=nth, after=after)
    assert left.items() <= wanted.items()
    if looks_finished(left):  # all else was there before the marker, and before the manifest
        assert wanted.keys() - left.keys() <= {"paddle_reshard.json"}


@pytest.mark.parametrize("dialect", SOME_DIALECTS)
@pytest.mark.parametrize(
    ("of", "nth", "after"),
    [
        exhaustive("complete_multipart_upload", 2, True),
        ("complete_multipart_upload saved_signal", 1, True),
    ],
)
def test_whatever_a_store_says_of_a_completed_upload(
    of: str,
    nth: int,
    after: bool,
    dialect: str,
    driver: Driver,
    store: Store,
    proxy: Proxy,
    bucket: str,
    source: Path,
    wanted: dict[str, bytes],
) -> None:
    proxy.dialect = DIALECTS[dialect]
    options = {**store.options, "endpoint_url": proxy.url}
    request = {"storage_options": options}
    order = {"of": of, "kill_at": nth, "after": after}
    assert driver.convert(source, f"s3://{bucket}/t", request=request, **order) == KILLED
    again = driver.convert(source, f"s3://{bucket}/t", request={**request, "resume": True})
    assert "error" not in again
    assert in_bucket(store, bucket, "t/") == wanted


@pytest.mark.parametrize("dialect", SOME_DIALECTS)
def test_the_answer_to_a_completed_upload_is_lost(
    dialect: str,
    driver: Driver,
    store: Store,
    proxy: Proxy,
    bucket: str,
    source: Path,
    wanted: dict[str, bytes],
) -> None:
    proxy.dialect = DIALECTS[dialect]
    proxy.fault = first(2, "lose", lambda method, path: method == "POST" and "uploadId=" in path)
    request = {"storage_options": {**store.options, "endpoint_url": proxy.url}}
    assert "error" not in driver.convert(source, f"s3://{bucket}/t", request=request)
    assert in_bucket(store, bucket, "t/") == wanted


@pytest.mark.parametrize("dialect", SOME_DIALECTS)
def test_uploads_that_a_rule_of_the_store_has_aborted(
    dialect: str,
    driver: Driver,
    store: Store,
    proxy: Proxy,
    bucket: str,
    source: Path,
    wanted: dict[str, bytes],
) -> None:
    proxy.dialect = DIALECTS[dialect]
    request = {"storage_options": {**store.options, "endpoint_url": proxy.url}}
    order = {"of": "upload_part", "kill_at": 4, "after": True}
    assert driver.convert(source, f"s3://{bucket}/t", request=request, **order) == KILLED
    for upload in store.client.list_multipart_uploads(Bucket=bucket)["Uploads"]:
        store.client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    again = driver.convert(source, f"s3://{bucket}/t", request={**request, "resume": True})
    assert "error" not in again
    assert in_bucket(store, bucket, "t/") == wanted


@pytest.mark.parametrize(
    ("of", "nth", "marked"),
    [
        (SESSION, 3, True),
        exhaustive("delete_object saved_signal", 2, True),
        ("delete_object .*tp01", 1, False),
    ],
)
def test_an_overwritten_checkpoint_never_looks_finished_again(
    of: str,
    nth: int,
    marked: bool,
    driver: Driver,
    store: Store,
    bucket: str,
    source: Path,
    old: Path,
    wanted: dict[str, bytes],
) -> None:
    fill_bucket(store, bucket, "t/", old)
    left = _kill_and_resume(
        driver, store, source, f"{bucket}/t", wanted, of=of, kill_at=nth, request={"overwrite": True}
    )
    # Its own markers go before anything else changes, and nothing is marked before the new one is whole.
    assert bool(looks_finished(left)) == marked
    if marked:
        assert left.items() <= in_folder(old).items()
    else:
        assert "paddle_reshard.json" not in left


@pytest.mark.parametrize(
    ("of", "nth", "begun"),
    [
        exhaustive("upload_part", 4, False),
        (SESSION, 3, False),  # all parts are there
        exhaustive("delete_object saved_signal", 2, True),
        exhaustive("complete_multipart_upload optimizer", 1, True),
        ("put_object paddle_reshard", 1, True),
    ],
)
def test_clean_keeps_the_old_checkpoint_complete_or_refuses(
    of: str,
    nth: int,
    begun: bool,
    driver: Driver,
    store: Store,
    bucket: str,
    source: Path,
    old: Path,
    wanted: dict[str, bytes],
) -> None:
    fill_bucket(store, bucket, "t/", old)
    target, request = f"s3://{bucket}/t", {"overwrite": True, "storage_options": store.options}
    assert driver.convert(source, target, of=of, kill_at=nth, request=request) == KILLED
    if not begun:
        paddle_reshard.clean(target, storage_options=store.options)
        assert in_bucket(store, bucket, "t/") == in_folder(old)
        return
    before = in_bucket(store, bucket, "t/")
    with pytest.raises(paddle_reshard.ReshardError, match="the same command with --resume publishes it"):
        paddle_reshard.clean(target, storage_options=store.options)
    left = in_bucket(store, bucket, "t/")
    assert {name: left[name] for name in visible(left)} == {name: before[name] for name in visible(before)}
    again = driver.convert(source, target, request={**request, "resume": True})
    assert "error" not in again
    assert in_bucket(store, bucket, "t/") == wanted
