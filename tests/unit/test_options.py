"""Every option is declared once: what Python takes, what the command line offers and what a session keeps agree."""

from __future__ import annotations

import inspect
import pydoc
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from click.testing import CliRunner

import paddle_reshard
from paddle_reshard.pipeline.cli.main import cli
from paddle_reshard.pipeline.cli.options import SECTIONS, given
from paddle_reshard.pipeline.core.errors import TargetError, UsageError
from paddle_reshard.pipeline.core.tensors import DROPPABLE
from paddle_reshard.pipeline.formats.registry import FORMATS, FormatName
from paddle_reshard.pipeline.request.options import (
    CONVERSION_OPTIONS,
    TARGET_OPTIONS,
    ConvertOptions,
    Decides,
    Kind,
    declarations,
    flag_of,
)
from paddle_reshard.pipeline.request.parse import ConversionRequest, check_options
from tests.conftest import COMMITTED
from tests.jobs.command import invoke

SOURCE = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"

CONVERT = cli.commands["convert"]
RUN_OPTIONS = sorted(declarations().keys() - {*CONVERSION_OPTIONS})
OF_COMMANDS = {"source", "target", "targets", "cards", "report_path", "as_json", "quiet", "events"}
"""Parameters of ``convert`` that are no options of a conversion."""
TYPES: dict[Kind, tuple[Any, ...]] = {Kind.COUNT: (int | None,), Kind.FLAG: (bool,)}


def test_the_command_line_offers_every_option_under_its_name_in_python() -> None:
    offered = {parameter.name for parameter in CONVERT.params}
    assert offered - OF_COMMANDS == {*CONVERSION_OPTIONS, *RUN_OPTIONS}
    for parameter in CONVERT.params:
        if parameter.name in declarations():
            assert flag_of(parameter.name) in parameter.opts


def test_what_is_left_out_means_the_same_on_the_command_line_and_in_python() -> None:
    for name, default in ((name, getattr(ConversionRequest(), name)) for name in RUN_OPTIONS):
        option = declarations()[name]
        assert default == {Kind.FLAG: False, Kind.LIST: ()}.get(option.kind, option.default), name
    context = CONVERT.make_context("convert", ["a", "b"])
    assert given(context) == {}


def test_short_help_is_the_usual_options_and_examples_that_are_read_as_they_stand() -> None:
    shown = invoke("convert", "-h").stdout
    listed = re.findall(r"^  (--?[\w-]+)", shown, re.MULTILINE)
    assert len(listed) == 14 + 2
    assert listed[-2:] == ["-h", "--help"]
    examples = [line.split() for line in shown.splitlines() if line.startswith("  paddle-reshard ")]
    assert len(examples) > 3
    for _, name, *arguments in examples:
        context = cli.commands[name].make_context(name, arguments)
        assert given(context) or context.params["cards"]
    assert len(shown.splitlines()) < len(invoke("convert", "--help").stdout.splitlines()) / 2


@pytest.mark.parametrize("name", ["convert", "ema", "explain", "plan"])
def test_help_in_sections_has_every_option_once_and_the_usual_ones_first(name: str) -> None:
    shown = invoke(name, "--help").stdout
    listed = re.findall(r"^  (--?[\w-]+)", shown, re.MULTILINE)
    options = [option for option in cli.commands[name].params if option.param_type_name == "option"]
    assert sorted(listed) == sorted(["-h", "--help", *(option.opts[0] for option in options)])
    usual, *others = shown.split("\n\n")[-4:]
    assert usual.startswith("Usual options:\n")
    assert all(f"  {flag} " in usual for flag in ("--to", "--format", "--memory", "--json"))
    assert [other.splitlines()[0] for other in others] == [
        f"{title}:" for title in dict.fromkeys(SECTIONS.values())
    ]


TAKE_OPTIONS = {
    name: function
    for name in paddle_reshard.__all__
    if hasattr(function := getattr(paddle_reshard, name), "__signature__")
}


def test_help_lists_every_option_of_a_function_with_its_type_and_default() -> None:
    functions = {
        "average", "check", "ema", "ls", "convert", "diff", "fingerprint", "inspect", "launch", "load_into",
        "plan", "resume", "verify",
    }  # fmt: skip
    assert TAKE_OPTIONS.keys() == functions
    told = pydoc.render_doc(paddle_reshard.verify, renderer=pydoc.plaintext)
    assert "memory: str | int = '1GiB'" in told
    assert "replicas: Literal['compare', 'first'] = 'compare'" in told
    for name, function in TAKE_OPTIONS.items():
        (options,) = get_args(get_type_hints(function)["options"])
        listed = inspect.signature(function).parameters
        assert "options" not in listed
        assert {*get_type_hints(options)} <= {*listed}, name
        for option in get_type_hints(options):
            assert option in declarations(), f"{name} has an option {option} that no conversion has"


