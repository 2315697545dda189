"""What the rule tables say of a model is what its class builds: rows, shapes, cuts, marks, names, order and ties."""

import json
from collections.abc import Iterable, Iterator
from functools import cache

import pytest

from paddle_reshard.pipeline.core.errors import RuleError
from paddle_reshard.pipeline.core.tensors import dtype_named
from paddle_reshard.pipeline.model.model import (
    Model,
    ModelTensor,
    cut_of,
    model_order,
    order_routers,
    predict_parameter_names,
)
from paddle_reshard.pipeline.model.rules.choose import choose_table
from paddle_reshard.pipeline.model.rules.rule import LORA, expected_shape
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from tests import facts
from tests.sampling import exhaustive

TP, SEQUENCE_PARALLEL = {"tp2", "tp2sp", "tp2pp2", "tp2pp2sp"}, {"tp2sp", "tp2pp2sp"}
PP, EP = {"pp2", "tp2pp2", "tp2pp2sp"}, {"ep2"}
TIED = {"tie_word_embeddings": True}
BASE = "Model"
"""The base class of a family, of whose keys no table has rows (``test_described.py``)."""
LISTED: dict[str, str] = {
    'ernie4_5_moe {"num_nextn_predict_layers": 2}': "mlp.gate.weight: the class numbers these blocks from 0",
    'ernie4_5_moe {"num_nextn_predict_layers": 3}': "mlp.gate.weight: the class numbers these blocks from 0",
    'qwen3_moe {"lora": {"r": 4}}': "LoRA of a routed expert is not supported",
}
"""Family and entries of the config → how the tables refuse a model that they do not describe."""


@cache
def variants() -> dict[str, list[facts.Build]]:
    """The builds by family and the entries of the config that differ from the base.

    Tied words are built in every topology without stages, and kept if that is another model: where none is kept, the
    class builds the same with and without them.
    """
    found: dict[str, list[facts.Build]] = {}
    for build in facts.builds():
        if build.entries and not build.topology.startswith("case ") and build.config.get("head") != BASE:
            found.setdefault(f"{build.family} {json.dumps(build.config)}", []).append(build)
    for family in sorted({build.family for build in facts.builds()}):
        tied = found.setdefault(f"{family} {json.dumps(TIED)}", [])
        kept = {build.topology for build in tied}
        tied += [
            build._replace(saved={**(build.saved or {}), **TIED})
            for build in found.get(f"{family} {{}}", ())
            if build.topology not in kept | PP and family != "gemma3_text"
        ]
    return {variant: builds for variant, builds in found.items() if builds}


def table_of(build: facts.Build) -> RuleTable:
    if "head" in build.config:
        keys = [entry.key for entry in build.entries or ()]
        return choose_table(shipped_tables("paddleformers"), keys, build.saved or {})
    return _table_of(build.family)


@cache
def _table_of(family: str) -> RuleTable:
    """Every build of a family is held against one table, which takes long to parse."""
    [table] = (
        table
        for table in shipped_tables().that_mention(family)
        if family in table.model_types
        if table.convention == "paddleformers" and table.version is None and not table.recipe
    )
    return table


def differences(build: facts.Build, table: RuleTable | None = None) -> Iterator[str]:
    """What the table says of a rank's tensors, where that is not what its class has built."""
    table, config = table or table_of(build), build.saved or {}
    tp, pp, ep = (2 if build.topology in topologies else 1 for topologies in (TP, PP, EP))
    if refused := table.unsupported_option(config, stages_known=True):
        yield str(refused)
        return
    tensors = []
    held = {entry.key: entry for entry in build.entries or ()}
    for key, entry in held.items():
        try:
            rule, layer = table.find(key, config)
            shape = expected_shape(rule, config, key)
            axis = table.expert_axis if rule.of_expert_rank and ep > 1 else None
            cut = cut_of(rule, config, key, tp, axis, ep)
            whole = cut.global_shape(key, tuple(entry.shape))
        except RuleError as error:
            yield str(error)
            continue
        if shape is not None and shape != whole:
            yield f"{key}: {shape}, but {whole} where the class has {entry.shape}"
        distributed = rule.marked_distributed(tp > 1 and cut.dim is not None, ep, of_rank=axis == "ep")
        if (tp > 1 or ep > 1) and distributed != entry.is_distributed:
            yield f"{key}: distributed {distributed}, but {entry.is_distributed}"
        if tp > 1 and entry.split_axis is not None and entry.split_axis != cut.dim:
            yield f"{key}: cut along {cut.dim}, but {entry.split_axis}"
        twin = None if rule.is_own(pp) else rule.twin(config, key)
        tied_to = twin if twin in held else None
        if tied_to != entry.same_as:
            yield f"{key}: tied to {tied_to}, but {entry.same_as}"
        tensors.append(ModelTensor(key, rule, layer, whole, dtype_named("bfloat16"), (), False, tied_to))
    if len(tensors) < len(held):
        return
    for tensor in tensors:
        form, swapped = tensor.rule.huggingface, build.saves_transposed(tensor.key, tensor.global_shape)
        if form is not None and len(tensor.global_shape) == 2 and form.transposed_as_saved != swapped:
            yield f"{tensor.key}: transposed by save_to_hf: {form.transposed_as_saved}, but {swapped}"
    yield from _differences_of_names(build, table, tensors)


