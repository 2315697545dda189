"""Checkpoints of the pre-training recipe ``ernie_pretrain``: read bit for bit, and written as the recipe does.

Its ranks number their own experts from 0 on, so that two ranks have different experts under one key and one name.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError, PlanError, RuleError, UnsupportedError
from paddle_reshard.pipeline.layouts.rules.choose import choose_table
from paddle_reshard.pipeline.layouts.rules.tables import shipped_tables
from tests import oracle
from tests.conftest import case_directory, case_names
from tests.expert_oracle import read_expert_parallel
from tests.golden.compare_one_card import read_one_card
from tests.job_memory import differences, places_of

SINGLE, TP, PP = "ernie_dense_single", "ernie_dense_mp2", "ernie_dense_pp2"
SHARDED = "ernie_dense_sh2_s1v1_meta_ema"
DENSE: dict[str, dict[str, Any]] = {
    SINGLE: {"to": "tp=1"},
    TP: {"to": "tp=2", "layout": {"sequence_parallel": True}},
    PP: {"to": "pp=2"},
    SHARDED: {"to": "sharding=2", "sharding_strategy": "stage1v1"},
}
ONE_CARD = "ernie_single"
META, PLAIN, FLEX = "ernie_ep2_sh2_s1v2_meta", "ernie_ep2_plain_sh2_s1v2", "ernie_ep2_fc_sh2_s1v2"
STAGES = "ernie_ep2_pp2sh2_s1v2_meta"
EXPERTS: dict[str, dict[str, Any]] = {
    META: {"to": "sharding=2,ep=2", "sharding_strategy": "stage1v2"},
    PLAIN: {"to": "sharding=2,ep=2", "sharding_strategy": "stage1v2", "format": "hybrid-plain"},
    FLEX: {"format": "flex"},
}
FUSED_NORMS = ("ernie_ep2_sh2_s1v2_meta_ema_rms", "ernie_ep2_sh2_s1v2_meta_linres_rms")
MTP = "ernie_ep2_sh2_s1v2_meta_mtp_tie_rms"
STAGES_ASKED = {"to": "pp=2,sharding=2,ep=2", "sharding_strategy": "stage1v2"}
EXPERTS_IN_ALL = 4
MOE_SOURCES = (META, PLAIN, FLEX, STAGES, *FUSED_NORMS)


def _case(name: str) -> Path:
    return case_directory(f"recipes/{name}")


@cache
def _truth(name: str) -> oracle.Tensors:
    return oracle.read_truth(_case(name) / "truth.safetensors")


def _shapes(name: str) -> dict[str, oracle.Shape]:
    return {key: s for key, s in oracle.shapes_of(_truth(name)).items() if not key.endswith(".ema")}


def _config(name: str) -> Path | None:
    """The config beside a FlexCheckpoint, which has none."""
    beside = _case(name) / "config.json"
    return beside if beside.exists() else None


def _with_config(name: str, folder: Path, **entries: Any) -> Path:
    """A copy of a checkpoint with other entries in its config."""
    copy = folder / "source"
    shutil.copytree(_case(name) / "checkpoint-3", copy)
    path = copy / "config.json"
    path.chmod(0o644)
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return copy


def _assert_files_of(made: Path, target: str, source: str) -> None:
    real = _case(target) / "checkpoint-3"
    files = oracle.structure(real)
    if source != target:  # averages are of the source
        files = oracle.expected_structure(files, ema=source == SHARDED)
    oracle.assert_same_structure(oracle.structure(made), files)
    assert (made / "model_meta.json").exists() == (real / "model_meta.json").exists()
    if (real / "model_meta.json").exists():
        ours = oracle.ordered_json(made / "model_meta.json")
        assert ours == oracle.ordered_json(real / "model_meta.json")


def test_every_case_is_tested() -> None:
    named = [*DENSE, ONE_CARD, *EXPERTS, STAGES, *FUSED_NORMS, MTP]
    assert set(case_names("recipes")) == {f"recipes/{name}" for name in named}


# --- dense ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), list(itertools.product(DENSE, repeat=2)))
def test_dense_conversions_are_the_files_of_the_recipe(source: str, target: str, tmp_path: Path) -> None:
    """Of ``fuse_linear`` only the names of jobs without tp tell; in the corpus its job with tp went without."""
    given, made = _case(source) / "checkpoint-3", tmp_path / "made"
    if source == TP != target:
        given = _with_config(source, tmp_path, fuse_linear=True)
    paddle_reshard.convert(given, made, **DENSE[target])
    truth = _truth(source)
    assert list(differences(made, places_of(_case(target)), truth)) == []
    if target != TP:  # the reader does not know which tensors tp cuts part by part
        oracle.assert_same_tensors(oracle.read_checkpoint(made, oracle.shapes_of(truth)), truth)
    _assert_files_of(made, target, source)


@pytest.mark.parametrize("source", [SINGLE, TP])
def test_a_job_of_tensor_parallelism_alone_has_plain_linear_layers(source: str, tmp_path: Path) -> None:
    """``ColumnParallelLinear`` and ``RowParallelLinear`` count as ``linear``, whatever ``fuse_linear`` says."""
    paddle_reshard.convert(
        _case(source) / "checkpoint-3", tmp_path / "made", to="tp=2", layout={"sequence_parallel": False}
    )
    names = oracle.unpickle(tmp_path / "made/model_state.tp00.pdparams")["StructuredToParameterName@@"]
    assert names["ernie.layers.0.self_attn.qkv_proj.weight"] == "linear_0.w_0"


@pytest.mark.parametrize("strategy", ["stage1v1", "stage1v2"])
@pytest.mark.parametrize("degrees", ["sharding=2", "tp=2,pp=2,sharding=2"])
def test_dense_through_other_topologies_and_back(strategy: str, degrees: str, tmp_path: Path) -> None:
    between, back = tmp_path / "between", tmp_path / "back"
    paddle_reshard.convert(_case(SHARDED) / "checkpoint-3", between, to=degrees, sharding_strategy=strategy)
    paddle_reshard.convert(between, back, to="tp=1")
    truth = _truth(SHARDED)
    oracle.assert_same_tensors(oracle.read_checkpoint(back, oracle.shapes_of(truth)), truth)


@pytest.mark.parametrize(("heads", "shares"), [(2, (2, 1, 1)), (4, (1,)), (None, (1,))])
def test_only_grouped_heads_lie_part_by_part(heads: int | None, shares: tuple[int, ...]) -> None:
    """Without groups ``qkv_proj`` is ``[q k v]`` head by head, which tp cuts as a plain matrix."""
    key = "ernie.layers.0.self_attn.qkv_proj.weight"
    config = json.loads((_case(SINGLE) / "checkpoint-3/config.json").read_bytes())
    config["num_key_value_heads"] = heads
    rule, _ = choose_table(shipped_tables(), [key], config).find(key, config)
    assert rule.shares(config) == shares


# --- experts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", MOE_SOURCES)
def test_on_one_card_experts_have_their_numbers_in_the_model(source: str, tmp_path: Path) -> None:
    made = tmp_path / "made"
    paddle_reshard.convert(_case(source) / "checkpoint-3", made, to="tp=1", config=_config(source))
    assert read_one_card(made) == {key: array.tobytes() for key, array in _truth(source).items()}


def test_the_names_of_one_card_are_those_of_the_recipe(tmp_path: Path) -> None:
    """It has no states of the correction bias, so a job with sharding would cut its slices differently."""
    paddle_reshard.convert(_case(ONE_CARD) / "checkpoint-3", tmp_path / "made", to="tp=1")
    _assert_files_of(tmp_path / "made", ONE_CARD, ONE_CARD)
    with pytest.raises(
        UnsupportedError, match="e_score_correction_bias has no optimizer states in the source"
    ):
        paddle_reshard.convert(_case(ONE_CARD) / "checkpoint-3", tmp_path / "sharded", to="sharding=2,ep=2")
    assert not (tmp_path / "sharded").exists()


@pytest.mark.parametrize(("source", "target"), list(itertools.product(EXPERTS, repeat=2)))
def test_experts_are_numbered_and_named_by_each_rank(source: str, target: str, tmp_path: Path) -> None:
    made, truth = tmp_path / "made", _truth(source)
    paddle_reshard.convert(_case(source) / "checkpoint-3", made, config=_config(source), **EXPERTS[target])
    if target == FLEX:
        paddle_reshard.convert(made, tmp_path / "back", to="tp=1", config=_config(FLEX))
        found = oracle.read_checkpoint(tmp_path / "back", oracle.shapes_of(truth))
        oracle.assert_same_tensors(found, truth)
        return
    _assert_files_of(made, target, source)
    found = read_expert_parallel(made, oracle.shapes_of(truth), of_each=EXPERTS_IN_ALL // 2)
    oracle.assert_same_tensors(found, truth)


@pytest.mark.parametrize("case", FUSED_NORMS)
def test_fused_norms_are_named_as_by_the_recipe(case: str, tmp_path: Path) -> None:
    """The projections that they replace are built first and count in the names of others."""
    made, truth = tmp_path / "made", _truth(case)
    paddle_reshard.convert(_case(case) / "checkpoint-3", tmp_path / "stages", to="pp=3,sharding=4,ep=4")
    paddle_reshard.convert(tmp_path / "stages", made, **EXPERTS[META])
    _assert_files_of(made, case, case)
    found = read_expert_parallel(made, _shapes(case), of_each=EXPERTS_IN_ALL // 2)
    oracle.assert_same_tensors(found, truth)
    with pytest.raises(RuleError, match="what a job calls its parameter is not known"):
        paddle_reshard.convert(made, tmp_path / "cut", to="tp=2")


def _assert_tied(found: oracle.Tensors, truth: oracle.Tensors) -> None:
    """Whichever of both keys a reader gives the one parameter, it is all there."""
    head, words = "lm_head.weight", "ernie.embed_tokens.weight"
    both = [{key.replace(head, words): array for key, array in tensors.items()} for tensors in (found, truth)]
    oracle.assert_same_tensors(*both)


def test_multi_token_prediction_and_tied_words_without_stages(tmp_path: Path) -> None:
    """With stages the head is a tensor of its own, and the embedding may be on two of them."""
    made, truth = tmp_path / "made", _truth(MTP)
    paddle_reshard.convert(_case(MTP) / "checkpoint-3", tmp_path / "four", to="sharding=4,ep=4")
    paddle_reshard.convert(tmp_path / "four", made, **EXPERTS[META])
    _assert_files_of(made, MTP, MTP)
    found = read_expert_parallel(made, _shapes(MTP), of_each=EXPERTS_IN_ALL // 2)
    _assert_tied(found, truth)
    paddle_reshard.convert(made, tmp_path / "one", to="tp=1")
    found = oracle.read_checkpoint(tmp_path / "one", oracle.shapes_of(truth))
    _assert_tied(found, truth)
    for topology in ("pp=3", "pp=3,sharding=2,ep=2"):
        with pytest.raises(RuleError, match=r"tie_word_embeddings=True.*not supported with pp > 1"):
            paddle_reshard.convert(made, tmp_path / "stages", to=topology)
    with pytest.raises(RuleError, match="not supported unless pp is 1"):
        paddle_reshard.plan(made, format="flex")


def test_stages_with_experts_are_the_files_of_the_recipe(tmp_path: Path) -> None:
    made, truth = tmp_path / "made", _truth(STAGES)
    paddle_reshard.convert(_case(STAGES) / "checkpoint-3", tmp_path / "one", to="sharding=2,ep=2")
    paddle_reshard.convert(tmp_path / "one", made, **STAGES_ASKED)
    _assert_files_of(made, STAGES, STAGES)
    found = read_expert_parallel(made, oracle.shapes_of(truth), of_each=EXPERTS_IN_ALL // 2)
    oracle.assert_same_tensors(found, truth)


@pytest.mark.parametrize(
    ("source", "topology", "ep"), [(META, "sharding=4,ep=4", 4), (STAGES, "sharding=4,ep=2", 2)]
)
def test_other_numbers_of_ranks_renumber_the_copies(
    source: str, topology: str, ep: int, tmp_path: Path
) -> None:
    made, truth = tmp_path / "made", _truth(source)
    paddle_reshard.convert(_case(source) / "checkpoint-3", made, to=topology)
    found = read_expert_parallel(made, oracle.shapes_of(truth), of_each=EXPERTS_IN_ALL // ep)
    oracle.assert_same_tensors(found, truth)
    cells = json.loads((made / "model_meta.json").read_bytes())["sharding_metas"].values()
    copies = [
        [name for name in cell["structure_name_mapping"].values() if "_deepcopy_" in name] for cell in cells
    ]
    layers = len({re.search(r"\d+", key)[0] for key in truth if "mlp.gate.weight" in key})  # type: ignore[index]
    for of_cell in copies:
        assert [int(name.rpartition("_")[2]) for name in of_cell] == list(
            range(2 * layers * (EXPERTS_IN_ALL // ep - 1))
        )


def test_a_share_of_experts_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    source = _with_config(META, tmp_path, moe_num_experts=8)
    with pytest.raises(CheckpointError, match=r"experts \[0, 1\].*ep=2 numbers its share of the 8 experts"):
        paddle_reshard.convert(source, tmp_path / "made", to="tp=1")


def test_of_an_unknown_family_nothing_that_ranks_number_themselves_is_read(tmp_path: Path) -> None:
    source = _with_config(META, tmp_path, model_type="my_own")
    with pytest.raises(RuleError, match="each rank of ep=2 has a tensor of its own under this key"):
        paddle_reshard.convert(source, tmp_path / "made", to="tp=1")


def test_tensor_parallelism_of_experts_is_refused(tmp_path: Path) -> None:
    for topology in ("tp=2", "tp=2,sharding=2,ep=2"):
        with pytest.raises((PlanError, RuleError), match="experts"):
            paddle_reshard.convert(_case(META) / "checkpoint-3", tmp_path / "made", to=topology)


@pytest.mark.parametrize(
    ("entry", "value", "words"),
    [
        ("moe_expert_fusion", True, "all experts of a rank are one tensor"),
        ("num_nextn_predict_layers", 2, "several layers of multi-token prediction"),
        ("insert_empty_layer", [1], "empty layers count"),
        ("num_empty_layers_add_in_tail", 2, "empty layers count"),
    ],
)
def test_options_of_the_recipe_that_are_not_known_are_refused(
    entry: str, value: Any, words: str, tmp_path: Path
) -> None:
    source = _with_config(META, tmp_path, **{entry: value})
    with pytest.raises(RuleError, match=rf"config.json says {entry}=.*{words}.*not supported"):
        paddle_reshard.convert(source, tmp_path / "made", to="tp=1")
    assert not (tmp_path / "made").exists()
    found = paddle_reshard.inspect(source)
    assert words in str(found.rules)
    for path in source.glob("model_state*"):
        held = oracle.load_with_paddle(path)
        listed = {array.key: array.shape for array in found.stored if array.file == path.name}
        assert listed == {key: tuple(value.shape) for key, value in held.items() if hasattr(value, "shape")}


@pytest.mark.parametrize(("entry", "value"), [("tie_word_embeddings", True), ("num_nextn_predict_layers", 1)])
def test_options_that_are_not_known_of_stages_are_refused_there(
    entry: str, value: Any, tmp_path: Path
) -> None:
    source = _with_config(STAGES, tmp_path, **{entry: value})
    with pytest.raises(RuleError, match=rf"config.json says {entry}=.*not supported with pp > 1"):
        paddle_reshard.convert(source, tmp_path / "made", to="tp=1")


def test_of_a_flex_checkpoint_nobody_knows_whether_words_are_tied(tmp_path: Path) -> None:
    config = json.loads((_case(FLEX) / "config.json").read_bytes()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuleError, match="unless pp is 1, which the files of this format do not tell"):
        paddle_reshard.convert(
            _case(FLEX) / "checkpoint-3", tmp_path / "made", to="tp=1", config=tmp_path / "config.json"
        )


@pytest.mark.parametrize(
    ("model_type", "key", "words"),
    [
        (
            "ernie",
            "ernie.mtp_block.0.mlp.experts.0.up_gate_proj.weight",
            "has the parameter name of another layer's",
        ),
        ("deepseek_v3", "deepseek_v2.embed_tokens.weight", "pre-training recipe deepseek_v3_pretrain"),
    ],
)
def test_keys_of_models_that_are_not_known_are_refused_in_words(
    model_type: str, key: str, words: str
) -> None:
    config = {"model_type": model_type, "paddleformers_version": "1.2.0", "num_nextn_predict_layers": 1}
    with pytest.raises(RuleError, match=f"{words}.*such checkpoints are not supported"):
        choose_table(shipped_tables(), [key], config, degrees={"pp": 1})
