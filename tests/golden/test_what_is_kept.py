"""Nothing is changed or omitted unless requested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import PlanError, UsageError
from tests import oracle
from tests.conftest import checkpoint_of
from tests.jobs.command import run_here as run

AVERAGED = "mp2pp2sh2_s1v2_meta_ema"


def written_strategy(folder: Path) -> str:
    """As the files themselves show it."""
    return oracle.strategy_of(folder)


@pytest.mark.parametrize(
    ("name", "to", "expected", "reason"),
    [
        (AVERAGED, "tp=2,pp=2,sharding=3", "stage1v2", "as the source"),
        ("sh2_s1v1_meta_fp32", "sharding=3", "stage1v1", "as the source"),
        ("mp2_tied", "tp=2,sharding=2", "stage1v2", "the default of PaddleFormers; the source is not sharded"),
        ("nlp_fused_mp2", "tp=2,sharding=2", "stage1v1", "the default of PaddleNLP; the source is not sharded"),
        (AVERAGED, "tp=2", "none", "sharding is 1"),
    ],
)  # fmt: skip
def test_the_strategy_is_the_sources_or_the_trainers_default(
    name: str, to: str, expected: str, reason: str, tmp_path: Path
) -> None:
    report = paddle_reshard.convert(checkpoint_of(name), tmp_path / "out", to=to)
    assert written_strategy(tmp_path / "out") == expected
    (target,) = report.plan.targets
    assert (target.spec.strategy, target.spec.strategy_reason) == (expected, reason)


def test_a_strategy_that_the_target_cannot_have_gives_way_and_says_so(tmp_path: Path) -> None:
    """The trainer refuses stage 3 with tensor or pipeline parallelism."""
    paddle_reshard.convert(
        checkpoint_of(AVERAGED), tmp_path / "3", to="sharding=2", sharding_strategy="stage3"
    )
    kept = paddle_reshard.plan(tmp_path / "3", tmp_path / "x", to="sharding=4").targets[0].spec
    assert (kept.strategy, kept.strategy_reason) == ("stage3", "as the source")
    report = paddle_reshard.convert(tmp_path / "3", tmp_path / "out", to="tp=2,sharding=2")
    assert written_strategy(tmp_path / "out") == "stage1v2"
    reason = report.plan.targets[0].spec.strategy_reason
    assert reason.startswith("the default of PaddleFormers; not stage3 as the source: stage3 with tp=2")


def test_fp32_training_does_not_cut_parameters_by_default(tmp_path: Path) -> None:
    """PaddleFormers asserts ``amp_master_grad`` with ``split_param``, and that AMP is on with the former."""
    paddle_reshard.convert(checkpoint_of("sh2_s1v1_meta_fp32"), tmp_path / "one", to="tp=1")
    form = paddle_reshard.plan(tmp_path / "one", tmp_path / "x", to="sharding=2").targets[0].spec
    assert form.strategy == "stage1v1"


def test_the_first_line_says_the_strategy_and_why(tmp_path: Path) -> None:
    done = run("convert", checkpoint_of(AVERAGED), tmp_path / "out", "--to", "tp=2,pp=2,sharding=3")
    assert done.returncode == 0
    assert done.stdout.splitlines()[0].split() == ["sharding", "stage1v2:", "as", "the", "source"]
    planned = run("plan", checkpoint_of(AVERAGED), tmp_path / "x", "--to", "sharding=3", "--json")
    target = json.loads(planned.stdout)["target"]
    assert (target["sharding_strategy"], target["sharding_strategy_reason"]) == ("stage1v2", "as the source")


@pytest.mark.parametrize("format", ["unified", "auto-parallel"])
def test_an_average_is_left_out_by_name_only(format: str, tmp_path: Path) -> None:
    source = checkpoint_of(AVERAGED)
    refused = run("convert", source, tmp_path / "out", "--format", format, "--quiet")
    assert refused.returncode == 1
    assert f"the format {format} cannot hold the exponential moving average" in refused.stderr
    for way in ("--drop ema", "hybrid, hybrid-plain or flex", "--target DST:huggingface:state=ema"):
        assert way in refused.stderr
    assert not (tmp_path / "out").exists()

    done = run("convert", source, tmp_path / "out", "--format", format, "--drop", "ema", "--json")
    assert json.loads(done.stdout)["plan"]["states_dropped"] == ["ema_master_weight"]
    manifest = json.loads((tmp_path / "out" / "paddle_reshard.json").read_text())
    assert manifest["source"]["states_dropped"] == ["ema_master_weight"]
    both = ["param", "master_weight", "moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc"]
    assert paddle_reshard.verify(source, tmp_path / "out", states=both).equal


@pytest.mark.parametrize("options", [{"to": "tp=2"}, {"format": "flex"}, {"format": "huggingface"}])
def test_what_is_dropped_is_in_no_target(options: dict, tmp_path: Path) -> None:
    report = paddle_reshard.convert(checkpoint_of(AVERAGED), tmp_path / "out", drop=["ema"], **options)
    assert report.plan.dropped == ("ema_master_weight",)
    assert not list((tmp_path / "out").rglob("ema*"))
    assert not paddle_reshard.inspect(tmp_path / "out").has_ema


def test_a_second_target_may_hold_the_average(tmp_path: Path) -> None:
    report = paddle_reshard.convert(
        checkpoint_of(AVERAGED),
        {tmp_path / "a": {"format": "unified"}, tmp_path / "b": {"format": "huggingface", "state": "ema"}},
    )
    assert report.plan.targets[0].states_not_carried == ("ema_master_weight",)
    assert report.plan.dropped == ()


def test_what_describes_an_average_goes_with_it(tmp_path: Path) -> None:
    paddle_reshard.average([checkpoint_of(AVERAGED)] * 2, tmp_path / "averaged", uniform=True, to="tp=1")
    assert (tmp_path / "averaged" / "ema.json").exists()
    report = paddle_reshard.convert(tmp_path / "averaged", tmp_path / "out", to="tp=1", drop="ema")
    assert not (tmp_path / "out" / "ema.json").exists()
    assert (
        "ema.json",
        "it describes a moving average, which this target does not hold",
    ) in report.plan.targets[0].not_carried


def test_only_what_can_be_done_without_is_dropped(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--drop moment1: cannot be dropped; known: ema"):
        paddle_reshard.plan(checkpoint_of(AVERAGED), tmp_path / "x", to="tp=1", drop=["moment1"])
    with pytest.raises(UsageError, match="--drop ema cannot be combined"):
        paddle_reshard.plan(
            checkpoint_of(AVERAGED), tmp_path / "x", format="huggingface", state="ema", drop=["ema"]
        )
    with pytest.raises(UsageError, match="--drop does not apply to averages"):
        paddle_reshard.average(
            [checkpoint_of(AVERAGED)] * 2, tmp_path / "x", uniform=True, to="tp=1", drop=["ema"]
        )
    with pytest.raises(PlanError, match="cannot hold the exponential moving average"):
        paddle_reshard.plan(checkpoint_of(AVERAGED), {tmp_path / "x": {"format": "unified"}})
