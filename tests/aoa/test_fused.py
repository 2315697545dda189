"""Fused tensors: their parts, and back, as Paddle's engine."""

import numpy as np
import pytest

from paddle_reshard.pipeline.changes.aoa.apply import apply_aoa
from paddle_reshard.pipeline.changes.aoa.language import parse_aoa
from tests.aoa.arrays import Engine, assert_same, gather, stored, trained

HEADS = "num_heads=8, num_key_value_groups=4"


@pytest.mark.parametrize(
    ("statement", "source", "target"),
    [
        ("g^T, u^T -> ug, fused_ffn", {"g": (8, 3), "u": (8, 3)}, {"ug": (3, 16)}),
        ("ug -> g, u, fused_ffn", {"ug": (3, 16)}, {"g": (3, 8), "u": (3, 8)}),
        ("ug -> there, fused_ffn", {"ug": (3, 16)}, {"there": (3, 16)}),
        (f"ug -> ug, fused_qkv_old, {HEADS}", {"ug": (3, 16)}, {"ug": (3, 16)}),
        (f"q, k, v -> qkv, fused_qkv_old, {HEADS}", {"q": (3, 16), "k": (3, 8), "v": (3, 8)}, {"qkv": (3, 32)}),
        (f"qkv -> q, k, v, fused_qkv_old, {HEADS}", {"qkv": (3, 32)}, {"q": (3, 16), "k": (3, 8), "v": (3, 8)}),
        (f"q, k, v -> qkv, fused_qkv, {HEADS}, axis=0", {"q": (16,), "k": (8,), "v": (8,)}, {"qkv": (32,)}),
    ],
    ids=["ffn to", "ffn from", "ffn", "qkv", "qkv to", "qkv from", "bias"],
)  # fmt: skip
def test_parts_to_fused_and_back(statement: str, source: dict, target: dict) -> None:
    rng = np.random.default_rng(2)
    arrays = trained({key: (shape, "bfloat16") for key, shape in source.items()}, rng)
    catalog, content = stored(arrays, rng)
    program = parse_aoa(statement, "a.aoa")
    outcome = apply_aoa(catalog, program)
    wanted = {key: (shape, "bfloat16") for key, shape in target.items()}
    engine = Engine({"aoa_statements": [statement]}, arrays, wanted)
    theirs = engine.parameters()
    assert_same(gather(outcome.catalog, content), theirs | engine.states_of(theirs))

    back = apply_aoa(outcome.catalog, program.reversed())
    assert_same(gather(back.catalog, content), arrays)
