"""What a program means, beside moving values: placeholders, facts, both spellings of a file."""

import json

import numpy as np
import pytest

from paddle_reshard.pipeline.changes.aoa.apply import AoaOutcome, apply_aoa
from paddle_reshard.pipeline.changes.aoa.language import parse_aoa
from tests.aoa.arrays import stored, trained

RNG = np.random.default_rng(5)


def keys(text: str, source: list[str], reverse: bool = False, **options) -> list[str]:
    return sorted({tensor.key for tensor in outcome(text, source, reverse, **options).catalog.tensors})


def outcome(text: str, source: list[str], reverse: bool = False, **options) -> AoaOutcome:
    catalog, _ = stored(trained({key: ((2, 2), "float32") for key in source}, RNG), RNG)
    program = parse_aoa(text, "rules.aoa")
    return apply_aoa(catalog, program.reversed() if reverse else program, **options)


def test_both_spellings_of_a_file() -> None:
    lines = ["a -> b", "c^T -> d", "e,f -> g, axis = 1"]
    plain = parse_aoa("\n# a comment\n".join(lines) + "  # to the end", "x")
    config = parse_aoa(json.dumps({"aoa_statements": lines, "enable_traceback": False}), "x")
    assert [(s.left, s.right, s.operation) for s in plain.statements] == [
        (s.left, s.right, s.operation) for s in config.statements
    ]
    assert [s.where for s in plain.statements] == ["x, line 1", "x, line 3", "x, line 5"]
    assert [s.where for s in config.statements] == ["x, statement 1", "x, statement 2", "x, statement 3"]
    assert not config.reverse
    assert parse_aoa('{"aoa_statements": ["a -> b"], "aoa_config_reverse": true}', "x").reverse


def test_placeholders_stand_for_what_the_source_has() -> None:
    source = ["l.0.w", "l.1.w", "l.10.w", "l.1.e.0.w", "l.1.e.2.w", "l.x.w", "other"]
    assert keys("l.$LAYER_ID.w -> m.$LAYER_ID.w", source) == sorted(
        ["m.0.w", "m.1.w", "m.10.w", "l.1.e.0.w", "l.1.e.2.w", "l.x.w", "other"]
    )
    assert keys("l.$LAYER_ID.e.$EXPERT_ID.w -> l.$LAYER_ID.$EXPERT_ID", source) == sorted(
        ["l.1.0", "l.1.2", "l.0.w", "l.1.w", "l.10.w", "l.x.w", "other"]
    )
    assert keys("l.$LAYER_ID.e.$EXPERT_ID.w -> _", source) == sorted(
        ["l.0.w", "l.1.w", "l.10.w", "l.x.w", "other"]
    )


def test_layers_one_lower_and_one_higher() -> None:
    statement = "l.$LAYER_ID_OFFSET.w -> l.$LAYER_ID_OFFSET.w"
    assert keys(statement, ["l.1.w", "l.2.w", "l.3.w"]) == ["l.0.w", "l.1.w", "l.2.w"]


def test_a_star_is_in_the_order_of_the_numbers() -> None:
    catalog, _ = stored(
        trained({f"e.{n}.w": ((1, 2), "float32") for n in range(12)}, RNG, states=False), RNG, cuts=0
    )
    made = apply_aoa(catalog, parse_aoa("e.*.w -> all, axis=0", "rules.aoa")).catalog
    first = made.fragments[made.fragments["replica"] == 0]
    source = catalog.fragments[catalog.fragments["replica"] == 0]
    assert first["offset"][:, 0].tolist() == list(range(12))
    assert first["byte_base"].tolist() == source["byte_base"].tolist()


@pytest.mark.parametrize(
    "lines", [("a -> a", "a -> b"), ("a -> b", "a -> a"), ("a -> a", "a, a -> b, axis=0")]
)
def test_a_tensor_that_is_to_keep_its_name_does(lines: tuple[str, ...]) -> None:
    """Whatever else is made of it, before or after."""
    assert keys("\n".join(lines), ["a"], untied=["b"]) == ["a", "b"]


def test_what_no_file_holds_is_left_out() -> None:
    """Buffers that a model computes; reversed, tensors that the original program drops."""
    told = outcome("_ -> y\na -> b", ["a"])
    assert (told.unmade, {t.key for t in told.catalog.tensors}) == (("y",), {"b"})
    back = outcome("a -> b\ny -> _", ["b"], reverse=True)
    assert (back.unmade, {t.key for t in back.catalog.tensors}) == (("y",), {"a"})


def test_a_part_may_be_dropped() -> None:
    assert keys("a -> x, y, axis=0\ny -> _", ["a"]) == ["x"]


def test_what_is_created_is_dropped_when_reversed() -> None:
    assert keys("_ -> b", ["a", "b"], reverse=True) == ["a"]
