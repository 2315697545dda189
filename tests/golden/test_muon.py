"""Muon: of matrices moment1 alone is kept, of everything else what AdamW keeps; with averages and experts too.

The checkpoints are real (``tests/corpus/states/README.md``). What is written is read by Paddle, its metadata by
Python's ``pickle`` with Paddle's classes, and held against the truth. Damaged ones are made of real ones, with some
tensors removed from data and metadata alike, as if they had never been saved.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from paddle_reshard.pipeline.model import rules
from tests import oracle
from tests.conftest import case_directory

MUON = ("muon_fc_mp2", "muon_fc_pp2", "muon_fc_sh2", "muon_fc_sh2_split")
"""Matrices cut by tensor parallelism, spread over stages, all on one sharding rank, spread over sharding ranks."""
AVERAGES = {"muon_fc_sh2_ema": "states/fp16_single", "muon_moe_fc_ep2_sh4_ema": "moe/moe_single"}
"""Both with matrices on several sharding ranks; those of an expert on the ranks of its own group. → a model like it"""
FOLDERS = ("model_state", "master_weight", "optimizer_state")
ADAMW_STATES = ("moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")
MATRIX = "model.layers.0.self_attn.q_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


def checkpoint(name: str) -> Path:
    return case_directory(f"states/{name}") / "checkpoint-3"


def truth(name: str) -> oracle.Tensors:
    return oracle.read_truth(case_directory(f"states/{name}") / "truth.safetensors")


def config() -> Path:
    """A FlexCheckpoint holds none; that of the same model on one card."""
    return checkpoint("fp16_single") / "config.json"


def arrays(folder: Path) -> oracle.Tensors:
    """Everything in the data files of the folders of a checkpoint whose tensors are whole."""
    found: oracle.Tensors = {}
    for path in sorted(folder.glob("*.distcp")):
        held = {k: v for k, v in oracle.load_with_paddle(path).items() if k != oracle.NAME_TABLE}
        assert not found.keys() & held.keys(), path
        found |= held
    return found


def metadata(folder: Path) -> Any:
    oracle._paddle_load()  # its classes
    (path,) = folder.glob("*.metadata")
    return pickle.loads(path.read_bytes())


def described(checkpoint: Path) -> dict[str, set[tuple[Any, ...]]]:
    """Folder → key, whole shape and dtype of each tensor, whatever its pieces."""
    return {
        folder: {
            (key, tuple(piece.global_shape), piece.dtype)
            for key, pieces in metadata(checkpoint / folder).state_dict_metadata.items()
            for piece in pieces
        }
        for folder in FOLDERS
    }


@pytest.mark.parametrize("name", MUON)
def test_every_state_is_that_of_the_truth_and_described_as_in_every_sibling(
    name: str, tmp_path: Path
) -> None:
    """In several files, and from these in one: what a job of any topology takes its pieces from."""
    paddle_reshard.convert(
        checkpoint(name), tmp_path / "several", format="flex", max_shard_size="20KB", config=config()
    )
    paddle_reshard.convert(tmp_path / "several", tmp_path / "one", format="flex")
    for target, several in (("several", True), ("one", False)):
        found: oracle.Tensors = {}
        for folder in FOLDERS:
            assert (len(list((tmp_path / target / folder).glob("*.distcp"))) > 1) is several
            found |= arrays(tmp_path / target / folder)
        oracle.assert_same_tensors(found, truth(name))
        for sibling in MUON:
            assert described(tmp_path / target) == described(checkpoint(sibling)), sibling
    assert f"{MATRIX}.moment1_0" in found
    assert f"{MATRIX}.moment2_0" not in found


@pytest.mark.parametrize("name", ["muon_fc_mp2", "muon_fc_sh2_split"])
def test_the_model_for_transformers(name: str, tmp_path: Path) -> None:
    paddle_reshard.convert(checkpoint(name), tmp_path / "model", format="huggingface", config=config())
    wanted = truth(name)
    keys = oracle.shapes_of(wanted).keys()
    expected = {key: wanted[key].T if "_proj." in key else wanted[key] for key in keys}
    oracle.assert_same_tensors(oracle.read_truth(tmp_path / "model/model.safetensors"), expected)


def config_of(name: str, folder: Path) -> Path:
    """That of the same family on one card, with the sizes of this case."""
    case = json.loads((case_directory(f"states/{name}") / "case.json").read_text("utf-8"))
    like = case_directory(AVERAGES[name]) / "checkpoint-3/config.json"
    (folder / "config.json").write_text(json.dumps({**json.loads(like.read_text("utf-8")), **case["model"]}))
    return folder / "config.json"


def averaged(name: str) -> tuple[oracle.Tensors, oracle.Tensors]:
    """Truth of everything else, and of the average under the keys that it has in files."""
    everything = truth(name)
    in_files = {".ema_w_0": ".w_0", ".ema": ""}  # a float32 router has no master weight
    average = {
        key.removesuffix(suffix) + stored: array
        for key, array in everything.items()
        for suffix, stored in in_files.items()
        if key.endswith(suffix)
    }
    return {k: v for k, v in everything.items() if not k.endswith(tuple(in_files))}, average


@pytest.mark.parametrize("name", AVERAGES)
def test_with_its_average_and_experts(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    paddle_reshard.convert(
        checkpoint(name), tmp_path / "two", format="flex", max_shard_size="20KB", config=config
    )
    paddle_reshard.convert(tmp_path / "two", tmp_path / "one", format="flex", config=config)
    rest, average = averaged(name)
    for target in (tmp_path / "two", tmp_path / "one"):
        found = {key: value for folder in FOLDERS for key, value in arrays(target / folder).items()}
        oracle.assert_same_tensors(found, rest)
        oracle.assert_same_tensors(arrays(target / "ema_state"), average)
        assert described(target) == described(checkpoint(name))


@pytest.mark.parametrize("name", AVERAGES)
def test_the_average_as_a_model(name: str, tmp_path: Path) -> None:
    """What Muon lacks is no part of it, so all formats of a model can have it."""
    config = config_of(name, tmp_path)
    options: dict[str, Any] = {"state": "ema", "dtype": "float32", "config": config}
    paddle_reshard.convert(checkpoint(name), tmp_path / "model", format="huggingface", **options)
    _, average = averaged(name)
    found = oracle.read_truth(tmp_path / "model/model.safetensors")
    key = "model.layers.1.self_attn.o_proj.weight"
    assert found[key].tobytes() == average[f"{key}.w_0"].T.tobytes()
    assert sum(array.size for array in found.values()) == sum(array.size for array in average.values())


@pytest.mark.parametrize(
    "options",
    [
        {"to": "tp=2"},
        {"to": "sharding=2", "sharding_strategy": "stage1v2", "format": "hybrid-plain"},
        {"format": "unified"},
        {"format": "auto-parallel"},
    ],
)
def test_formats_in_which_no_trainer_saves_muon(options: dict[str, Any], tmp_path: Path) -> None:
    """They would be read as AdamW's, whose moment2 is nowhere."""
    told = (
        rf"{MATRIX} and 11 more: the optimizer is Muon, .*, only as flex; and AdamW cannot continue from it"
    )
    with pytest.raises(ReshardError, match=told):
        paddle_reshard.convert(checkpoint("muon_fc_sh2"), tmp_path / "target", config=config(), **options)
    assert not (tmp_path / "target").exists()


