"""The programs of PaddleFormers' own models: our catalogs hold the values that Paddle's engine says."""

import json
from pathlib import Path

import numpy as np
import pytest

from paddle_reshard.pipeline.changes.aoa.apply import AoaOutcome, apply_aoa
from paddle_reshard.pipeline.changes.aoa.language import AoaProgram, parse_aoa
from paddle_reshard.pipeline.core.catalog import check_catalog
from paddle_reshard.pipeline.core.errors import UsageError
from tests.aoa.arrays import Arrays, Engine, assert_same, cast, gather, stored, trained

PROGRAMS = Path(__file__).parent / "programs"
WRONG = {
    "deepseek_v32": r"placeholders take numbers .*\$EXPERT_ID\.gate_proj\.weight\^T",
    "glm_moe_dsa": r"placeholders take numbers .*\$EXPERT_ID\.gate_proj\.weight\^T",
    "deepseek_v4": r"expected ',' or the end, found 'model\.layers\.1\.mlp_hyper_connection\.bias'",
}
"""Family → what is wrong with its inverse map. Paddle's engine goes on: experts stay transposed, or under names that
nothing reads, and two statements without a comma between them are one."""
FAMILIES = sorted(path.stem for path in PROGRAMS.glob("*.json") if path.stem not in WRONG)


def load(family: str) -> dict:
    return json.loads((PROGRAMS / f"{family}.json").read_text())


def program(config: dict) -> AoaProgram:
    return parse_aoa(json.dumps(config), "rules.json")


def values(outcome: AoaOutcome, content: bytes) -> Arrays:
    """What comes out, with the casts done."""
    check_catalog(outcome.catalog)
    index = outcome.catalog.index()
    found = {}
    for name, (array, kind) in gather(outcome.catalog, content).items():
        wanted = outcome.catalog.tensors[index[name]].dtype.name
        assert kind == wanted or (kind, wanted) in outcome.catalog.casts()
        found[name] = cast(array, kind, wanted), wanted
    return found


TIED = {"model.embed_tokens.weight": ("lm_head.weight",)}


@pytest.mark.parametrize("family", FAMILIES)
def test_out_and_back(family: str) -> None:
    """What the trainer does on ``save_to_hf``, and then on loading that, with all optimizer states."""
    case, rng = load(family), np.random.default_rng(7)
    tied = TIED if family in ("llama_tied", "qwen2_tied") else {}
    arrays = trained(
        {key: kind for key, kind in case["model"].items() if not tied or key != "lm_head.weight"}, rng
    )

    catalog, content = stored(arrays, rng, tied)
    exported = apply_aoa(catalog, program(case["inverse"]))
    engine = Engine(case["inverse"], arrays)
    theirs = engine.parameters()
    assert_same(values(exported, content), theirs | engine.states_of(theirs))

    parameters = {
        key: (array.shape, dtype) for (key, state), (array, dtype) in theirs.items() if state == "param"
    }
    arrays, wanted = trained(parameters, rng), case["model"]
    catalog, content = stored(arrays, rng)
    loaded = apply_aoa(catalog, program(case["forward"]), untied=wanted)
    engine = Engine(case["forward"], arrays, wanted)
    theirs = engine.parameters()
    assert {key for key, _ in theirs} == wanted.keys()
    assert_same(values(loaded, content), theirs | engine.states_of(theirs))


@pytest.mark.parametrize("family", WRONG)
def test_an_inverse_map_that_loses_tensors_is_refused(family: str) -> None:
    case, rng = load(family), np.random.default_rng(7)
    catalog, _ = stored(trained(case["model"], rng, states=False), rng)
    with pytest.raises(UsageError, match=WRONG[family]):
        apply_aoa(catalog, program(case["inverse"]))
