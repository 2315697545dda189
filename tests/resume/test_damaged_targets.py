"""A finished target to which something happened: what ``verify DST`` finds, and what ``--resume`` makes of it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.convert.integrity import IntegrityReport
from paddle_reshard.pipeline.convert.manifest import parse_manifest
from paddle_reshard.pipeline.core.errors import FormatError, TargetError
from tests.storage.servers import Store

ONE = {"to": "tp=1", "memory": "256MiB"}
MANIFEST = "paddle_reshard.json"


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("made") / "one-card"
    paddle_reshard.convert(source, target, **ONE)
    return target


@pytest.fixture
def target(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "one-card", copy_function=shutil.copyfile))


def edit(target: Path, change: Callable[[dict], None]) -> None:
    values = json.loads((target / MANIFEST).read_text())
    change(values)
    (target / MANIFEST).write_text(json.dumps(values))


def added(name: str, content: bytes = b"x") -> Callable[[Path], None]:
    def change(target: Path) -> None:
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(content)

    return change


def forget(name: str, *also: str) -> Callable[[Path], None]:
    """Take a file out of the manifest everywhere, and the file itself out of the folder if ``also`` says so."""

    def change(values: dict) -> None:
        for table in (values["files"], values["parts"]):
            del table[name]

    def both(target: Path) -> None:
        edit(target, change)
        for path in also:
            (target / path).unlink()

    return both


def flipped(name: str) -> Callable[[Path], None]:
    def change(target: Path) -> None:
        data = bytearray((target / name).read_bytes())
        data[len(data) // 2] ^= 1
        (target / name).write_bytes(data)

    return change


DAMAGES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "another rank's file": (added("optimizer.shard07.pdopt"), "optimizer.shard07.pdopt", "not in the manifest"),
    "a note": (added("notes.txt"), "notes.txt", "not in the manifest"),
    "an empty file": (added("empty", b""), "empty", "not in the manifest"),
    "a folder": (added("finetuned/model.pdparams"), "finetuned/", "a folder that is not in the manifest"),
    "a file of tensors in a folder": (
        added("model_state/0_0.distcp"), "model_state/0_0.distcp", "not in the manifest"
    ),
    "a file gone": (lambda t: (t / "config.json").unlink(), "config.json", "missing; the manifest says"),
    "a file cut": (lambda t: os.truncate(t / "optimizer.pdopt", 5), "optimizer.pdopt", "truncated: has 5 bytes"),
    "a file that grew": (lambda t: os.truncate(t / "config.json", 9999), "config.json", "longer than it was: has"),
    "a small file changed": (flipped("config.json"), "config.json", "the manifest says"),
    "a file forgotten": (forget("config.json"), "config.json", "not in the manifest"),
    "a file forgotten and gone": (forget("config.json", "config.json"), MANIFEST, "was changed after it was written"),
    "another source": (
        lambda t: edit(t, lambda values: values["source"].update(location="/elsewhere")),
        MANIFEST,
        "was changed after it was written",
    ),
    "no digest": (lambda t: edit(t, lambda v: v.pop("digest")), MANIFEST, "the manifest says None"),
    "more that may lie beside": (
        lambda t: edit(t, lambda v: v["additional_files"].append("x")), MANIFEST, "was changed after it was written"
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_finds_it_and_resuming_does_not_say_that_all_is_done(
    damage: str, source: Path, target: Path
) -> None:
    change, path, detail = DAMAGES[damage]
    change(target)
    before = sorted(p.name for p in target.iterdir())
    report = paddle_reshard.check(target)
    assert not report
    assert [d for d in report.damages if d.path == path and detail in d.detail], report.damages
    with pytest.raises(TargetError) as refused:
        paddle_reshard.convert(source, target, resume=True, **ONE)
    if damage != "a file forgotten" and damage != "a file forgotten and gone":  # another plan by its files
        assert "finished, but damaged: " in str(refused.value)
    assert sorted(p.name for p in target.iterdir()) == before


def assert_flipped(report: IntegrityReport, size_bytes: int) -> None:
    """The part that has the one byte that is another."""
    (damage,) = report.damages
    assert damage.path == "optimizer.pdopt" and "the manifest says" in damage.detail
    assert damage.byte_offset <= size_bytes // 2 < damage.byte_offset + damage.nbytes


def test_a_large_file_is_read_only_on_request(source: Path, target: Path) -> None:
    size_bytes = (target / "optimizer.pdopt").stat().st_size
    assert size_bytes > 1 << 20
    whole = paddle_reshard.check(target)
    assert whole and whole.unchecked_bytes == 0
    assert whole.read_bytes == sum(p.stat().st_size for p in target.iterdir() if p.name != MANIFEST)
    flipped("optimizer.pdopt")(target)
    paddle_reshard.convert(source, target, resume=True, **ONE)
    assert_flipped(paddle_reshard.check(target), size_bytes)


def test_an_object_store_detects_a_changed_object_by_its_etag(
    source: Path, store: Store, bucket: str
) -> None:
    place, options = f"s3://{bucket}/t", {"storage_options": store.options, **ONE}
    paddle_reshard.convert(source, place, **options)
    assert paddle_reshard.check(place, storage_options=store.options)
    key = "t/optimizer.pdopt"
    data = bytearray(store.client.get_object(Bucket=bucket, Key=key)["Body"].read())
    store.client.put_object(Bucket=bucket, Key=key, Body=bytes(data))  # the same bytes by another ETag
    paddle_reshard.convert(source, place, resume=True, **options)
    data[len(data) // 2] ^= 1
    store.client.put_object(Bucket=bucket, Key=key, Body=bytes(data))
    assert_flipped(paddle_reshard.check(place, storage_options=store.options), len(data))
    with pytest.raises(TargetError, match=r"finished, but damaged: optimizer\.pdopt"):
        paddle_reshard.convert(source, place, resume=True, **options)
    store.client.put_object(Bucket=bucket, Key=key, Body=b"")
    with pytest.raises(TargetError, match=r"optimizer\.pdopt: truncated: has 0 bytes"):
        paddle_reshard.convert(source, place, resume=True, **options)
    store.client.put_object(Bucket=bucket, Key=f"t/{secrets.token_hex(4)}", Body=b"")
    assert len(paddle_reshard.check(place, storage_options=store.options).damages) == 2


@pytest.mark.parametrize("generation", [0, 1, 3, "2", None, True])
def test_a_manifest_of_another_generation_is_refused(generation: object, target: Path) -> None:
    edit(target, lambda values: values.update(generation=generation))
    with pytest.raises(FormatError, match="generation"):
        parse_manifest((target / MANIFEST).read_bytes(), MANIFEST)
