"""Families of the group ``families`` with a table of their own: files like the trainer's, and what transformers reads.

``tests/golden/test_newer_checkpoints.py`` holds the tensors of every case against its truth.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors

import paddle_reshard
from tests import oracle
from tests.conftest import case_directory
from tests.golden.compare_one_card import read_one_card
from tests.golden.unified_cases import read_unified

TOPOLOGIES = {
    "mp2": {"to": "tp=2"},
    "sh2_s1v2_meta": {"to": "sharding=2", "sharding_strategy": "stage1v2"},
    "single": {"to": "tp=1"},
}
SIBLINGS = {"qwen3_next": ("mp2", "sh2_s1v2_meta", "single")}
"""Family → its cases of one and the same model, in files of each rank."""
EXPORTS = {"qwen3_next": "hf-right/model.safetensors"}
"""Family → what ``transformers`` computes the logits of the Paddle model from, of the case on one card."""
DRIFTED = ("qwen3_next_mp2",)
"""Cases whose tensors drift apart between tp ranks, in the trainer."""
PAIRS = [(family, source, target) for family, of in SIBLINGS.items() for source in of for target in of]
Entries = dict[str, tuple[str, tuple[int, ...], bytes]]


def _checkpoint(name: str) -> Path:
    return case_directory(f"families/{name}") / "checkpoint-3"


def _read(path: Path) -> Entries:
    entries = safetensors.deserialize(path.read_bytes())
    return {key: (e["dtype"], tuple(e["shape"]), bytes(e["data"])) for key, e in entries}


@pytest.mark.parametrize(("family", "source", "target"), PAIRS, ids="-".join)
def test_converted_files_are_those_of_the_trainer(
    family: str, source: str, target: str, tmp_path: Path
) -> None:
    real, converted = _checkpoint(f"{family}_{target}"), tmp_path / "checkpoint-3"
    drifts = f"{family}_{source}" in DRIFTED
    paddle_reshard.convert(
        _checkpoint(f"{family}_{source}"), converted, **TOPOLOGIES[target], allow_replica_drift=drifts
    )
    oracle.assert_same_structure(oracle.structure(converted), oracle.structure(real))
    if (real / "model_meta.json").exists():
        ours = oracle.ordered_json(converted / "model_meta.json")
        assert ours == oracle.ordered_json(real / "model_meta.json")


@pytest.mark.parametrize("family", SIBLINGS)
def test_through_every_axis_and_back(family: str, tmp_path: Path) -> None:
    cut, flex, back = tmp_path / "cut", tmp_path / "flex", tmp_path / "back"
    source = _checkpoint(f"{family}_single")
    paddle_reshard.convert(source, cut, to="tp=2,sharding=2", sharding_strategy="stage1v2")
    paddle_reshard.convert(cut, flex, format="flex", files=2)
    paddle_reshard.convert(flex, back, to="tp=1", config=source / "config.json")
    truth = oracle.read_truth(source.parent / "truth.safetensors")
    assert read_one_card(back) == {key: array.tobytes() for key, array in truth.items()}
    oracle.assert_same_structure(oracle.structure(back), oracle.structure(source))


@pytest.mark.parametrize("case", ["single", "single_tohf"])
@pytest.mark.parametrize("family", EXPORTS)
def test_an_export_is_what_transformers_reads_and_the_way_back(
    family: str, case: str, tmp_path: Path
) -> None:
    name = f"{family}_{case}"
    paddle_reshard.convert(_checkpoint(name), tmp_path / "hf", format="huggingface")
    right = _read(case_directory(f"families/{family}_single") / EXPORTS[family])
    assert _read(tmp_path / "hf" / "model.safetensors") == right
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "unified", format="unified")
    truth = oracle.read_truth(case_directory(f"families/{name}") / "truth.safetensors")
    parameters = {key: truth[key] for key in oracle.shapes_of(truth)}
    oracle.assert_same_tensors(read_unified(tmp_path / "unified"), parameters)
