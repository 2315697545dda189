"""Where Paddle 3.3.1's own engine is wrong or fails, ours is right: NumPy says so."""

import numpy as np
import pytest

from paddle_reshard.pipeline.changes.aoa.apply import apply_aoa
from paddle_reshard.pipeline.changes.aoa.language import parse_aoa
from tests.aoa.arrays import Array, Arrays, Engine, gather, random_array, stored, trained

RNG = np.random.default_rng(3)


def parameters(**values: Array) -> Arrays:
    return {(key, "param"): (array, "float32") for key, array in values.items()}


def ours(statement: str, arrays: Arrays) -> dict[str, Array]:
    """What a reversed statement makes of arrays."""
    catalog, content = stored(arrays, RNG)
    outcome = apply_aoa(catalog, parse_aoa(statement, "a.aoa").reversed())
    return {key: values for (key, _), (values, _) in gather(outcome.catalog, content).items()}


def theirs(statement: str, arrays: Arrays, wanted: dict[str, Array]) -> dict[str, Array]:
    config = {"aoa_statements": [statement], "aoa_config_reverse": True}
    shapes = {key: (values.shape, "float32") for key, values in wanted.items()}
    return {key: values for (key, _), (values, _) in Engine(config, arrays, shapes).parameters().items()}


def same(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def test_fused_heads_are_taken_apart_by_their_widths() -> None:
    q, k, v = (random_array((2, width), "float32", RNG) for width in (8, 4, 4))
    fused = np.concatenate([q, k, v], axis=1)
    statement, truth = (
        "q,k,v -> qkv, fused_qkv_old, num_heads=4, num_key_value_groups=2",
        {"q": q, "k": k, "v": v},
    )
    assert same(ours(statement, parameters(qkv=fused)), truth)
    with pytest.raises(AssertionError):  # it wants three equal parts
        theirs(statement, parameters(qkv=fused), truth)


def test_parts_taken_apart_by_a_statement_are_fused() -> None:
    gate, up = (random_array((4, 8), "float32", RNG) for _ in range(2))
    truth = {"ug": np.concatenate([gate, up], axis=1)}
    statement = "ug -> g, u, fused_ffn"
    assert same(ours(statement, parameters(g=gate, u=up)), truth)
    with pytest.raises(AttributeError):
        theirs(statement, parameters(g=gate, u=up), truth)


def test_layers_are_counted_on_the_sources_side() -> None:
    truth = {f"m.{n + 1}.w": random_array((2,), "float32", RNG) for n in range(3)}
    source = parameters(**{f"l.{n}.w": truth[f"m.{n + 1}.w"] for n in range(3)})
    statement = "m.$LAYER_ID_OFFSET.w -> l.$LAYER_ID_OFFSET.w"
    assert same(ours(statement, source), truth)
    with pytest.raises(KeyError):
        theirs(statement, source, truth)


def test_only_the_experts_that_a_layer_has() -> None:
    arrays = parameters(
        **{f"l.{n}.e.{m}.w": random_array((2,), "float32", RNG) for n, m in [(0, 0), (1, 0), (1, 1)]}
    )
    statement = "l.$LAYER_ID.e.$EXPERT_ID.w -> m.$LAYER_ID.e.$EXPERT_ID.w"
    catalog, content = stored(arrays, RNG)
    made = gather(apply_aoa(catalog, parse_aoa(statement, "a.aoa")).catalog, content)
    assert {key: values.tolist() for (key, _), (values, _) in made.items()} == {
        key.replace("l.", "m."): values.tolist() for (key, _), (values, _) in arrays.items()
    }
    with pytest.raises(ValueError, match="should be assigned before"):
        Engine({"aoa_statements": [statement]}, arrays)


def test_a_cast_is_of_the_parameter_only() -> None:
    arrays = trained({"a.w": ((4, 6), "bfloat16")}, RNG)
    catalog, content = stored(arrays, RNG)
    outcome = apply_aoa(catalog, parse_aoa("a.w -> b.w, dtype='float16'", "a.aoa"))
    assert {t.state: t.dtype.name for t in outcome.catalog.tensors} == {
        "param": "float16", "master_weight": "float32", "moment1": "float32", "moment2": "float32",
        "beta1_pow_acc": "float32", "beta2_pow_acc": "float32",
    }  # fmt: skip
    assert outcome.catalog.casts() == {("bfloat16", "float16")}
    made = gather(outcome.catalog, content)
    assert made["b.w", "moment1"][0].tobytes() == arrays["a.w", "moment1"][0].tobytes()

    engine = Engine({"aoa_statements": ["a.w -> b.w, dtype='float16'"]}, arrays, {"b.w": ((4, 6), "float16")})
    assert not np.array_equal(
        engine.made("b.w", "moment1", "float32", casts_leak=True), arrays["a.w", "moment1"][0]
    )


def test_the_order_of_parameters_and_states_does_not_matter() -> None:
    arrays = trained({"e": ((4, 2), "bfloat16")}, RNG)
    results = []
    for order in (sorted(arrays), sorted(arrays, reverse=True)):
        catalog, content = stored({name: arrays[name] for name in order}, RNG)
        outcome = apply_aoa(catalog, parse_aoa("e -> e1\ne -> lm", "a.aoa"), untied={"lm"})
        results.append({n: (v.tobytes(), d) for n, (v, d) in gather(outcome.catalog, content).items()})
    assert results[0] == results[1]
    assert results[0] == {
        (key, state): (values.tobytes(), dtype)
        for (_, state), (values, dtype) in arrays.items()
        for key in ("e1", "lm")
    }
    kind = ((4, 2), "bfloat16")
    engine = Engine({"aoa_statements": ["e -> lm"]}, arrays, {"e": kind, "lm": kind})
    engine.made("e", "param", "bfloat16")
    engine.made("e", "master_weight", "float32")
    with pytest.raises(AssertionError, match="different types is prohibited"):
        engine.made("lm", "param", "bfloat16")
