"""A manifest says what was asked: whoever reads it can make the call and the command, which give the same plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.convert.manifest import format_manifest
from paddle_reshard.pipeline.request.options import TARGET_OPTIONS
from paddle_reshard.pipeline.request.parse import parse_request
from paddle_reshard.pipeline.request.record import NOT_STATED, OF_ALL_TARGETS, record_of
from tests.conftest import COMMITTED
from tests.jobs.command import run_here
from tests.published import hold, schema

SOURCE = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
KEY = "model.layers.3.self_attn.k_proj.weight"
PROGRAM = "model.norm.weight -> tail.norm.weight\n"
ASKED: dict[str, dict[str, Any]] = {
    "topology": {"to": "tp=2,pp=2", "memory": "300MiB"},
    "flex": {"format": "flex", "max_shard_size": "200KB"},
    "model": {"format": "huggingface", "dtype": "float32", "max_shard_size": "100KB"},
    "average": {"format": "huggingface", "state": "ema"},
    "vocabulary": {
        "to": "sharding=2",
        "sharding_strategy": "stage1v1",
        "vocab_size": 192,
        "layout": {"comm_buffer_size_MB": 1},
        "drop": ["ema"],
        "allow_missing": ["*.bias"],
    },
    "statements": {"format": "huggingface", "aoa": PROGRAM},
}


def manifest_of(target: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((target / "paddle_reshard.json").read_text())
    hold(found, "manifest-2")
    return found


def with_files(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Options in which files that are stated with their text are files again."""
    made = {}
    for name, value in options.items():
        if isinstance(value, dict) and "sha256" in value:
            (folder / value["name"]).write_text(value["text"])
            value = folder / value["name"]
        made[name] = value
    return made


def in_words(options: dict[str, Any], folder: Path) -> Iterator[str]:
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, dict):
            (folder / "entries.json").write_text(json.dumps(value))
            value = folder / "entries.json"
        for each in value if isinstance(value, list) else [value]:
            yield from [flag] if each is True else [flag, str(each)]


@pytest.mark.parametrize("name", ASKED)
def test_call_and_command_can_be_made_of_it(name: str, tmp_path: Path) -> None:
    options = dict(ASKED[name])
    if "aoa" in options:
        (tmp_path / "program.txt").write_text(options["aoa"])
        options["aoa"] = tmp_path / "program.txt"
    paddle_reshard.convert(SOURCE, tmp_path / "made", **options)
    manifest = manifest_of(tmp_path / "made")
    request = manifest["request"]
    assert request["memory"] == options.get("memory", "1GiB")
    (of_target,) = request.pop("targets")
    assert {*request, *of_target} == {*options, "memory"}

    stated = with_files(of_target | request, tmp_path)
    source, elsewhere = manifest["source"]["location"], tmp_path / "elsewhere"
    planned = paddle_reshard.plan(source, elsewhere, **stated)
    assert planned.plan.plan_id == manifest["plan_id"]
    words = ["plan", source, str(elsewhere), *in_words(stated, tmp_path), "--json"]
    shown = run_here(*words)
    assert json.loads(shown.stdout)["plan_id"] == manifest["plan_id"]


def test_each_of_several_targets_states_all_and_which_one_it_is(tmp_path: Path) -> None:
    asked = {tmp_path / "one": {"to": "tp=2"}, tmp_path / "two": {"format": "flex"}}
    paddle_reshard.convert(SOURCE, asked)  # type: ignore[arg-type]
    one, two = (manifest_of(target) for target in asked)
    assert one["request"] == two["request"] == {"targets": [*asked.values()], "memory": "1GiB"}
    assert (one["target_number"], two["target_number"]) == (0, 1)


def test_an_average_states_its_sources_and_weights(tmp_path: Path) -> None:
    paddle_reshard.average([SOURCE, SOURCE], tmp_path / "made", weights=[0.25, 0.75], to="tp=1")
    stated = manifest_of(tmp_path / "made")["request"]
    assert stated == {
        "sources": [str(SOURCE)] * 2,
        "weights": [0.25, 0.75],
        "targets": [{"to": "tp=1"}],
        "memory": "1GiB",
    }


def test_it_holds_no_secrets(tmp_path: Path) -> None:
    asked = parse_request(
        {
            "format": "huggingface",
            "fill": "https://user:pa55word@host/missing.safetensors?X-Amz-Signature=5ecret",
            "like": "s3://key:5ecret@bucket/model",
            "storage_options": {"key": "k3y", "secret": "5ecret", "source": {"https": {"secret": "5ecret"}}},
            "allow_links": True,
        }
    )
    stated = record_of(asked)
    assert stated == {
        "targets": [{"format": "huggingface"}],
        "fill": "https://host/missing.safetensors",
        "like": "s3://bucket/model",
        "allow_links": True,
        "memory": "1GiB",
    }


def test_the_schema_knows_every_option_that_is_stated() -> None:
    shared = schema("manifest-2")["$defs"]["request"]["properties"]
    of_target = shared["targets"]["items"]["properties"]
    assert {*of_target} == {*TARGET_OPTIONS}
    assert {*shared} - {"targets", "sources", "decay", "weights", "uniform"} == {*OF_ALL_TARGETS} - {
        *NOT_STATED
    }


def test_a_manifest_that_does_not_state_its_request_is_read(tmp_path: Path) -> None:
    target = tmp_path / "made"
    paddle_reshard.convert(SOURCE, target, to="tp=1")
    values = manifest_of(target)
    for name in ("request", "target_number", "limits", "digest"):
        del values[name]
    (target / "paddle_reshard.json").write_bytes(format_manifest(values))
    assert paddle_reshard.check(target)
