"""A manifest says what was asked: whoever reads it can make the call and the command, which give the same plan."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

import paddle_reshard
from paddle_reshard import UsageError
from paddle_reshard.pipeline.cli.main import cli
from paddle_reshard.pipeline.convert import resuming
from paddle_reshard.pipeline.convert.asked import NOT_STATED, stated_request
from paddle_reshard.pipeline.convert.manifest import format_manifest
from paddle_reshard.pipeline.convert.options import TARGET_OPTIONS
from paddle_reshard.pipeline.convert.resuming import OF_ALL_TARGETS
from tests.conftest import COMMITTED, REPO, case_directory

SOURCE = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
SCHEMA = json.loads((REPO / "docs" / "schemas" / "manifest-2.json").read_text())
KEY = "model.layers.3.self_attn.k_proj.weight"
PROGRAM = "model.norm.weight -> tail.norm.weight\n"
ASKED: dict[str, dict[str, Any]] = {
    "topology": {"to": "tp=2,pp=2", "memory": "300MiB"},
    "flex": {"format": "flex", "files": 2, "fingerprint": "known"},
    "model": {"format": "huggingface", "dtype": "float32", "max_shard_size": "100KB", "card": True},
    "average": {"format": "huggingface", "state": "ema"},
    "vocabulary": {
        "to": "sharding=2",
        "sharding_strategy": "stage1v1",
        "vocab_pad": 192,
        "layout": {"comm_buffer_size_MB": 1},
        "drop": ["ema"],
        "allow_missing": ["*.bias"],
    },
    "statements": {"format": "huggingface", "aoa": PROGRAM},
}


def manifest_of(target: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((target / "paddle_reshard.json").read_text())
    jsonschema.validate(found, SCHEMA)
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
    shown = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert json.loads(shown.stdout)["plan_id"] == manifest["plan_id"]


def test_each_of_several_targets_states_all_and_which_one_it_is(tmp_path: Path) -> None:
    asked = {tmp_path / "one": {"to": "tp=2"}, tmp_path / "two": {"format": "flex", "files": 1}}
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
    stated = stated_request(
        tmp_path,
        {
            "format": "huggingface",
            "fill": "https://user:pa55word@host/missing.safetensors?X-Amz-Signature=5ecret",
            "like": "s3://key:5ecret@bucket/model",
            "storage_options": {"key": "k3y", "secret": "5ecret"},
            "source_storage_options": {"secret": "5ecret"},
            "allow_scheme": ["https"],
            "allow_links": True,
        },
    )
    assert stated == {
        "targets": [{"format": "huggingface"}],
        "fill": "https://host/missing.safetensors",
        "like": "s3://bucket/model",
        "allow_links": True,
        "memory": "1GiB",
    }


def test_the_schema_knows_every_option_that_is_stated() -> None:
    shared = SCHEMA["$defs"]["request"]["properties"]
    of_target = shared["targets"]["items"]["properties"]
    assert {*of_target} == {*TARGET_OPTIONS}
    assert {*shared} - {"targets", "sources", "decay", "weights", "uniform"} == {*OF_ALL_TARGETS} - {
        *NOT_STATED
    }


# ------------------------------------------------------------------------------------------------ planned again


@pytest.mark.parametrize("name", ASKED)
def test_a_finished_target_is_explained_as_its_plan_was(name: str, tmp_path: Path) -> None:
    options = dict(ASKED[name])
    if "aoa" in options:
        (tmp_path / "program.txt").write_text(options["aoa"])
        options["aoa"] = tmp_path / "program.txt"
    planned = paddle_reshard.plan(SOURCE, tmp_path / "made", **options)
    file = next(
        file.path for file in planned.plan.target_files if "ptimizer" in file.path or "model" in file.path
    )
    explained = paddle_reshard.explain(planned, file)
    paddle_reshard.convert(SOURCE, tmp_path / "made", **options)
    if "aoa" in options:
        options["aoa"].unlink()
    again = paddle_reshard.plan_again(tmp_path / "made", SOURCE)
    found = paddle_reshard.explain(again, file)
    assert found.stretches == explained.stretches
    assert [tensor.key for tensor in found.tensors] == [tensor.key for tensor in explained.tensors]
    assert paddle_reshard.prove(again)


def explained(*words: object) -> Result:
    return CliRunner().invoke(cli, ["explain", *map(str, words)], catch_exceptions=False)


def test_of_several_targets_each_is_explained_with_its_own_files(tmp_path: Path) -> None:
    asked = {tmp_path / "one": {"to": "tp=2"}, tmp_path / "two": {"to": "tp=1"}}
    paddle_reshard.convert(SOURCE, asked)  # type: ignore[arg-type]
    straight = json.loads(explained(SOURCE, "--tensor", KEY, "--to", "tp=1", "--json").stdout)
    shown = json.loads(explained(tmp_path / "two", "--tensor", KEY, "--source", SOURCE, "--json").stdout)
    without = [{**stretch, "origins": None} for stretch in shown["stretches"]]
    assert without == [{**stretch, "origins": None} for stretch in straight["stretches"]]
    assert shown["target"] == straight["target"]
    refused = explained(tmp_path / "two", "optimizer.tp00.pdopt", "--source", SOURCE)
    assert "the target has no file optimizer.tp00.pdopt" in refused.stderr


def test_a_saved_plan_is_explained(tmp_path: Path) -> None:
    words = ["plan", SOURCE, "--to", "tp=2", "--vocab-pad", "192", "--save", tmp_path / "plan"]
    assert CliRunner().invoke(cli, [*map(str, words)]).exit_code == 0
    of_plan = explained(tmp_path / "plan", "optimizer.tp01.pdopt", "--source", SOURCE, "--json")
    straight = explained(SOURCE, "optimizer.tp01.pdopt", "--to", "tp=2", "--vocab-pad", "192", "--json")
    assert of_plan.stdout == straight.stdout


def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SOURCE, tmp_path / "source", copy_function=shutil.copyfile))


@pytest.mark.parametrize(
    ("change", "words", "sentence"),
    [
        (None, [], "give its location: --source "),
        (None, ["--source", "SOURCE", "--to", "tp=2"], "--to: "),
        (shutil.rmtree, ["--source", "SOURCE"], "no such folder"),
        (
            lambda source: (source / "optimizer.tp01_pp01_shard01.pdopt").touch(),
            ["--source", "SOURCE"],
            "optimizer.tp01_pp01_shard01.pdopt was 223117 bytes (modified ",
        ),
        (
            lambda source: (source / "ema.tp00_pp00_shard00.pdopt").unlink(),
            ["--source", "SOURCE"],
            "(modified ",
        ),
        (None, ["--source", "another"], "is not what "),
    ],
    ids=["no source", "options", "gone", "changed", "a file gone", "another source"],
)
def test_what_cannot_be_explained_is_refused_with_the_reason(
    change: Any, words: list[str], sentence: str, tmp_path: Path
) -> None:
    source, target = copied(tmp_path), tmp_path / "made"
    paddle_reshard.convert(source, target, to="tp=1")
    if change is not None:
        change(source)
    places = {"SOURCE": source, "another": case_directory("dense/single") / "checkpoint-3"}
    refused = explained(target, "--tensor", KEY, *(places.get(word, word) for word in words))
    assert refused.exit_code in (1, 2)
    assert sentence in refused.stderr
    assert str(tmp_path) in refused.stderr


def test_consent_is_given_again_and_a_large_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "LARGEST_KEPT_BYTES", 10)
    source, program = copied(tmp_path), tmp_path / "program.txt"
    program.write_text(PROGRAM)
    (tmp_path / "elsewhere.json").symlink_to(source / "config.json")
    (source / "tokenizer.json").symlink_to(tmp_path / "elsewhere.json")
    model = tmp_path / "made"
    paddle_reshard.convert(source, model, format="huggingface", aoa=program, allow_links=True)
    assert "text" not in manifest_of(model)["request"]["aoa"]
    for given, sentence in (
        ({"aoa": program}, "had --allow-links; recorded consent is not enough, give it again"),
        ({"allow_links": True}, "--aoa program.txt is too large to be stated with its text"),
        ({"aoa": SOURCE / "config.json", "allow_links": True}, "not the file of which"),
    ):
        with pytest.raises(UsageError, match=sentence):
            paddle_reshard.plan_again(model, source, **given)  # type: ignore[arg-type]
    assert paddle_reshard.plan_again(model, source, aoa=program, allow_links=True)


def test_a_manifest_of_an_earlier_version_is_read_but_not_planned_again(tmp_path: Path) -> None:
    target = tmp_path / "made"
    paddle_reshard.convert(SOURCE, target, to="tp=1")
    values = manifest_of(target)
    for name in ("request", "target_number", "limits", "digest"):
        del values[name]
    (target / "paddle_reshard.json").write_bytes(format_manifest(values))
    assert paddle_reshard.check(target)
    with pytest.raises(UsageError, match="does not say what was asked; it was written by version"):
        paddle_reshard.plan_again(target, SOURCE)
