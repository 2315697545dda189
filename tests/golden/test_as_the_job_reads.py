"""A conversion is what a real job of the target's topology reads: the same files, and the right values by their names.

The corpus holds the same training in many topologies. Converting one of them to the topology of another must give the
files of that other job: the same file names, in each file the same keys in the same order, with the same shapes,
dtypes and tensor names, and the same ``model_meta.json``. Then every optimizer state is looked up as the trainer does
it, by the parameter name in the file of the rank, and compared with what the source's job held in memory for the
tensor that has this name in the target's job (``tests/job_memory.py``). Of llama, all tensors are read too.

``make test`` takes one source of every format to one target of every strategy, and ``make full`` every source to one
target; ``make exhaustive`` takes every source to every target.
"""

from __future__ import annotations

import itertools
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import paddle_reshard
from tests import oracle
from tests.conftest import case_directory, case_names, hybrid_cases
from tests.job_memory import Places, differences, places_of

MODELS: dict[str, tuple[str, ...]] = {
    "llama": (
        *("dense/single", "dense/dp2", "dense/mp2", "dense/pp2", "dense/mp2pp2", "dense/mp2pp2_sp"),
        *("dense/sh2_s1v1", "dense/sh2_s1v1_meta", "dense/sh2_s1v2", "dense/sh2_s1v2_meta", "dense/sh2_s2"),
        *("dense/sh2_s3_seg512", "dense/mp2sh2_s1v1_meta", "dense/mp2pp2sh2_s1v1_meta_ema"),
        *("dense/mp2pp2sh2_s1v2_meta_ema", "dense/single_tohf"),
        *("dense/defaults_2ranks", "dense/fc_single", "dense/fc_mp2pp2", "dense/fc_mp2pp2sh2_s1v2"),
        *("dense/fc_sh2_s1v2", "dense/fc_sh2_s3_seg512", "dense/uc_single", "dense/uc_sh2_s1v2"),
    ),
    "llama of 8 layers": ("dense/single_l8", "dense/pp4vpp2"),
    "llama, tied": ("dense/single_tied", "dense/mp2_tied"),
    "llama in float32": ("dense/single_fp32", "dense/sh2_s1v1_meta_fp32"),
    "llama of several buffers": ("dense/mp2sh2_s1v2_meta_mid",),
    "llama in float16": ("states/fp16_single", "states/fp16_sh2_s1v2_meta"),
    "llama, small": (
        *("states/p5_single", "states/p5_sh2_s1v2_meta", "states/p5_np2_single", "states/p5_ro_single"),
        *("states/tfusion_sh2_s1v1", "states/opt_custom_single", "states/fc_replicas_sh2_s1v2"),
        *("states/hfsteps_fc_single", "states/uc_nomerge_sh2_s1v1", "states/uc_optimshard2_sh2_s1v1"),
        *("states/uc_rmmaster_sh2_s1v1", "states/uc_skipmodel_sh2_s1v1"),
    ),
    "LoRA": (
        *("states/lora_single", "states/lora_pp2", "states/lora_mp2pp2_sp", "states/lora_sh2_s1v1"),
        *("states/lora_sh2_s1v2_meta", "states/p5_lora_single"),
    ),
    "LoRA of qwen2": ("states/lora_qwen2_full_single", "states/lora_qwen2_full_pp2"),
    "llama of paddlenlp": ("dense/nlp_single", "dense/nlp_mp2", "dense/nlp_sp_mp2pp2", "dense/nlp_uc_mp2pp2"),
    "llama of paddlenlp, fused": ("dense/nlp_fused_single", "dense/nlp_fused_mp2"),
    "gpt of paddlenlp": ("small-families/nlp_gpt_single", "small-families/nlp_gpt_mp2pp2sh2_s1v2_meta"),
    "qwen2 of paddlenlp": ("small-families/nlp_qwen2_mp2pp2sh2_s1v2_meta",),
    "qwen2": ("small-families/qwen2_single", "small-families/qwen2_mp2pp2sh2_s1v2_meta"),
    "qwen3": ("small-families/qwen3_single", "small-families/qwen3_pp2sh2_s1v2_meta"),
    "qwen3_moe": (
        *("moe/moe_single", "moe/moe_mp2", "moe/moe_pp2", "moe/moe_sh2_s1v1_meta", "moe/moe_sh2_s1v2_meta"),
        *("moe/moe_mp2pp2sh2_s1v2_meta_ema", "moe/ep2_mp2", "moe/ep2_mp2sh2_s1v2_meta"),
        *("moe/ep2_pp2sh2_s1v2_meta", "moe/ep2_sh2_s1v2", "moe/ep2_sh2_s1v2_meta_ema"),
        *("moe/ep4_mp2pp2sh2_s1v2_meta", "moe/ep2_fc_sh2_s1v2", "moe/moe_fc_single", "moe/moe_uc_single"),
    ),
    "qwen3_moe, fused": ("moe/moe_fused_single", "moe/moe_fused_sh2_s1v2_meta", "families/qwen3_moe_fused_single"),
    "ernie4_5_moe": ("moe/ernie45moe_single", "moe/ernie45moe_mpmoe_mp2"),
    "deepseek_v3": ("moe/dsv3_single", "moe/dsv3_ep2_sh2_s1v2_meta_ema"),
    "glm4_moe": ("moe/glm4moe_single", "moe/glm4moe_ep2_sh2_s1v2_meta_ema"),
    "deepseek_v2 of paddlenlp": (
        *("moe/nlp_dsv2_single", "moe/nlp_dsv2_ep_dp2", "moe/nlp_dsv2_ep_dp2sh2_s1v2_meta"),
    ),
    "deepseek_v3 with MTP": (
        *("states/dsv3_mtp_small_single", "states/dsv3_mtp_pp2", "states/dsv3_mtp_mp2"),
        *("states/dsv3_mtp_sh2_s1v1_meta", "states/dsv3_mtp_sh2_s1v2_meta_ema"),
        *("states/dsv3_mtp_ep2_sh2_s1v2_meta", "states/dsv3_mtp_single_tohf"),
    ),
    "ernie4_5_moe with MTP": (
        *("states/ernie45_mtp_single", "states/ernie45_mtp_sh2_s1v2_meta_ema"), *("states/ernie45_mtp_single_tohf",)
    ),
    "deepseek_v2 of paddlenlp with MTP": (
        *("states/nlp_dsv2_mtp_single", "states/nlp_dsv2_mtp_pp2", "states/nlp_dsv2_mtp_mp2"),
        *("states/nlp_dsv2_mtp_sh2_s1v2_meta",),
    ),
    "gemma3_text": ("families/gemma3_text_single", "families/gemma3_text_sh2_s1v2_meta"),
    "phi3": ("families/phi3_single", "families/phi3_pp2", "families/phi3_sh2_s1v2_meta"),
    "qwen2_5_vl": ("families/qwen2_5_vl_single", "families/qwen2_5_vl_mp2"),
    "qwen3_next": ("families/qwen3_next_single", "families/qwen3_next_mp2", "families/qwen3_next_sh2_s1v2_meta"),
    "qwen3_vl": ("families/qwen3_vl_single", "families/qwen3_vl_sh2_s1v2_meta"),
    "qwen3_vl_moe": ("families/qwen3_vl_moe_single",),
    "glm4v_moe": ("families/glm4v_moe_single",),
    "glm4v_moe over tp": ("families/glm4v_moe_mp2",),
    "glm_ocr": ("families/glm_ocr_single",),
    "paddleocr_vl": ("families/paddleocr_vl_single",),
    "paddleocr_vl, with states of what has no gradient": ("families/paddleocr_vl_sh2_s1v2_meta",),
}  # fmt: skip
"""Cases of one model each, trained for three steps in several topologies."""

