"""Conversions of exports that are killed: from FP8 weights, and with a donor."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from tests.golden.fp8 import store_as_fp8
from tests.golden.wide import write_wide
from tests.resume.conftest import SMALL, Driver
from tests.sized import in_groups
from tests.storage.contents import fill_bucket, in_bucket, in_folder, uploads
from tests.storage.servers import Store

KILLED = {"killed": 9}
EXPORT = {"format": "huggingface"}
SMALL_GROUPS = 300_000


@dataclass(frozen=True)
class Case:
    """A conversion, and what it makes if nothing disturbs it."""

    source: Path
    options: dict[str, Any]
    made: dict[str, bytes]

    @property
    def request(self) -> dict[str, Any]:
        return {"to": None, **self.options}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("exports")
    fp8 = store_as_fp8(write_wide(folder / "fp8"))
    paddle_reshard.convert(SMALL, folder / "donor", **EXPORT, max_shard_size="200KB")
    (folder / "donor" / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    requests = {
        "from fp8": (fp8, {"to": "tp=2"}),
        "like": (SMALL, {**EXPORT, "like": str(folder / "donor"), "max_shard_size": "200KB"}),
    }
    found = {}
    for name, (source, options) in requests.items():
        in_groups(SMALL_GROUPS).convert(source, folder / name, **options)
        found[name] = Case(source, options, in_folder(folder / name))
    return found


@pytest.mark.parametrize("name", ["from fp8", "like"])
def test_a_killed_export_is_resumed(
    name: str, cases: dict[str, Case], driver: Driver, tmp_path: Path
) -> None:
    case, target = cases[name], tmp_path / "made"
    order = {"group_bytes": SMALL_GROUPS, "of": "pwrite", "kill_at": 3, "after": True}
    assert driver.convert(case.source, target, request=case.request, **order) == KILLED
    resumed = {**case.request, "resume": True}
    again = driver.convert(case.source, target, request=resumed, group_bytes=SMALL_GROUPS)
    assert again["resumed"] > 0 and again["groups"] > 0
    assert in_folder(target) == case.made
    assert paddle_reshard.check(target).intact


@pytest.mark.parametrize("name", ["from fp8", "like"])
def test_a_killed_export_to_s3_is_resumed(
    name: str, cases: dict[str, Case], driver: Driver, store: Store, bucket: str
) -> None:
    case = cases[name]
    fill_bucket(store, bucket, "source/", case.source)
    request = {**case.request, "storage_options": store.options}
    if name == "like":
        fill_bucket(store, bucket, "donor/", Path(request["like"]))
        request["like"] = f"s3://{bucket}/donor"
    source, target = f"s3://{bucket}/source", f"s3://{bucket}/made"
    assert driver.convert(source, target, request=request, of="upload_part", kill_at=2, after=True) == KILLED
    again = driver.convert(source, target, request={**request, "resume": True})
    assert "error" not in again, again
    found = in_bucket(store, bucket, "made/")
    assert found.keys() == case.made.keys()
    assert [key for key in found if found[key] != case.made[key]] == ["paddle_reshard.json"]
    assert uploads(store, bucket) == []
    assert paddle_reshard.check(target, storage_options=store.options).intact
