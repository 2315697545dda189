"""Every refusal names a way that its reader can go: options of the command, a rule table only where one lacks.

The walk is over damaged checkpoints and the strings of the program.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import paddle_reshard
from paddle_reshard.pipeline.cli.main import cli
from tests.conftest import REPO
from tests.golden.test_folders_as_found import Tensors, copy_of, saved, tensors_of
from tests.hostile.damage import copied
from tests.hostile.refusals import DAMAGES

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*(?![\w-])")
OF_THE_TRAINER = {"--bf16", "--fp16", "--devices", "--nnodes", "--rank"}
"""Those of the trainer and its launcher that look like ours; all others have an underscore in their names."""
OF_ALL = {"--help", "--version"}
PARTS = {"--vocab-"}
"""Beginnings of options that a message completes."""
TABLE_LACKS = (
    r"no rule table knows it",
    r"rule table knows it in the formats .* only",
    r"no row of the \w+ rule table '\w+' (fits|has this key)",
    r"muon_exclude_patterns",
    r"does not give its form",
    r"its rule has no shape",
)
"""What is said where a rule table really is what is missing."""


def options(command: str) -> set[str]:
    return {
        flag
        for parameter in cli.commands[command].params
        for flag in (*parameter.opts, *parameter.secondary_opts)
    }


def texts(tree: ast.AST) -> Iterator[str]:
    """The strings of a module that are no docstrings; what is filled in is left out."""
    nodes = list(ast.walk(tree))
    apart = {part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    apart |= {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in apart:
            yield node.value


def test_every_option_that_the_program_names_exists() -> None:
    known = set().union(*map(options, cli.commands)) | OF_THE_TRAINER | OF_ALL | PARTS
    for folder in ("pipeline", "storage", "tasks", "clusters"):
        for path in sorted((REPO / folder).rglob("*.py")):
            source = path.read_text()
            for text in texts(ast.parse(source)) if FLAG.search(source) else ():
                assert {*FLAG.findall(text)} <= known, (path, text)


@pytest.mark.parametrize("script", ["Dockerfile", "Makefile", "tests/pythons.sh"])
def test_scripts_give_commands_options_that_they_have(script: str) -> None:
    lines = re.findall(r"paddle-reshard ([a-z]+) (.*)", (REPO / script).read_text().replace("\\\n", " "))
    assert lines
    for command, line in lines:
        known = options(command) | (options("convert") if command == "watch" else OF_ALL)
        assert {*FLAG.findall(line)} <= known, (command, line)


def of(case: str, damage: Callable[[Path], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        source = copied(case, folder)
        damage(source)
        return source

    return make


def config(folder: Path, **entries: object) -> None:
    read = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in {**read, **entries}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def of_hub(change: Callable[[Tensors], object], **entries: object) -> Callable[[Path], Path]:
    """A model of the hub whose tensors and config are others."""

    def make(folder: Path) -> Path:
        paddle_reshard.convert(copy_of("mp2pp2_sp", folder / "job"), folder / "model", format="huggingface")
        held = tensors_of(folder / "model")
        change(held)
        source = saved(folder / "changed", held, folder / "model")
        config(source, **entries)
        return source

    return make


def without(part: str) -> Callable[[Tensors], object]:
    return lambda held: [held.pop(key) for key in [*held] if part in key]


def also(**tensors: int) -> Callable[[Tensors], object]:
    return lambda held: held.update({key: ("F32", [2], bytes(8)) for key in tensors})


FOLDERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no model type": (of_hub(lambda held: None, model_type=None), "config.json: it has no model_type"),
    "another model's config": (of_hub(lambda held: [held.update({f"transformer.{k}": held.pop(k)})
        for k in [*held][1:]]), "it must be that of the model in the files"),
    "several libraries": (of_hub(lambda held: None, paddleformers_version=None), "--convention paddlenlp"),
    "a class of tensors": (of_hub(without("input_layernorm")), "--fill BASE"),
    "no head": (of_hub(without("lm_head")), "--allow-missing 'lm_head.weight'"),
    "a score": (of_hub(also(**{"score.weight": 1})), "architectures"),
    "a tensor of no row": (of_hub(also(**{"model.extra.weight": 1})), "--rules FILE"),
    "unannounced prediction": (of("states/dsv3_mtp_sh2_s1v2_meta_ema",
        lambda folder: config(folder, num_nextn_predict_layers=0)),
        "layer 3 is of multi-token prediction, of which config.json announces 0"),
    **{damage.name: (of(damage.case, damage.change), damage.facts[0]) for damage in DAMAGES
        if damage.name != "unknown model" and damage.request == {"to": "tp=1"}},
    "unknown model": (of("mp2_tied", lambda folder: config(folder, model_type="mystery")), "no rule table knows it"),
}  # fmt: skip
COMMANDS = (
    ("convert", "out", "--to", "tp=1"),
    ("inspect",),
    ("fingerprint",),
    ("ema", "again", "out", "--uniform", "--to", "tp=1"),
)


SHOWN = ("several libraries", "a class of tensors", "unannounced prediction")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHOWN else pytest.mark.full) for name in FOLDERS]
)
def test_a_refusal_names_what_its_reader_can_do(name: str, tmp_path: Path) -> None:
    make, fact = FOLDERS[name]
    source = make(tmp_path / "source")
    shutil.copytree(source, tmp_path / "again")
    said = []
    for command, *arguments in COMMANDS:
        given = [str(tmp_path / word) if word in ("again", "out") else word for word in arguments]
        done = CliRunner().invoke(cli, [command, str(source), *given])
        answer = done.stderr if done.exit_code else ""
        said.append(answer)
        assert "Traceback" not in answer and "[Defect]" not in answer
        named, own = {*FLAG.findall(answer)}, options(command)
        if elsewhere := named - own - OF_THE_TRAINER:
            assert elsewhere <= options("convert") and re.search("of convert(: convert with|\\))", answer)
        if "--rules" in named or "copy of the table" in answer:
            assert any(re.search(lacks, answer) for lacks in TABLE_LACKS), answer
    assert fact in said[0]
    shutil.rmtree(tmp_path / "source")


def test_what_a_command_lacks_is_done_by_converting_first(tmp_path: Path) -> None:
    make, _ = FOLDERS["several libraries"]
    hub = str(make(tmp_path / "source"))
    refused = CliRunner().invoke(cli, ["ema", hub, hub, str(tmp_path / "out"), "--uniform", "--to", "tp=1"])
    assert (
        "(--convention is an option of convert: convert with it first, and give the result)" in refused.stderr
    )
    first = str(tmp_path / "first")
    for command in (
        ["convert", hub, first, "--to", "tp=1", "--convention", "paddlenlp"],
        ["ema", first, first, str(tmp_path / "out"), "--uniform", "--format", "huggingface"],
    ):
        done = CliRunner().invoke(cli, command)
        assert done.exit_code == 0, done.stderr
    assert tensors_of(tmp_path / "out") == tensors_of(Path(hub))


def test_layers_of_prediction_that_nobody_announces_are_dropped_on_request(tmp_path: Path) -> None:
    source = copy_of("states/dsv3_mtp_sh2_s1v2_meta_ema", tmp_path / "announced")
    lost = {"allow_missing": ["*.e_score_correction_bias"]}
    exported = {**lost, "format": "huggingface", "drop": ["mtp"]}
    paddle_reshard.convert(source, tmp_path / "a", **exported)
    paddle_reshard.convert(source, tmp_path / "whole", format="huggingface", **lost)
    wanted = tensors_of(tmp_path / "a")
    config(source, num_nextn_predict_layers=0)
    paddle_reshard.convert(source, tmp_path / "b", **exported)
    assert tensors_of(tmp_path / "b") == wanted
    hub = tmp_path / "whole"
    (hub / "paddle_reshard.json").unlink()
    config(hub, num_nextn_predict_layers=0)
    with pytest.raises(paddle_reshard.ReshardError, match="--drop mtp"):
        paddle_reshard.plan(hub, to="tp=1", **lost)
    paddle_reshard.convert(hub, tmp_path / "job", to="tp=1", drop=["mtp"], **lost)
    paddle_reshard.convert(tmp_path / "job", tmp_path / "c", format="huggingface", **lost)
    assert tensors_of(tmp_path / "c") == wanted
    config(hub, num_hidden_layers=2)
    with pytest.raises(paddle_reshard.ReshardError, match="2 decoder layers; layer 2"):
        paddle_reshard.plan(hub, to="tp=1", drop=["mtp"], **lost)
