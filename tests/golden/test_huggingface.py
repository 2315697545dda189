"""Hugging Face checkpoints of real training checkpoints hold the truth, and are what the real exporters write.

The truth is renamed, taken apart and transposed here once more, with NumPy; the files are opened with the safetensors
library. ``tests/golden/exports`` holds what PaddleFormers itself exports of the same models.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

import paddle_reshard
from paddle_reshard.pipeline.core.errors import (
    CastError,
    CheckpointError,
    DriftError,
    PlanError,
    RuleError,
    UsageError,
)
from paddle_reshard.pipeline.core.tensors import dtype_named
from paddle_reshard.pipeline.formats.huggingface.parts import model_parts
from paddle_reshard.pipeline.model.model import Model, ModelTensor
from paddle_reshard.pipeline.model.rules.choose import choose_table
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from tests import oracle
from tests.conftest import FEW_CASES, REPO, case_directory
from tests.golden.unified_cases import Entry, read_unified, write_safetensors
from tests.golden.unified_cases import read as _read

EXPORTS = Path(__file__).parent / "exports"
FAMILIES = (
    "qwen2_single", "qwen3_single", "qwen2_mp2pp2sh2_s1v2_meta", "nlp_qwen2_mp2pp2sh2_s1v2_meta",
    "families/phi3_pp2", "families/phi3_sh2_s1v2_meta", "families/gemma3_text_sh2_s1v2_meta",
)  # fmt: skip
MIXTURES = {
    "moe_single": "moe_single", "moe_pp2": None, "moe_sh2_s1v1_meta": None,
    "moe_mp2pp2sh2_s1v2_meta_ema": None, "qwen2moe_single": "qwen2moe_single",
    "ernie45moe_single": "ernie45moe_single", "dsv3_single": "dsv3_single", "nlp_dsv2_single": None,
    "nlp_qwen2moe_single": None,
}  # fmt: skip
"""Case of the corpus → its real export."""
DRIFTED = "moe_mp2pp2sh2_s1v2_meta_ema"
TAG = {np.dtype("u2"): "BF16", np.dtype("f4"): "F32", np.dtype("f2"): "F16"}
PREFIX = re.compile(r"^(llama|qwen2|qwen2_moe|deepseek_v2)\.(?=embed|layers|norm)")
LINEAR = re.compile(r"\.(\w+_proj|kv_a_proj_with_mqa|gate|shared_expert_gate)\.weight$")


def _case(name: str) -> Path:
    in_group = name in FAMILIES and "/" not in name
    return case_directory(f"small-families/{name}" if in_group else name)


@cache
def _truth(case: Path) -> dict[str, np.ndarray]:
    return oracle.read_truth(case / "truth.safetensors")


def _config(case: Path) -> dict[str, Any]:
    (path,) = case.glob("checkpoint-*/config.json")
    return json.loads(path.read_text())


def _checkpoint(case: Path) -> Path:
    (path,) = case.glob("checkpoint-*")
    return path


def _entry(array: np.ndarray) -> Entry:
    return TAG[array.dtype], array.shape, np.ascontiguousarray(array).tobytes()


def _parameters(truth: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {key: truth[key] for key in oracle.shapes_of(truth) if not key.endswith(".ema")}


def _expected(parameters: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, Entry]:
    """What ``transformers`` calls these parameters, and how it stores them."""
    nlp = "paddlenlp_version" in config
    found: dict[str, np.ndarray] = {}
    for key, array in parameters.items():
        name = PREFIX.sub("model.", key)
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if "qkv_proj" in name and config["model_type"] != "phi3":  # whose projections stay fused
            for which, part in zip("qkv", _heads(array, config), strict=True):
                found[name.replace("qkv", which)] = part
        elif "up_gate_proj" in name or "gate_up_fused_proj" in name:
            gate, up = np.split(array, 2, axis=1)
            found[re.sub("up_gate_proj|gate_up_fused_proj", "gate_proj", name)] = gate
            found[re.sub("up_gate_proj|gate_up_fused_proj", "up_proj", name)] = up
        else:
            found[name] = array
    return {
        key: _entry(array.T if LINEAR.search(key) or (nlp and key == "lm_head.weight") else array)
        for key, array in found.items()
    }


def _heads(fused: np.ndarray, config: dict[str, Any]) -> list[np.ndarray]:
    """q, k and v of ``[q, q, …, k, v]`` per key-value head."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = fused.shape[-1] // (heads + 2 * groups)
    by_group = fused.reshape(*fused.shape[:-1], groups, heads // groups + 2, size)
    cut = (by_group[..., :-2, :], by_group[..., -2, :], by_group[..., -1, :])
    return [part.reshape(*fused.shape[:-1], -1) for part in cut]


def _export(case: Path, target: Path, **options: Any) -> dict[str, Entry]:
    paddle_reshard.convert(_checkpoint(case), target, format="huggingface", **options)
    return _read(target)


# ------------------------------------------------------------------------------------------------ parameters


@pytest.mark.parametrize("name", [*FEW_CASES, *FAMILIES, *(f"moe/{name}" for name in MIXTURES)])
def test_a_case_becomes_the_truth(name: str, tmp_path: Path) -> None:
    case = _case(name)
    found = _export(case, tmp_path / "hf", replicas="report" if name.endswith(DRIFTED) else "compare")
    assert found == _expected(_parameters(_truth(case)), _config(case))


# ------------------------------------------------------------------------------------- the real exporters


def _real_export(name: str) -> dict[str, tuple[str, tuple[int, ...], str]]:
    data = json.loads((EXPORTS / f"{name}.json").read_text())
    return {key: (tag, tuple(shape), digest) for key, (tag, shape, digest) in data.items()}


def _digests(found: dict[str, Entry]) -> dict[str, tuple[str, tuple[int, ...], str]]:
    return {key: (tag, shape, hashlib.sha256(data).hexdigest()) for key, (tag, shape, data) in found.items()}


@pytest.mark.parametrize(
    "case",
    [
        *("mp2_tied", "mp2sh2_s1v2_meta_mid", "qwen2_single", "qwen3_single"),
        *[f"moe/{name}" for name, real in MIXTURES.items() if real],
    ],
)
def test_it_is_what_paddleformers_exports(case: str, tmp_path: Path) -> None:
    """In bfloat16, to which it casts the routers of most families; what it keeps in float32 is kept."""
    real = _real_export(case.removeprefix("moe/"))
    if case == "mp2_tied":  # which it writes twice, and ``transformers`` once
        assert real.pop("lm_head.weight") == real["model.embed_tokens.weight"]
    found = _export(_case(case), tmp_path / "hf", dtype="bfloat16" if case.startswith("moe/") else None)
    assert _digests(found) == real


BESIDE = {
    "families/phi3_single": "hf-export",
    "families/phi3_single_tohf": "checkpoint-3",
    "families/gemma3_text_single": "hf-export-derived",
}
"""Case → the folder beside its checkpoint with what PaddleFormers exports, where that is right."""


@pytest.mark.parametrize("name", BESIDE)
def test_it_equals_the_export_of_paddleformers_next_to_the_checkpoint(name: str, tmp_path: Path) -> None:
    """And what PaddleFormers exports is read as a checkpoint of its own."""
    case = case_directory(name)
    assert _export(case, tmp_path / "hf") == _read(case / BESIDE[name])
    if BESIDE[name] != "checkpoint-3":
        found = _read_back(case / BESIDE[name], tmp_path / "unified")
        expected = _parameters(_truth(case))
        oracle.assert_same_tensors(found, expected)


def test_an_export_that_leaves_a_layer_fused_is_refused(tmp_path: Path) -> None:
    """The map of PaddleFormers 1.2.0 for gemma3_text names layer 0 only."""
    case = case_directory("families/gemma3_text_single")
    with pytest.raises(RuleError, match=r"layers\.1\.mlp\.up_gate_proj\.weight: no row .* has this key"):
        _read_back(case / "hf-export", tmp_path / "unified")
    assert not (tmp_path / "unified").exists()


def test_gemma3_is_tied_without_an_entry_that_says_so(tmp_path: Path) -> None:
    """``transformers`` leaves ``tie_word_embeddings`` out of the config, since it is the default of the class."""
    case = case_directory("families/gemma3_text_single")
    shutil.copytree(case / "hf-export-derived", tmp_path / "hf", copy_function=shutil.copyfile)
    _config_of(tmp_path / "hf", tie_word_embeddings=None, paddleformers_version=None)
    found = _read_back(tmp_path / "hf", tmp_path / "unified")
    oracle.assert_same_tensors(found, _parameters(_truth(case)))


@pytest.mark.parametrize("path", sorted(EXPORTS.glob("*.forms.json")), ids=lambda path: path.name)
def test_models_without_a_checkpoint_too(path: Path) -> None:
    """Every box of every part, read from random parameters and put where its strides say."""
    data = json.loads(path.read_text())
    random = np.random.RandomState(5)
    logical = {}
    for key, (dtype, shape) in data["parameters"].items():
        values = random.randn(*shape).astype(np.float32)
        logical[key] = values if dtype == "float32" else oracle.round_to_bfloat16(values)
    if data["config"]["tie_word_embeddings"]:  # one parameter with two names: it was drawn twice
        logical["model.embed_tokens.weight"] = logical["lm_head.weight"]
    found = {}
    for tensor, parts in model_parts(_model_of(logical, data["config"])):
        for part in parts:
            array = logical[tensor.key]
            if array.dtype == np.float32 and not part.keep_float32:
                array = oracle.round_to_bfloat16(array)  # as PaddleFormers does with routers
            flat = np.empty(np.prod(part.shape, dtype=int), array.dtype)
            for box in part.boxes:
                steps = [stride * array.itemsize for stride in box.strides]
                place = np.lib.stride_tricks.as_strided(flat[box.first_element :], box.extents, steps)
                place[...] = array[
                    tuple(slice(o, o + e) for o, e in zip(box.offset, box.extents, strict=True))
                ]
            found[part.key] = _entry(flat.reshape(part.shape))
    real = {key: (tag, tuple(shape), digest) for key, (tag, shape, digest) in data["export"].items()}
    if (
        data["config"].get("q_lora_rank", 0) is None
    ):  # the library exports a norm that computes nothing; we name it
        real = {key: entry for key, entry in real.items() if "q_a_layernorm" not in key}
    assert _digests(found) == real


def _model_of(parameters: dict[str, np.ndarray], config: dict[str, Any]) -> Model:
    table = choose_table(shipped_tables(), parameters, config)
    tensors = []
    for key, array in parameters.items():
        rule, layer = table.find(key, config)
        dtype = dtype_named("float32" if array.dtype == np.float32 else "bfloat16")
        tensors.append(ModelTensor(key, rule, layer, array.shape, dtype, (), False, rule.twin(config, key)))
    return Model(tuple(tensors), table, config)


def test_the_same_training_saved_by_the_trainer_as_hugging_face_has_the_same_bytes(tmp_path: Path) -> None:
    """``single`` and ``single_tohf`` are one training; the second was saved with ``save_to_hf``."""
    real = _checkpoint(case_directory("single_tohf"))
    _export(case_directory("single"), tmp_path / "hf")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "hf" / file).read_bytes() == (real / file).read_bytes()
    assert paddle_reshard.verify(_checkpoint(case_directory("single")), real, states=["param"]).equal


