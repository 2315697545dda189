"""LoRA of vision-language models: between topologies and formats, merged, for ``peft``; it equals the trainer's memory.

The classes rename keys where they save weights, and ``model_meta.json`` has a prefix instead.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests import oracle
from tests.conftest import case_directory, case_names
from tests.golden.compare_one_card import bits, load, read_flex

CASES = [name.rpartition("/")[2] for name in case_names("small-lora")]
FAMILIES = ("paddleocr_vl", "qwen2_5_vl", "qwen3_vl")
SAVED = {"qwen2_5_vl": {"model.visual.": "visual.", "model.language_model.": "model."}}
"""Family → beginnings of keys in the model → in its files of weights."""
MODULES = {
    "paddleocr_vl": {"visual.": "model.visual.", "mlp_AR.": "model.projector.", "model.": "model.language_model."},
    "qwen2_5_vl": {"visual.": "model.visual.", "model.": "model.language_model."},
}  # fmt: skip
"""Family → beginnings of keys in its files of weights → of modules in ``transformers`` 5."""
CONFIGS = ("config", "lora_config")


def folder(name: str) -> Path:
    return case_directory(f"small-lora/{name}")


def family_of(name: str) -> str:
    return next(family for family in FAMILIES if family in name)


def base_of(name: str) -> Path:
    return folder(f"lora_{family_of(name)}_single") / "base"


def configs(name: str) -> dict[str, Path]:
    """A FlexCheckpoint has none; the library writes them when the job ends."""
    if (folder(name) / "checkpoint-3/config.json").exists():
        return {}
    return {entry: folder(name) / f"final/{entry}.json" for entry in CONFIGS}


def saved_as(name: str, key: str) -> str:
    for of_model, of_files in SAVED.get(family_of(name), {}).items():
        if key.startswith(of_model):
            return of_files + key.removeprefix(of_model)
    return key


def truth_of(name: str, file: str = "truth") -> dict[str, np.ndarray]:
    path = folder(name) / f"{file}.safetensors"
    return {
        key: np.frombuffer(entry["data"], "<f4" if entry["dtype"] == "F32" else "<u2").reshape(entry["shape"])
        for key, entry in safetensors.deserialize(path.read_bytes())
    }


def matrices_of(name: str) -> dict[str, np.ndarray]:
    return {key: array for key, array in truth_of(name).items() if key.endswith(("lora_A", "lora_B"))}


@pytest.mark.parametrize(
    ("source", "target", "options"),
    [
        ("{}_single", "{}_sh2_s1v2_meta", {"to": "sharding=2", "sharding_strategy": "stage1v2"}),
        ("{}_sh2_s1v2_meta", "{}_single", {"to": "tp=1", "format": "hybrid-plain"}),
    ],
)
@pytest.mark.parametrize("family", ["paddleocr_vl", "qwen2_5_vl"])
def test_a_target_is_what_the_trainer_writes_there(
    family: str, source: str, target: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Keys and their order, names of parameters, and both files of metadata."""
    made, real = tmp_path / "made", folder(f"lora_{target.format(family)}") / "checkpoint-3"
    paddle_reshard.convert(folder(f"lora_{source.format(family)}") / "checkpoint-3", made, **options)
    assert oracle.structure(made) == oracle.structure(real)
    assert (made / "model_meta.json").exists() == (real / "model_meta.json").exists()
    if (real / "model_meta.json").exists():
        assert (made / "model_meta.json").read_bytes() == (real / "model_meta.json").read_bytes()
    written, expected = (json.loads((place / "lora_config.json").read_bytes()) for place in (made, real))
    of_job = "tensor_model_parallel_size"  # -1 in a job on one card
    assert {k: v for k, v in written.items() if k != of_job} == {
        k: v for k, v in expected.items() if k != of_job
    }


