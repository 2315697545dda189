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

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError, PlanError, RuleError, UnsupportedError
from paddle_reshard.pipeline.model.rules.choose import choose_table
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from tests import oracle
from tests.conftest import case_directory
from tests.expert_oracle import read_expert_parallel
from tests.golden.compare_one_card import read_one_card
from tests.golden.unified_cases import write_safetensors
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
FUSED = "ernie_ep2_sh2_s1v2_meta_fusedexperts"
META, PLAIN, FLEX = "ernie_ep2_sh2_s1v2_meta", "ernie_ep2_plain_sh2_s1v2", "ernie_ep2_fc_sh2_s1v2"
STAGES = "ernie_ep2_pp2sh2_s1v2_meta"
EXPERTS: dict[str, dict[str, Any]] = {
    META: {"to": "sharding=2,ep=2", "sharding_strategy": "stage1v2"},
    PLAIN: {"to": "sharding=2,ep=2", "sharding_strategy": "stage1v2", "format": "hybrid-plain"},
    FLEX: {"format": "flex"},
}
FUSED_NORMS = ("ernie_ep2_sh2_s1v2_meta_ema_rms", "ernie_ep2_sh2_s1v2_meta_linres_rms")
MTP = "ernie_ep2_sh2_s1v2_meta_mtp_tie_rms"
MAGIC, EMPTY = "ernie_ep2_pp2sh2_s1v2_meta_mtp_magic_rms_tail", "ernie_ep2_pp2sh2_s1v2_meta_mtp_tie_empty"
MTP_OF_EXPERTS, MTP_ONE_CARD = "ernie_ep2_sh2_s1v2_meta_mtp2_moe0", "ernie_mtp_moe0_single"
STAGES_ASKED = {"to": "pp=2,sharding=2,ep=2", "sharding_strategy": "stage1v2"}
OF_BIASES = "ernie_ep2_sh2_s1v2_meta_biases"
IN_SEQUENCE = {"layout": {"sequence_parallel": True}}
BIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ernie_dense_mp2pp2_unfused_biases": ("sharding=2", {"to": "tp=2,pp=2", **IN_SEQUENCE}),
    "ernie_dense_mp2sh2_s1v2_meta_biases": (
        "pp=2",
        {"to": "tp=2,sharding=2", "sharding_strategy": "stage1v2", **IN_SEQUENCE},
    ),
    "ernie_ep2_pp2sh2_s1v2_meta_mtp_ema_unfused_biases": ("sharding=4,ep=4", STAGES_ASKED),
    OF_BIASES: ("pp=2,sharding=4,ep=4", EXPERTS[META]),
    "ernie_dense_sh2_s1v2_meta_tie_biases": ("pp=2", {"to": "sharding=2", "sharding_strategy": "stage1v2"}),
}
"""Cases with ``use_bias`` → another topology, and their own."""
EXPERTS_IN_ALL = 4


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


@pytest.mark.parametrize(("heads", "shares"), [(2, (2, 1, 1)), (4, (1,)), (None, (1,))])
def test_only_grouped_heads_lie_part_by_part(heads: int | None, shares: tuple[int, ...]) -> None:
    """Without groups ``qkv_proj`` is ``[q k v]`` head by head, which tp cuts as a plain matrix."""
    key = "ernie.layers.0.self_attn.qkv_proj.weight"
    config = json.loads((_case(SINGLE) / "checkpoint-3/config.json").read_bytes())
    config["num_key_value_heads"] = heads
    rule, _ = choose_table(shipped_tables(), [key], config).find(key, config)
    assert rule.shares(config) == shares


# --- experts -------------------------------------------------------------------------------------------


def test_the_names_of_one_card_are_those_of_the_recipe(tmp_path: Path) -> None:
    """It has no states of the correction bias, so a job with sharding would cut its slices differently."""
    paddle_reshard.convert(_case(ONE_CARD) / "checkpoint-3", tmp_path / "made", to="tp=1")
    _assert_files_of(tmp_path / "made", ONE_CARD, ONE_CARD)
    with pytest.raises(UnsupportedError, match="e_score_correction_bias has no optimizer states"):
        paddle_reshard.convert(_case(ONE_CARD) / "checkpoint-3", tmp_path / "sharded", to="sharding=2,ep=2")
    assert not (tmp_path / "sharded").exists()