# ----------------------------------------------------------------------------------------- files and config


@pytest.mark.parametrize("limit", ["40KB", "12KB"])
def test_several_files_as_huggingface_hub_splits_them(limit: str, tmp_path: Path) -> None:
    case = case_directory("mp2_tied")
    whole = _export(case, tmp_path / "one")
    assert _export(case, tmp_path / "several", max_shard_size=limit) == whole
    split = json.loads((EXPORTS / "mp2_tied.files.json").read_text())[limit]
    names = [f"model-{i:05d}-of-{len(split):05d}.safetensors" for i in range(1, len(split) + 1)]
    for name, keys in zip(names, split, strict=True):
        with safetensors.safe_open(tmp_path / "several" / name, "np") as file:
            assert sorted(file.keys()) == sorted(keys)
            assert file.metadata() == {"format": "pt"}
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {key: name for name, keys in zip(names, split, strict=True) for key in keys}
    assert index["metadata"] == {"total_size": sum(len(data) for _, _, data in whole.values())}


def test_small_files(tmp_path: Path) -> None:
    """What belongs to the model goes along, what belongs to training is named."""
    source = tmp_path / "source"
    source.mkdir()
    for path in _checkpoint(case_directory("mp2_tied")).iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    for name in ("tokenizer.json", "generation_config.json"):
        (source / name).write_text("{}")
    report = paddle_reshard.convert(source, tmp_path / "hf", format="huggingface", dtype="float16")
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "paddle_reshard.json", "tokenizer.json",
    }  # fmt: skip
    given = json.loads((source / "config.json").read_text())
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config == {
        **{k: v for k, v in given.items() if k not in ("source", "tensor_model_parallel_size")},
        "torch_dtype": "float16",
    }
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert {"training_args.bin", "scheduler.pdparams", "rng_state_0.pth"} <= {
        p for p, _ in report.plan.targets[0].not_carried
    }
    assert set(report.plan.targets[0].states_not_carried) == {
        "moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc",
    }  # fmt: skip