SOURCES_ONLY = re.compile(r"fc_|uc_|defaults_|_tohf|p5_|tfusion|opt_custom|hfsteps|ep_dp2$")
"""Other formats, and jobs with options that a conversion does not take over: a pickle protocol, a fused
buffer, an optimizer, files for each of two ranks that hold the same."""
ALONE = re.compile(
    r"muon_|lora_(fc|rslora|qwen2_single)|p5_(fp32|mid)|noopt|_mini_|_lowp_|quantO1|dsv3_mtp_fc|auto_|ep2_fc_mp2"
    r"|gptoss|qwen2moe|^families/.*(_fc_|tohf|ernie|v3_mtp|qwen2_single|qwen3_single)"
)
"""Cases of models that are in no hybrid job of the corpus but their own, or that hold other states: Muon's, the base of
an adapter, none, those of one number, quantised ones, copies that drifted in a FlexCheckpoint."""
WITHOUT_SEQUENCE_PARALLEL = "dense/nlp_sp_mp2pp2"
"""Its trainer was given the argument, its model was not."""
BIAS = "e_score_correction_bias"
"""A buffer that sharded saving loses; the truth has it."""


def asked(case: str) -> dict[str, Any]:
    """The options for a target like the job of a case, as its name gives its topology."""
    name = case.partition("/")[2]
    found = {
        axis: re.search(rf"(?<![a-z]){part}(\d)|(?<=\d){part}(\d)", name) for axis, part in PARTS.items()
    }
    degrees = {axis: int(match[1] or match[2]) for axis, match in found.items() if match}
    if "nlp_dsv2_ep_dp2sh2" in name:  # with data-parallel ranks alone, each of them has all experts
        degrees["ep"] = degrees["dp"]
    args = json.loads((case_directory(case) / "case.json").read_bytes()).get("args") or {}
    layout: dict[str, Any] = {
        "sequence_parallel": bool(args.get("sequence_parallel")) and case != WITHOUT_SEQUENCE_PARALLEL,
        "use_unified_moe": "glm4moe_ep" in name,
    }
    if "seg512" in name:
        layout["stage3_segment_size"] = 512
    strategy = re.search(r"_s(1v1|1v2|2|3)(?=_|$)", name)
    return {
        "to": ",".join(f"{axis}={degree}" for axis, degree in degrees.items()) or "tp=1",
        "sharding_strategy": f"stage{strategy[1]}" if strategy else None,
        "format": "hybrid" if "_meta" in name or not strategy else "hybrid-plain",
        "layout": layout,
    }


