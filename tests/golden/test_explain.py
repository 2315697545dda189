"""What ``explain`` says of targets is so: plain Python finds the truth's values at the bytes that it names.

The truth was taken from the memory of the trainer. Nothing here parses a checkpoint: bytes are sliced out of files.
"""

from __future__ import annotations

import subprocess
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from tests import oracle
from tests.conftest import case_directory
from tests.jobs.command import run_here
from tests.published import checked, schema

HYBRID = "mp2pp2sh2_s1v2_meta_ema"
KEY = "model.layers.3.self_attn.k_proj.weight"
SUFFIXES = {"param": "", "master_weight": ".w_0", "ema_master_weight": ".ema_w_0", "ema_param": ".ema"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one card": (HYBRID, {"to": "tp=1"}),
    "other cuts": (HYBRID, {"to": "tp=2,pp=2,sharding=2", "sharding_strategy": "stage1v1"}),
    "padded": (HYBRID, {"to": "sharding=2", "vocab_size": 192}),
    "flex": (HYBRID, {"format": "flex", "max_shard_size": "200KB"}),
    "unified": (HYBRID, {"format": "unified", "drop": ["ema"]}),
    "model": (HYBRID, {"format": "huggingface"}),
    "average": (HYBRID, {"format": "huggingface", "state": "ema"}),
    "sharding v1": ("dense/mp2sh2_s1v1_meta", {"to": "tp=1"}),
    "from flex": ("dense/fc_sh2_s1v2", {"format": "flex"}),
    "from unified": ("dense/uc_single", {"format": "huggingface"}),
    "experts": ("moe/ep2_sh2_s1v2_meta_ema", {"to": "tp=1"}),
    "experts to a model": ("moe/ep2_pp2sh2_s1v2_meta", {"format": "huggingface"}),
}