def test_class_names_of_paddleformers_become_those_of_transformers(tmp_path: Path) -> None:
    case = _case("qwen2_mp2pp2sh2_s1v2_meta")
    assert _config(case)["architectures"] == ["Qwen2ForCausalLMPipeDeprecated"]
    _export(case, tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]


def test_a_trimmed_vocabulary(tmp_path: Path) -> None:
    case = case_directory("nlp_fused_mp2")
    trimmed = {
        key: array[:100] if "embed_tokens" in key else array[:, :100] if key == "lm_head.weight" else array
        for key, array in _parameters(_truth(case)).items()
    }
    assert _export(case, tmp_path / "hf", vocab_size=100) == _expected(trimmed, _config(case))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == 100


# ---------------------------------------------------------------------------------------------- dtype and EMA


ROUNDED = {
    "float32": lambda array: array,
    "float16": lambda array: array.astype(np.float16),
    "bfloat16": oracle.round_to_bfloat16,
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("mp2sh2_s1v2_meta_mid", "float16"),
        ("mp2sh2_s1v2_meta_mid", "float32"),
        ("mp2_tied", "float16"),
        ("sh2_s1v1_meta_fp32", "float16"),
        ("sh2_s1v1_meta_fp32", "bfloat16"),
    ],
)
def test_another_dtype_is_the_master_weight_rounded_once(name: str, dtype: str, tmp_path: Path) -> None:
    case = case_directory(name)
    truth = _truth(case)
    rounded = {
        key: ROUNDED[dtype](truth.get(f"{key}.w_0", array)) for key, array in _parameters(truth).items()
    }
    assert _export(case, tmp_path / "hf", dtype=dtype) == _expected(rounded, _config(case))