PARTS = {"tp": "mp", "pp": "pp", "vpp": "vpp", "sharding": "sh", "ep": "ep", "dp": "dp"}


def targets_of(model: str) -> list[str]:
    """The cases of a model that are jobs of a topology of their own."""
    return [case for case in MODELS[model] if not SOURCES_ONLY.search(case)]


def kinds_of(source: str, target: str) -> set[object]:
    """What a pair is a sample of: the format of its source, and format, strategy and axes of its target."""
    wanted = asked(target)
    axes = tuple(axis.partition("=")[0] for axis in wanted["to"].split(","))
    prefix = SOURCES_ONLY.match(source.partition("/")[2])
    return {prefix and prefix[0], (wanted["format"], wanted["sharding_strategy"]), axes}


def pairs() -> list[Any]:
    """Every source to every target; ``make full`` takes each source to one, and comes to each target once at least."""
    found, shown = [], set[object]()
    for model, cases in MODELS.items():
        targets = targets_of(model)
        for (at, source), (below, target) in itertools.product(enumerate(cases), enumerate(targets)):
            marks: Any = pytest.mark.exhaustive
            if (below - at - 1) % len(targets) == 0:
                kinds = kinds_of(source, target)
                marks = pytest.mark.full if kinds <= shown else ()
                shown |= kinds
            name = f"{source.partition('/')[2]}-to-{target.partition('/')[2]}"
            found.append(pytest.param(source, target, id=name, marks=marks))
    return found


