"""PaddleFleet's names and layouts, and the way to them and back with optimizer and average.

No checkpoint that PaddleFleet wrote was available. What is known are the statements by which its model classes say how
a Hugging Face checkpoint becomes their model (``fleet/declared.json``, the output of the classes of PaddleFormers 1.2.0
for the configs of the real checkpoints here). Paddle's own engine executes them; what it makes of the truth of a real
training is what the conversions have to hold.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CoverageError, RuleError, UnsupportedError, UsageError
from paddle_reshard.pipeline.formats.flex.boxes import Box, describe_boxes
from paddle_reshard.pipeline.formats.flex.checkpoint import SHAPES, with_two_dims
from tests import facts, oracle
from tests.aoa.arrays import SUFFIXES, Arrays, Engine, paddle, random_array
from tests.golden.test_newer_checkpoints import checkpoint, truth_of
from tests.golden.unified_cases import write_safetensors
from tests.lab import fleet

DECLARED = json.loads(fleet.DECLARED.read_text())
CASES = {
    "families/qwen2_single": "qwen2", "families/qwen3_single": "qwen3", "moe/qwen2moe_single": "qwen2_moe",
    "moe/ep2_sh2_s1v2_meta_ema": "qwen3_moe", "moe/glm4moe_single": "glm4_moe",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- the oracle


def statements(program: list[str]) -> dict[str, Any]:
    """Without the casts: what is moved here keeps its bits. With the norms as their attributes are called."""
    spelled = [re.sub(r", ?(src_|dst_)?dtype='\w+'", "", statement) for statement in program]
    return {"aoa_statements": [re.sub(r"\b([qk])_layernorm\.", r"\1_norm.", one) for one in spelled]}


def through(family: str, variant: str, arrays: Arrays) -> dict[str, np.ndarray]:
    """What Paddle's engine makes of the arrays of PaddleFormers' own class, by the statements of both classes."""
    own = Engine(statements(facts.declared(family, inverse=True)), arrays)
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
    with pytest.raises(RuleError, match=r"flex and huggingface only, not for hybrid: .*--conv"):
        paddle_reshard.convert(fleet_checkpoints(QWEN3), tmp_path / "x", to="tp=2")
    with pytest.raises(RuleError, match="flex and huggingface only, not for unified"):
        paddle_reshard.convert(checkpoint(QWEN3), tmp_path / "x", format="unified", convention="paddlefleet")


def test_a_family_whose_class_only_moved_keeps_its_names(tmp_path: Path) -> None:
    """PaddleFleet's llama and deepseek_v3 declare what PaddleFormers' do; its trainer is another."""
    case = "states/dsv3_mtp_small_single"
    paddle_reshard.convert(checkpoint(case), tmp_path / "x", format="flex", convention="paddlefleet")
    assert_same(read_flex(tmp_path / "x"), own_truth(case))
    assert trainer_state(tmp_path / "x") == ("paddlefleet", trainer_state(checkpoint(case))[1])


def test_a_family_without_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"no paddlefleet rule table for ernie4_5 \(known: deepseek_v32, "):
        paddle_reshard.convert(
            checkpoint("families/ernie4_5_single"), tmp_path / "x", format="flex", convention="paddlefleet"
        )


def test_layers_behind_empty_ones_are_numbered_as_the_statements_do(tmp_path: Path) -> None:
    """Those of PaddleFormers 1.2, whose jobs PaddleFleet 0.3 trains; read again they have the model's numbers."""
    case = GLM
    config = with_entries(checkpoint(case), tmp_path, num_empty_layers_add_in_head=2)
    options = {"format": "flex", "convention": "paddlefleet"}
    paddle_reshard.convert(checkpoint(case), tmp_path / "pushed", config=config, **options)
    paddle_reshard.convert(checkpoint(case), tmp_path / "export", format="huggingface")
    program = statements(DECLARED["families"]["glm4_moe"]["shifted"])
    declared = {key for key, _ in Engine(program, with_mtp(exported(tmp_path / "export"))).parameters()}
    found = read_flex(tmp_path / "pushed")
    held = {key for key in found if key.endswith((".weight", "correction_bias"))}
    assert held == {key for key in declared if ".layers.5." not in key}
    wanted = {pushed(key): array for key, array in declared_truth(case, "plain").items()}
    assert_same(found, wanted)
    paddle_reshard.convert(
        tmp_path / "pushed", tmp_path / "back", format="flex", convention="paddleformers", config=config
    )
    assert_same(read_flex(tmp_path / "back"), own_truth(case))