def test_a_value_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    case = case_directory("sh2_s1v1_meta_fp32")
    source = tmp_path / "source"
    source.mkdir()
    start = _truth(case)["model.norm.weight"].tobytes()[:64]
    for path in _checkpoint(case).iterdir():
        content = path.read_bytes()
        if path.name.startswith("model_state"):
            content = content.replace(start, np.float32(70000).tobytes() + start[4:])
        (source / path.name).write_bytes(content)
    with pytest.raises(
        CastError, match=r"model\.norm\.weight \(param\): the value 70000\.0 is too large"
    ) as caught:
        paddle_reshard.convert(source, tmp_path / "hf", format="huggingface", dtype="float16")
    assert caught.value.tensor == "model.norm.weight (param)"
    assert not (tmp_path / "hf").exists()
    found = paddle_reshard.convert(source, tmp_path / "hf", format="huggingface", dtype="bfloat16")
    assert found.moved.written_bytes


def test_a_parameter_that_is_not_its_master_weight_is_refused(tmp_path: Path) -> None:
    """Asked for in float32, the master weight goes out: a parameter that was changed on its own would be lost."""
    case = case_directory("nlp_fused_mp2")
    source = tmp_path / "source"
    shutil.copytree(_checkpoint(case), source, copy_function=shutil.copyfile)
    start = _truth(case)["llama.norm.weight"].tobytes()[:64]
    for path in source.glob("model_state*"):
        content = path.read_bytes()
        assert start in content
        path.write_bytes(content.replace(start, bytes([start[0] ^ 1]) + start[1:]))
    with pytest.raises(DriftError, match=r"llama\.norm\.weight \(param\): element \(0,\)"):
        paddle_reshard.convert(source, tmp_path / "hf", format="huggingface", dtype="float32")
    changed = _parameters(_truth(case)) | {"llama.norm.weight": _truth(case)["llama.norm.weight"].copy()}
    changed["llama.norm.weight"].view(np.uint8)[0] ^= 1
    paddle_reshard.convert(source, tmp_path / "as_trained", format="huggingface", master_weights="report")
    assert _read(tmp_path / "as_trained") == _expected(changed, _config(case))


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_the_average_as_a_model(dtype: str | None, tmp_path: Path) -> None:
    case = case_directory("mp2pp2sh2_s1v2_meta_ema")
    truth = _truth(case)
    averages = {key: truth[f"{key}.ema_w_0"] for key in _parameters(truth)}
    if dtype is None:
        averages = {key: oracle.round_to_bfloat16(array) for key, array in averages.items()}
    assert _export(case, tmp_path / "hf", state="ema", dtype=dtype) == _expected(averages, _config(case))


