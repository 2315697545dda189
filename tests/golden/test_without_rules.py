"""Families that no rule table knows: what their own files tell is enough for every change that needs no rule.

Real checkpoints whose ``config.json`` names a model type that is in no table.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import deserialize

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests import expert_oracle, oracle
from tests.conftest import case_directory, case_names
from tests.golden.compare_one_card import load, read_flex
from tests.golden.test_newer_checkpoints import checkpoint, config_of, truth_of
from tests.sampling import exhaustive

FAMILIES = ("gemma3_text", "phi3", "qwen3_next")
HYBRID = [f"families/{family}_{case}" for family in FAMILIES for case in ("single", "sh2_s1v2_meta")]
HYBRID.append("families/paddleocr_vl_sh2_s1v2_meta")
FLEX = ["families/gemma3_text_fc_sh2_s1v2", "families/qwen3_next_fc_sh2_s1v2"]
SUFFIXES = (".pdparams", ".pdopt", ".distcp", ".safetensors")
TARGETS = [("sharding=2", "stage1v2"), ("sharding=3", "stage1v1"), ("sharding=2", "stage3")]


@pytest.fixture(scope="module")
def unknown(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a case as that of a family that no rule table knows."""
    made: dict[str, Path] = {}

    def of_case(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("unknown") / checkpoint(name).name
            shutil.copytree(checkpoint(name), made[name], copy_function=shutil.copyfile)
            path = made[name] / "config.json"
            if path.exists():
                config = json.loads(path.read_text()) | {"model_type": "newest"}
                path.write_text(json.dumps(config, indent=2))
        return made[name]

    return of_case


@pytest.fixture(scope="module")
def config_for(unknown: Callable[[str], Path]) -> Callable[[str], Path | None]:
    """The ``config.json`` of a sibling, for a case that has none."""

    def of_case(name: str) -> Path | None:
        if (unknown(name) / "config.json").exists():
            return None
        return unknown(f"{name.partition('_fc_')[0]}_single") / "config.json"

    return of_case


@pytest.mark.parametrize("name", [exhaustive(name) if name.endswith("_single") else name for name in HYBRID])
def test_sharding_and_strategy_change_and_the_truth_does_not(
    name: str, unknown: Callable[[str], Path], tmp_path: Path
) -> None:
    truth = truth_of(name)
    for number, (to, strategy) in enumerate(TARGETS):
        target = tmp_path / str(number)
        paddle_reshard.convert(
            unknown(name),
            target,
            to=to,
            sharding_strategy=strategy,
            format="hybrid-plain",
            layout={"stage3_segment_size": 512},
        )
        oracle.assert_same_tensors(oracle.read_checkpoint(target, oracle.shapes_of(truth)), truth)
        assert paddle_reshard.verify(unknown(name), target).equal


STRUCTURES = [
    (f"families/{family}_{source}", f"families/{family}_{target}", to)
    for family in FAMILIES
    for source, target, to in (
        ("single", "single", "tp=1"),
        ("sh2_s1v2_meta", "single", "tp=1"),
        ("sh2_s1v2_meta", "sh2_s1v2_meta", "sharding=2"),
    )
]


@pytest.mark.parametrize(("source", "sibling", "to"), STRUCTURES)
def test_structure_is_that_of_the_trainer(
    source: str, sibling: str, to: str, unknown: Callable[[str], Path], tmp_path: Path
) -> None:
    real = checkpoint(sibling)
    paddle_reshard.convert(unknown(source), tmp_path / "converted", to=to)
    oracle.assert_same_structure(oracle.structure(tmp_path / "converted"), oracle.structure(real))
    if to != "tp=1":
        written, expected = (
            oracle.ordered_json(folder / "model_meta.json") for folder in (tmp_path / "converted", real)
        )
        assert written == expected


@pytest.mark.parametrize("name", [*HYBRID, *FLEX, "families/phi3_pp2"])
def test_a_flex_checkpoint_holds_the_truth(
    name: str, unknown: Callable[[str], Path], config_for: Callable[[str], Path | None], tmp_path: Path
) -> None:
    paddle_reshard.convert(unknown(name), tmp_path / "flex", format="flex", config=config_for(name))
    found = read_flex(tmp_path / "flex")
    truth = {key: array.tobytes() for key, array in truth_of(name).items()}
    assert found.items() <= truth.items()
    assert set(found.values()) == set(
        truth.values()
    )  # the trainer writes states of tied weights under one key


SAME_RANKS = [
    ("families/phi3_pp2", "pp=2,sharding=2", "stage1v2", "hybrid-plain"),
    ("pp4vpp2", "pp=4,sharding=2", "stage1v1", "hybrid-plain"),
    ("mp2pp2_sp", "tp=2,pp=2,sharding=2", "stage1v2", "hybrid-plain"),
    ("mp2pp2sh2_s1v1_meta_ema", "tp=2,pp=2", None, "hybrid"),
    ("mp2pp2sh2_s1v2_meta_ema", "tp=2,pp=2,sharding=3", "stage1v1", "hybrid"),
    ("moe/ep2_sh2_s1v2_meta_ema", "sharding=4,ep=2", None, "hybrid"),
    ("moe/ep2_sh2_s1v2", "sharding=4,ep=2", None, "hybrid-plain"),
]


@pytest.mark.parametrize(("name", "to", "strategy", "format"), SAME_RANKS)
def test_the_same_tp_pp_and_ep_need_no_rule(
    name: str, to: str, strategy: str | None, format: str, unknown: Callable[[str], Path], tmp_path: Path
) -> None:
    source, target = unknown(name), tmp_path / "target"
    config = (checkpoint(name) / "config.json").read_bytes()
    paddle_reshard.convert(source, target, to=to, sharding_strategy=strategy, format=format)
    assert paddle_reshard.verify(source, target).equal
    (target / "config.json").write_bytes(config)  # the oracles know the family
    truth = read_truth(name)
    shapes = oracle.shapes_of(truth)
    if "ep=2" in to:
        found = expert_oracle.read_expert_parallel(target, shapes)
        assert not list(expert_oracle.differing(found, truth))
    else:
        oracle.assert_same_tensors(oracle.read_checkpoint(target, shapes), truth)


def read_truth(name: str) -> dict[str, np.ndarray]:
    return oracle.read_truth(checkpoint(name).parent / "truth.safetensors")


@pytest.mark.parametrize(
    ("name", "there", "back"),
    [
        ("families/qwen3_next_mp2", ("tp=2,sharding=2", "stage1v1"), ("tp=2", "none")),
        ("families/qwen2_5_vl_mp2", ("tp=2,sharding=3", "stage1v2"), ("tp=2", "none")),
        (
            "moe/moe_mp2pp2sh2_s1v2_meta_ema",
            ("tp=2,pp=2,sharding=3", "stage1v1"),
            ("tp=2,pp=2,sharding=2", "stage1v2"),
        ),
        ("moe/ep2_mp2sh2_s1v2_meta", ("tp=2,sharding=4,ep=2", "stage1v2"), ("tp=2,sharding=2,ep=2", "stage1v2")),
    ],
)  # fmt: skip
def test_there_and_back_is_what_the_trainer_wrote(
    name: str, there: tuple[str, str], back: tuple[str, str], unknown: Callable[[str], Path], tmp_path: Path
) -> None:
    """Every tp rank keeps what it holds, also where tensors have drifted apart between them."""
    format = "hybrid" if "_meta" in name else "hybrid-plain"
    places = [unknown(name), tmp_path / "there", tmp_path / "back"]
    for source, target, (to, strategy) in zip(places, places[1:], (there, back), strict=False):
        paddle_reshard.convert(source, target, to=to, sharding_strategy=strategy, format=format)
    written, real = (
        {p.name: contents(oracle.unpickle(p)) for p in place.iterdir() if p.suffix in SUFFIXES}
        for place in (places[2], places[0])
    )
    assert written == real


def contents(value: object) -> object:
    """What a pickle holds, in its order, with every bit of its arrays."""
    if isinstance(value, dict):
        return [(key, contents(entry)) for key, entry in value.items()]
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return [contents(entry) for entry in value] if isinstance(value, tuple) else value


WITHOUT_CONFIG = [
    "fc_sh2_s1v2", "fc_sh2_s3_seg512", "moe/ep2_fc_sh2_s1v2", "states/dsv3_mtp_fc_sh2_s1v2_ema",
    "states/muon_fc_pp2", "states/muon_fc_sh2_split",
]  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_CONFIG)
def test_a_flex_checkpoint_without_config_becomes_another(name: str, tmp_path: Path) -> None:
    source = checkpoint(name)
    found = paddle_reshard.inspect(source)
    assert (found.format, found.convention, found.stored) == ("flex", "paddleformers", ())
    assert "--config FILE" in (found.rules or "")
    paddle_reshard.convert(source, tmp_path / "flex", format="flex", max_shard_size="200KB")
    assert paddle_reshard.verify(source, tmp_path / "flex").equal
    assert not (tmp_path / "flex/config.json").exists()
    written = read_flex(tmp_path / "flex")
    truth = {key: array.tobytes() for key, array in read_truth(name).items()}
    assert written.items() <= truth.items()
    assert set(written.values()) == set(truth.values())


