"""Checkpoints of every format that somebody has damaged: refused, or what was not damaged goes through bit for bit.

``make fuzz`` runs the same with many more examples.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CoverageError, ReshardError
from paddle_reshard.pipeline.request.options import TargetOptions
from paddle_reshard.storage.files.dist_metadata import encode_dist_metadata, parse_dist_metadata
from tests.conftest import case_directory
from tests.golden.unified_cases import small_case
from tests.hostile.test_fuzz_checkpoints import damaged
from tests.sampling import examples

SETTINGS = examples(4)
MADE: dict[str, TargetOptions] = {
    "experts over ranks": {"to": "ep=2,sharding=2", "sharding_strategy": "stage1v2"},
    "experts over stages": {"to": "ep=2,pp=2,sharding=2", "sharding_strategy": "stage1v2"},
    "auto-parallel": {"format": "auto-parallel", "max_shard_size": "20KB"},
    "model": {"format": "huggingface", "max_shard_size": "8KB"},
}
"""Made of a real unified checkpoint with experts."""
REAL = ("ep2_uc_sh2_s1v2", "uc_single_tied", "nlp_uc_mp2sh2_ignoremerge", "mp2pp2_tohf", "sh2_s1v1_meta_tohf")
NO_JSON = ("fc_pp2sh2_s1v2_tied", "mp2pp2_tohf", "auto-parallel")
"""None but the model's own."""
SOURCES = ("fc_moe_mp2sh2_s1v2_ema", "fc_pp2sh2_s1v2_tied", *REAL, *MADE)


class Sandbox:
    """A copy of a checkpoint that may be damaged, and what the sound one becomes."""

    def __init__(self, sound: Path, folder: Path, target: TargetOptions) -> None:
        self.sound, self.source, self.made, self.target = sound, folder / "source", folder / "made", target
        self.reset()
        self.expected = self.convert()
        assert self.expected

    def reset(self) -> None:
        shutil.rmtree(self.source, ignore_errors=True)
        shutil.copytree(self.sound, self.source, copy_function=shutil.copyfile)

    def names(self, *suffixes: str) -> list[str]:
        files = (path.relative_to(self.sound).as_posix() for path in self.sound.rglob("*") if path.is_file())
        return sorted(name for name in files if name.endswith(suffixes))

    def convert(self) -> dict[str, bytes]:
        """Its tensor files; what goes along beside them is carried as it is."""
        shutil.rmtree(self.made, ignore_errors=True)
        paddle_reshard.convert(self.source, self.made, **self.target)
        files = (path for path in self.made.rglob("*") if path.is_file())
        return {
            path.relative_to(self.made).as_posix(): path.read_bytes()
            for path in files
            if path.suffix in (".pdparams", ".pdopt", ".safetensors") and path.name != "scheduler.pdparams"
        }

    def check(self) -> None:
        """It is refused, for a reason that crosses processes, or as before."""
        try:
            found = self.convert()
        except ReshardError as refusal:
            assert str(refusal)
            again = pickle.loads(pickle.dumps(refusal))
            assert (type(again), str(again)) == (type(refusal), str(refusal))
            assert not self.made.exists()
        else:
            assert found == self.expected


def sound(name: str, folder: Path) -> Path:
    if name in REAL:
        return small_case(name) / "checkpoint-3"
    if name in MADE:
        paddle_reshard.convert(small_case("ep2_uc_sh2_s1v2") / "checkpoint-3", folder / name, **MADE[name])
        return folder / name
    shutil.copytree(case_directory(f"small-flex/{name}"), folder / name, copy_function=shutil.copyfile)
    shutil.copy(folder / name / "config.json", folder / name / "checkpoint-3")
    return folder / name / "checkpoint-3"


@pytest.fixture(scope="module")
def sandboxes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sandbox]:
    return {
        name: Sandbox(
            sound(name, tmp_path_factory.mktemp("sound")),
            tmp_path_factory.mktemp("damaged"),
            {"format": "unified"} if name == "model" else {"to": "tp=1"},
        )
        for name in SOURCES
    }


TENSOR_FILES = (".safetensors", ".distcp", ".pdparams", ".pdopt", ".metadata")


def rank_files(sandbox: Sandbox) -> list[str]:
    return [name for name in sandbox.names(*TENSOR_FILES) if name != "scheduler.pdparams"]