def test_the_average_of_parameters_without_master_weights(tmp_path: Path) -> None:
    case = case_directory("moe/moe_mp2pp2sh2_s1v2_meta_ema")
    truth = _truth(case)
    averages = {
        key: truth[f"{key}.ema"]
        if f"{key}.ema" in truth
        else oracle.round_to_bfloat16(truth[f"{key}.ema_w_0"])
        for key in _parameters(truth)
    }
    found = _export(case, tmp_path / "hf", state="ema", replicas="report")
    assert found == _expected(averages, _config(case))


# ----------------------------------------------------------------------------------------- verify and refusals


def test_verify_compares_with_the_training_checkpoint(tmp_path: Path) -> None:
    source = _checkpoint(case_directory("nlp_fused_mp2"))
    paddle_reshard.convert(source, tmp_path / "hf", format="huggingface", max_shard_size=40_000)
    for sides in ((source, tmp_path / "hf"), (tmp_path / "hf", source)):
        report = paddle_reshard.verify(*sides, states=["param"])
        assert report.equal
        assert report.tensors == 27
    assert not paddle_reshard.verify(source, tmp_path / "hf").equal
    whole = _read(tmp_path / "hf")
    path = sorted((tmp_path / "hf").glob("*.safetensors"))[3]
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x40
    path.write_bytes(content)
    (difference,) = paddle_reshard.verify(source, tmp_path / "hf", states=["param"]).differences
    assert path.name in difference.detail
    (key,) = [key for key, entry in whole.items() if _read(tmp_path / "hf")[key] != entry]
    assert difference.tensor == f"{key.replace('model.', 'llama.')} (param)"
    path.unlink()
    with pytest.raises(CheckpointError, match=f"the index says that {path.name} holds it, but no file does"):
        paddle_reshard.verify(source, tmp_path / "hf", states=["param"])