def test_the_optimizer_is_reported() -> None:
    inspection = paddle_reshard.inspect(checkpoint("muon_fc_sh2"), config=config())
    assert ("optimizer", "Muon, with moment1 only for 12 parameters") in inspection.facts()


# ----------------------------------------------------------------------------------------------- damaged


def without(source: Path, target: Path, lost: Callable[[str], bool]) -> Path:
    """A copy of a checkpoint that lacks some tensors, in the data files and in the metadata."""
    shutil.copytree(source, target, copy_function=shutil.copyfile)
    count = 0
    for folder in (path for path in target.iterdir() if path.is_dir()):
        described = metadata(folder)
        described.state_dict_metadata = {
            k: v for k, v in described.state_dict_metadata.items() if not lost(k)
        }
        described.storage_metadata = {
            k: v for k, v in described.storage_metadata.items() if not lost(k.tensor_key)
        }
        described.flat_mapping = {k: v for k, v in described.flat_mapping.items() if not lost(k)}
        next(folder.glob("*.metadata")).write_bytes(pickle.dumps(described, protocol=4))
        for path in folder.glob("*.distcp"):
            held = oracle.load_with_paddle(path)
            count += sum(map(lost, held))
            path.write_bytes(pickle.dumps({k: v for k, v in held.items() if not lost(k)}, protocol=4))
    assert count
    return target


def states_of(key: str, *states: str) -> Callable[[str], bool]:
    return {f"{key}.{state}" for state in states}.__contains__


PATTERNS = r"2 or 3 dims whose name contains none of embed, bias, lm_head, mlp\.gate; but "


