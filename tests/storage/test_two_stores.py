"""Two stores of one scheme, each with its own endpoint and credentials, in one run."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import paddle_reshard
from paddle_reshard.pipeline.cli.main import cli
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.storage.locate import source_access, target_access
from tests.storage.contents import SMALL, TARGET, assert_same_checkpoint, fill_bucket, in_bucket, in_folder
from tests.storage.servers import Store, running_store


@pytest.fixture(scope="module")
def other() -> Iterator[Store]:
    """A second server, which knows other keys."""
    with running_store() as store:
        yield store


@pytest.fixture
def there(other: Store) -> str:
    name = f"there-{secrets.token_hex(6)}"
    other.client.create_bucket(Bucket=name)
    return name


@pytest.fixture
def reach(store: Store, other: Store) -> dict[str, Any]:
    return {"storage_options": {"source": store.options, "target": other.options}}


@pytest.fixture
def flags(reach: dict[str, Any], tmp_path: Path) -> list[str]:
    """The same on the command line, out of the list of processes."""
    (tmp_path / "stores.json").write_text(json.dumps(reach["storage_options"]))
    return ["--storage-options", f"@{tmp_path / 'stores.json'}"]


def test_from_one_store_to_another(
    reach: dict[str, Any],
    small_source: str,
    other: Store,
    there: str,
    for_four: dict[str, bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="paddle_reshard")
    target = f"s3://{there}/c"
    planned = paddle_reshard.plan(small_source, target, **reach, **TARGET)
    report = paddle_reshard.convert(small_source, target, **reach, **TARGET)
    made = in_bucket(other, there, "c/")
    assert_same_checkpoint(made, for_four)
    assert paddle_reshard.verify(small_source, target, **reach).equal
    assert paddle_reshard.check(target, source=small_source, **reach).intact
    told = [repr(planned), repr(report), caplog.text, *map(repr, made.values())]
    hidden = [options[name] for options in reach["storage_options"].values() for name in ("key", "secret")]
    assert [secret for secret in hidden for text in told if secret in text] == []


@pytest.mark.full  # `watch` takes the same options
def test_on_the_command_line(
    flags: list[str],
    reach: dict[str, Any],
    store: Store,
    other: Store,
    small_source: str,
    there: str,
    tmp_path: Path,
    for_one_card: dict[str, bytes],
) -> None:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(cli, [*arguments])
        assert done.exit_code == 0, done.output
        assert store.secret not in done.output and other.secret not in done.output
        return done.output

    target = f"s3://{there}/c"
    run("plan", small_source, target, "--to", "tp=1", *flags, "--save", str(tmp_path / "plan"))
    saved = (tmp_path / "plan").read_bytes()
    assert store.secret.encode() not in saved and other.secret.encode() not in saved
    run("convert", small_source, target, "--to", "tp=1", *flags, "--plan", str(tmp_path / "plan"))
    assert_same_checkpoint(in_bucket(other, there, "c/"), for_one_card)
    run("verify", small_source, target, *flags)
    run("verify", target, "--source", small_source, *flags)
    run("inspect", small_source, *flags)
    run("ema", small_source, small_source, f"s3://{there}/mean", "--uniform", "--to", "tp=1", *flags)
    assert paddle_reshard.check(f"s3://{there}/mean", storage_options=other.options).intact
    run("clean", target, *flags)


def test_a_watched_run_in_one_store_and_its_conversions_in_another(
    flags: list[str], store: Store, bucket: str, other: Store, there: str, tmp_path: Path
) -> None:
    fill_bucket(store, bucket, "run/checkpoint-3/", SMALL)
    watch = ["watch", f"s3://{bucket}/run", f"s3://{there}/out", "--to", "tp=1", "--once", "--settle", "0"]
    done = CliRunner().invoke(cli, [*watch, *flags])
    assert done.exit_code == 0, done.output
    made = in_bucket(other, there, "out/")
    assert "checkpoint-3/paddle_reshard.json" in made
    assert in_bucket(store, bucket, "run/") == {f"checkpoint-3/{k}": v for k, v in in_folder(SMALL).items()}
    secrets_found = [name for name, data in made.items() if store.secret.encode() in data]
    assert secrets_found == [name for name, data in made.items() if other.secret.encode() in data] == []


def test_no_option_of_one_store_goes_to_the_other() -> None:
    both, own = {"key": "k", "secret": "s"}, {"endpoint_url": "https://elsewhere"}
    given = {"storage_options": {**both, "target": own}}
    assert (source_access(given).options, target_access(given).options) == (both, own)
    assert target_access({"storage_options": {**both, "target": {}}}).options == {}
    with pytest.raises(UsageError, match=r"^storage options: target: an object"):
        target_access({"storage_options": {"target": "minio"}})
    assert "secret" not in repr(source_access(given))


def test_a_job_is_not_given_credentials_on_its_command_line() -> None:
    options = ["--storage-options", '{"target": {"secret": "s3cr3t"}}']
    done = CliRunner().invoke(cli, ["submit", "s3://b/c", "s3://b/d", "--to", "tp=1", *options])
    assert done.exit_code == 2
    assert "would be readable in the job's command line" in done.output
    assert "s3cr3t" not in done.output