@cache
def memory_of(case: str) -> Places:
    return places_of(case_directory(case))


@cache
def truth_of(case: str) -> oracle.Tensors:
    return oracle.read_truth(case_directory(case) / "truth.safetensors")


def config_of(source: str, target: str) -> Path | None:
    """The config for sources in formats without one."""
    if (case_directory(source) / "checkpoint-3/config.json").exists():
        return None
    return case_directory(target) / "checkpoint-3/config.json"


def convert(source: str, target: str, folder: Path) -> Path:
    """Convert a case to the topology of another, with what sharded saving has lost."""
    lost = {key: np.array(array) for key, array in truth_of(source).items() if key.endswith(BIAS)}
    given: dict[str, Any] = {}
    if lost and "_meta" in source:
        save_file(lost, folder / "lost.safetensors")
        given["fill"] = folder / "lost.safetensors"
    paddle_reshard.convert(
        case_directory(source) / "checkpoint-3",
        folder / "checkpoint-3",
        config=config_of(source, target),
        replicas="report",
        **asked(target),
        **given,
    )
    return folder / "checkpoint-3"


# --- harmless differences -----------------------------------------------------------------------------


def _as_read(entry: object) -> str:
    """An entry without what no reader looks at.

    The number in the name of a nameless buffer counts such tensors in the process, and is read by nobody. Of dicts, the
    loaders ask for the entries and not for the class.
    """
    return re.sub(r"eager_tmp_\d+", "eager_tmp", repr(entry)).replace("OrderedDict", "dict")


def _structure(folder: Path, averaged: bool, loses: bool) -> dict[str, list[str]]:
    """The structure of a checkpoint's files, as far as both sides have the same states.

    Averages are compared if both jobs keep one. Sharded saving by the real trainer loses buffers, which conversions
    keep: they, and the numbers of entries, are then not compared.
    """
    found: dict[str, list[str]] = {}
    for name, entries in oracle.structure(folder).items():
        if name.startswith("ema") and not averaged:
            continue
        if loses:
            entries = [entry for entry in entries if not entry[2].endswith("ict") and BIAS not in entry[0]]
        found[name] = [_as_read(entry) for entry in entries]
    return found


def _config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    return config


@pytest.mark.parametrize(("source", "target"), pairs())
def test_the_job_finds_its_states_by_name(source: str, target: str, tmp_path: Path) -> None:
    real, made = case_directory(target) / "checkpoint-3", convert(source, target, tmp_path)
    averaged, loses = source.endswith("ema") and target.endswith("ema"), "_meta" in target
    ours, theirs = _structure(made, averaged, loses), _structure(real, averaged, loses)
    assert sorted(ours) == sorted(theirs)
    for name in sorted(theirs):
        for place, (mine, written) in enumerate(itertools.zip_longest(ours[name], theirs[name])):
            assert mine == written, f"{name}, entry {place}: {mine}, but the trainer writes {written}"
    meta = [folder / "model_meta.json" for folder in (made, real) if (folder / "model_meta.json").exists()]
    assert len(meta) in (0, 2)
    assert len({_as_read(oracle.ordered_json(path)) for path in meta}) <= 1
    assert len({_config_of(folder).get("use_expert_parallel") for folder in (made, real)}) == 1
    assert list(differences(made, memory_of(target), truth_of(source))) == []
    if target in {f"dense/{name}" for name in hybrid_cases()}:  # whose cuts the reader knows
        truth = truth_of(source)
        oracle.assert_same_tensors(oracle.read_checkpoint(made, oracle.shapes_of(truth)), truth)


@pytest.mark.parametrize("group", ["dense", "moe", "states", "families", "small-families"])
def test_no_case_is_forgotten(group: str) -> None:
    named = [case for cases in MODELS.values() for case in cases]
    assert len(named) == len(set(named))
    assert {case for case in case_names(group) if not ALONE.search(case)} == {
        case for case in named if case.startswith(f"{group}/")
    }