@pytest.mark.parametrize("part", ["checkpoint-3", "final"])
@pytest.mark.parametrize("name", [name for name in CASES if "_single" in name and "fc" not in name])
def test_merged_it_is_what_the_library_merges(name: str, part: str, tmp_path: Path) -> None:
    paddle_reshard.convert(folder(name) / part, tmp_path / "merged", format="flex", merge_into=base_of(name))
    found = read_flex(tmp_path / "merged")
    expected = truth_of(name, "truth_merged")
    assert {saved_as(name, key): content for key, content in found.items()} == {
        key: array.tobytes() for key, array in expected.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_what_a_job_leaves_when_it_ends_holds_the_same_matrices(name: str, tmp_path: Path) -> None:
    paddle_reshard.convert(folder(name) / "final", tmp_path / "made", to="tp=1", format="hybrid-plain")
    held = load(tmp_path / "made/lora_model_state.pdparams")
    held.pop(oracle.NAME_TABLE)
    assert {key: bits(value) for key, value in held.items()} == {
        saved_as(name, key): array.tobytes() for key, array in matrices_of(name).items()
    }


def test_a_base_beside_the_matrices_is_named_and_left_out(tmp_path: Path) -> None:
    """One card's FlexCheckpoint job of qwen2_5_vl ends with most of its base in ``peft_model-*.safetensors``."""
    source = folder("lora_qwen2_5_vl_fc_single") / "final"
    report = paddle_reshard.convert(source, tmp_path / "made", to="tp=1", format="hybrid-plain")
    left = [value for name, value in report.plan.facts() if name == "not carried"]
    assert [line for line in left if "(46): belongs to the base model" in line] == left
    with pytest.raises(ReshardError, match=r"lm_head\.weight: no file holds it"):
        paddle_reshard.convert(source, tmp_path / "flex", format="flex")


def test_beside_matrices_nothing_tells_what_was_trained_in_full(tmp_path: Path) -> None:
    source, own = folder("lora_qwen2_5_vl_fc_single") / "final", tmp_path / "final"
    own.mkdir()
    for path in source.iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    entries = json.loads((own / "lora_config.json").read_bytes())
    (own / "lora_config.json").write_text(json.dumps({**entries, "trainable_bias": "all"}))
    with pytest.raises(ReshardError, match="not a matrix of LoRA, and nothing tells whether it was trained"):
        paddle_reshard.convert(own, tmp_path / "made", to="tp=1", format="hybrid-plain")


def split_widths(matrix: np.ndarray, *widths: int, groups: int = 1) -> Iterable[np.ndarray]:
    """Columns of a fused projection, group by group."""
    grouped = matrix.reshape(len(matrix), groups, -1)
    parts = np.split(grouped, np.cumsum(widths)[:-1], axis=2)
    return [part.reshape(len(matrix), -1) for part in parts]


def parts_of(name: str, key: str, matrix: np.ndarray) -> dict[str, np.ndarray]:
    """What becomes of a matrix in ``peft``: the fused projections of the language models are several modules there."""
    module, which = key.rsplit(".", 1)
    above, _, last = module.rpartition(".")
    fused: dict[str, tuple[tuple[str, ...], Callable[[], Iterable[np.ndarray]]]] = {
        "qkv_proj": (("q_proj", "k_proj", "v_proj"), lambda: qkv_of(name, matrix)),
        "up_gate_proj": (("gate_proj", "up_proj"), lambda: np.split(matrix, 2, axis=1)),
    }
    if last not in fused or "visual" in module:
        return {f"{module}.{which}": matrix}
    names, columns = fused[last]
    values = columns() if which == "lora_B" else [matrix] * len(names)
    return {f"{above}.{part}.{which}": part_of for part, part_of in zip(names, values, strict=True)}


def qkv_of(name: str, matrix: np.ndarray) -> Iterable[np.ndarray]:
    config = json.loads((base_of(name) / "config.json").read_bytes())["text_config"]
    groups, heads = config["num_key_value_heads"], config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    return split_widths(matrix, heads // groups * width, width, width, groups=groups)


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_for_peft(name: str, tmp_path: Path) -> None:
    source = folder(name) / "checkpoint-3"
    paddle_reshard.convert(source, tmp_path / "made", format="huggingface", **configs(name))
    found = {
        key.removeprefix("base_model.model.").removesuffix(".weight"): (entry["shape"], bytes(entry["data"]))
        for key, entry in safetensors.deserialize((tmp_path / "made/adapter_model.safetensors").read_bytes())
    }
    expected = {}
    for key, matrix in matrices_of(name).items():
        for part, values in parts_of(name, saved_as(name, key), matrix).items():
            modules = MODULES.get(family_of(name), {})
            start = next((start for start in modules if part.startswith(start)), "")
            part = modules.get(start, "") + part.removeprefix(start)
            expected[part] = (list(values.T.shape), np.ascontiguousarray(values.T).tobytes())
    assert found == expected
    entries = json.loads((tmp_path / "made/adapter_config.json").read_bytes())
    assert entries["target_modules"] == sorted({key.rpartition(".")[0] for key in expected})


def test_a_layer_that_the_config_does_not_have_is_refused(tmp_path: Path) -> None:
    """Blocks of the vision tower are counted apart from decoder layers."""
    source, own = folder("lora_qwen2_5_vl_single") / "final", tmp_path / "final"
    own.mkdir()
    for path in source.iterdir():
        (own / path.name).write_bytes(path.read_bytes())
    config = json.loads((own / "config.json").read_bytes())
    config["vision_config"]["depth"] = 1
    (own / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReshardError, match=r"visual\.blocks\.1\..*: LoRA of layer 1, but config\.json says"):
        paddle_reshard.convert(own, tmp_path / "made", to="tp=1", format="hybrid-plain")