def pushed(key: str) -> str:
    """A key behind two empty layers."""
    return re.sub(r"layers\.(\d+)\.", lambda match: f"layers.{int(match[1]) + 2}.", key)


def test_layers_behind_empty_ones_are_not_numbered_for_an_unknown_version(tmp_path: Path) -> None:
    entries = json.loads((checkpoint(GLM) / "config.json").read_text())
    entries["paddlefleet_version"] = entries.pop("paddleformers_version")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**entries, "num_empty_layers_add_in_head": 2}))
    options = {"format": "flex", "convention": "paddlefleet", "config": config}
    with pytest.raises(RuleError, match=r"num_empty_layers_add_in_head=2: .* set the entry to 0 in it"):
        paddle_reshard.convert(checkpoint(GLM), tmp_path / "x", **options)


def test_two_ways_to_rename_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "rules.txt").write_text("a -> b")
    with pytest.raises(UsageError, match="--convention paddlefleet and --aoa would both"):
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


def exported(folder: Path) -> Arrays:
    """The tensors of a Hugging Face checkpoint."""
    found: Arrays = {}
    for key, tensor in safetensors.deserialize((folder / "model.safetensors").read_bytes()):
        dtype = {"BF16": "uint16", "F32": "float32"}[tensor["dtype"]]
        array = np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])
        found[key, "param"] = array, "bfloat16" if dtype == "uint16" else dtype
    return found


def with_mtp(arrays: Arrays) -> Arrays:
    """The same with a layer of multi-token prediction behind layer 2, as GLM-4.5 has it."""
    rng, hidden = np.random.default_rng(5), 64
    found = dict(arrays)
    for (key, state), (array, dtype) in arrays.items():
        if key.startswith("model.layers.2."):
            found[key.replace("layers.2.", "layers.3."), state] = rng.permutation(array), dtype
    for name, shape in {
        "eh_proj.weight": (hidden, 2 * hidden),
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "shared_head.norm.weight": (hidden,),
    }.items():
        found[f"model.layers.3.{name}", "param"] = random_array(shape, "bfloat16", rng), "bfloat16"
    return found


def save_exported(folder: Path, arrays: Arrays, config: dict[str, Any]) -> None:
    folder.mkdir()
    tensors = {
        key: ("BF16" if dtype == "bfloat16" else "F32", array.shape, np.ascontiguousarray(array).tobytes())
        for (key, _), (array, dtype) in arrays.items()
    }
    write_safetensors(folder / "model.safetensors", tensors)
    config = {name: value for name, value in config.items() if name != "paddleformers_version"}
    (folder / "config.json").write_text(json.dumps(config))


STARTS = {
    (QWEN3, "plain"): {},
    (QWEN3, "tied"): {"tie_word_embeddings": True},
    (GLM, "mtp"): {"num_nextn_predict_layers": 1},
    (GLM, "mtp_grouped"): {"num_nextn_predict_layers": 1, "moe_expert_fusion": True},
}


