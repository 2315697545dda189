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


def test_a_plan_says_how_long_it_would_take(source: Path) -> None:
    asked = ("plan", source, "--to", "tp=2", "--workers", "1,4")
    planned = json.loads(run(*asked, "--json").stdout)
    found = planned["simulations"]
    assert [one["workers"] for one in found] == [1, 4]
    assert found[0]["most_read_bytes"] == planned["read_bytes"]
    assert found[0]["seconds"] >= found[1]["seconds"] > 0
    assert [line.split("\t")[0] for line in run(*asked).stdout.splitlines()[-3:]] == ["workers", "1", "4"]

    slow = json.loads(run(*asked, "--rates", "total-read=1MB,latency=0", "--json").stdout)["simulations"]
    for one in slow:  # the source's store, shared by all, takes this long to give what is read
        assert one["seconds"] >= planned["read_bytes"] / 1e6


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--workers", "many"], "'many' is not a list of whole numbers"),
        (["--workers", "8,0"], "0 workers cannot run a plan"),
        (["--workers", "8", "--rates", "read=fast"], "'fast' is not a size"),
        (["--workers", "8", "--rates", "read=0"], "read bytes per second cannot be 0"),
        (["--workers", "8", "--rates", "latency=long"], "'long' is not a number of seconds"),
        (
            ["--workers", "8", "--rates", "disk=1GB"],
            "'disk=1GB' is not a rate; write NAME=RATE with read, write",
        ),
        (["--rates", "read=1GB"], "--rates is for --workers"),
        (["--workers", "8", "--cards", "8"], "--workers are for one of them"),
    ],
)
def test_an_estimate_refuses_in_one_sentence(source: Path, arguments: list[str], sentence: str) -> None:
    refused = run("plan", source, *arguments)
    assert refused.exit_code == 2
    assert sentence in refused.stderr


def test_a_file_that_is_no_plan_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "plan").write_text("{}")
    refused = run("convert", source, tmp_path / "target", "--to", "tp=2", "--plan", tmp_path / "plan")
    assert refused.exit_code == 1
    assert "not a paddle-reshard plan" in refused.stderr