def _differences_of_names(
    build: facts.Build, table: RuleTable, tensors: Iterable[ModelTensor]
) -> Iterator[str]:
    held, config = {entry.key: entry for entry in build.entries or ()}, build.saved or {}
    tp, pp, ep = (2 if build.topology in topologies else 1 for topologies in (TP, PP, EP))
    ordered = sorted(tensors, key=model_order(table))
    model = Model(tuple(order_routers(ordered, unified=False)), table, config)
    built = model.as_built(pp)
    if pp == 1 and [tensor.key for tensor in built] != list(held):
        yield f"order {[t.key for t in built]}, but {list(held)}"
    names = predict_parameter_names(built, config, pp, tp, build.topology in SEQUENCE_PARALLEL, ep)
    for key, entry in held.items():
        if entry.is_parameter and names[key] != entry.name:
            yield f"{key}: named {names[key]}, but {entry.name}"


def _sampled() -> list[object]:
    """Every variant; those that only make a number another are for `make exhaustive`."""
    resized = {
        variant
        for variant, builds in variants().items()
        if any(
            isinstance(value, (int, list)) and not isinstance(value, bool)
            for value in builds[0].config.values()
        )
    }
    return [exhaustive(variant) if variant in resized - LISTED.keys() else variant for variant in variants()]


@pytest.mark.parametrize("variant", _sampled())
def test_a_table_says_what_its_class_builds(variant: str) -> None:
    found = [
        f"{build.topology}, rank {build.rank}: {difference}"
        for build in variants()[variant]
        for difference in differences(build)
    ]
    if variant in LISTED:
        assert any(LISTED[variant] in difference for difference in found), found[:5]
    else:
        assert not found, found[:5]


def test_no_family_has_a_flexcheckpoint_of_stacked_experts() -> None:
    """In the trainer of PaddleFormers 1.2 each of the five stops as it saves one, and as it resumes from one."""
    stacked = {
        b.family: b for b in facts.builds() if b.topology == "tp1" and b.config == {"fd_fallback": True}
    }
    assert len(stacked) == 5
    for build in stacked.values():
        with pytest.raises(
            RuleError, match="neither saves the states of stacked experts in a FlexCheckpoint"
        ):
            table_of(build).check_format("flex", build.saved or {})


WRAPPED = {
    f"{build.family} {build.topology} {build.rank}": build
    for variant, builds in variants().items()
    for build in builds
    if "lora" in build.config and variant not in LISTED
}
"""The builds with adapters."""


@pytest.mark.parametrize("name", WRAPPED)
def test_adapters_alone_are_trained_and_multiply_to_the_shape_of_their_weight(name: str) -> None:
    build = WRAPPED[name]
    table, config, rank = table_of(build), build.saved or {}, build.config["lora"]["r"]
    held = {entry.key: entry for entry in build.entries or ()}

    def whole(key: str) -> tuple[int, ...]:
        cut = cut_of(table.find(key, config)[0], config, key, 2 if build.topology in TP else 1, None, 1)
        return cut.global_shape(key, tuple(held[key].shape))

    modules = {key.removesuffix(".lora_A") for key in held if key.endswith(".lora_A")}
    assert {key for key, entry in held.items() if entry.trainable} == {
        f"{module}.{matrix}" for module in modules for matrix in LORA
    }
    for module in modules:
        shapes = [whole(f"{module}.{part}") for part in ("weight", *LORA)]
        assert shapes == [shapes[0], (shapes[0][0], rank), (rank, shapes[0][1])], module
