"""Options of S3 mean what s3fs says they mean, which is asked here, and nowhere else."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from fsspec.config import conf
from s3fs import S3FileSystem

from paddle_reshard.pipeline.core.errors import CheckpointError, UsageError
from paddle_reshard.storage.locate import open_folder
from paddle_reshard.storage.s3.folder import S3Folder
from paddle_reshard.storage.s3.options import read_options

KEYS = {"key": "k", "secret": "s"}
GIVEN: list[dict[str, Any]] = [
    {},
    {"anon": True},
    {**KEYS, "token": "t", "endpoint_url": "http://127.0.0.1:1", "use_ssl": False},
    {"username": "k", "password": "s"},
    {**KEYS, "client_kwargs": {"region_name": "bj", "verify": False}, "config_kwargs": {"read_timeout": 3}},
    {**KEYS, "client_kwargs": None, "config_kwargs": None, "s3_additional_kwargs": None},
    {**KEYS, "requester_pays": True, "s3_additional_kwargs": {"SSECustomerKey": "x"}},
    {"profile": "work"},
    {
        **KEYS,
        "version_aware": True,
        "default_block_size": 5 << 20,
        "max_concurrency": 3,
        "cache_regions": True,
    },
    {**KEYS, "local_expiry_check": True},
]


def of_s3fs(options: dict[str, Any]) -> dict[str, Any]:
    theirs = S3FileSystem(**options, skip_instance_cache=True)
    same = ("anon", "endpoint_url", "key", "secret", "token", "use_ssl", "client_kwargs", "config_kwargs")
    return {
        **{name: getattr(theirs, name) for name in (*same, "local_expiry_check")},
        "of_every_request": {**theirs.s3_additional_kwargs, **theirs.req_kw},
        "session_kwargs": theirs.kwargs,
    }


@pytest.mark.parametrize("configured", [{}, {"token": "configured", "endpoint_url": "http://127.0.0.1:2"}])
@pytest.mark.parametrize("options", GIVEN, ids=lambda options: ",".join(options) or "none")
def test_options_are_those_of_s3fs(
    options: dict[str, Any], configured: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(conf, "s3", configured)
    wanted = of_s3fs(options)
    ours = read_options(options)
    assert {name: getattr(ours, name) for name in wanted} == wanted


@pytest.mark.parametrize("protocol", ["s3", "s3a"])
def test_a_default_of_fsspec_is_for_both_schemes(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(conf, protocol, {"token": "configured"})
    assert read_options({}).token == S3FileSystem(skip_instance_cache=True).token == "configured"


def test_every_option_of_s3fs_is_known() -> None:
    """None of them reaches botocore's session, which takes what is left: a profile."""
    named = {
        p.name
        for p in inspect.signature(S3FileSystem.__init__).parameters.values()
        if p.default is not p.empty
    }
    named -= {"asynchronous", "session"}  # taken out before, and refused
    assert {"key", "username", "loop", "max_concurrency"} <= named
    for name in named:
        assert read_options({name: "x"}).session_kwargs == {}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"key": "a", "username": "b"}, "key and username are two names"),
        ({"secret": "abcd", "password": "efgh"}, "secret and password are two names"),
        ({"session": object()}, "give a profile"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        open_folder("s3://bucket/here", options, CheckpointError)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a/b",
        "s3a://bucket/a b/",
        "s3://bucket",
        "s3:///bucket/a",
        "s3://arn:aws:s3:us-east-1:123456789012:accesspoint/mine/a/b",
        "s3://arn:aws-cn:s3:cn-north-1:123456789012:accesspoint:mine/a",
        "s3://arn:aws:s3-object-lambda:us-east-1:123456789012:accesspoint/mine/a",
        "s3://arn:aws:s3-outposts:us-east-1:123456789012:outpost/op-1/accesspoint/mine/a",
    ],
)
def test_bucket_and_prefix_are_those_of_s3fs(url: str) -> None:
    folder = S3Folder(url, KEYS, CheckpointError)
    bucket, key = folder.key("file")
    theirs = S3FileSystem(**KEYS).split_path(f"{url.rstrip('/')}/file")
    assert (bucket, key) == theirs[:2]
