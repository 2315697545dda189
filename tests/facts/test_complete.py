"""Complete is what the class has: of every model that a class builds, each tensor is required, and nothing else."""

import re
from collections.abc import Collection, Iterable
from dataclasses import replace

import pytest

from paddle_reshard.pipeline.core.errors import CoverageError, ReshardError
from paddle_reshard.pipeline.core.tensors import PARAM, Tensor, dtype_named
from paddle_reshard.pipeline.model.completeness import completed
from paddle_reshard.pipeline.model.model import Model, read_model
from paddle_reshard.pipeline.model.rules.choose import choose_table
from paddle_reshard.pipeline.model.rules.rule import expected_shape
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from tests import facts
from tests.facts.test_tables import BASE
from tests.sampling import exhaustive

LISTED = {
    "{'num_nextn_predict_layers': 2} ernie4_5_moe": "the table has no rows for its experts",
    "{'num_nextn_predict_layers': 3} ernie4_5_moe": "the table has no rows for its experts",
}
"""What the tables cannot say of a class yet → why. Such models are refused."""
UNSAID = "{'moe_use_aux_free': False} ernie4_5_moe"
"""A complete model whose config.json lacks the entry that decides: refused until somebody says it."""
UNUSED = "{'q_lora_rank': None} deepseek_v3"
"""The class builds a norm that computes nothing; published models, and conversions of them, lack it: not missed."""
BUILDS = {
    f"{build.config} {build.family}" if build.topology == "tp1" else build.topology: build
    for build in facts.builds()
    if build.entries and build.rank == 0 and "Pipe" not in (build.kind or "")
    if build.topology == "tp1" or build.topology.endswith("single") or build.topology.endswith("single_tied")
    if build.config.get("head") != BASE
    if build.config.get("num_hidden_layers") != 0  # no layer tells what layers have
    if build.config.get("intermediate_size") != 0  # nothing is in the tensors of dense layers
    if f"{build.config} {build.family}" != UNSAID
    if "lora" not in build.config  # which layers have adapters is each job's choice
}


DIFFERENT = sorted(
    {
        tuple(entry.key for entry in build.entries or ()): name
        for name, build in BUILDS.items()
        if name not in LISTED and 0 not in build.config.values()  # the tables take what is empty for left out
    }.values()
)
"""One build of each set of keys."""


def _model(build: facts.Build) -> Model:
    """The model whose files hold what the class has; shapes are those of the table."""
    config = build.saved or {}
    keys = [entry.key for entry in build.entries or []]
    table = choose_table(
        shipped_tables("paddleformers"), dict.fromkeys(keys), config, "hybrid", stages_known=True
    )
    shapes = {key: expected_shape(table.find(key, config)[0], config, key) for key in keys}
    tensors = [Tensor(key, PARAM, dtype_named("bfloat16"), shapes[key] or (1,)) for key in keys]
    return read_model(tensors, table, config)


def _without(model: Model, keys: Collection[str]) -> Model:
    return replace(model, tensors=tuple(t for t in model.tensors if t.key not in keys))


def _sampled(names: Iterable[str]) -> list[object]:
    """Every build; those that only make a number another, but not 0, are for `make exhaustive`."""
    return [
        exhaustive(name)
        if any(type(value) is int and value for value in BUILDS[name].config.values())
        else name
        for name in names
    ]


@pytest.mark.parametrize("name", _sampled(sorted(BUILDS.keys() - LISTED.keys())))
def test_a_model_as_its_class_builds_it_is_complete(name: str) -> None:
    model = _model(BUILDS[name])

    assert {t.key for t in completed(model).tensors} == {e.key for e in BUILDS[name].entries or []}


@pytest.mark.parametrize("name", sorted(LISTED))
def test_what_the_tables_cannot_say_is_refused(name: str) -> None:
    with pytest.raises(ReshardError):
        completed(_model(BUILDS[name]))


@pytest.mark.parametrize("name", _sampled(DIFFERENT))
def test_every_tensor_and_every_class_of_tensors_is_required(name: str) -> None:
    model = _model(BUILDS[name])
    aliases = {t.key for t in model.tensors if t.is_alias}
    classes: dict[str, set[str]] = {}
    for tensor in model.tensors:
        classes.setdefault(tensor.rule.key, set()).add(tensor.key)

    each = [{t.key} for t in model.tensors if {t.key} != classes[t.rule.key]]
    for taken in (keys for keys in [*classes.values(), *each] if not keys <= aliases):
        if name == UNUSED and all("q_a_layernorm" in key for key in taken):
            assert len(completed(_without(model, taken)).tensors) == len(model.tensors) - len(taken)
            continue
        with pytest.raises(CoverageError, match=re.escape(f"{sorted(taken)[0]}: no file holds it")):
            completed(_without(model, taken))
        if taken in classes.values():
            whole = completed(_without(model, taken), taken.__contains__)
            assert {t.key for t in whole.tensors if t.missing} == taken
            assert [t.key for t in whole.tensors] == [t.key for t in model.tensors]


def test_what_the_config_decides_is_said_with_the_refusal() -> None:
    [unsaid] = [b for b in facts.builds() if f"{b.config} {b.family}" == UNSAID and b.topology == "tp1"]
    with pytest.raises(CoverageError, match=r"\(config\.json does not say moe_use_aux_free false\)"):
        completed(_model(unsaid))
    said = _model(unsaid._replace(saved={**(unsaid.saved or {}), "moe_use_aux_free": False}))
    assert len(completed(said).tensors) == len(unsaid.entries or ())

    for name, part, words in (
        ("{'attention_bias': True} llama", "o_proj.bias", "says attention_bias true"),
        (
            "{'num_nextn_predict_layers': 1} deepseek_v3",
            "3.eh_proj.weight",
            "says num_nextn_predict_layers 1",
        ),
        ("{} deepseek_v3", "q_a_proj.weight", r"says q_lora_rank \d+"),
        ("{} qwen3_moe", "experts.1.down_proj.weight", r"says num_local_experts \d+"),
        ("{} glm4_moe", "shared_experts.down_proj.weight", r"[^)]*says n_shared_experts \d+"),
    ):
        model = _model(BUILDS[name])
        taken = {tensor.key for tensor in model.tensors if tensor.key.endswith(part)}
        with pytest.raises(CoverageError, match=rf"\(config\.json {words}"):
            completed(_without(model, taken))
