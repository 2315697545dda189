"""Every real checkpoint, converted to other topologies, still holds the truth bit for bit."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import paddle_reshard
from tests import oracle
from tests.conftest import case_directory, hybrid_cases


@dataclass(frozen=True)
class Target:
    """What to convert to, and what the files must then show."""

    to: str
    strategy: str | None = None
    format: str = "hybrid"

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees by which the files are named."""
        asked = {axis: int(size) for axis, size in (pair.split("=") for pair in self.to.split(","))}
        return {"tp": asked.get("tp", 1), "pp": asked.get("pp", 1), "shard": asked.get("sharding", 1)}

    def __str__(self) -> str:
        return "-".join(filter(None, (self.to.replace(",", "+"), self.strategy, self.format)))


SINGLE = Target("tp=1")
ALL_AXES = Target("tp=2,pp=2,sharding=2", "stage1v2")
FOUR_STAGES = Target("pp=4")
ODD_OWNERS = Target("sharding=3", "stage1v1")
EVERY_CASE = (SINGLE, ALL_AXES, FOUR_STAGES, ODD_OWNERS)

MORE = (
    Target("tp=2,sharding=2", "stage1v1", "hybrid-plain"),
    Target("tp=2,pp=2,sharding=2", "stage1v2", "hybrid-plain"),
    Target("pp=2,sharding=3", "stage1v2", "hybrid-plain"),
    Target("tp=2,pp=2", None, "hybrid-plain"),
    Target("sharding=5", "stage1v2"),
    Target("tp=2,pp=2,sharding=2", "stage1v1"),
    Target("dp=2,tp=2,sharding=2", "stage1v2"),
)
MORE_CASES = (
    "mp2_tied",
    "mp2pp2sh2_s1v1_meta_ema",
    "mp2pp2sh2_s1v2_meta_ema",
    "mp2sh2_s1v2_meta_mid",
    "nlp_fused_mp2",
    "pp4vpp2",
    "sh2_s1v1_meta_fp32",
    "sh2_s1v2",
    "single",
)
TWO_LAYERS = ("mp2sh2_s1v2_meta_mid",)


def _conversions() -> list:
    cases = hybrid_cases()
    pairs = [(name, target) for name in cases for target in EVERY_CASE]
    pairs += [(name, target) for name in MORE_CASES if name in cases for target in MORE]
    # A model of two layers has no four stages.
    pairs = [
        (name, Target("pp=2") if name in TWO_LAYERS and target == FOUR_STAGES else target)
        for name, target in pairs
    ]
    return [pytest.param(name, target, id=f"{name}-to-{target}") for name, target in pairs]


@cache
def _truth(name: str) -> dict[str, np.ndarray]:
    return oracle.read_truth(case_directory(name) / "truth.safetensors")


@pytest.mark.parametrize(("name", "target"), _conversions())
def test_converted_checkpoint_equals_the_truth(name: str, target: Target, tmp_path: Path) -> None:
    truth = _truth(name)
    shapes = oracle.shapes_of(truth)
    converted = tmp_path / "checkpoint-3"

    paddle_reshard.convert(
        case_directory(name) / "checkpoint-3",
        converted,
        to=target.to,
        sharding_strategy=target.strategy,
        format=target.format,
    )

    oracle.assert_same_tensors(oracle.read_checkpoint(converted, shapes), truth)
    assert oracle.degrees_of(oracle.find_files(converted)["optimizer"]) == target.degrees
    assert oracle.strategy_of(converted) == (target.strategy or "none")
    # The trainer writes model_meta.json for sharded optimizer state only.
    has_meta = target.format == "hybrid" and target.degrees["shard"] > 1
    assert (converted / "model_meta.json").exists() == has_meta
    if has_meta:
        oracle.check_distribution(converted, shapes)


def test_there_and_back_again(tmp_path: Path) -> None:
    """Two conversions in a row lose nothing, and the second ends in the structure of the first source."""
    name = "mp2pp2sh2_s1v2_meta_ema"
    source, there, back = case_directory(name) / "checkpoint-3", tmp_path / "there", tmp_path / "back"
    paddle_reshard.convert(source, there, to="sharding=3", sharding_strategy="stage1v1")
    paddle_reshard.convert(there, back, to="tp=2,pp=2,sharding=2", sharding_strategy="stage1v2")
    oracle.assert_same_tensors(oracle.read_checkpoint(back, oracle.shapes_of(_truth(name))), _truth(name))
    oracle.assert_same_structure(oracle.structure(back), oracle.structure(source))
