"""Kills at the effects of a conversion to S3; each is resumed to the very same objects, and nothing else stays."""

from dataclasses import dataclass, field, replace
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
    ("create_multipart_upload .*probe", 1, True),  # there may be no session yet
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


@dataclass(frozen=True)
class Target:
    """A place in a bucket, to which conversions of a source are killed."""

    driver: Driver
    store: Store
    bucket: str
    source: Path
    wanted: dict[str, bytes]
    options: dict[str, Any] = field(default_factory=dict)

    def convert(
        self, of: str = "", nth: int | None = None, after: bool = False, **request: Any
    ) -> dict[str, Any]:
        """One run, killed at an effect if one is named."""
        request["storage_options"] = {**self.store.options, **self.options}
        order = {"of": of, "kill_at": nth, "after": after, "request": request}
        return self.driver.convert(self.source, f"s3://{self.bucket}/t", **order)

    def kill(self, of: str, nth: int, after: bool = False, **request: Any) -> dict[str, bytes]:
        """What is visible then."""
        assert self.convert(of, nth, after, **request) == KILLED
        return visible(self.held())

    def resume(self, **request: Any) -> None:
        """It becomes what an undisturbed run makes, and nothing else stays."""
        again = self.convert(resume=True, **request)
        assert "error" not in again
        assert again["groups"] + again["resumed"] == again["planned"]
        assert self.held() == self.wanted
        assert uploads(self.store, self.bucket) == []

    def held(self) -> dict[str, bytes]:
        return in_bucket(self.store, self.bucket, "t/")


@pytest.fixture(scope="module")
def wanted(driver: Driver, store: Store, source: Path) -> dict[str, bytes]:
    """The result of an undisturbed run."""
    store.client.create_bucket(Bucket="undisturbed")
    driver.convert(source, "s3://undisturbed/whole", request={"storage_options": store.options})
    return in_bucket(store, "undisturbed", "whole/")


@pytest.fixture
def target(driver: Driver, store: Store, bucket: str, source: Path, wanted: dict[str, bytes]) -> Target:
    return Target(driver, store, bucket, source, wanted)


@pytest.fixture(params=SOME_DIALECTS)
def heard(request: pytest.FixtureRequest, target: Target, proxy: Proxy) -> Target:
    """The same through a proxy that answers as another store does."""
    proxy.dialect = DIALECTS[request.param]
    return replace(target, options={"endpoint_url": proxy.url})


@pytest.fixture(scope="module")
def old(driver: Driver, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished conversion to two ranks, with two signals, that is to be replaced."""
    folder = tmp_path_factory.mktemp("old") / "t"
    driver.convert(source, folder, request={"to": "tp=2"})
    return folder


@pytest.mark.parametrize(("of", "nth", "after"), BOUNDARIES)
def test_a_kill_at_an_effect_is_made_good(of: str, nth: int, after: bool, target: Target) -> None:
    left = target.kill(of, nth, after)
    target.resume()
    assert left.items() <= target.wanted.items()
    if looks_finished(left):  # all else was there before the marker, and before the manifest
        assert target.wanted.keys() - left.keys() <= {"paddle_reshard.json"}


@pytest.mark.parametrize(
    ("of", "nth"),
    [exhaustive("complete_multipart_upload", 2), ("complete_multipart_upload saved_signal", 1)],
)
def test_whatever_a_store_says_of_a_completed_upload(of: str, nth: int, heard: Target) -> None:
    heard.kill(of, nth, after=True)
    heard.resume()


def test_the_answer_to_a_completed_upload_is_lost(heard: Target, proxy: Proxy) -> None:
    proxy.fault = first(2, "lose", lambda method, path: method == "POST" and "uploadId=" in path)
    assert "error" not in heard.convert()
    assert heard.held() == heard.wanted


def test_uploads_that_a_rule_of_the_store_has_aborted(heard: Target) -> None:
    heard.kill("upload_part", 4, after=True)
    client, bucket = heard.store.client, heard.bucket
    for upload in client.list_multipart_uploads(Bucket=bucket)["Uploads"]:
        client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    heard.resume()


@pytest.mark.parametrize(
    ("of", "nth", "marked"),
    [
        (SESSION, 3, True),
        exhaustive("delete_object saved_signal", 2, True),
        ("delete_object .*tp01", 1, False),
    ],
)
def test_an_overwritten_checkpoint_never_looks_finished_again(
    of: str, nth: int, marked: bool, target: Target, old: Path
) -> None:
    fill_bucket(target.store, target.bucket, "t/", old)
    left = target.kill(of, nth, overwrite=True)
    target.resume(overwrite=True)
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
    of: str, nth: int, begun: bool, target: Target, old: Path
) -> None:
    fill_bucket(target.store, target.bucket, "t/", old)
    before = target.kill(of, nth, overwrite=True)
    place, options = f"s3://{target.bucket}/t", {"storage_options": target.store.options}
    if not begun:
        paddle_reshard.clean(place, **options)
        assert target.held() == in_folder(old)
        return
    with pytest.raises(paddle_reshard.ReshardError, match="the same command with --resume publishes it"):
        paddle_reshard.clean(place, **options)
    assert visible(target.held()) == before
    target.resume(overwrite=True)