@pytest.mark.parametrize("name", SOURCES)
@SETTINGS
@given(data=st.data())
def test_files_that_are_gone_new_or_cut(
    sandboxes: dict[str, Sandbox], name: str, data: st.DataObject
) -> None:
    sandbox = sandboxes[name]
    sandbox.reset()
    victim = sandbox.source / data.draw(st.sampled_from(rank_files(sandbox)))
    other = re.sub(r"\d+", lambda m: str(int(m[0]) + 7).zfill(len(m[0])), victim.name)
    content = victim.read_bytes()
    deed = data.draw(st.sampled_from(["remove", "rename", "copy", "cut", "longer"]))
    if deed == "remove":
        victim.unlink()
    elif deed == "rename":
        victim.rename(victim.with_name("copy_of_" + victim.name))
    elif deed == "copy":
        victim.with_name(other if other != victim.name else "0" + victim.name).write_bytes(content)
    elif deed == "cut":
        victim.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    else:
        victim.write_bytes(content + bytes(data.draw(st.sampled_from([1, 4, 4096]))))
    sandbox.check()


@pytest.mark.parametrize("name", SOURCES)
@SETTINGS
@given(data=st.data())
def test_headers_and_metadata_with_other_bytes(
    sandboxes: dict[str, Sandbox], name: str, data: st.DataObject
) -> None:
    sandbox = sandboxes[name]
    sandbox.reset()
    described = sandbox.names(".metadata", ".safetensors")
    victim = sandbox.source / data.draw(st.sampled_from(described or sandbox.names("model_meta.json")))
    content = bytearray(victim.read_bytes())
    in_header = victim.suffix == ".safetensors"
    stop = 8 + int.from_bytes(content[:8], "little") if in_header else len(content)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, stop - 1))] = data.draw(st.integers(0, 255))
    victim.write_bytes(content)
    sandbox.check()


@pytest.mark.parametrize("name", [name for name in SOURCES if name not in NO_JSON])
@SETTINGS
@given(data=st.data())
def test_json_that_says_something_else(sandboxes: dict[str, Sandbox], name: str, data: st.DataObject) -> None:
    sandbox = sandboxes[name]
    sandbox.reset()
    # What config.json says of a model may be another model of the same shapes: tied, with other groups of heads.
    files = sandbox.names(".index.json", "model_meta.json")
    victim = sandbox.source / data.draw(st.sampled_from(files))
    victim.write_text(json.dumps(data.draw(damaged(json.loads(victim.read_text())))))
    sandbox.check()


NUMBERS = ("num_hidden_layers", "num_attention_heads", "num_experts", "vocab_size", "hidden_size")


@pytest.mark.parametrize("value", [0, -1, 2**70])
@pytest.mark.parametrize("name", [*REAL[:1], "fc_moe_mp2sh2_s1v2_ema", "experts over ranks", "model"])
def test_absurd_numbers_in_a_config(
    sandboxes: dict[str, Sandbox], name: str, value: Any, tmp_path: Path
) -> None:
    sandbox = sandboxes[name]
    config = json.loads((sandbox.sound / "config.json").read_text())
    for entry in NUMBERS:
        sandbox.reset()
        (sandbox.source / "config.json").write_text(json.dumps({**config, entry: value}))
        try:
            paddle_reshard.plan(sandbox.source, tmp_path / "target", **sandbox.target)
        except ReshardError as refusal:
            assert str(refusal)
        else:
            assert entry != "num_hidden_layers", value


@pytest.mark.parametrize("name", ["fc_pp2sh2_s1v2_tied", "uc_single_tied", "auto-parallel"])
def test_a_schedule_that_is_none(sandboxes: dict[str, Sandbox], name: str) -> None:
    """A file of tensors in its place."""
    sandbox = sandboxes[name]
    sandbox.reset()
    donor = sandboxes["fc_pp2sh2_s1v2_tied"].sound / "model_state" / "0_0.distcp"
    shutil.copy(donor, sandbox.source / "scheduler.pdparams")
    with pytest.raises(ReshardError, match=r"scheduler\.pdparams: .*learning-rate schedule"):
        sandbox.convert()


def test_a_fused_tensor_with_too_few_dims(sandboxes: dict[str, Sandbox]) -> None:
    """A metadata file that takes a vector for a fused projection, and the projection for the vector."""
    sandbox = sandboxes["fc_moe_mp2sh2_s1v2_ema"]
    sandbox.reset()
    path = sandbox.source / "model_state" / "0.metadata"
    content = path.read_bytes()
    metadata = parse_dist_metadata(lambda at, nbytes: content[at : at + nbytes], len(content), path.name)
    vector, fused = "model.norm.weight", "model.layers.0.mlp.experts.0.up_gate_proj.weight"
    keys = tuple({vector: fused, fused: vector}.get(key, key) for key in metadata.keys)
    assert keys != metadata.keys
    path.write_bytes(encode_dist_metadata(replace(metadata, keys=keys, flat_mapping={k: (k,) for k in keys})))
    with pytest.raises(CoverageError, match=rf"{fused}.*: shape \(16,\), but 2 parts are fused along dim 1"):
        sandbox.convert()
