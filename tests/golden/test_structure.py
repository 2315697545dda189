"""A converted checkpoint has exactly the structure that the real trainer writes for that topology.

The corpus holds the same training run in many topologies. Converting A to the topology of B must give
the files of B: the same names, and in each the same keys in the same order with the same shapes, dtypes
and tensor names. The values are those of A: other ranks sum in another order.

``make test`` takes every source to a few targets, and comes to every target from a few sources; ``make exhaustive``
takes every source to every target.
"""

import itertools
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import paddle_reshard
from tests import oracle
from tests.conftest import case_directory, hybrid_cases


@dataclass(frozen=True)
class Topology:
    """How to ask for the topology, the sharding and the format of a case."""

    to: str
    strategy: str | None = None
    format: str = "hybrid"
    layout: dict[str, object] = field(default_factory=dict)


CUT = {"stage3_segment_size": 512}
PARALLEL, SERIAL = {"sequence_parallel": True}, {"sequence_parallel": False}

FAMILIES: tuple[dict[str, Topology], ...] = (
    {
        "single": Topology("tp=1"),
        "dp2": Topology("dp=2"),
        "mp2": Topology("tp=2", layout=SERIAL),
        "pp2": Topology("pp=2"),
        "mp2pp2": Topology("tp=2,pp=2", layout=SERIAL),
        "mp2pp2_sp": Topology("tp=2,pp=2", layout=PARALLEL),
        "sh2_s1v1": Topology("sharding=2", "stage1v1", "hybrid-plain"),
        "sh2_s1v1_meta": Topology("sharding=2", "stage1v1"),
        "sh2_s1v2": Topology("sharding=2", "stage1v2", "hybrid-plain"),
        "sh2_s1v2_meta": Topology("sharding=2", "stage1v2"),
        "sh2_s2": Topology("sharding=2", "stage2"),
        "sh2_s3_seg512": Topology("sharding=2", "stage3", layout=CUT),
        "mp2sh2_s1v1_meta": Topology("tp=2,sharding=2", "stage1v1", layout=SERIAL),
        "mp2pp2sh2_s1v1_meta_ema": Topology("tp=2,pp=2,sharding=2", "stage1v1", layout=SERIAL),
        "mp2pp2sh2_s1v2_meta_ema": Topology("tp=2,pp=2,sharding=2", "stage1v2", layout=SERIAL),
    },
    {"single_l8": Topology("tp=1"), "pp4vpp2": Topology("pp=4,vpp=2")},
    {"single_tied": Topology("tp=1"), "mp2_tied": Topology("tp=2")},
    {"single_fp32": Topology("tp=1"), "sh2_s1v1_meta_fp32": Topology("sharding=2", "stage1v1")},
    {
        "nlp_single": Topology("tp=1"),
        "nlp_mp2": Topology("tp=2"),
        "nlp_sp_mp2pp2": Topology("tp=2,pp=2"),
    },
    {"nlp_fused_single": Topology("tp=1"), "nlp_fused_mp2": Topology("tp=2")},
    # This has no sibling and is converted to its own topology only.
    {"mp2sh2_s1v2_meta_mid": Topology("tp=2,sharding=2", "stage1v2")},
)


STEPS = (0, 1, 4)
"""How many lines below its own, beginning again at the top, are the targets to which ``make test`` takes a source."""


def _pairs() -> list:
    return [
        pytest.param(
            source,
            target,
            family[target],
            id=f"{source}-to-{target}",
            marks=() if (below - line) % len(family) in STEPS else pytest.mark.exhaustive,
        )
        for family in FAMILIES
        for (line, source), (below, target) in itertools.product(enumerate(family), repeat=2)
    ]


@cache
def _real_structure(name: str) -> dict[str, list[oracle.Entry]]:
    return oracle.structure(case_directory(name) / "checkpoint-3")


@cache
def _truth(name: str) -> dict[str, np.ndarray]:
    return oracle.read_truth(case_directory(name) / "truth.safetensors")


def test_every_case_is_in_a_family() -> None:
    named = [name for family in FAMILIES for name in family]
    assert len(named) == len(set(named))
    assert set(hybrid_cases()) == set(named)


@pytest.mark.parametrize(("source", "target", "topology"), _pairs())
def test_converted_files_are_those_of_the_trainer(
    source: str, target: str, topology: Topology, tmp_path: Path
) -> None:
    real = case_directory(target) / "checkpoint-3"
    converted = tmp_path / "checkpoint-3"

    paddle_reshard.convert(
        case_directory(source) / "checkpoint-3",
        converted,
        to=topology.to,
        sharding_strategy=topology.strategy,
        format=topology.format,
        layout=topology.layout,
    )

    truth = _truth(source)
    oracle.assert_same_tensors(oracle.read_checkpoint(converted, oracle.shapes_of(truth)), truth)
    has_ema = any(name.startswith("ema") for name in _real_structure(source))
    expected = oracle.expected_structure(_real_structure(target), ema=has_ema)
    oracle.assert_same_structure(oracle.structure(converted), expected)
    assert (converted / "model_meta.json").exists() == (real / "model_meta.json").exists()
    if (real / "model_meta.json").exists():
        ours = oracle.ordered_json(converted / "model_meta.json")
        assert ours == oracle.ordered_json(real / "model_meta.json")
