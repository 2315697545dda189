"""What becomes of the states, the single numbers, the casts and the other names of a tensor."""

from dataclasses import replace

import numpy as np
import pytest

from paddle_reshard.pipeline.changes.aoa.apply import AoaOutcome, apply_aoa
from paddle_reshard.pipeline.changes.aoa.language import parse_aoa
from paddle_reshard.pipeline.core.catalog import Catalog, check_catalog
from paddle_reshard.pipeline.core.errors import PlanError, UnsupportedError
from paddle_reshard.pipeline.core.mixture import Mixture, Term
from paddle_reshard.pipeline.planning.match import COMPARE, MOVE, plan_ops
from tests.aoa.arrays import Arrays, gather, stored, trained
from tests.oracle import round_to_bfloat16

RNG = np.random.default_rng(11)
PAIR = {"a": ((4, 6), "bfloat16"), "b": ((4, 2), "bfloat16")}
JOIN = "a, b -> c, axis=1"


def apply(text: str, catalog: Catalog, **options) -> AoaOutcome:
    return apply_aoa(catalog, parse_aoa(text, "rules.aoa"), **options)


def sharded(parameters: dict, implied_keys: tuple[str, ...]) -> tuple[Catalog, bytes, Arrays]:
    """A checkpoint that leaves parameters out, as the casts of their master weights."""
    arrays = trained(parameters, RNG)
    for key in implied_keys:
        arrays[key, "param"] = round_to_bfloat16(arrays[key, "master_weight"][0]), "bfloat16"
    catalog, content = stored(arrays, RNG)
    index = catalog.index()
    implied = {index[key, "param"]: index[key, "master_weight"] for key in implied_keys}
    kept = catalog.fragments[~np.isin(catalog.fragments["tensor"], list(implied))]
    return Catalog(catalog.tensors, catalog.files, kept, implied), content, arrays


def test_numbers_of_joined_tensors_are_copies_of_one() -> None:
    """Both are there, so the plan compares them; of the target's number there is one."""
    catalog, content = stored(trained(PAIR, RNG), RNG)
    made = apply(JOIN, catalog).catalog
    number = made.index()["c", "beta1_pow_acc"]
    pieces = made.fragments[made.fragments["tensor"] == number]
    stored_at = {int(piece["byte_base"]) for piece in pieces}
    source = catalog.index()
    all_of_both = [source[key, "beta1_pow_acc"] for key in ("a", "b")]
    wanted = catalog.fragments[np.isin(catalog.fragments["tensor"], all_of_both)]
    assert stored_at == set(wanted["byte_base"].tolist())
    assert sorted(pieces["replica"].tolist()) == list(range(len(wanted)))
    gather(made, content)

    target = pieces[pieces["replica"] == 0].copy()
    ops = plan_ops(
        Catalog(made.tensors, made.files, made.fragments[made.fragments["tensor"] == number], {}), target
    )
    assert ops["kind"].tolist() == [MOVE] + [COMPARE] * (len(wanted) - 1)


def test_a_parameter_of_one_element_and_its_numbers() -> None:
    """They have the same shape, and only one of them is joined."""
    arrays = trained({"a": ((1,), "bfloat16"), "b": ((1,), "bfloat16")}, RNG)
    catalog, content = stored(arrays, RNG)
    made = gather(apply("a, b -> c, axis=0", catalog).catalog, content)
    assert made["c", "moment1"][0].shape == (2,)
    assert made["c", "beta1_pow_acc"][0].shape == (1,)


def test_states_that_only_one_has() -> None:
    arrays = trained(PAIR, RNG)
    catalog, _ = stored({name: one for name, one in arrays.items() if name != ("b", "moment2")}, RNG)
    with pytest.raises(PlanError, match="c is made from a and b, of which only a has the state moment2"):
        apply(JOIN, catalog)


def test_states_without_their_parameter() -> None:
    """A folder of optimizer states is a checkpoint too, and there is nothing to cast in it."""
    arrays = {name: one for name, one in trained(PAIR, RNG).items() if name[1] != "param"}
    catalog, content = stored(arrays, RNG)
    outcome = apply("a, b -> c, axis=1\nc -> d, dtype='float16'", catalog)
    joined = np.concatenate([arrays["a", "moment1"][0], arrays["b", "moment1"][0]], axis=1)
    assert gather(outcome.catalog, content)["d", "moment1"][0].tobytes() == joined.tobytes()
    assert not outcome.catalog.casts()


def test_a_state_of_another_shape_can_be_renamed_but_not_cut() -> None:
    arrays = trained(PAIR, RNG)
    arrays["a", "moment1"] = np.zeros((24,), np.float32), "float32"
    catalog, content = stored(arrays, RNG)
    assert gather(apply("a -> z", catalog).catalog, content)["z", "moment1"][0].shape == (24,)
    with pytest.raises(PlanError, match=r"a \(moment1\) has shape \(24,\), its parameter \(4, 6\)"):
        apply("a -> x[0:2], axis=1", catalog)


