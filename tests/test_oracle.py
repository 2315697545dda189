"""The judge is judged: it reads real checkpoints to their truth, and it objects to damaged ones."""

import itertools
import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests import oracle
from tests.conftest import case_directory, hybrid_cases

DEMO = "mp2pp2sh2_s1v2_meta_ema"


def _read(case: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    truth = oracle.read_truth(case / "truth.safetensors")
    return oracle.read_checkpoint(case / "checkpoint-3", oracle.shapes_of(truth)), truth


@pytest.mark.parametrize("name", hybrid_cases())
def test_real_checkpoint_equals_its_truth(name: str) -> None:
    actual, truth = _read(case_directory(name))
    oracle.assert_same_tensors(actual, truth)


def test_every_state_is_in_the_truth() -> None:
    truth = oracle.read_truth(case_directory(DEMO) / "truth.safetensors")
    shapes = oracle.shapes_of(truth)
    states = ("w_0", *oracle.MOMENTS, *oracle.POWERS, "ema_w_0")
    assert set(truth) == {*shapes, *(f"{key}.{state}" for key in shapes for state in states)}
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (64, 96)


def test_meta_calls_distributed_what_tensor_parallelism_cut() -> None:
    for name in hybrid_cases():
        case = case_directory(name)
        if (case / "checkpoint-3" / "model_meta.json").exists():
            shapes = oracle.shapes_of(oracle.read_truth(case / "truth.safetensors"))
            oracle.check_distribution(case / "checkpoint-3", shapes)


def test_bfloat16_rounds_to_nearest_even() -> None:
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF818000], np.uint32)
    expected = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF82]
    assert oracle.round_to_bfloat16(bits.view(np.float32)).tolist() == expected


# --- damage -------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A private copy of a real checkpoint, for a test to damage."""
    return Path(shutil.copytree(case_directory(DEMO) / "checkpoint-3", tmp_path / "checkpoint-3"))


def _expect_objection(directory: Path, message: str) -> None:
    shapes = oracle.shapes_of(oracle.read_truth(case_directory(DEMO) / "truth.safetensors"))
    with pytest.raises(AssertionError, match=message):
        oracle.read_checkpoint(directory, shapes)


def _edit_tensor(path: Path, *keys: str, index: int) -> None:
    """Add one to an element of a tensor and write the file anew."""
    content = oracle.unpickle(path)
    holder = content
    for key in keys[:-1]:
        holder = holder[key]
    name, array = holder[keys[-1]]
    edited = array.copy()
    edited.reshape(-1)[index] += 1
    holder[keys[-1]] = (name, edited)
    path.write_bytes(pickle.dumps(content, protocol=4))


def _edit_meta(directory: Path, cell: str, **changes: object) -> None:
    path = directory / "model_meta.json"
    meta = json.loads(path.read_bytes())
    meta["sharding_metas"][cell].update(changes)
    path.write_text(json.dumps(meta))


def test_the_copy_is_accepted_before_it_is_damaged(damaged: Path) -> None:
    actual = oracle.read_checkpoint(damaged, oracle.shapes_of(_read(case_directory(DEMO))[1]))
    oracle.assert_same_tensors(actual, _read(case_directory(DEMO))[1])


@pytest.mark.parametrize("kind", ["optimizer.{}.pdopt", "ema.{}.pdopt", "model_state.{}.pdparams"])
def test_a_missing_file_is_noticed(damaged: Path, kind: str) -> None:
    (damaged / kind.format("tp01_pp00_shard01")).unlink()
    _expect_objection(damaged, "not one file per rank")


@pytest.mark.parametrize(
    "name", ["optimizer.tp0_pp00_shard00.pdopt", "optimizer.pp00_tp00.pdopt", "adam.pdopt"]
)
def test_a_wrong_file_name_is_noticed(damaged: Path, name: str) -> None:
    shutil.copy(damaged / "optimizer.tp00_pp00_shard00.pdopt", damaged / name)
    _expect_objection(damaged, name)


def test_padding_that_is_not_zero_is_noticed(damaged: Path) -> None:
    # A norm weight has 64 elements and is padded to 256.
    path = damaged / "optimizer.tp00_pp00_shard01.pdopt"
    _edit_tensor(path, "create_parameter_3.w_0_fp32_master_0_moment1_0", index=100)
    _expect_objection(damaged, "padding is not zero")


def test_replicas_that_differ_are_noticed(damaged: Path) -> None:
    path = damaged / "optimizer.tp01_pp00_shard01.pdopt"
    _edit_tensor(path, "master_weights", "create_parameter_3.w_0", index=0)
    _expect_objection(damaged, "replicas on the tp ranks differ")


def test_a_beta_power_that_differs_is_noticed(damaged: Path) -> None:
    path = damaged / "optimizer.tp01_pp01_shard01.pdopt"
    _edit_tensor(path, "lm_head_pipe_0.w_0_fp32_master_0_beta1_pow_acc_0", index=0)
    _expect_objection(damaged, "lm_head.weight beta1_pow_acc_0: the replicas")


def test_a_wrong_value_is_a_difference(damaged: Path) -> None:
    _edit_tensor(damaged / "ema.tp01_pp00_shard00.pdopt", "master_weights", "linear_0.w_0", index=7)
    truth = oracle.read_truth(case_directory(DEMO) / "truth.safetensors")
    actual = oracle.read_checkpoint(damaged, oracle.shapes_of(truth))
    with pytest.raises(AssertionError, match=r"1 of 273 tensors differ.*q_proj.weight.ema_w_0: 1 of 4096"):
        oracle.assert_same_tensors(actual, truth)