@pytest.mark.parametrize(
    ("name", "lost", "told"),
    [
        (
            "states/muon_fc_sh2",
            states_of(MATRIX, "moment1_0"),
            rf"{MATRIX} \(moment1\): no file holds it, but other parameters have it",
        ),
        (
            "states/muon_fc_sh2_split",
            states_of("model.norm.weight", "moment2_0"),
            r"model\.norm\.weight \(moment2\): no file holds it, but other parameters have it",
        ),
        (
            "states/muon_fc_sh2",
            states_of("model.norm.weight", *ADAMW_STATES),
            rf"model\.norm\.weight \(moment2\): .*{PATTERNS}its shape is \(\d+,\)",
        ),
        (
            "states/muon_fc_mp2",
            states_of(GATE, *ADAMW_STATES),
            rf"{GATE} \(moment2\): .*{PATTERNS}this name contains mlp\.gate\. If the job has other muon",
        ),
        (
            "dense/fc_sh2_s1v2",
            states_of(MATRIX, *ADAMW_STATES),
            rf"{MATRIX} \(moment2\): .*{PATTERNS}model\.layers\.\d\.[a-z_.]+ has moment1, moment2, beta1_pow_acc",
        ),
        (
            "dense/fc_sh2_s1v2",
            states_of(MATRIX, "moment2_0"),
            rf"{MATRIX} \(moment2\): no file holds it, but other parameters have it$",
        ),
    ],
)
def test_lost_states_are_not_taken_for_muon(
    name: str, lost: Callable[[str], bool], told: str, tmp_path: Path
) -> None:
    damaged = without(case_directory(name) / "checkpoint-3", tmp_path / "damaged", lost)
    siblings = {"dense/fc_sh2_s1v2": "dense/single"}
    given = case_directory(siblings.get(name, "states/fp16_single")) / "checkpoint-3/config.json"
    with pytest.raises(ReshardError, match=told):
        paddle_reshard.convert(damaged, tmp_path / "target", format="flex", config=given)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("name", "strategy", "told"),
    [
        ("muon_fc_sh2", "ShardingV2", rf"sharding_strategy is ShardingV2, and {MATRIX} has moment1 alone"),
        ("fc_replicas_sh2_s1v2", "MuonSharding", r"is MuonSharding, and no tensor has moment1 alone"),
    ],
)
def test_a_strategy_of_another_optimizer(name: str, strategy: str, told: str, tmp_path: Path) -> None:
    source = shutil.copytree(checkpoint(name), tmp_path / "source", copy_function=shutil.copyfile)
    meta = {"sharding_metas": {"tp00_pp00": {"sharding_strategy": strategy}}}
    (source / "model_meta.json").write_text(json.dumps(meta))
    with pytest.raises(ReshardError, match=told):
        paddle_reshard.plan(source, format="flex", config=config())


# ----------------------------------------------------------------------------------- other settings, AOA


def test_other_patterns_are_given_in_a_rule_table(tmp_path: Path) -> None:
    """A job that trains gate projections with Muon, too."""
    gates = {
        f"{key}.{state}"
        for key in oracle.shapes_of(truth("muon_fc_sh2"))
        for state in ADAMW_STATES
        if "gate_proj" in key
    }
    source = without(checkpoint("muon_fc_sh2"), tmp_path / "source", gates.__contains__)
    with pytest.raises(ReshardError, match=r"this name contains mlp\.gate"):
        paddle_reshard.plan(source, format="flex", config=config())
    table = json.loads((Path(rules.__file__).parent / "llama.paddleformers.json").read_text("utf-8"))
    own = tmp_path / "mine.json"
    own.write_text(json.dumps({**table, "muon_exclude_patterns": ["Embed", "bias", "lm_head"]}))
    paddle_reshard.convert(source, tmp_path / "flex", format="flex", config=config(), rules=own)
    wanted = {key: value for key, value in truth("muon_fc_sh2").items() if key not in gates}
    found = {k: v for folder in FOLDERS for k, v in arrays(tmp_path / "flex" / folder).items()}
    oracle.assert_same_tensors(found, wanted)


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (
            "model.layers.$LAYER_ID.mlp.gate_proj.weight, model.layers.$LAYER_ID.mlp.up_proj.weight -> "
            "model.layers.$LAYER_ID.mlp.up_gate_proj.weight, axis=1",
            r"of which only .*gate_proj\.weight has the state beta1_pow_acc",
        ),
        (f"{MATRIX} -> model.embedding", r"model\.embedding \(moment2\): .*this name contains embed"),
    ],
    ids=["joined with what AdamW holds", "a name that Muon would not choose"],
)
def test_statements_that_make_no_tensor_of_muon_are_refused(program: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "program.aoa").write_text(program)
    with pytest.raises(ReshardError, match=told):
        paddle_reshard.plan(
            checkpoint("muon_fc_sh2"), format="flex", config=config(), aoa=tmp_path / "program.aoa"
        )