@pytest.mark.parametrize(("case", "variant"), STARTS)
def test_from_hugging_face_and_back(case: str, variant: str, tmp_path: Path) -> None:
    """Also what no real checkpoint here has: tied words, and PaddleFleet's multi-token prediction."""
    paddle_reshard.convert(checkpoint(case), tmp_path / "export", format="huggingface")
    arrays = exported(tmp_path / "export")
    arrays = with_mtp(arrays) if "mtp" in variant else arrays
    if variant == "tied":
        del arrays["lm_head.weight", "param"]
    config = json.loads((checkpoint(case) / "config.json").read_text()) | STARTS[case, variant]
    save_exported(tmp_path / "hf", arrays, config)
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "fleet", format="flex", convention="paddlefleet")
    declared = Engine(statements(DECLARED["families"][CASES[case]][variant]), arrays).parameters()
    wanted = {key: array for (key, _), (array, _) in declared.items()}
    if variant == "tied":
        wanted["model.shared_head.weight"] = wanted["model.lm_head.weight"]
    assert_same(read_flex(tmp_path / "fleet"), wanted)
    paddle_reshard.convert(tmp_path / "fleet", tmp_path / "back", format="huggingface")
    back = exported(tmp_path / "back")
    assert back.keys() == arrays.keys()
    assert all(back[name][0].tobytes() == array.tobytes() for name, (array, _) in arrays.items())
    if "mtp" in variant:
        paddle_reshard.convert(tmp_path / "fleet", tmp_path / "less", format="huggingface", drop=["mtp"])
        assert exported(tmp_path / "less").keys() == exported(tmp_path / "export").keys()


# ------------------------------------------------------------------------------------- what other versions write


def resaved(
    source: Path, folder: Path, renamed: Callable[[str], str], shape_of: Callable[[str], Any]
) -> Path:
    """A FlexCheckpoint with other keys, or other shapes of the same values, written by Paddle."""
    shutil.copytree(source, folder, copy_function=shutil.copyfile)
    (folder / "paddle_reshard.json").unlink()
    for path in folder.glob("*/*.distcp"):
        held = oracle.load_with_paddle(path)
        table = held.pop(oracle.NAME_TABLE)
        arrays = {
            renamed(key): np.asarray(a).reshape(shape_of(f"{path.parent.name}/{key}") or a.shape)
            for key, a in held.items()
        }
        paddle.save(
            arrays | {oracle.NAME_TABLE: {renamed(key): name for key, name in table.items()}}, str(path)
        )
    for path in folder.glob("*/*.metadata"):
        said = paddle.load(str(path))
        described = {}
        for key, (piece,) in said.state_dict_metadata.items():
            if (shape := shape_of(f"{path.parent.name}/{key}")) is not None:
                changed = {"global_offset": (0,) * len(shape), "local_shape": shape, "global_shape": shape}
                piece = dataclasses.replace(piece, **changed)
            described[renamed(key)] = [piece]
        said.state_dict_metadata = described
        storage = {}
        for index, file in said.storage_metadata.items():
            (piece,) = described[renamed(index.tensor_key)]
            changes = {"tensor_key": renamed(index.tensor_key), "global_offset": piece.global_offset}
            if index.local_shape is not None:
                changes["local_shape"] = piece.local_shape
            storage[dataclasses.replace(index, **changes)] = file
        said.storage_metadata = storage
        said.flat_mapping = {renamed(key): (renamed(key),) for key in said.flat_mapping or {}}
        paddle.save(said, str(path))
    return folder