def test_a_lost_slice_is_noticed(damaged: Path) -> None:
    path = damaged / "optimizer.tp00_pp00_shard00.pdopt"
    content = oracle.unpickle(path)
    del content["master_weights"]["linear_0.w_0"]
    path.write_bytes(pickle.dumps(content, protocol=4))
    _expect_objection(damaged, "linear_0.w_0_fp32_master_0_moment1_0 without a master weight")


def test_a_leftover_key_is_noticed(damaged: Path) -> None:
    path = damaged / "optimizer.tp00_pp00_shard00.pdopt"
    content = oracle.unpickle(path)
    content["linear_0.w_0_fp32_master_0_moment2_max_0"] = ("x", np.zeros(3, np.float32))
    path.write_bytes(pickle.dumps(content, protocol=4))
    _expect_objection(damaged, "unknown keys.*moment2_max")


def test_a_scheduler_that_differs_is_noticed(damaged: Path) -> None:
    path = damaged / "optimizer.tp01_pp00_shard00.pdopt"
    content = oracle.unpickle(path)
    content["LR_Scheduler"]["last_epoch"] += 1
    path.write_bytes(pickle.dumps(content, protocol=4))
    _expect_objection(damaged, "LR_Scheduler differs")


def test_a_shape_that_is_wrong_in_the_meta_is_noticed(damaged: Path) -> None:
    entry = json.loads((damaged / "model_meta.json").read_bytes())["sharding_metas"]["tp01_pp01"]
    entry["param_meta"]["model.layers.2.mlp.up_proj.weight"][0] = [64, 96]
    _edit_meta(damaged, "tp01_pp01", param_meta=entry["param_meta"])
    _expect_objection(damaged, "up_proj.weight.* elements with padding")


def test_a_strategy_that_is_wrong_in_the_meta_is_noticed(damaged: Path) -> None:
    _edit_meta(damaged, "tp00_pp01", sharding_strategy="ShardingV1")
    _expect_objection(damaged, "files look like ShardingV2")


def test_owners_that_are_wrong_in_the_meta_are_noticed(damaged: Path) -> None:
    _edit_meta(damaged, "tp00_pp01", param2rank={"linear_0.w_0": 0})
    _expect_objection(damaged, "v2 with owners")


def test_names_that_are_wrong_in_the_meta_are_noticed(damaged: Path) -> None:
    entry = json.loads((damaged / "model_meta.json").read_bytes())["sharding_metas"]["tp00_pp00"]
    mapping = entry["structure_name_mapping"]
    mapping["model.layers.0.mlp.up_proj.weight"] = "linear_99.w_0"
    _edit_meta(damaged, "tp00_pp00", structure_name_mapping=mapping)
    _expect_objection(damaged, "unknown parameters.*linear_5.w_0")


# --- structure ----------------------------------------------------------------------------------------


def test_structure_shows_names_in_order() -> None:
    files = oracle.structure(case_directory(DEMO) / "checkpoint-3")
    assert len(files) == 3 * 8 + 1
    assert files["model_state.tp00_pp00_shard00.pdparams"] == [
        ("", None, "dict", 1),
        ("StructuredToParameterName@@", None, "dict", 0),
    ]
    optimizer = files["optimizer.tp00_pp00_shard00.pdopt"]
    key = "embedding_0.w_0_fp32_master_0_moment1_0"
    assert optimizer[1] == (key, (4096,), "<f4", key)
    assert ("master_weights/embedding_0.w_0", (4096,), "<f4", "embedding_0.w_0_fp32_master_0") in optimizer
    assert optimizer[-3] == ("LR_Scheduler", None, "dict", 2)


def test_structure_distinguishes_checkpoints() -> None:
    structures = {name: oracle.structure(case_directory(name) / "checkpoint-3") for name in hybrid_cases()}
    same = {
        pair for pair in itertools.combinations(structures, 2) if structures[pair[0]] == structures[pair[1]]
    }
    # The trainer writes the same files for one rank and for replicas of it.
    assert same <= {("dp2", "single")}


def test_structural_differences_are_named() -> None:
    real = oracle.structure(case_directory(DEMO) / "checkpoint-3")
    oracle.assert_same_structure(real, oracle.expected_structure(real, ema=True))
    without = oracle.expected_structure(real, ema=False)
    assert set(real) - set(without) == {name for name in real if name.startswith("ema.")}
    with pytest.raises(AssertionError):
        oracle.assert_same_structure(real, without)
    file = "optimizer.tp01_pp01_shard00.pdopt"
    for edited in (real[file][:-1], [*real[file][:5], *real[file][6:], real[file][5]]):
        with pytest.raises(AssertionError, match=f"{file}, entry"):
            oracle.assert_same_structure({**real, file: edited}, real)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [(DEMO, "stage1v2"), ("sh2_s1v1_meta_fp32", "stage1v1"), ("mp2_tied", "none")],
)
def test_strategy_is_seen_in_the_files(name: str, strategy: str) -> None:
    assert oracle.strategy_of(case_directory(name) / "checkpoint-3") == strategy


def test_structure_of_ema_follows_from_the_optimizer() -> None:
    for name in hybrid_cases():
        files = oracle.structure(case_directory(name) / "checkpoint-3")
        for file in [file for file in files if file.startswith("ema")]:
            assert files[file] == oracle.expected_ema(files[file.replace("ema", "optimizer")])


def test_unpickling_refuses_other_names(tmp_path: Path) -> None:
    path = tmp_path / "evil.pdparams"
    path.write_bytes(pickle.dumps(Path("x"), protocol=4))
    with pytest.raises(AssertionError, match="names pathlib"):
        oracle.unpickle(path)
