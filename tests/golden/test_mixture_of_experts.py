"""Mixture-of-experts models without expert parallelism: fp32 routers, fused experts, buffers, EMA of both kinds.

The trainer lets tensors that every tp rank holds drift apart in these models; the truth is the first rank's copy.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import paddle_reshard
from tests import oracle
from tests.conftest import case_directory
from tests.golden.compare_one_card import read_one_card

CASES = (
    "moe_single",
    "moe_pp2",
    "moe_sh2_s1v1_meta",
    "moe_sh2_s1v2_meta",
    "moe_mp2",
    "moe_mp2pp2sh2_s1v2_meta_ema",
    "qwen2moe_single",
    "ernie45moe_single",
    "dsv3_single",
    "nlp_dsv2_single",
    "nlp_qwen2moe_single",
)
DRIFTED = ("moe_mp2", "moe_mp2pp2sh2_s1v2_meta_ema")
TARGETS = (
    ("tp=2,sharding=2", "stage1v2"),
    ("sharding=3", "stage1v1"),
    ("sharding=2", "stage3"),
    ("pp=2", None),
)


def _case(name: str) -> Path:
    return case_directory(f"moe/{name}")


def _truth(name: str) -> dict[str, bytes]:
    truth = oracle.read_truth(_case(name) / "truth.safetensors")
    return {key: array.tobytes() for key, array in truth.items()}


@pytest.mark.parametrize("name", CASES)
def test_on_one_card_it_equals_the_truth(name: str, tmp_path: Path) -> None:
    source = _case(name) / "checkpoint-3"
    report = paddle_reshard.convert(
        source, tmp_path / "one", to="tp=1", replicas="report" if name in DRIFTED else "compare"
    )
    assert read_one_card(tmp_path / "one") == _truth(name)
    assert bool(report.moved.replica_drift) == (name in DRIFTED)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("to", "strategy"), TARGETS)
def test_through_every_strategy_and_back(name: str, to: str, strategy: str | None, tmp_path: Path) -> None:
    layout = {"stage3_segment_size": 512} if strategy == "stage3" else None
    paddle_reshard.convert(
        _case(name) / "checkpoint-3",
        tmp_path / "there",
        to=to,
        sharding_strategy=strategy,
        layout=layout,
        replicas="report" if name in DRIFTED else "compare",
    )
    paddle_reshard.convert(tmp_path / "there", tmp_path / "back", to="tp=1")
    assert read_one_card(tmp_path / "back") == _truth(name)


@pytest.mark.parametrize("name", DRIFTED)
def test_drift_is_refused_unless_allowed(name: str, tmp_path: Path) -> None:
    with pytest.raises(paddle_reshard.ReshardError, match="with --replicas report the first copy is taken"):
        paddle_reshard.convert(_case(name) / "checkpoint-3", tmp_path / "one", to="tp=1")
    assert not list(tmp_path.iterdir())