def test_an_average_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no EMA state"):
        _export(case_directory("mp2_tied"), tmp_path / "hf", state="ema")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"divide_by": 0}, "divide_by is 0"),
        ({"divide_by": None}, "divide_by is None"),
        ({}, "divide_by is None"),
    ],
)
def test_an_average_that_is_not_one_yet(facts: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(
        _checkpoint(case_directory("mp2pp2sh2_s1v2_meta_ema")), source, copy_function=shutil.copyfile
    )
    (source / "training_args.bin").unlink()  # it says that the trainer kept the average itself
    (source / "ema.json").write_text(json.dumps(facts))
    with pytest.raises(paddle_reshard.ReshardError, match=message):
        paddle_reshard.plan(source, tmp_path / "hf", format="huggingface", state="ema")
    (source / "ema.json").write_text('{"divide_by": 1}')
    planned = paddle_reshard.plan(source, tmp_path / "hf", format="huggingface", state="ema")
    assert ("ema.json", "state of the training job, not of the model") in planned.targets[0].not_carried


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_average_that_began_at_zero_is_divided_before_it_is_rounded(dtype: str, tmp_path: Path) -> None:
    case = case_directory("mp2pp2sh2_s1v2_meta_ema")
    source = tmp_path / "source"
    shutil.copytree(_checkpoint(case), source, copy_function=shutil.copyfile)
    (source / "training_args.bin").unlink()  # it says that the trainer kept the average itself
    (source / "ema.json").write_text('{"divide_by": 0.271}')
    options = {"format": "huggingface", "state": "ema", "dtype": dtype}
    with pytest.raises(paddle_reshard.ReshardError, match=r"divided by 0\.271, .*; convert it to a model"):
        paddle_reshard.plan(source, {tmp_path / "hf": options, tmp_path / "one": {"to": "tp=1"}})
    paddle_reshard.convert(source, tmp_path / "hf", **options)
    made = oracle.read_truth(tmp_path / "hf" / "model.safetensors")
    truth = oracle.read_truth(case / "truth.safetensors")
    averages = {k.removesuffix(".ema_w_0"): v for k, v in truth.items() if k.endswith(".ema_w_0")}
    assert made.keys() == averages.keys()
    for key, average in averages.items():
        whole = average / np.float32(0.271)
        expected = whole if dtype == "float32" else oracle.round_to_bfloat16(whole)
        got = made[key].T if "_proj" in key else made[key]
        assert got.tobytes() == expected.tobytes(), key


def test_a_family_whose_form_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"gpt\.embeddings.*does not give its form in a Hugging Face"):
        _export(case_directory("small-families/nlp_gpt_single"), tmp_path / "hf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "huggingface", "dtype": "int8"}, "unknown dtype 'int8'"),
        ({"format": "huggingface", "state": "moment1"}, "unknown state 'moment1'"),
        ({"format": "hf", "to": "tp=1"}, "unknown format 'hf'"),
    ],
)
def test_requests_that_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        paddle_reshard.plan(_checkpoint(case_directory("mp2_tied")), tmp_path / "hf", **options)


# ------------------------------------------------------------------------------------------------ as a source


def _read_back(folder: Path, target: Path, **options: Any) -> dict[str, np.ndarray]:
    """The parameters of a Hugging Face checkpoint as Paddle has them, without the checkpoint that it was made of."""
    paddle_reshard.convert(folder, target, format="unified", **options)
    return read_unified(target)