def rounded(values: np.ndarray) -> np.ndarray:
    """Float32 as the nearest bfloat16, ties to even; these values are finite."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def truth_of(truth: oracle.Tensors, key: str, state: str) -> np.ndarray:
    suffix = SUFFIXES.get(state, f".{state}_0")
    return truth[key + suffix]


def origins_of(plan: paddle_reshard.ConversionPlan) -> list[paddle_reshard.Origin]:
    """The boxes of all tensors of a plan."""
    keys = {tensor.key for tensor in plan.plan.tensors[: len(plan.plan.tensors) - plan.plan.compared_only]}
    return [origin for key in sorted(keys) for origin in paddle_reshard.explain(plan, key).origins]


@pytest.mark.parametrize("name", CASES)
def test_the_values_lie_where_it_says(name: str, tmp_path: Path) -> None:
    case, options = CASES[name]
    folder = case_directory(case)
    source, target = folder / "checkpoint-3", tmp_path / "target"
    truth = oracle.read_truth(folder / "truth.safetensors")
    paddle_reshard.convert(source, target, **options)
    plan = paddle_reshard.plan(source, **options)
    random = np.random.default_rng(1)
    files = (p for p in source.rglob("*") if p.is_file())
    stored_files = {p.relative_to(source).as_posix(): p.read_bytes() for p in files}
    contents = {p.relative_to(target).as_posix(): p.read_bytes() for p in target.rglob("*") if p.is_file()}
    seen = 0
    for origin in origins_of(plan):
        element = [int(o + random.integers(e)) for o, e in zip(origin.offset, origin.extents, strict=True)]
        one = origin.at(element)
        assert one is not None
        written = contents[one.target_file][slice(*one.target_range)]
        stored = stored_files[one.source_file][slice(*one.source_range)]
        read = truth_of(truth, one.key, one.source_state)
        assert stored == read[tuple(element)].tobytes(), one
        if one.source_dtype == one.target_dtype:
            assert written == stored
        else:
            assert written == rounded(read)[tuple(element)].tobytes(), one
        seen += prod(origin.extents) * len(written)
    assert seen == paddle_reshard.prove(plan).value_bytes


def test_ranks_are_those_of_the_source_file() -> None:
    plan = paddle_reshard.plan(case_directory("moe/ep2_sh2_s1v2_meta_ema") / "checkpoint-3", to="tp=1")
    key = "model.layers.1.mlp.experts.3.down_proj.weight"
    found = paddle_reshard.explain(plan, key=key)
    moments = [origin for origin in found.origins if origin.state == "moment1"]
    assert moments
    for origin in moments:
        assert origin.rank["ep"] == origin.rank["sharding"] == 1
        assert "shard01" in origin.source_file
    assert any(
        "whole experts are distributed over ep" in rule for tensor in found.tensors for rule in tensor.rules
    )


def test_files_of_a_flex_checkpoint_name_the_rank_that_wrote_them(tmp_path: Path) -> None:
    """Those that a conversion wrote have numbers, which are no ranks."""
    folder = case_directory("small-flex/fc_moe_mp2sh2_s1v2_ema")
    source, config = folder / "checkpoint-3", folder / "config.json"
    plan = paddle_reshard.plan(source, to="tp=1", config=config)
    found = origins_of(plan)
    assert {origin.rank["rank"] for origin in found} == {0, 1, 2, 3}
    for origin in found:
        assert origin.source_file.partition("/")[2] == f"{origin.rank['rank']}_0.distcp"
    paddle_reshard.convert(source, tmp_path / "made", format="flex", config=config)
    again = paddle_reshard.plan(tmp_path / "made", to="tp=1", config=config)
    assert not any(origin.rank for origin in origins_of(again))


def test_statements_and_rules_are_named(tmp_path: Path) -> None:
    program = tmp_path / "program.txt"
    program.write_text(
        "model.norm.weight -> tail.norm.weight\n"
        "model.layers.0.self_attn.q_proj.weight -> q0, q1, axis=1\n"
        "q1^T -> q1_turned\n"
    )
    plan = paddle_reshard.plan(case_directory(HYBRID) / "checkpoint-3", format="huggingface", aoa=program)
    found = paddle_reshard.explain(plan, key="q1_turned")
    (tensor,) = [tensor for tensor in found.tensors if tensor.state == "param"]
    assert [rule.split(": ", 1) for rule in tensor.rules if str(tmp_path) in rule] == [
        [f"{program}, line 2", "model.layers.0.self_attn.q_proj.weight -> q0, q1, axis=1"],
        [f"{program}, line 3", "q1^T -> q1_turned"],
    ]
    assert all("transposed" in origin.how for origin in found.origins)

    usual = paddle_reshard.explain(
        paddle_reshard.plan(case_directory(HYBRID) / "checkpoint-3", to="tp=1"), key=KEY
    )
    assert all("k_proj.weight: tp cuts dim 1" in tensor.rules[0] for tensor in usual.tensors)


# ------------------------------------------------------------------------------------------------ command line

SOURCE = case_directory(HYBRID) / "checkpoint-3"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_here("explain", SOURCE, *arguments)


def test_the_printed_commands_show_the_same_bytes(tmp_path: Path) -> None:
    paddle_reshard.convert(SOURCE, tmp_path / "DST", to="tp=1")
    shown = run(KEY, "--element", "20,18", "--to", "tp=1")
    assert shown.returncode == 0
    commands = [line for line in shown.stdout.splitlines() if line.startswith("od ")]
    assert len(commands) == 9  # five values, of which two are made from one
    dumped = {}
    for command in commands:
        done = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True, check=True)
        dumped[command] = done.stdout.splitlines()[0].split()[1:]
    value = oracle.read_truth(case_directory(HYBRID) / "truth.safetensors")[f"{KEY}.w_0"][20, 18]
    expected = value.tobytes().hex(" ").split()
    assert sum(found == expected for found in dumped.values()) == 2


def test_json_is_as_the_schema_says() -> None:
    shown = run(KEY, "--to", "tp=1", "--json")
    assert checked(shown)["origins"]
    assert {"$ref": "#/$defs/explain"} in schema()["anyOf"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([f"{KEY}s", "--to", "tp=1"], f"has no tensor {KEY}s; did you mean {KEY}"),
        (["model.layers.3", "--to", "tp=1"], "the source has no tensor model.layers.3"),
        ([KEY, "--element", "64,0", "--to", "tp=1"], "lies in none of its boxes, which end at [64, 32]"),
        ([KEY, "--element", "a", "--to", "tp=1"], "'a': not an index like 20,18"),
        ([KEY], "--to is missing"),
    ],
)
def test_what_it_cannot_explain_is_refused_in_one_sentence(arguments: list[str], sentence: str) -> None:
    refused = run(*arguments)
    assert refused.returncode in (1, 2)
    assert sentence in refused.stderr
    assert "Traceback" not in refused.stderr


def test_what_no_target_has_is_explained_too() -> None:
    plan = paddle_reshard.plan(SOURCE, format="huggingface")
    found = paddle_reshard.explain(plan, key=KEY)
    assert {tensor.state: tensor.left_out for tensor in found.tensors}["moment1"] == "not requested"
    assert [origin.state for origin in found.origins] == ["param"] * 4
