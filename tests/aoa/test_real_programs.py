"""The programs of PaddleFormers' own models: our catalogs hold the values that Paddle's engine says."""

import json
from pathlib import Path

import numpy as np
import pytest

from paddle_reshard.pipeline.aoa.apply import AoaOutcome, apply_aoa
from paddle_reshard.pipeline.aoa.language import AoaProgram, parse_aoa
from paddle_reshard.pipeline.core.catalog import check_catalog
from tests.aoa.arrays import Arrays, Engine, assert_same, cast, gather, stored, trained

PROGRAMS = Path(__file__).parent / "programs"
FAMILIES = sorted(path.stem for path in PROGRAMS.glob("*.json"))


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
        assert kind == wanted or (kind, wanted) in outcome.casts
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
    loaded = apply_aoa(catalog, program(case["forward"]), wanted=wanted, untied=wanted)
    engine = Engine(case["forward"], arrays, wanted)
    theirs = engine.parameters()
    assert_same(values(loaded, content), theirs | engine.states_of(theirs))
    assert {key for key, _ in theirs} == wanted.keys()