@pytest.mark.parametrize("name", ["qwen2_single", "mp2_tied", "nlp_fused_mp2", "sh2_s1v1_meta_fp32"])
def test_read_by_itself_it_is_the_truth(name: str, tmp_path: Path) -> None:
    case = _case(name)
    _export(case, tmp_path / "hf", max_shard_size="20KB")
    found = _read_back(tmp_path / "hf", tmp_path / "unified")
    oracle.assert_same_tensors(found, _parameters(_truth(case)))
    assert paddle_reshard.verify(tmp_path / "hf", tmp_path / "unified").equal


def _config_of(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_what_is_fused_is_what_the_config_says(tmp_path: Path) -> None:
    case = case_directory("nlp_fused_mp2")
    _export(case, tmp_path / "hf")
    _config_of(tmp_path / "hf", fuse_attention_qkv=None, fuse_attention_ffn=False)
    found = _read_back(tmp_path / "hf", tmp_path / "unified")
    truth, config = _truth(case), _config(case)
    q, k, v = _heads(truth["llama.layers.0.self_attn.qkv_proj.weight"], config)
    gate, up = np.split(truth["llama.layers.0.mlp.gate_up_fused_proj.weight"], 2, axis=1)
    parts = {"self_attn.q": q, "self_attn.k": k, "self_attn.v": v, "mlp.gate": gate, "mlp.up": up}
    for name, part in parts.items():
        np.testing.assert_array_equal(found[f"llama.layers.0.{name}_proj.weight"], part)


def test_which_library_it_is_for_must_be_said(tmp_path: Path) -> None:
    case = case_directory("mp2_tied")
    _export(case, tmp_path / "hf")
    _config_of(tmp_path / "hf", paddleformers_version=None)
    with pytest.raises(RuleError, match=r"llama \(paddleformers\), llama \(paddlenlp\).*--convention"):
        _read_back(tmp_path / "hf", tmp_path / "unified")
    rules = REPO / "pipeline" / "model" / "rules" / "llama.paddleformers.json"
    found = _read_back(tmp_path / "hf", tmp_path / "unified", rules=rules)
    oracle.assert_same_tensors(found, _parameters(_truth(case)))


def test_a_tied_head_that_is_stored_too_is_compared(tmp_path: Path) -> None:
    """As PaddleFormers writes it, and ``transformers`` does not."""
    _export(case_directory("mp2_tied"), tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    whole = _read(tmp_path / "hf")
    tag, shape, data = whole["model.embed_tokens.weight"]
    write_safetensors(path, {**whole, "lm_head.weight": (tag, shape, data)})
    oracle.assert_same_tensors(
        _read_back(tmp_path / "hf", tmp_path / "unified"), _parameters(_truth(case_directory("mp2_tied")))
    )
    write_safetensors(path, {**whole, "lm_head.weight": (tag, shape, data[::-1])})
    with pytest.raises(DriftError, match=r"model\.embed_tokens\.weight"):
        _read_back(tmp_path / "hf", tmp_path / "again")


def test_a_job_of_any_topology_starts_from_it(tmp_path: Path) -> None:
    """Its files are the real trainer's model_state, bit for bit, and nothing else that would look like a state."""
    real = _checkpoint(_case("mp2pp2"))
    paddle_reshard.convert(real, tmp_path / "hf", format="huggingface")
    paddle_reshard.convert(tmp_path / "hf", tmp_path / "job", to="tp=2,pp=2", format="hybrid-plain")
    files = sorted(path.name for path in real.glob("model_state.*"))
    assert len(files) == 4
    assert sorted(path.name for path in (tmp_path / "job").glob("*.pd*")) == files
    for file in files:
        ours, theirs = (oracle.load_with_paddle(folder / file) for folder in (tmp_path / "job", real))
        assert ours.pop("StructuredToParameterName@@") == theirs.pop("StructuredToParameterName@@")
        assert list(ours) == list(theirs)
        assert all(np.array_equal(ours[key].view(np.uint16), theirs[key].view(np.uint16)) for key in theirs)
