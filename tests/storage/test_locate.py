"""The store of a location; what messages show of it, and what they never show."""

import logging
import pickle
from pathlib import Path

import pytest
from fsspec.registry import known_implementations

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError, TargetError, UnsupportedError, UsageError
from paddle_reshard.storage.local.source import LocalSource
from paddle_reshard.storage.local.target import LocalTarget
from paddle_reshard.storage.locate import Access, comparable_path, is_local, open_source, open_target
from paddle_reshard.storage.remote.folder import FsspecFolder, choose_options, without_secrets
from paddle_reshard.storage.s3.target import S3Target
from paddle_reshard.storage.store import Identity
from tests.storage.contents import SMALL, TARGET, fill_memory
from tests.storage.servers import Store


def test_paths_and_file_urls_are_local(tmp_path: Path) -> None:
    assert is_local("a/b")
    assert is_local("file:///a/b")
    assert not is_local("s3://a/b")
    assert isinstance(open_source(f"file://{SMALL}", {}), LocalSource)
    assert isinstance(open_target(f"file://{tmp_path / 'new'}", Access({})), LocalTarget)
    paddle_reshard.convert(SMALL, f"file://{tmp_path / 'new'}", **TARGET)
    assert (tmp_path / "new" / "paddle_reshard.json").exists()


def test_a_folder_may_be_called_as_a_scheme_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("hf", "s3", "memory"):
        assert isinstance(open_target(name, Access({})), LocalTarget)


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = {"class": "no_such_driver.FileSystem", "err": "a hint of fsspec"}
    monkeypatch.setitem(known_implementations, "far", driver)
    with pytest.raises(UnsupportedError, match="far://: the package no_such_driver is missing; install it"):
        open_source("far://bucket/c", {"far": {}})
    monkeypatch.setitem(known_implementations, "far", {**driver, "class": "fsspec.no_such_driver.FileSystem"})
    with pytest.raises(UnsupportedError, match="far://: a hint of fsspec"):
        open_target("far://bucket/c", Access({"far": {}}))
    with pytest.raises(UnsupportedError, match="nonsense:// is not a scheme"):
        open_target("nonsense://bucket/c", Access({"nonsense": {}}))


def test_unknown_options_are_a_wrong_request(store: Store) -> None:
    with pytest.raises(UsageError, match=r"storage options: unknown option 'colour'$"):
        open_source("s3://bucket/c", {**store.options, "colour": "blue"})
    with pytest.raises(UsageError, match=r"storage options: unknown option 'keyy'; did you mean key\?$"):
        open_source("s3://bucket/c", {**store.options, "keyy": "k"})


def test_options_by_scheme() -> None:
    options = {"s3": {"key": "k"}, "gs": {"token": "t"}, "timeout": 3, "use_listings_cache": True}
    assert choose_options("s3", options) == {"key": "k", "timeout": 3}
    assert choose_options("memory", options) == {"timeout": 3}


def test_the_same_location_spelled_differently(tmp_path: Path) -> None:
    assert comparable_path("s3://b/a/c/") == comparable_path("s3a://b/a/c") != comparable_path("gs://b/a/c")
    assert comparable_path("s3://b/a") in comparable_path("s3://b/a/c").parents
    assert comparable_path("s3://b/q?x=1/y") != comparable_path("s3://b/q")
    assert comparable_path("memory:///a") == comparable_path("memory://a")
    assert comparable_path(f"file://{tmp_path}/x") == comparable_path(f"{tmp_path}/y/../x")
    assert comparable_path("hdfs://me:word@host/a") == comparable_path("hdfs://host/a")


def test_urls_are_shown_without_secrets() -> None:
    assert without_secrets("hdfs://me:pass@word@host:9000/a?token=t#f") == "hdfs://host:9000/a"
    assert without_secrets("s3://bucket/a@b/c") == "s3://bucket/a@b/c"
    assert without_secrets("s3a://bucket/q?x=1#2/y") == "s3a://bucket/q?x=1#2/y"
    assert without_secrets("/a@b") == "/a@b"
    assert without_secrets("zip://a::hdfs://me:pass@host/c?t=1") == "zip://a::hdfs://host/c"


SECRETS = ("AKIDSECRETKEY", "s3cr3t-w0rd", "passw0rd", "sig-nature", "t0ken-nested")


def test_secrets_are_in_the_pickle_and_nowhere_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="paddle_reshard")
    options = {
        "key": SECRETS[0],
        "secret": SECRETS[1].encode(),
        "client_kwargs": {"auth": [{"t": SECRETS[4]}]},
        "endpoint": "nothing secret",
    }
    fill_memory("/c", SMALL)
    folder = FsspecFolder(f"memory://me:{SECRETS[2]}@/c?sig={SECRETS[3]}", options, CheckpointError)
    told = folder.explain(OSError(f"no entry with {', '.join(SECRETS)} and nothing secret"), "file")
    assert str(told).endswith("no entry with ***, ***, ***, ***, *** and nothing secret")
    source = open_source("memory://c", options)
    shown = [repr(folder), folder.location, repr(source), source.location, repr(told), caplog.text]
    assert [secret for secret in SECRETS for text in shown if secret in text] == []
    assert all(secret.encode() in pickle.dumps(folder) for secret in SECRETS)
    assert pickle.loads(pickle.dumps(source)).read("saved_signal_0", 0, 1) == b"1"


def test_a_target_shows_no_secret(store: Store, bucket: str) -> None:
    """Plans, reports and manifests: ``test_two_stores.py``."""
    target = open_target(f"s3://{bucket}/new", Access(store.options))
    assert isinstance(target, S3Target)
    with target:
        begun = target.begin([], Identity("plan", "version", "source", {}))
        shown = [repr(target), repr(begun), repr(vars(target))]
    assert [text for text in shown if store.key in text or store.secret in text] == []


def test_bugs_are_not_taken_for_failures_of_the_store() -> None:
    folder = FsspecFolder("memory://c", {}, TargetError)

    def bug() -> None:
        raise AttributeError("a typing error")

    with pytest.raises(AttributeError):
        folder.attempt("file", bug)
