"""Output and targets do not depend on the order in which a process keeps sets of strings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import case_directory
from tests.rule_tables import whole

RUN = "from paddle_reshard.pipeline.cli.main import main; main()"
SEEDS = ("0", "1", "2", "3")


def _run(seed: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("case", "family"), [("ernie45_mtp_single_tohf", "ernie4_5_moe"), ("dsv3_mtp_single_tohf", "deepseek_v3")]
)
def test_the_same_unknown_tensor_is_named(case: str, family: str, tmp_path: Path) -> None:
    """By a table that lacks the rows of multi-token prediction."""
    table = whole(f"{family}.paddleformers")
    for entry, name in (("items", "name"), ("rules", "item")):
        table[entry] = [row for row in table[entry] if not row[name].startswith("mtp")]
    (tmp_path / "rules.json").write_text(json.dumps(table))
    checkpoint = case_directory(f"states/{case}") / "checkpoint-3"
    with ThreadPoolExecutor(2) as pool:
        ends = list(
            pool.map(
                lambda seed: _run(seed, "inspect", checkpoint, "--rules", tmp_path / "rules.json"), SEEDS
            )
        )
    assert [end.returncode for end in ends] == [1] * len(SEEDS)
    # a slow machine tells first how far indexing is
    refusals = {end.stderr.splitlines()[-1] for end in ends}
    assert "no row of the paddleformers rule table" in ends[0].stderr
    assert len(refusals) == 1


@pytest.mark.parametrize(
    "options",
    [
        ("--to", "pp=2,sharding=2"),
        ("--format", "huggingface"),
        ("--format", "flex", "--max-shard-size", "200KB"),
    ],
    ids=lambda options: options[1],
)
def test_the_same_bytes_are_written(options: tuple[str, ...], tmp_path: Path) -> None:
    source = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
    drop = () if options[1] == "pp=2,sharding=2" else ("--drop", "ema")
    made = []
    for seed in SEEDS[:2]:
        end = _run(seed, "convert", source, tmp_path / seed / "target", *options, *drop)
        assert end.returncode == 0, end.stderr
        made.append(_content(tmp_path / seed / "target"))
    assert len(made[0]) >= 3
    assert made[0] == made[1]
