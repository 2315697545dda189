"""What a user's editor, type checker and program learn of the public names."""

from __future__ import annotations

import functools
import inspect
import json
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core import errors
from tests.conftest import COMMITTED, REPO
from tests.sampling import exhaustive

SOURCE = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
ORCHESTRATED = {REPO / "examples" / name for name in ("airflow_dag.py", "prefect_flow.py")}
EXAMPLES = sorted(set((REPO / "examples").glob("*.py")) - ORCHESTRATED)
"""All but those whose libraries are not among those that the tests install."""
PUBLIC = {name: getattr(paddle_reshard, name) for name in paddle_reshard.__all__ if name != "__version__"}
ALIASES = {"Event", "Observer", "PathLike", "StorageOptions"}
OWN_VALUES = {
    "AsyncEma.progress",  # of an average, not the event of that name
    "AsyncEma.save",  # FlexRank: ema_callback makes it
    "HtmlReport.command",  # the command line makes it
    "ConversionPlan.limits",
    "ConversionPlan.portion",  # what --ranks makes
    "ConversionPlan.source",
    "ConversionPlan.store",
    "Fingerprints.tensors",
    "ModelTensor.rule",
    "Plan.literals",
    "Plan.mixtures",
    "Plan.ops",
    "Plan.tensors",
    "Plan.tied",
    "PlannedTarget.files",
    "PlannedTarget.spec",
    "PlannedTarget.wanted",
}
"""Attributes that hold the converter's own values: they are there to look at, and may change in every version."""


def members(public: type) -> Iterator[tuple[str, Callable[..., object]]]:
    """Public methods and properties of a class that are written in it, and how it is made."""
    for name, member in vars(public).items():
        if name.startswith("_") and name not in ("__call__", "__enter__", "__init__"):
            continue
        for kind, inner in (
            (property, "fget"),
            (functools.cached_property, "func"),
            (classmethod, "__func__"),
        ):
            member = getattr(member, inner) if isinstance(member, kind) else member
        if inspect.isfunction(member):
            yield name, member


def hints(public: object) -> dict[str, dict[str, object]]:
    """Member → its types; those of fields, or of a function, under the empty name."""
    assert callable(public)
    found = {"": typing.get_type_hints(public)}
    if inspect.isclass(public):
        found |= {name: typing.get_type_hints(member) for name, member in members(public)}
    return found


def classes(hint: object) -> Iterator[type]:
    """Every class of this package in a type."""
    if inspect.isclass(hint) and hint.__module__.startswith("paddle_reshard."):
        yield hint
    for inner in typing.get_args(hint):
        for part in inner if isinstance(inner, list) else (inner,):
            yield from classes(part)


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - ALIASES))
def test_types_are_known_at_run_time_and_every_class_in_them_is_public(name: str) -> None:
    for member, types in hints(PUBLIC[name]).items():
        for argument, hint in types.items():
            if {f"{name}.{member}", f"{name}.{argument}"} & OWN_VALUES:
                continue
            for found in classes(hint):
                assert PUBLIC.get(found.__name__) is found, f"{name}.{member or argument} is a {found}"


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_aliases_are_made_of_public_classes(name: str) -> None:
    for found in classes(PUBLIC[name]):
        assert PUBLIC.get(found.__name__) is found


def test_every_error_is_public_and_in_the_drawn_tree() -> None:
    drawn: dict[str, str] = {}
    above = [errors.ReshardError.__name__]
    for prefix, name in re.findall(r"^ {4}([│├└─ ]+)(\w+Error)\b", errors.__doc__ or "", re.MULTILINE):
        depth = len(prefix) // 4
        above[depth:] = [name]
        drawn[name] = above[depth - 1]
    defined = {
        name: kind.__bases__[0].__name__
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.ReshardError)
    }
    assert len(defined) > 20
    assert defined.keys() <= PUBLIC.keys()
    assert {**drawn, "ReshardError": "Exception"} == defined


def test_every_public_name_is_in_the_reference_and_no_other() -> None:
    text = (REPO / "docs" / "api.md").read_text("utf-8")
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    generated = (REPO / "docs" / "reference" / "python.md").read_text("utf-8")
    named = {
        *re.findall(r"`(\w+)", "\n".join(rows)),
        *re.findall(r"^\.\. auto\w+:: paddle_reshard\.(\w+)", generated, re.MULTILINE),
    }
    assert named == PUBLIC.keys() - {"Event", "Observer"}