@pytest.mark.parametrize(
    ("name", "options", "missing"),
    [
        ("fc_sh2_s1v2", {"to": "tp=1"}, "the order of parameters"),
        ("fc_sh2_s1v2", {"format": "huggingface"}, "the form of its tensors in a Hugging Face"),
        ("fc_sh2_s1v2", {"format": "unified"}, "which keys"),
        ("states/muon_fc_mp2", {"format": "flex"}, r"lm_head\.weight.* begin at \(48, 0\): what is fused"),
    ],
)
def test_what_config_tells_is_asked_for(name: str, options: dict, missing: str, tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match=rf"config\.json is missing, .*{missing}.*--config FILE"):
        paddle_reshard.convert(checkpoint(name), tmp_path / "target", **options)
    assert not (tmp_path / "target").exists()


REFUSED = [
    ("families/phi3_single", {"to": "tp=2"}, r"no rule table knows it, .*what tp=2 changes"),
    ("families/phi3_single", {"to": "pp=2"}, r"no rule table knows it, .*what pp=2 changes"),
    ("families/qwen3_next_single", {"to": "sharding=2,ep=2"}, r"what ep=2 changes"),
    ("families/phi3_single", {"to": "sharding=2"}, r"is_distributed in model_meta\.json; --format hybrid-plain"),
    ("families/phi3_single", {"format": "huggingface"}, r"tell the form of its tensors in a Hugging Face"),
    ("families/phi3_single", {"format": "unified"}, r"no rule table knows it, .* unified checkpoint"),
    ("families/phi3_single", {"format": "auto-parallel"}, r"no rule table knows it, .*auto-parallel"),
    ("families/phi3_pp2", {"to": "tp=1"}, r"what pp=1 changes"),
    ("families/phi3_pp2", {"to": "pp=2", "layout": {"segmentation": "uniform"}}, r"in a stage: omit segm"),
    ("pp4vpp2", {"to": "pp=4,vpp=2"}, r"what vpp=2 changes"),
    ("families/qwen3_next_mp2", {"to": "tp=1"}, r"what tp=1 changes"),
    ("families/qwen3_next_mp2", {"to": "tp=2,pp=2"}, r"what pp=2 changes"),
    ("families/qwen3_next_mp2", {"format": "flex"}, r"which dim its tp=2 ranks have cut"),
    ("families/qwen3_next_mp2", {"format": "huggingface"}, r"tell the form of its tensors in a Hugging Face"),
    ("moe/ep2_sh2_s1v2", {"to": "sharding=2"}, r"what ep=1 changes"),
    ("moe/ernie45moe_mpmoe_mp2", {"to": "tp=2,sharding=2"}, r"no rule table knows it"),
    (
        "families/paddleocr_vl_single",
        {"to": "sharding=2", "format": "hybrid-plain"},
        r"has no optimizer state: .* not known",
    ),
    ("families/qwen2_5_vl_single", {"format": "flex"}, r"which keys its tensors have in the model"),
    (FLEX[0], {"to": "tp=1"}, r"the order of parameters, and their names"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_what_only_a_rule_tells_is_not_guessed(
    name: str,
    options: dict,
    message: str,
    unknown: Callable[[str], Path],
    config_for: Callable[[str], Path | None],
    tmp_path: Path,
) -> None:
    with pytest.raises(ReshardError) as caught:
        paddle_reshard.convert(unknown(name), tmp_path / "target", config=config_for(name), **options)
    assert re.search(message, str(caught.value), re.DOTALL)
    assert not (tmp_path / "target").exists()


def arrays_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Key → shape of everything in a file, read without the converter."""
    if path.suffix == ".safetensors":
        return {key: tuple(entry["shape"]) for key, entry in deserialize(path.read_bytes())}
    found: dict[str, tuple[int, ...]] = {}
    for key, value in load(path).items():
        for inner, array in value.items() if isinstance(value, dict) else [("", value)]:
            array = array[1] if isinstance(array, tuple) else array
            if isinstance(array, np.ndarray):
                found[f"{key}/{inner}" if inner else key] = array.shape
    return found


@pytest.mark.parametrize("name", case_names("families"))
def test_inspect_describes_every_family(name: str) -> None:
    source = checkpoint(name)
    found = paddle_reshard.inspect(source, config=config_of(name))
    if not found.stored:
        shapes = oracle.shapes_of(oracle.read_truth(case_directory(name) / "truth.safetensors"))
        assert {t.key: t.global_shape for t in found.tensors if not t.missing} == {
            t.key: shapes[t.key] for t in found.tensors if not t.missing
        }
        assert shapes.keys() >= {t.key for t in found.tensors} or found.rules is None
        return
    assert "no rule table knows it" in found.rules or "no optimizer file" in found.rules
    held: dict[str, dict[str, tuple[int, ...]]] = {}
    for array in found.stored:
        held.setdefault(array.file, {})[array.key] = array.shape
    assert held == {file: arrays_of(source / file) for file in held}
    files = {str(p.relative_to(source)): p for p in source.rglob("*") if p.suffix in SUFFIXES}
    assert held.keys() == {file for file in files.keys() - {"scheduler.pdparams"} if arrays_of(files[file])}


@pytest.mark.parametrize(
    ("name", "format"),
    [("dense/fc_mp2pp2", "flex"), ("states/muon_fc_mp2", "flex"), ("dense/auto_dp2mp2", "auto-parallel")],
)
def test_inspect_tells_flex_from_auto_parallel_by_its_folders(name: str, format: str) -> None:
    source = checkpoint(name)
    assert (source / "config.json").exists() is False, "otherwise the metadata would tell"
    assert paddle_reshard.inspect(source).format == format