@pytest.mark.parametrize(("source", "target"), list(itertools.product(EXPERTS, repeat=2)))
def test_experts_are_numbered_and_named_by_each_rank(source: str, target: str, tmp_path: Path) -> None:
    made, truth = tmp_path / "made", _truth(source)
    paddle_reshard.convert(_case(source) / "checkpoint-3", made, config=_config(source), **EXPERTS[target])
    if target == FLEX:
        paddle_reshard.convert(made, tmp_path / "back", to="tp=1")
        found = oracle.read_checkpoint(tmp_path / "back", oracle.shapes_of(truth))
        oracle.assert_same_tensors(found, truth)
        return
    _assert_files_of(made, target, source)
    configs = [json.loads((f / "config.json").read_bytes()) for f in (made, _case(target) / "checkpoint-3")]
    assert not any("use_expert_parallel" in config for config in configs)  # the recipe does not write it
    found = read_expert_parallel(made, oracle.shapes_of(truth), of_each=EXPERTS_IN_ALL // 2)
    oracle.assert_same_tensors(found, truth)


BIAS = "mlp.moe_statics.e_score_correction_bias"
WAYS: list[tuple[str, str | None, dict[str, Any]]] = [
    (STAGES, "sharding=2,ep=2", STAGES_ASKED),
    # The projections that fused norms replace are built first and count in the names of others.
    *[(case, "pp=3,sharding=4,ep=4", EXPERTS[META]) for case in FUSED_NORMS],
    # Of an expert, weight and bias are copied in turn; the bias of the head is a second weight by its name, also where
    # the first is given up for the embedding.
    *[(case, through, own) for case, (through, own) in BIASES.items()],
    # The empty layers at the tail count where layers are distributed.
    *[(MAGIC, through, STAGES_ASKED) for through in ("tp=1", "pp=3,sharding=4,ep=4")],
    # Layers without parameters count in stages; tied words have a head of its own there, in the embedding's shape.
    *[(EMPTY, through, STAGES_ASKED) for through in (None, "pp=4", "pp=2")],
    # With stages the head is a tensor of its own, and the embedding may be on two of them.
    (MTP, "sharding=4,ep=4", EXPERTS[META]),
    # Two biases of one name are one parameter: listed twice, cut twice, updated twice a step.
    *[(MTP_OF_EXPERTS, through, EXPERTS[META]) for through in (None, "tp=1", "sharding=4,ep=4")],
]
"""Case, another topology on the way, and the options of its own job."""


@pytest.mark.parametrize(("case", "through", "own"), WAYS)
def test_through_another_topology_a_case_has_the_files_of_the_recipe(
    case: str, through: str | None, own: dict[str, Any], tmp_path: Path
) -> None:
    source, made, truth = _case(case) / "checkpoint-3", tmp_path / "made", _truth(case)
    if through is not None:
        paddle_reshard.convert(source, tmp_path / "between", to=through)
        source = tmp_path / "between"
    paddle_reshard.convert(source, made, **own)
    _assert_files_of(made, case, case)
    if "dense" in case:
        assert list(differences(made, places_of(_case(case)), truth)) == []
        return
    found = read_expert_parallel(made, _shapes(case), of_each=EXPERTS_IN_ALL // 2)
    found = _shared_states(found, truth) if case == MTP_OF_EXPERTS else found
    (_assert_tied if case == MTP else oracle.assert_same_tensors)(found, truth)


def _assert_tied(found: oracle.Tensors, truth: oracle.Tensors) -> None:
    """Whichever of both keys a reader gives the one parameter, it is all there."""
    head, words = "lm_head.weight", "ernie.embed_tokens.weight"
    both = [{key.replace(head, words): array for key, array in tensors.items()} for tensors in (found, truth)]
    oracle.assert_same_tensors(*both)


def test_copies_of_an_embedding_that_differ_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(_case(MAGIC) / "checkpoint-3", source)
    path = source / "optimizer.pp01_shard00.pdopt"
    words = oracle.unpickle(path)["master_weights"]["embedding_0.w_0"][1].tobytes()
    data = path.read_bytes()
    assert data.count(words) == 1
    path.chmod(0o644)
    path.write_bytes(data.replace(words, bytes([words[0] ^ 1]) + words[1:]))
    for signal in source.glob("saved_signal_*"):
        signal.touch()
    with pytest.raises(CheckpointError, match=r"ernie\.embed_tokens\.weight"):
        paddle_reshard.convert(source, tmp_path / "made", to="tp=1")


def test_a_head_of_its_own_is_not_lost_without_stages(tmp_path: Path) -> None:
    source, truth = _case(EMPTY) / "checkpoint-3", _truth(EMPTY)
    lost = r"lm_head.weight: .* one of the two would be lost.*--drop head"
    with pytest.raises(CheckpointError, match=lost + r".*pp\d\d.* and .*pp\d\d.* differ"):
        paddle_reshard.convert(source, tmp_path / "refused", to="sharding=2,ep=2")
    for unseen in ({"replicas": "first"}, {"replicas": "report"}, {"ranks": "0"}):
        with pytest.raises(PlanError, match=lost):
            paddle_reshard.convert(source, tmp_path / "refused", to="sharding=2,ep=2", **unseen)
    assert not (tmp_path / "refused").exists()
    paddle_reshard.convert(source, tmp_path / "made", to="tp=1", drop=["head"])
    wanted = {key: array.tobytes() for key, array in truth.items() if not key.startswith("lm_head.weight.")}
    wanted["lm_head.weight"] = wanted["ernie.embed_tokens.weight"]
    assert read_one_card(tmp_path / "made") == wanted
    with pytest.raises(PlanError, match="--drop head: it is for a head that"):
        paddle_reshard.convert(_case(META) / "checkpoint-3", tmp_path / "refused", to="tp=1", drop=["head"])


def test_a_head_that_is_still_equal_goes_back_to_the_embedding(tmp_path: Path) -> None:
    """It started as a copy, and no step has been made since; what tells is its bytes, in every state."""
    paddle_reshard.convert(_case(MTP) / "checkpoint-3", tmp_path / "stages", **STAGES_ASKED)
    made = tmp_path / "made"
    report = paddle_reshard.convert(tmp_path / "stages", made, **EXPERTS[META])
    left_out = dict(report.plan.targets[0].not_carried)
    assert left_out["lm_head.weight"].endswith("the two are compared, and must be equal")
    _assert_files_of(made, MTP, MTP)
    _assert_tied(read_expert_parallel(made, _shapes(MTP), of_each=EXPERTS_IN_ALL // 2), _truth(MTP))


def test_a_head_of_its_own_starts_as_the_embedding(tmp_path: Path) -> None:
    asked = STAGES_ASKED
    plan = paddle_reshard.plan(_case(MTP) / "checkpoint-3", **asked)
    assert (
        plan.targets[0].remarks[0].startswith("lm_head.weight starts as a copy of ernie.embed_tokens.weight")
    )
    paddle_reshard.convert(_case(MTP) / "checkpoint-3", tmp_path / "made", **asked)
    truth = dict(_truth(MTP))
    words = {key: array for key, array in truth.items() if key.startswith("ernie.embed_tokens.weight.")}
    truth |= {key.replace("ernie.embed_tokens", "lm_head"): array for key, array in words.items()}
    shapes = {key: array.shape for key, array in truth.items()}
    found = read_expert_parallel(tmp_path / "made", shapes, of_each=EXPERTS_IN_ALL // 2)
    oracle.assert_same_tensors(found, truth)
    names = json.loads((tmp_path / "made/model_meta.json").read_bytes())["sharding_metas"]["tp00_pp01_ep00"]
    assert names["structure_name_mapping"]["lm_head.weight"] == "ernie_mo_elm_head_pipe_0.w_0"


def _shared_states(found: oracle.Tensors, truth: oracle.Tensors) -> oracle.Tensors:
    """The states of two biases of one parameter name under both keys, as in the memory of the job."""
    twins = {f"ernie.{part}.{n}.{BIAS}": n for part in ("layers", "mtp_block") for n in (0, 1)}
    of = {
        (n, key.removeprefix(twin)): array
        for twin, n in twins.items()
        for key, array in found.items()
        if twin in key
    }
    missing = {
        f"{twin}{state}": array for (m, state), array in of.items() for twin, n in twins.items() if n == m
    }
    return {**missing, **found}


def test_two_biases_of_one_name_are_two_on_different_stages(tmp_path: Path) -> None:
    """Each starts with the states of both; after that no job of one stage can have them."""
    made, truth = tmp_path / "made", _truth(MTP_OF_EXPERTS)
    paddle_reshard.convert(_case(MTP_OF_EXPERTS) / "checkpoint-3", made, **STAGES_ASKED)
    found = read_expert_parallel(made, _shapes(MTP_OF_EXPERTS), of_each=EXPERTS_IN_ALL // 2)
    oracle.assert_same_tensors(found, truth)
    with pytest.raises(PlanError, match="have the same parameter name mm_layer_0_corr_bias_0"):
        paddle_reshard.convert(made, tmp_path / "refused", **EXPERTS[META])


def test_two_biases_of_one_name_keep_their_values_without_sharding(tmp_path: Path) -> None:
    truth = {key: array.tobytes() for key, array in _truth(MTP_ONE_CARD).items()}
    assert truth[f"ernie.layers.0.{BIAS}"] != truth[f"ernie.mtp_block.0.{BIAS}"]
    paddle_reshard.convert(_case(MTP_ONE_CARD) / "checkpoint-3", tmp_path / "stages", to="pp=2")
    paddle_reshard.convert(tmp_path / "stages", tmp_path / "made", to="tp=1")
    assert read_one_card(tmp_path / "made") == truth
    _assert_files_of(tmp_path / "made", MTP_ONE_CARD, MTP_ONE_CARD)


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


@pytest.mark.parametrize("through", ["tp=1", "sharding=4,ep=4", "pp=3,sharding=2,ep=2"])
def test_experts_that_are_one_tensor_of_each_rank(through: str, tmp_path: Path) -> None:
    """``moe_expert_fusion``: each rank has its share of the experts along the first dim, under one key."""
    made, truth = tmp_path / "made", _truth(FUSED)
    paddle_reshard.convert(_case(FUSED) / "checkpoint-3", tmp_path / "between", to=through)
    if through == "tp=1":
        wanted = {key: array.tobytes() for key, array in truth.items()}
        assert read_one_card(tmp_path / "between") == wanted
    paddle_reshard.convert(tmp_path / "between", made, **EXPERTS[META])
    _assert_files_of(made, FUSED, FUSED)
    paddle_reshard.convert(tmp_path / "between", tmp_path / "plain", **EXPERTS[PLAIN])
    places = places_of(_case(FUSED))
    for folder in (made, tmp_path / "plain"):
        assert list(differences(folder, places, truth)) == []
    experts = [key for key in _shapes(FUSED) if ".mlp.experts." in key]
    for key in experts:
        held = [
            oracle.load_with_paddle(tmp_path / f"plain/model_state.moe_sharding0{ep}.pdparams")[key]
            for ep in (0, 1)
        ]
        assert np.concatenate(held).tobytes() == truth[key].tobytes()


def test_what_the_recipe_does_not_distribute_is_not_distributed() -> None:
    """Neither by tp, nor fused experts over ranks between which they cannot be shared out."""
    unnamed = "what a job calls its parameter is not known"
    for case, topology, words in (
        *[(case, "tp=2", unnamed) for case in (*FUSED_NORMS, FUSED)],
        (FUSED, "sharding=3,ep=3", "have 4 experts that can be told apart"),
        *[(META, topology, "experts") for topology in ("tp=2", "tp=2,sharding=2,ep=2")],
    ):
        with pytest.raises((PlanError, RuleError), match=words):
            paddle_reshard.plan(_case(case) / "checkpoint-3", to=topology)


def test_a_share_of_experts_that_is_not_the_models_is_refused(tmp_path: Path) -> None:
    source = _with_config(META, tmp_path, moe_num_experts=8)
    with pytest.raises(CheckpointError, match=r"experts \[0, 1\].*ep=2 numbers its share of the 8 experts"):
        paddle_reshard.convert(source, tmp_path / "made", to="tp=1")


def test_of_an_unknown_family_nothing_that_ranks_number_themselves_is_read(tmp_path: Path) -> None:
    source = _with_config(META, tmp_path, model_type="my_own")
    with pytest.raises(RuleError, match="each rank of ep=2 has a tensor of its own under this key"):
        paddle_reshard.convert(source, tmp_path / "made", to="tp=1")


def test_an_option_of_the_recipe_that_is_not_known_is_refused(tmp_path: Path) -> None:
    source, words = _with_config(META, tmp_path, remove_tail_layer=True), "empty layers count"
    with pytest.raises(RuleError, match=rf"config.json says remove_tail_layer=.*{words}.*not supported"):
        paddle_reshard.convert(source, tmp_path / "made", to="tp=1")
    assert not (tmp_path / "made").exists()
    found = paddle_reshard.inspect(source)
    assert words in str(found.rules)
    for path in source.glob("model_state*"):
        held = oracle.load_with_paddle(path)
        listed = {array.key: array.shape for array in found.stored if array.file == path.name}
        assert listed == {key: tuple(value.shape) for key, value in held.items() if hasattr(value, "shape")}


def test_of_a_flex_checkpoint_nobody_knows_whether_words_are_tied(tmp_path: Path) -> None:
    config = json.loads((_case(FLEX) / "config.json").read_bytes()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuleError, match="of which jobs files are, this format does not tell"):
        paddle_reshard.convert(
            _case(FLEX) / "checkpoint-3", tmp_path / "made", to="tp=1", config=tmp_path / "config.json"
        )


# --- what one does next --------------------------------------------------------------------------------


def _published(folder: Path) -> oracle.Tensors:
    return {
        key: array
        for path in sorted(folder.glob("*.safetensors"))
        for key, array in oracle.read_truth(path).items()
    }


@pytest.mark.parametrize("case", [MAGIC, EMPTY, MTP_OF_EXPERTS, OF_BIASES])
def test_exports_are_those_of_the_recipe_but_for_its_flaws(case: str, tmp_path: Path) -> None:
    """It writes routers untransposed under a transposed shape, a tied head transposed, and an embedding twice."""
    paddle_reshard.convert(_case(case) / "checkpoint-3", tmp_path / "made", format="huggingface")
    found, truth = _published(tmp_path / "made"), _truth(case)
    wanted = _published(_case(case) / "export")
    for key in [key for key in wanted if key.endswith("mlp.gate.weight")]:
        router = truth[key.replace("model.", "ernie.", 1)]
        assert wanted[key].tobytes() == router.tobytes() != router.T.tobytes()
        wanted[key] = np.ascontiguousarray(router.T)
    if case == MAGIC:
        twice = wanted.pop("model.embed.embed_tokens.weight")
        assert twice.tobytes() == wanted["model.embed_tokens.weight"].tobytes()
    if case == EMPTY:
        assert wanted["lm_head.weight"].shape[::-1] == truth["lm_head.weight"].shape
        wanted["lm_head.weight"] = truth["lm_head.weight"]
        config = json.loads((tmp_path / "made/config.json").read_bytes())
        assert config["tie_word_embeddings"] is False
    oracle.assert_same_tensors(found, wanted)


def _in_library(key: str, array: np.ndarray) -> tuple[str, np.ndarray]:
    """A tensor of the recipe as PaddleFormers' own model of the family has it; 4 query and 2 key-value heads of 8."""
    if "_pow_acc" not in key and "qkv_proj" in key:
        queries, keys, values = np.split(array, [32, 48], axis=-1)
        groups = zip(np.split(queries, 2, -1), np.split(keys, 2, -1), np.split(values, 2, -1), strict=True)
        array = np.concatenate([part for group in groups for part in group], axis=-1)
    if "_pow_acc" not in key and key.startswith("lm_head"):
        array = array.T
    return key.replace("ernie.", "model.", 1), array


def _library_config(folder: Path, name: str, model_type: str, **entries: Any) -> Path:
    own = _config(name) or _case(name) / "checkpoint-3/config.json"
    config = (
        json.loads(own.read_bytes()) | {"model_type": model_type, "num_nextn_predict_layers": 0} | entries
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def test_the_library_has_no_biases(tmp_path: Path) -> None:
    config, words = (
        _library_config(tmp_path, OF_BIASES, "ernie4_5_moe"),
        "paddleformers's ernie4_5_moe has not",
    )
    with pytest.raises(RuleError, match=rf"bias: .*\(ernie, paddleformers\) has this tensor, and {words}"):
        paddle_reshard.convert(
            _case(OF_BIASES) / "checkpoint-3",
            tmp_path / "made",
            to="tp=1",
            convention="paddleformers",
            config=config,
        )
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("case", "model_type"), [(SHARDED, "ernie4_5"), (META, "ernie4_5_moe"), (STAGES, "ernie4_5_moe")]
)
def test_the_library_goes_on_with_all_states(case: str, model_type: str, tmp_path: Path) -> None:
    """Its model of the family never trains the correction bias, so that it has no states of it."""
    config = _library_config(tmp_path, case, model_type)
    source, asked = _case(case) / "checkpoint-3", {"to": "tp=1", "convention": "paddleformers"}
    with pytest.raises(RuleError, match="recipe ernie_pretrain; give the config"):
        paddle_reshard.plan(source, **asked)
    paddle_reshard.convert(source, tmp_path / "made", config=config, **asked)
    wanted = dict(_in_library(*entry) for entry in _truth(case).items())
    states = [key for key in wanted if f"{BIAS}." in key]
    left_out = paddle_reshard.plan(source, config=config, **asked).targets[0].not_carried
    assert [reason for _, reason in left_out if "does not train it" in reason] == [
        "paddleformers does not train it"
    ] * len(states)
    assert bool(states) == (case != SHARDED)
    wanted = {key: array.tobytes() for key, array in wanted.items() if key not in states}
    assert read_one_card(tmp_path / "made") == wanted
    assert json.loads((tmp_path / "made/config.json").read_bytes())["model_type"] == model_type


def test_a_source_without_its_config_takes_the_names_of_the_library_in_two_steps(tmp_path: Path) -> None:
    source, asked = _case(FLEX) / "checkpoint-3", {"to": "tp=1", "convention": "paddleformers"}
    with pytest.raises(RuleError, match="needs two conversions, the first with its own and without --conv"):
        paddle_reshard.plan(source, config=_config(FLEX), **asked)
    paddle_reshard.convert(source, tmp_path / "first", to="sharding=2,ep=2", config=_config(FLEX))
    config = _library_config(tmp_path, FLEX, "ernie4_5_moe")
    paddle_reshard.convert(tmp_path / "first", tmp_path / "made", config=config, **asked)
    wanted = dict(_in_library(*entry) for entry in _truth(FLEX).items())
    wanted = {key: array.tobytes() for key, array in wanted.items() if f"{BIAS}." not in key}
    assert read_one_card(tmp_path / "made") == wanted


def test_a_dense_model_of_the_library_goes_back_to_the_recipe(tmp_path: Path) -> None:
    """Parameters, optimizer and average: the config of the recipe says that its job is to train on."""
    given = _case(SHARDED) / "checkpoint-3"
    config = _library_config(tmp_path, SHARDED, "ernie4_5")
    paddle_reshard.convert(given, tmp_path / "library", to="tp=2", convention="paddleformers", config=config)
    asked: dict[str, Any] = {"convention": "paddleformers", "config": given / "config.json"}
    paddle_reshard.convert(tmp_path / "library", tmp_path / "made", **asked, **DENSE[SHARDED])
    _assert_files_of(tmp_path / "made", SHARDED, SHARDED)
    truth = _truth(SHARDED)
    found = oracle.read_checkpoint(tmp_path / "made", oracle.shapes_of(truth))
    oracle.assert_same_tensors(found, truth)


def test_experts_of_the_library_go_back_without_what_it_does_not_train(tmp_path: Path) -> None:
    """It has no states of the correction bias, which a job of the recipe with sharding asks for."""
    given, library = _case(META) / "checkpoint-3", tmp_path / "library"
    config = _library_config(tmp_path, META, "ernie4_5_moe")
    paddle_reshard.convert(given, library, to="tp=1", convention="paddleformers", config=config)
    asked: dict[str, Any] = {"convention": "paddleformers", "config": given / "config.json"}
    with pytest.raises(UnsupportedError, match="e_score_correction_bias has no optimizer states"):
        paddle_reshard.convert(library, tmp_path / "refused", **asked, **EXPERTS[META])
    paddle_reshard.convert(library, tmp_path / "card", to="tp=1", **asked)
    truth = {key: array.tobytes() for key, array in _truth(META).items() if f"{BIAS}." not in key}
    assert read_one_card(tmp_path / "card") == truth
    paddle_reshard.convert(library, tmp_path / "model", format="huggingface")
    paddle_reshard.convert(tmp_path / "model", tmp_path / "parameters", **asked, **EXPERTS[PLAIN])
    expert = "mlp.experts.{}.down_proj.weight"
    for ep in (0, 1):
        held = oracle.load_with_paddle(tmp_path / f"parameters/model_state.moe_sharding0{ep}.pdparams")
        for local in (0, 1):
            mine, whole = (
                f"ernie.layers.1.{expert.format(local)}",
                f"ernie.layers.1.{expert.format(2 * ep + local)}",
            )
            assert held[mine].tobytes() == truth[whole]


@pytest.mark.parametrize("case", [META, ONE_CARD, SINGLE])
def test_the_recipes_own_exports_are_listed_and_not_read(case: str, tmp_path: Path) -> None:
    """Routers of them lie untransposed under a transposed shape, and those of one card are as in training."""
    source, model = _case(case) / "checkpoint-3", tmp_path / "model"
    paddle_reshard.convert(source, model, format="huggingface")
    paddle_reshard.convert(model, tmp_path / "back", to="tp=1", format="hybrid-plain")
    wanted = {key: _truth(case)[key].tobytes() for key in oracle.shapes_of(_truth(case))}
    assert read_one_card(tmp_path / "back") == wanted
    (model / "paddle_reshard.json").unlink()
    words = "the recipe's own export writes its float32 values untransposed under a transposed shape"
    if case != META:  # as it exports from one card
        kinds = {"uint16": "BF16", "float32": "F32"}
        tensors = {key: _truth(case)[key] for key in wanted}
        write_safetensors(
            model / "model.safetensors",
            {key: (kinds[a.dtype.name], a.shape, a.tobytes()) for key, a in tensors.items()},
        )
        words = "its own export from one card leaves keys and layouts as they are in training"
    with pytest.raises(RuleError, match=words):
        paddle_reshard.convert(model, tmp_path / "refused", to="tp=1", format="hybrid-plain")
    found = paddle_reshard.inspect(model)
    assert words in str(found.rules)
    assert len(found.stored) > 0


def test_the_librarys_export_is_the_recipes(tmp_path: Path) -> None:
    """By either way to Hugging Face the tensors are the same."""
    config = _library_config(tmp_path, META, "ernie4_5_moe")
    given = _case(META) / "checkpoint-3"
    paddle_reshard.convert(given, tmp_path / "one", format="huggingface")
    paddle_reshard.convert(
        given, tmp_path / "two", format="huggingface", convention="paddleformers", config=config
    )
    oracle.assert_same_tensors(_published(tmp_path / "two"), _published(tmp_path / "one"))
    assert json.loads((tmp_path / "one/config.json").read_bytes())["model_type"] == "ernie"


def test_a_head_of_its_own_stays_one_in_the_library(tmp_path: Path) -> None:
    source = _case(EMPTY) / "checkpoint-3"
    asked: dict[str, Any] = {"to": "tp=1", "convention": "paddleformers"}
    config = _library_config(tmp_path, EMPTY, "ernie4_5_moe", num_nextn_predict_layers=1)
    with pytest.raises(RuleError, match=r"lm_head\.weight: .*say tie_word_embeddings=false"):
        paddle_reshard.plan(source, config=config, **asked)
    config = _library_config(
        tmp_path, EMPTY, "ernie4_5_moe", num_nextn_predict_layers=1, tie_word_embeddings=False
    )
    paddle_reshard.convert(source, tmp_path / "made", config=config, **asked)
    found = read_one_card(tmp_path / "made")
    for state in ("", ".w_0"):
        assert found[f"lm_head.weight{state}"] == _truth(EMPTY)[f"lm_head.weight{state}"].tobytes()


@pytest.mark.parametrize("case", [TP, PP, STAGES, MAGIC])
def test_launch_names_the_arguments_of_the_recipe(case: str) -> None:
    """Those with which the case was run; its batch, its data and the average's coefficient are the user's."""
    found = paddle_reshard.launch(_case(case) / "checkpoint-3").arguments
    given = json.loads((_case(case) / "case.json").read_bytes())["args"]
    assert found["stage"] == "ernie_pretrain"
    for name, value in given.items():
        if name != "zcc_save_ema_coef":
            assert found[name] == value, name