@pytest.mark.parametrize("name", TAKE_OPTIONS)
def test_help_says_what_every_option_is(name: str) -> None:
    told = pydoc.render_doc(TAKE_OPTIONS[name], renderer=pydoc.plaintext)
    (options,) = get_args(get_type_hints(TAKE_OPTIONS[name])["options"])
    _, _, section = told.partition("Other Parameters")
    for option in options.__annotations__:
        assert re.search(rf"^ +{option}\n +\S.*\w", section, re.MULTILINE), option


def test_help_of_the_command_line_and_of_python_are_one_text() -> None:
    """Python names other options as it does, ``allow_links`` for ``--allow-links``."""
    told = pydoc.render_doc(paddle_reshard.convert, renderer=pydoc.plaintext)
    for parameter in CONVERT.params:
        if parameter.name in declarations():
            words = getattr(parameter, "help", "").split(" ")
            spoken = [word for word in words if "--" not in word and word != "*"]
            entry = told.partition(f"    {parameter.name}\n")[2].partition("\n")[0].split(" ")
            assert [word for word in entry if word in spoken] == spoken, parameter.name
    assert "as in convert" in invoke("verify", "--help").stdout
    assert "as in convert" in pydoc.render_doc(paddle_reshard.verify, renderer=pydoc.plaintext)


def test_types_list_the_choices() -> None:
    types = get_type_hints(ConvertOptions)
    for name, option in declarations().items():
        kinds = [types[name], *get_args(types[name])]
        (listed,) = [get_args(kind) for kind in kinds if get_origin(kind) is Literal] or [()]
        assert name == "drop" or set(listed) == set(option.choices), name
    assert get_args(get_args(types["drop"])[0]) == tuple(DROPPABLE)
    assert set(get_args(FormatName)) == set(FORMATS)


