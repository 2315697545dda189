"""Multi-token prediction (MTP): its layers in every topology and format, and left out on request.

``test_as_the_job_reads.py`` shows that what is written has the trainer's own files in every topology. ``deepseek_v3``
numbers an MTP layer on from its decoder layers, and builds it before the last norm on one card, behind it in a
pipeline. ``ernie4_5_moe`` gives it names of its own, and its pipeline class has none.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError, PlanError, RuleError, UsageError
from tests import oracle
from tests.conftest import case_directory
from tests.golden.compare_one_card import read_one_card
from tests.golden.unified_cases import read as _tensors
from tests.golden.unified_cases import write_safetensors

MTP = re.compile(r"model\.(layers\.3\.|mtp_)")
DSV3, ERNIE = "dsv3_mtp_small_single", "ernie45_mtp_single"


def _checkpoint(name: str) -> Path:
    return case_directory(f"states/{name}") / "checkpoint-3"


def _truth(name: str) -> oracle.Tensors:
    return oracle.read_truth(case_directory(f"states/{name}") / "truth.safetensors")


def _bits(truth: oracle.Tensors) -> dict[str, bytes]:
    return {key: array.tobytes() for key, array in truth.items()}


def _lost(name: str, folder: Path) -> Path | None:
    """A file of the buffers that sharded saving loses, as the job had them in memory."""
    if "_meta" not in name:
        return None
    lost = {key: np.array(array) for key, array in _truth(name).items() if key.endswith("correction_bias")}
    save_file(lost, folder / "lost.safetensors")
    return folder / "lost.safetensors"


# ------------------------------------------------------------------------------------------------ Hugging Face


def test_the_model_is_what_the_trainer_saves_as_hugging_face(tmp_path: Path) -> None:
    paddle_reshard.convert(_checkpoint(DSV3), tmp_path / "hf", format="huggingface")
    real = _checkpoint("dsv3_mtp_single_tohf") / "model.safetensors"
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == real.read_bytes()
    assert _tensors(tmp_path / "hf")["model.layers.3.eh_proj.weight"][1] == (32, 64)


def test_what_the_trainer_leaves_fused_is_taken_apart(tmp_path: Path) -> None:
    """The names and shapes are those that ERNIE's own checkpoints have."""
    paddle_reshard.convert(_checkpoint(ERNIE), tmp_path / "hf", format="huggingface")
    found = _tensors(tmp_path / "hf")
    real = _tensors(_checkpoint("ernie45_mtp_single_tohf"))
    fused = {key for key in real if re.search("qkv_proj|up_gate_proj", key)}
    assert {key: found.get(key) for key in real.keys() - fused} == {k: real[k] for k in real.keys() - fused}
    truth = _truth(ERNIE)["model.mtp_block.0.mlp.up_gate_proj.weight"]
    for part, name in zip(np.split(truth, 2, axis=1), ("gate_proj", "up_proj"), strict=True):
        key = f"model.mtp_block.0.mlp.{name}.weight"
        assert found[key] == ("BF16", part.T.shape, np.ascontiguousarray(part.T).tobytes())
    assert paddle_reshard.verify(_checkpoint(ERNIE), tmp_path / "hf", states=["param"]).equal


@pytest.mark.parametrize("name", ["dsv3_mtp_single_tohf", "ernie45_mtp_single_tohf", "dsv3_mtp_pp2"])
def test_a_hugging_face_checkpoint_becomes_the_parameters(name: str, tmp_path: Path) -> None:
    paddle_reshard.convert(_checkpoint(name), tmp_path / "hf", format="huggingface")
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "flex", format="flex")
    assert paddle_reshard.verify(_checkpoint(name), tmp_path / "flex", states=["param"]).equal


# --------------------------------------------------------------------------------------------------- left out


@pytest.mark.parametrize(
    ("source", "options"),
    [
        (DSV3, {"to": "tp=1"}),
        ("dsv3_mtp_pp2", {"to": "tp=1"}),
        ("dsv3_mtp_sh2_s1v2_meta_ema", {"to": "tp=1"}),
        (ERNIE, {"to": "tp=1"}),
        (DSV3, {"to": "pp=3"}),
        (ERNIE, {"to": "pp=3"}),
        (DSV3, {"format": "flex"}),
        (ERNIE, {"format": "unified"}),
    ],
)
def test_without_it_all_else_is_the_truth(source: str, options: dict[str, Any], tmp_path: Path) -> None:
    fill, made = _lost(source, tmp_path), tmp_path / "without"
    if fill is not None:  # the buffer of the MTP layer is to be dropped too
        assert MTP.match(max(key for key in _truth(source) if key.endswith("correction_bias")))
    report = paddle_reshard.convert(_checkpoint(source), made, drop=["mtp"], fill=fill, **options)
    assert json.loads((made / "config.json").read_text())["num_nextn_predict_layers"] == 0
    if options != {"to": "tp=1"}:
        paddle_reshard.convert(made, tmp_path / "back", to="tp=1")
        made = tmp_path / "back"
    truth = {key: bits for key, bits in _bits(_truth(source)).items() if not MTP.match(key)}
    assert read_one_card(made) == truth
    dropped = {key for key in oracle.shapes_of(_truth(source)) if MTP.match(key) and not key.endswith(".ema")}
    reasons = dict(report.plan.targets[0].not_carried)
    assert dropped == {key for key, reason in reasons.items() if "multi-token prediction" in reason}