def test_every_attribute_in_the_reference_is_there() -> None:
    text = (REPO / "docs" / "api.md").read_text("utf-8")
    named = {(name, attribute) for name, attribute in re.findall(r"`(\w+)\.(\w+)", text) if name in PUBLIC}
    assert len(named) >= 5
    for name, attribute in named:
        public = PUBLIC[name]
        assert hasattr(public, attribute) or attribute in typing.get_type_hints(public)


@pytest.mark.parametrize("name", sorted(PUBLIC.keys() - ALIASES))
def test_every_public_name_and_member_says_what_it_is(name: str) -> None:
    public = PUBLIC[name]
    assert public.__doc__
    assert not public.__doc__.startswith(f"{name}("), "what a dataclass writes for itself is no documentation"
    for member, function in members(public) if inspect.isclass(public) else ():
        assert member.startswith("__") or inspect.getdoc(function), f"{name}.{member}"


WRONG = """\
import paddle_reshard as pr

pr.convert("a", "b", to=3.5)  # wrong
pr.convert("a", "b", memori="1GiB")  # wrong
pr.convert("a", "b", workers="2")  # wrong
pr.convert("a", {"b": {"format": 7}})  # wrong
pr.convert("a", "b", format="hugging-face")  # wrong
pr.convert("a", "b", to={"tp": 2}, replicas="every")  # wrong
pr.plan("a", cards=4).plan  # wrong
pr.plan("a", to={"tp": 2}).plan.plan_id
report = pr.convert("a", "b", to="tp=1")
size: str = report.moved.written_bytes  # wrong
print(report.nothing)  # wrong
print(pr.nothing)  # wrong
pr.inspect("a", observe=lambda event: event.nothing)  # wrong
equal: bool = pr.verify("a").differences[0].tensor  # wrong
"""


def mypy_finds(files: list[Path], folder: Path) -> set[tuple[Path, int]]:
    """File and line of every error that mypy sees in strict mode."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={folder}/mypy"]
    command += ["--python-executable", sys.executable, "--output=json", *map(str, files)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {
        ((folder / error["file"]).resolve(), error["line"]) for error in found if error["severity"] == "error"
    }


def pyright_finds(files: list[Path], folder: Path) -> set[tuple[Path, int]]:
    """File and line of every error that pyright sees in strict mode; basedpyright brings its Node along."""
    config = folder / "pyrightconfig.json"
    config.write_text(json.dumps({"typeCheckingMode": "strict", "include": [str(file) for file in files]}))
    command = [sys.executable, "-m", "basedpyright", "-p", str(config), "--pythonpath", sys.executable]
    done = subprocess.run([*command, "--outputjson"], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode in (0, 1), done.stderr
    told = json.loads(done.stdout)
    assert told["summary"]["filesAnalyzed"] == len(files)
    found = [error for error in told["generalDiagnostics"] if error["severity"] == "error"]
    return {(Path(error["file"]).resolve(), error["range"]["start"]["line"] + 1) for error in found}


@pytest.mark.parametrize("finds", [exhaustive(mypy_finds), pyright_finds])
@pytest.mark.full
def test_type_checkers_accept_the_examples_in_strict_mode_and_nothing_wrong(
    finds: Callable[[list[Path], Path], set[tuple[Path, int]]], tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    assert len(EXAMPLES) > 3
    marked = {(wrong.resolve(), n) for n, line in enumerate(WRONG.splitlines(), 1) if "# wrong" in line}
    assert finds([*EXAMPLES, wrong], tmp_path) == marked


def run_example(name: str, *arguments: object) -> str:
    """What an example prints."""
    command = [sys.executable, REPO / "examples" / name, *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_of_a_conversion_does_it(tmp_path: Path) -> None:
    said = run_example("convert_and_verify.py", SOURCE, tmp_path / "out", "tp=1")
    assert re.fullmatch(r"[\d,]+ bytes written in [\d.]+ s by plan [0-9a-f]{16}\n", said)
    assert paddle_reshard.verify(SOURCE, tmp_path / "out")


def test_the_example_of_several_targets_makes_them(tmp_path: Path) -> None:
    said = run_example("several_targets.py", SOURCE, tmp_path / "out")
    assert "ema_master_weight" in said
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"one-card", "model", "averaged"}
    assert (tmp_path / "out" / "averaged" / "model.safetensors").stat().st_size > 0


def test_the_example_of_an_observer_shows_every_step(tmp_path: Path) -> None:
    said = run_example("progress.py", SOURCE, tmp_path / "out", "pp=4,sharding=2").splitlines()
    steps = ("plan", "move", "verify", "publish")
    assert [line.removesuffix(" …") for line in said if line.endswith(" …")] == list(steps)
    assert "  100 %" in said