@pytest.mark.parametrize("name", TAKE_OPTIONS)
def test_a_misspelled_option_is_an_error_as_python_makes_it(name: str) -> None:
    places: list[Any] = ["a"] if name in ("check", "fingerprint", "inspect", "launch", "ls") else [{}, "b"]
    with pytest.raises(TypeError, match=r"unknown option 'allow_lings'; did you mean .*allow_links"):
        TAKE_OPTIONS[name](*places, allow_lings=True)
    with pytest.raises(TypeError, match="unknown option 'options'"):
        TAKE_OPTIONS[name](*places, options={})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paddle_reshard.ema("a", "b"), "^sources: a list of paths is expected, not str$"),
        (lambda: paddle_reshard.ls("a", targets=Path("b")), "^targets: a list of paths is expected, not "),
        (lambda: paddle_reshard.ema(["a", "b"], "c", weights="11"), "^weights: a list of numbers is expected"),
        (lambda: paddle_reshard.ema(["a", "b"], "c", decay="0.9"), "^decay: a number is expected, not str$"),
        (lambda: paddle_reshard.convert(["a"], "b"), "^source: a path is expected, not list of str$"),
        (lambda: paddle_reshard.plan("a", drop=[1]), "^drop: a list of texts is expected, not list of int$"),
        (lambda: paddle_reshard.plan("a", ranks=3), "^ranks: a text or a list of whole numbers is expected"),
        (lambda: paddle_reshard.plan("a", vocab_size=300.0), "^vocab_size: a whole number is expected, not float$"),
        (lambda: paddle_reshard.plan("a", vocab_size=True), "^vocab_size: a whole number is expected, not bool$"),
        (lambda: paddle_reshard.plan("a", to="tp=1", vocab_size=0), "^--vocab-size 0: at least 1 is expected$"),
        (lambda: paddle_reshard.plan("a", paddle_version=3.4), "^paddle_version: a text is expected, not float$"),
        (lambda: paddle_reshard.convert("a", "b", overwrite="no"), "^overwrite: True or False is expected"),
        (lambda: paddle_reshard.convert("a", "b", layout=1), "^layout: a path or a mapping is expected"),
        (lambda: paddle_reshard.plan("a", {"b": {"max_shard_size": 2.5}}), "^max_shard_size: a text or a whole number"),
        (lambda: paddle_reshard.plan("a", {"b": "tp=1"}), "^target: the options of a location are a mapping"),
        (lambda: paddle_reshard.verify("a", "b", states=[1]), "^states: a list of texts is expected"),
        (lambda: paddle_reshard.verify("a", workers="2"), "^workers: a whole number is expected, not str$"),
        (lambda: paddle_reshard.inspect("a", storage_options="s3cret"), "a mapping is expected, not str$"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_before_anything_is_read(
    call: Callable[[], object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        call()


def test_the_options_of_one_of_several_targets_are_refused_by_name_too() -> None:
    with pytest.raises(TypeError, match="unknown option 'max_shard_sise'; did you mean max_shard_size"):
        paddle_reshard.plan("a", {"b": {"format": "flex", "max_shard_sise": 2}})  # type: ignore[dict-item]


def test_what_stands_for_the_same_value_is_taken(tmp_path: Path) -> None:
    """A single text for a list of it, any collection for a list, NumPy's numbers, bytes as a number."""
    plans = [
        paddle_reshard.plan(SOURCE, to="tp=1", drop=drop, memory=memory, vocab_size=rows)
        for drop, memory, rows in (
            (["ema"], "1GiB", 256),
            ("ema", 1 << 30, np.int64(256)),
            ({"ema"}, None, 256),
        )
    ]
    assert len({plan.plan.plan_id for plan in plans}) == 1
    by_ranks = [
        paddle_reshard.plan(SOURCE, to="tp=2", ranks=r) for r in ("1", [1], range(1, 2), np.array([1]))
    ]
    assert len({plan.plan.plan_id for plan in by_ranks}) == 1
    with pytest.raises(TargetError):  # which has been opened
        paddle_reshard.clean("zip://x", storage_options={"zip": {}})


def test_kinds_agree_with_the_types_that_checkers_see() -> None:
    types = get_type_hints(ConvertOptions)
    for name, option in declarations().items():
        assert types[name] in TYPES.get(option.kind, (types[name],)), name
        assert (option.kind is Kind.FLAG) == (types[name] is bool), name


def test_no_secret_is_kept_or_decides_an_id() -> None:
    for name, option in declarations().items():
        if option.decides is Decides.ACCESS:
            assert not option.in_session, name
            assert not option.changes_bytes, name
        assert not (option.kind is Kind.OBJECT and option.decides is not Decides.ACCESS), name


def test_an_option_of_a_target_is_an_entry_of_some_format_and_refused_for_the_others() -> None:
    for name in TARGET_OPTIONS:
        if name in ("format", "to"):
            continue
        with pytest.raises(UsageError, match=f"^{flag_of(name)} does not apply to --format"):
            check_options("unified" if name != "max_shard_size" else "hybrid", {name: "x"})
    done = invoke("convert", "a", "b", "--format", "unified", "--layout", '{"segmentation": "uniform"}')
    assert done.exit_code == 2
    assert "--layout (segmentation) does not apply to --format unified" in done.stderr


def test_a_variable_counts_as_if_its_option_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_RESHARD_MEMORY", "4GiB")
    monkeypatch.setenv("PADDLE_RESHARD_STORAGE_OPTIONS", '{"profile": "lab"}')
    found = given(CONVERT.make_context("convert", ["a", "b", "--to", "tp=1"]))
    assert found == {"to": "tp=1", "memory": "4GiB", "storage_options": {"profile": "lab"}}
    assert given(CONVERT.make_context("convert", ["a", "b", "--memory", "2GiB"]))["memory"] == "2GiB"
    monkeypatch.setenv("PADDLE_RESHARD_STORAGE_OPTIONS", "hunter2")
    wrong = invoke("convert", "a", "b", "--to", "tp=1")
    assert (wrong.exit_code, "hunter2" in wrong.output) == (2, False)


def completed(*words: str) -> list[str]:
    """What the shell is told to offer for the last of the words; ``file,…``: paths, by its own means."""
    asked = {"COMP_WORDS": shlex.join(["paddle-reshard", *words]), "COMP_CWORD": str(len(words))}
    environment = {"_PADDLE_RESHARD_COMPLETE": "bash_complete", **asked}
    done = CliRunner().invoke(cli, env=environment, prog_name="paddle-reshard")
    assert done.exit_code == 0, done.stderr
    return done.stdout.splitlines()


def test_shells_complete_paths_options_and_values() -> None:
    for name in ("convert", "plan", "inspect", "ls", "clean", "verify", "submit", "watch"):
        assert completed(name, "check") == ["file,check"], name
    assert completed("convert", "a", "b", "--like", "check") == ["file,check"]
    assert completed("convert", "a", "b", "--format", "hug") == ["plain,huggingface"]
    assert completed("submit", "a", "b", "--fo") == ["plain,--follow", "plain,--format"]
    assert "plain,--target" not in completed("submit", "a", "b", "--target")
