"""A plan on the command line: saved, looked at, and held against the conversion that is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from paddle_reshard.pipeline.cli.main import cli
from tests.conftest import case_directory


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def source() -> Path:
    return case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"


def test_what_was_planned_is_run_and_nothing_else_is(source: Path, tmp_path: Path) -> None:
    saved, target = tmp_path / "saved.plan", tmp_path / "target"
    planned = json.loads(run("plan", source, target, "--to", "tp=2", "--save", saved, "--json").stdout)

    other = run("convert", source, target, "--to", "tp=1", "--plan", saved)
    assert other.exit_code == 1
    assert f"holds the plan {planned['plan_id']}" in other.stderr
    assert not target.exists()

    done = run("convert", source, target, "--to", "tp=2", "--plan", saved, "--json")
    assert json.loads(done.stdout)["plan"]["plan_id"] == planned["plan_id"]
    assert target.exists()
