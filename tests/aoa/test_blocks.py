"""Fused tensors of one block for each tensor-parallel shard: between any numbers of blocks, as Paddle's engine."""

import numpy as np
import pytest

from paddle_reshard.pipeline.changes.aoa.apply import apply_aoa
from paddle_reshard.pipeline.changes.aoa.language import parse_aoa
from tests.aoa.arrays import Engine, assert_same, gather, stored, trained

HEADS = "num_heads=8, num_key_value_groups=4"
TRANSPOSED_TO_FUSED = "g^T, u^T -> ug, fused_ffn"


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize(
    "statements",
    [
        ["ug -> ug, fused_ffn"],
        ["ug -> there, fused_ffn", "there -> ug"],
        ["ug -> here", "here -> ug, fused_ffn"],
        ["ug -> here, fused_ffn", 'here -> turned, permute="[]"', "turned^T -> ug"],
        [f"ug -> ug, fused_qkv_old, {HEADS}"],
    ],
    ids=["ffn", "named later", "named before", "turned", "qkv"],
)
def test_from_blocks_to_blocks(statements: list[str], before: int, after: int) -> None:
    shape = (3, 16)
    rng = np.random.default_rng(1)
    arrays = trained({"ug": (shape, "bfloat16")}, rng)
    catalog, content = stored(arrays, rng)
    blocks = {"source_blocks": {"ug": before}, "target_blocks": {"ug": after}}
    ours = apply_aoa(catalog, parse_aoa("\n".join(statements), "a.aoa"), wanted=["ug"], **blocks)
    if len(statements) == 3 or "here" in statements[0]:
        expected = regrouped(arrays, 2 if "qkv" not in statements[0] else 3, before, after)
    else:
        engine = Engine({"aoa_statements": statements}, arrays, {"ug": (shape, "bfloat16")}, **blocks)
        theirs = engine.parameters()
        expected = theirs | engine.states_of(theirs)
    assert_same(gather(ours.catalog, content), expected)


def regrouped(arrays, parts: int, before: int, after: int):
    """Two halves in other blocks, with NumPy."""
    found = {}
    for name, (values, dtype) in arrays.items():
        if values.ndim == 1:
            found[name] = values, dtype
            continue
        rows, width = values.shape
        logical = (
            values.reshape(rows, before, parts, -1).transpose(0, 2, 1, 3).reshape(rows, parts, after, -1)
        )
        found[name] = np.ascontiguousarray(logical.transpose(0, 2, 1, 3)).reshape(rows, width), dtype
    return found


@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize(
    ("statement", "source", "target", "side"),
    [
        (TRANSPOSED_TO_FUSED, {"g": (8, 3), "u": (8, 3)}, {"ug": (3, 16)}, "target_blocks"),
        ("ug -> g, u, fused_ffn", {"ug": (3, 16)}, {"g": (3, 8), "u": (3, 8)}, "source_blocks"),
        (
            f"q, k, v -> qkv, fused_qkv_old, {HEADS}",
            {"q": (3, 16), "k": (3, 8), "v": (3, 8)},
            {"qkv": (3, 32)},
            "target_blocks",
        ),
        (
            f"qkv -> q, k, v, fused_qkv_old, {HEADS}",
            {"qkv": (3, 32)},
            {"q": (3, 16), "k": (3, 8), "v": (3, 8)},
            "source_blocks",
        ),
        (
            f"q, k, v -> qkv, fused_qkv, {HEADS}, axis=0",
            {"q": (16,), "k": (8,), "v": (8,)},
            {"qkv": (32,)},
            "target_blocks",
        ),
    ],
    ids=["ffn to", "ffn from", "qkv to", "qkv from", "bias"],
)
def test_parts_to_blocks_and_back(statement: str, source: dict, target: dict, side: str, blocks: int) -> None:
    if "axis=0" in statement:
        blocks = 1  # the engine's shards are cut along axis 1
    rng = np.random.default_rng(2)
    arrays = trained({key: (shape, "bfloat16") for key, shape in source.items()}, rng)
    catalog, content = stored(arrays, rng)
    program = parse_aoa(statement, "a.aoa")
    options = {side: {key: blocks for key in ("ug", "qkv")}}
    outcome = apply_aoa(catalog, program, wanted=target, **options)
    wanted = {key: (shape, "bfloat16") for key, shape in target.items()}
    engine = Engine({"aoa_statements": [statement]}, arrays, wanted, **options)
    theirs = engine.parameters()
    assert_same(gather(outcome.catalog, content), theirs | engine.states_of(theirs))

    other = {"target_blocks": "source_blocks", "source_blocks": "target_blocks"}[side]
    back = apply_aoa(outcome.catalog, program.reversed(), wanted=source, **{other: options[side]})
    assert_same(gather(back.catalog, content), arrays)
