"""Kills at the effects of a conversion to S3; each is resumed to the very same objects, and nothing else stays."""

from pathlib import Path
from typing import Any

import pytest

from tests.resume.conftest import Driver
from tests.storage.contents import fill_bucket, in_bucket, in_folder, looks_finished, uploads, visible
from tests.storage.servers import Store

KILLED = {"killed": 9}
SESSION = r"put_object \.paddle_reshard_session"
LEDGER = r"\w+_object \.paddle_reshard_ledger"
BOUNDARIES = [
    ("create_multipart_upload .*probe", 1, True),
    (SESSION, 1, True),
    ("create_multipart_upload [^.]", 3, True),
    (LEDGER, 1, True),
    ("upload_part", 4, True),
    (SESSION, 3, False),  # all parts are there
    ("complete_multipart_upload", 1, True),
    (SESSION, 4, False),  # all files are there
    (SESSION, 4, True),
    ("complete_multipart_upload saved_signal", 1, True),
    ("put_object paddle_reshard", 1, True),
    ("delete_object .*ledger", 2, False),
    ("delete_object .*session", 1, True),
]


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
    """What a run makes that nobody disturbs."""
    store.client.create_bucket(Bucket="undisturbed")
    driver.convert(source, "s3://undisturbed/whole", request={"storage_options": store.options})
    return in_bucket(store, "undisturbed", "whole/")


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


@pytest.mark.parametrize(
    ("of", "nth", "marked"),
    [
        (SESSION, 3, True),
        ("delete_object saved_signal", 2, True),
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
    wanted: dict[str, bytes],
) -> None:
    fill_bucket(store, bucket, "t/", source)
    left = _kill_and_resume(
        driver, store, source, f"{bucket}/t", wanted, of=of, kill_at=nth, request={"overwrite": True}
    )
    # Its own markers go before anything else changes, and nothing is marked before the new one is whole.
    assert bool(looks_finished(left)) == marked
    if marked:
        assert left.items() <= in_folder(source).items()
    assert "paddle_reshard.json" not in left
