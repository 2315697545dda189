"""PaddleFleet's names and layouts, and the way to them and back with optimizer and average.

No checkpoint that PaddleFleet wrote was available. What is known are the statements by which its model classes say how
a Hugging Face checkpoint becomes their model (``fleet/declared.json``, the output of the classes of PaddleFormers 1.2.0
for the configs of the real checkpoints here). Paddle's own engine executes them; what it makes of the truth of a real
training is what the conversions have to hold.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import RuleError, UsageError
from tests import oracle
from tests.aoa.arrays import SUFFIXES, Arrays, Engine
from tests.golden.test_newer_checkpoints import checkpoint, truth_of
from tests.lab import fleet

DECLARED = json.loads(fleet.DECLARED.read_text())
CASES = {
    "families/qwen2_single": "qwen2",
    "families/qwen3_single": "qwen3",
    "moe/qwen2moe_single": "qwen2_moe",
    "moe/ep2_sh2_s1v2_meta_ema": "qwen3_moe",
    "moe/glm4moe_single": "glm4_moe",
}


def test_the_tables_follow_from_what_the_classes_declare() -> None:
    for path, text in fleet.tables().items():
        assert path.read_text() == text, path.name


# ------------------------------------------------------------------------------------------------- the oracle


def statements(program: list[str]) -> dict[str, Any]:
    """Without the casts: what is moved here keeps its bits. With the norms as their attributes are called."""
    spelled = [re.sub(r", dtype='\w+'", "", statement) for statement in program]
    return {"aoa_statements": [re.sub(r"\b([qk])_layernorm\.", r"\1_norm.", one) for one in spelled]}


def through(family: str, variant: str, arrays: Arrays) -> dict[str, np.ndarray]:
    """What Paddle's engine makes of the arrays of PaddleFormers' own class, by the statements of both classes."""
    own = Engine(statements(DECLARED["eager"][family]), arrays)
    exported = own.parameters() | own.states_of(own.parameters())
    model = Engine(statements(DECLARED["families"][family][variant]), exported)
    made = model.parameters() | model.states_of(model.parameters())
    return {key + SUFFIXES[state]: array for (key, state), (array, _) in made.items()}


@cache
def declared_truth(case: str, variant: str) -> dict[str, np.ndarray]:
    """Key in a FlexCheckpoint of PaddleFleet → what it must hold; averages with ``ema_state/`` before it."""
    arrays, averages = {}, {}
    states = {suffix[1:]: state for state, suffix in SUFFIXES.items() if suffix}
    for key, array in truth_of(case).items():
        name, _, last = key.rpartition(".")
        dtype = "bfloat16" if array.dtype == np.uint16 else array.dtype.name
        if last in ("ema", "ema_w_0"):
            averages[name] = array, last == "ema_w_0"
        else:
            arrays[(name, states[last]) if last in states else (key, "param")] = np.array(array), dtype
    made = through(CASES[case], variant, arrays)
    for of_master in (True, False):
        some = {
            (key, "param"): (np.array(a), "float32")
            for key, (a, master) in averages.items()
            if master == of_master
        }
        others = {
            (key, "param"): (np.zeros_like(a), "float32")
            for key, (a, master) in averages.items()
            if master != of_master
        }
        if some:
            found = through(CASES[case], variant, some | others)
            made |= {
                f"ema_state/{key}{'.w_0' * of_master}": a
                for key, a in found.items()
                if of_master == (f"{key}.w_0" in made)
            }
    return made


def read_flex(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a FlexCheckpoint with whole tensors, by Paddle's own loader."""
    found: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*/*.distcp")):
        loaded = oracle.load_with_paddle(path)
        loaded.pop(oracle.NAME_TABLE)
        before = "ema_state/" if path.parent.name == "ema_state" else ""
        found |= {before + key: np.asarray(array) for key, array in loaded.items()}
    return found


def with_entries(source: Path, folder: Path, **entries: Any) -> Path:
    """The ``config.json`` of a checkpoint with further entries."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads((source / "config.json").read_text()) | entries))
    return path


def own_truth(case: str) -> dict[str, np.ndarray]:
    """The same of PaddleFormers' own class."""
    truth = truth_of(case)
    found = {key: array for key, array in truth.items() if key.rpartition(".")[2] not in ("ema", "ema_w_0")}
    for key, array in truth.items():
        name, _, last = key.rpartition(".")
        if last == "ema_w_0":
            found[f"ema_state/{name}.w_0"] = array
        if last == "ema" and f"{name}.w_0" not in truth:
            found[f"ema_state/{name}"] = array
    return found


def trainer_state(folder: Path) -> tuple[str, dict[str, Any]]:
    """The library whose class a trainer's state is pickled of, and its fields."""
    named = []

    class AnyState(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> type:
            named.append((module, name))
            return type(name, (), {})

    with (folder / "trainer_state.bin").open("rb") as file:
        state = AnyState(file).load()
    ((module, name),) = named
    assert (module.partition(".")[2], name) == ("trainer.trainer_callback", "TrainerState")
    return module.partition(".")[0], vars(state)


def assert_same(held: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert sorted(held) == sorted(wanted)
    for key, array in wanted.items():
        assert (held[key].shape, held[key].tobytes()) == (array.shape, array.tobytes()), key


# --------------------------------------------------------------------------------------------- there and back

WAYS = [
    (case, variant)
    for case, family in CASES.items()
    for variant in ("plain", "grouped")
    if variant in DECLARED["families"][family]
]


@pytest.fixture(scope="module")
def fleet_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """A real checkpoint of PaddleFormers as one of PaddleFleet."""

    @cache
    def of_case(case: str, variant: str = "plain") -> Path:
        folder = tmp_path_factory.mktemp("fleet")
        config = with_entries(checkpoint(case), folder, moe_expert_fusion=variant == "grouped")
        target = folder / "checkpoint-3"
        options = {"format": "flex", "convention": "paddlefleet", "config": config}
        paddle_reshard.convert(checkpoint(case), target, **options)
        return target

    return of_case


@pytest.mark.parametrize(("case", "variant"), WAYS)
def test_every_tensor_is_what_the_declarations_make_of_the_truth(
    case: str, variant: str, fleet_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    made = fleet_checkpoints(case, variant)
    assert_same(read_flex(made), declared_truth(case, variant))
    found = paddle_reshard.inspect(made)
    assert (found.convention, found.family) == ("paddlefleet", CASES[case])
    paddle_reshard.convert(made, tmp_path / "back", format="flex", convention="paddleformers")
    assert trainer_state(made) == ("paddlefleet", trainer_state(checkpoint(case))[1])
    assert trainer_state(tmp_path / "back") == trainer_state(checkpoint(case))
    assert_same(read_flex(tmp_path / "back"), own_truth(case))


# ------------------------------------------------------------------------------------------------ what is refused

QWEN3, GLM = "families/qwen3_single", "moe/glm4moe_single"


def test_other_formats_are_refused(fleet_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(
        RuleError, match=r"known for the formats flex and huggingface only, not for hybrid: .*--conv"
    ):
        paddle_reshard.convert(fleet_checkpoints(QWEN3), tmp_path / "x", to="tp=2")
    with pytest.raises(RuleError, match="flex and huggingface only, not for unified"):
        paddle_reshard.convert(checkpoint(QWEN3), tmp_path / "x", format="unified", convention="paddlefleet")


def test_a_family_without_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RuleError, match=r"what paddlefleet calls the tensors of ernie4_5 \(known: glm4_moe, "
    ):
        paddle_reshard.convert(
            checkpoint("families/ernie4_5_single"), tmp_path / "x", format="flex", convention="paddlefleet"
        )


def test_layers_behind_empty_ones_have_two_numberings(tmp_path: Path) -> None:
    config = with_entries(checkpoint(GLM), tmp_path, num_empty_layers_add_in_head=2)
    options = {"format": "flex", "convention": "paddlefleet", "config": config}
    with pytest.raises(RuleError, match=r"num_empty_layers_add_in_head=2: .* set the entry to 0 in a copy"):
        paddle_reshard.convert(checkpoint(GLM), tmp_path / "x", **options)


def test_two_ways_to_rename_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "rules.txt").write_text("a -> b")
    with pytest.raises(UsageError, match="--convention and --aoa both"):
        paddle_reshard.plan(
            checkpoint(QWEN3), format="flex", convention="paddlefleet", aoa=tmp_path / "rules.txt"
        )
    with pytest.raises(UsageError, match="unknown convention 'fleet'"):
        paddle_reshard.plan(checkpoint(QWEN3), format="flex", convention="fleet")


# --------------------------------------------------------------------------------------------- other libraries


NLP = {"qwen2": "small-families/nlp_qwen2_mp2pp2sh2_s1v2_meta", "qwen2_moe": "moe/nlp_qwen2moe_single"}


def as_exported(truth: oracle.Tensors, family: str) -> Arrays:
    """PaddleNLP's tensors as those of a Hugging Face checkpoint: the same names, and linear layers turned."""
    states = {suffix[1:]: state for state, suffix in SUFFIXES.items() if suffix}
    found: Arrays = {}
    for key, array in truth.items():
        name, _, last = key.rpartition(".")
        key, state = (name, states[last]) if last in states else (key, "param")
        values = np.array(array)
        if values.ndim == 2 and "embed_tokens" not in key:
            values = np.ascontiguousarray(values.T)
        dtype = "bfloat16" if array.dtype == np.uint16 else array.dtype.name
        found[re.sub(f"^{family}\\.", "model.", key), state] = values, dtype
    return found


@pytest.mark.parametrize("family", NLP)
def test_from_paddlenlp_and_back(family: str, tmp_path: Path) -> None:
    source, truth = checkpoint(NLP[family]), truth_of(NLP[family])
    paddle_reshard.convert(source, tmp_path / "fleet", format="flex", convention="paddlefleet")
    model = Engine(statements(DECLARED["families"][family]["plain"]), as_exported(truth, family))
    made = model.parameters() | model.states_of(model.parameters())
    assert_same(
        read_flex(tmp_path / "fleet"),
        {key + SUFFIXES[state]: array for (key, state), (array, _) in made.items()},
    )
    assert "paddlenlp_version" not in json.loads((tmp_path / "fleet" / "config.json").read_text())
    paddle_reshard.convert(tmp_path / "fleet", tmp_path / "back", to="tp=1", convention="paddlenlp")
    states = [
        json.loads((folder / "trainer_state.json").read_text()) for folder in (source, tmp_path / "back")
    ]
    assert states[0] == states[1]
    oracle.assert_same_tensors(oracle.read_checkpoint(tmp_path / "back", oracle.shapes_of(truth)), truth)