def test_joined_with_a_parameter_that_is_stored() -> None:
    """What was left out is taken of the master weight, which is then rounded as the format defines it."""
    catalog, _, _ = sharded(PAIR, ("a",))
    outcome = apply(JOIN, catalog)
    check_catalog(outcome.catalog)
    assert not outcome.catalog.implied
    assert outcome.catalog.casts() == {("float32", "bfloat16")}
    number = outcome.catalog.index()["c", "param"]
    pieces = outcome.catalog.fragments[outcome.catalog.fragments["tensor"] == number]
    stored_as = {(int(piece["offset"][1]) < 6, int(piece["dtype"])) for piece in pieces}
    assert stored_as == {(True, 0), (False, 1)}


@pytest.mark.parametrize("wanted", ["float32", "float16"])
def test_a_parameter_that_is_rounded_already_is_not_rounded_again(wanted: str) -> None:
    catalog, _, _ = sharded(PAIR, ("a",))
    with pytest.raises(PlanError, match=f"line 1: a is stored as float32 and is bfloat16 here; as {wanted}"):
        apply(f"a -> a, dtype='{wanted}'", catalog)
    assert apply("a -> a, dtype='bfloat16'", catalog).catalog.implied


@pytest.mark.parametrize(
    ("dtypes", "allowed"),
    [
        (("bfloat16", "float32", "float16"), True),
        (("float16", "float32", "float16"), True),
        (("float32", "bfloat16", "bfloat16"), True),
        (("float32", "bfloat16", "float32"), False),
        (("float32", "float16", "bfloat16"), False),
        (("bfloat16", "float16", "bfloat16"), False),
    ],
)
def test_values_are_rounded_once(dtypes: tuple[str, str, str], allowed: bool) -> None:
    stored_as, first, second = dtypes
    catalog, _ = stored(trained({"a": ((2, 2), stored_as)}, RNG, states=False), RNG)
    text = f"a -> b, src_dtype='{stored_as}', dst_dtype='{first}'\nb -> c, dtype='{second}'"
    if not allowed:
        with pytest.raises(PlanError, match=f"as {second} it would be rounded twice"):
            apply(text, catalog)
        return
    outcome = apply(text, catalog)
    assert outcome.catalog.tensors[0].dtype.name == second
    assert outcome.catalog.casts() == ({(stored_as, second)} if stored_as != second else set())


def test_a_tied_tensor_stays_one() -> None:
    catalog, content = stored(trained({"embed": ((4, 2), "bfloat16")}, RNG), RNG, {"embed": ("head",)})
    tensor = apply("embed -> model.embed", catalog).catalog.tensors[0]
    assert (tensor.key, tensor.aliases) == ("model.embed", ("head",))
    tensor = apply("embed -> model.embed\nhead -> model.head", catalog).catalog.tensors[0]
    assert (tensor.key, tensor.aliases) == ("model.embed", ("model.head",))
    tensor = apply("head -> _", catalog).catalog.tensors[0]
    assert (tensor.key, tensor.aliases) == ("embed", ())
    parted = apply("head -> head", catalog, untied=["head"])
    both = gather(parted.catalog, content)
    assert both["head", "moment2"][0].tobytes() == both["embed", "moment2"][0].tobytes()
    reversed_copy = parse_aoa("embed -> embed\nembed -> head", "rules.aoa").reversed()
    assert apply_aoa(catalog, reversed_copy).catalog.tensors[0].key == "embed"


def test_tensors_that_are_mixed() -> None:
    catalog, _ = stored(trained(PAIR, RNG), RNG)
    mixed = replace(catalog, mixtures={1: Mixture((Term(1, 0.0, 1.0),), 0.5)})
    with pytest.raises(UnsupportedError, match="apply AOA statements before averaging"):
        apply(JOIN, mixed)


def test_averages_follow() -> None:
    arrays = trained(PAIR, RNG)
    for key, (shape, _) in PAIR.items():
        for state in ("ema_param", "ema_master_weight"):
            arrays[key, state] = RNG.standard_normal(shape).astype(np.float32), "float32"
    catalog, content = stored(arrays, RNG)
    outcome = apply("a^T -> t, dtype='float32'", catalog)
    made = gather(outcome.catalog, content)
    assert made["t", "ema_param"][0].tolist() == arrays["a", "ema_param"][0].T.tolist()
    assert made["t", "ema_master_weight"][0].tolist() == arrays["a", "ema_master_weight"][0].T.tolist()
    assert outcome.catalog.casts() == {("bfloat16", "float32")}