def test_grouped_experts_of_three_dims(fleet_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    """As later versions of PaddleFleet save parameters, and not states."""

    def shape_of(place: str) -> tuple[int, ...] | None:
        sizes = {"weight1": (4, 64, 64), "weight2": (4, 32, 64)}
        return sizes.get(place.rpartition(".")[2]) if place.startswith("model_state/") else None

    made = fleet_checkpoints(GLM, "grouped")
    shapes = {key: a.shape for key, a in read_flex(made).items() if key.endswith((".weight1", ".weight2"))}
    other = resaved(made, tmp_path / "three", lambda key: key, shape_of)
    assert read_flex(other)["model.layers.1.mlp.grouped_gemm_experts.weight1"].ndim == 3
    assert {shape for shape in shapes.values()} == {(256, 64), (128, 64)}
    paddle_reshard.convert(other, tmp_path / "back", format="flex", convention="paddleformers")
    assert_same(read_flex(tmp_path / "back"), own_truth(GLM))


def test_experts_as_sonic_moe_computes_with_them_are_refused(
    fleet_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    """Gate and up have other dims there, and two orders."""

    def shape_of(key: str) -> tuple[int, ...] | None:
        if "_pow_" in key:
            return None
        return (4 * 64, 64) if ".weight1" in key else (4, 64, 32) if ".weight2" in key else None

    other = resaved(fleet_checkpoints(GLM, "grouped"), tmp_path / "sonic", lambda key: key, shape_of)
    told = (
        r"weight2: stored as \(256, 32\), as SonicMoE computes .* not as \(128, 64\)\. .* save it as a Flex"
    )
    with pytest.raises(UnsupportedError, match=told):
        paddle_reshard.convert(other, tmp_path / "back", format="flex", convention="paddleformers")


def test_fused_buffers_of_fsdp_are_refused(fleet_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    def fused(key: str) -> str:
        return key.replace("model.norm.weight", "fuse_params_0")

    other = resaved(fleet_checkpoints(QWEN3), tmp_path / "fsdp", fused, lambda key: None)
    with pytest.raises(UnsupportedError, match=r"fuse_params_0\S* is a buffer into which FSDP .* another"):
        paddle_reshard.convert(other, tmp_path / "back", format="flex")


def test_norms_as_they_were_called(fleet_checkpoints: Callable[..., Path], tmp_path: Path) -> None:
    def before(key: str) -> str:
        return re.sub(r"\b([qk])_norm\.", r"\1_layernorm.", key)

    other = resaved(fleet_checkpoints(QWEN3), tmp_path / "before", before, lambda key: None)
    assert "model.layers.0.self_attn.q_layernorm.weight" in read_flex(other)
    paddle_reshard.convert(other, tmp_path / "back", format="flex", convention="paddleformers")
    assert_same(read_flex(tmp_path / "back"), own_truth(QWEN3))


def test_pieces_of_whole_experts_are_boxes_of_two_dims() -> None:
    """Expert parallelism distributes whole experts; a piece that cuts them is no box."""
    key, whole = "mlp.grouped_gemm_experts.weight1", (4, 8, 6)
    ranks = {Box(key, whole, (2 * rank, 0, 0), (2, 8, 6)): [f"{rank}_0.distcp"] for rank in range(2)}
    flat = Box("norm.weight", (8,), (0,), (8,))
    made = with_two_dims("0.metadata", describe_boxes({**ranks, flat: ["0_0.distcp"]}), {key})
    found = [tuple(made.shapes[number] for number in piece) for piece in made.pieces[list(SHAPES)].tolist()]
    assert found == [((0, 0), (16, 6), (32, 6)), ((16, 0), (16, 6), (32, 6)), ((0,), (8,), (8,))]
    cut = describe_boxes({Box(key, whole, (0, 0, 3), (4, 8, 3)): ["0_0.distcp"]})
    with pytest.raises(CoverageError, match=r"\(4, 8, 3\) at \(0, 0, 3\) of \(4, 8, 6\) cuts the 4 experts"):
        with_two_dims("0.metadata", cut, {key})


def test_hybrid_files_are_described_and_not_converted(
    fleet_checkpoints: Callable[..., Path], tmp_path: Path
) -> None:
    """PaddleFleet keeps its names there, and what it calls parameters nobody knows."""
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(checkpoint(QWEN3) / "config.json", source)
    parameters = oracle.load_with_paddle(fleet_checkpoints(QWEN3) / "model_state" / "0_0.distcp")
    parameters[oracle.NAME_TABLE] = {key: f"linear_{n}.w_0" for n, key in enumerate(parameters) if "." in key}
    paddle.save(parameters, str(source / "model_state.pdparams"))
    found = paddle_reshard.inspect(source)
    assert (found.convention, found.format, found.tensors) == ("paddlefleet", "hybrid-plain", ())
    assert {tensor.key for tensor in found.stored} == set(parameters) - {oracle.NAME_TABLE}
    with pytest.raises(RuleError, match="flex and huggingface only, not for hybrid"):
        paddle_reshard.convert(source, tmp_path / "x", format="huggingface")