@pytest.mark.parametrize("limit", [None, "40KB"])
def test_the_form_of_the_models_authors_is_refused_or_left_out(limit: str | None, tmp_path: Path) -> None:
    """DeepSeek's layer has copies of embedding and head, a norm of its own and no bias."""
    paddle_reshard.convert(_checkpoint(DSV3), tmp_path / "hf", format="huggingface", max_shard_size=limit)
    if limit is None:
        path, layer = tmp_path / "hf" / "model.safetensors", "model.layers.3."
        found = _tensors(path.parent)
        del found[f"{layer}eh_proj.bias"]
        found[f"{layer}embed_tokens.weight"] = found["model.embed_tokens.weight"]
        found[f"{layer}shared_head.head.weight"] = found["lm_head.weight"]
        found[f"{layer}shared_head.norm.weight"] = found[f"{layer}enorm.weight"]
        write_safetensors(path, found)
        with pytest.raises(RuleError, match=r"layers\.3\.\S+: .* has no such tensor .* --drop mtp"):
            paddle_reshard.plan(tmp_path / "hf", tmp_path / "x", format="flex")
    report = paddle_reshard.convert(tmp_path / "hf", tmp_path / "flex", format="flex", drop="mtp")
    dropped = [key for key, reason in report.plan.targets[0].not_carried if "multi-token" in reason]
    assert len(dropped) == (32 if limit is None else 30)
    paddle_reshard.convert(_checkpoint(DSV3), tmp_path / "without", format="flex", drop="mtp")
    assert paddle_reshard.verify(tmp_path / "without", tmp_path / "flex", states=["param"]).equal


def test_without_it_names_and_order_are_those_of_a_model_that_never_had_it(tmp_path: Path) -> None:
    """The last norm is built right behind the decoder layers, so it is the next of its class."""
    paddle_reshard.convert(_checkpoint(DSV3), tmp_path / "without", to="tp=1", drop="mtp")
    root = oracle.unpickle(tmp_path / "without" / "model_state.pdparams")
    names = root.pop("StructuredToParameterName@@")
    assert [*root][-2:] == ["model.norm.weight", "lm_head.weight"]
    assert names["model.norm.weight"] == "create_parameter_14.w_0"


def test_the_pipeline_class_of_ernie_has_none(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"mtp_\S+: with pp=3, .*ernie4_5_moe has no .*--drop mtp"):
        paddle_reshard.convert(_checkpoint(ERNIE), tmp_path / "x", to="pp=3")
    assert not (tmp_path / "x").exists()


def test_it_is_dropped_by_the_names_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "rules.aoa").write_text("model.norm.weight -> model.norm.weight")
    with pytest.raises(UsageError, match=r"--drop mtp .* with statements, NAME -> _"):
        paddle_reshard.plan(
            _checkpoint(DSV3), tmp_path / "x", format="flex", drop="mtp", aoa=tmp_path / "rules.aoa"
        )


# ----------------------------------------------------------------------------------------------------- damaged


@pytest.mark.parametrize(
    ("name", "entries", "message"),
    [
        (DSV3, {"num_nextn_predict_layers": 2}, r"says 2 layers of multi-token .*; layer 4 is in only"),
        (DSV3, {"num_nextn_predict_layers": 0}, r"layer 3 is of multi-token prediction, .* announces 0"),
        (DSV3, {"num_hidden_layers": 2}, r"says 2 decoder layers; layer 3 is in only one|MTP"),
        (ERNIE, {"num_nextn_predict_layers": 2}, r"says 2 layers of multi-token .*; layer 1 is in only"),
    ],
)
def test_a_config_with_other_layers_is_refused(
    name: str, entries: dict[str, int], message: str, tmp_path: Path
) -> None:
    shutil.copytree(_checkpoint(name), tmp_path / "source", copy_function=shutil.copyfile)
    path = tmp_path / "source" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    with pytest.raises(CheckpointError, match=message):
        paddle_reshard.inspect(tmp_path / "source")
