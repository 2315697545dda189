"""A ``model_meta.json`` of another run: what it says is held against the files, or decides nothing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError, ReshardError
from tests.hostile.damage import REMOVED, copied, edit_json, edited, sound
from tests.sampling import exhaustive

Meta = dict[str, Any]
FLOAT32, FLOAT16, BFLOAT16 = 10, 15, 16
DTYPE = 1
"""Column of ``param_meta``."""
KEY = "model.layers.1.mlp.up_proj.weight"
TARGETS: tuple[dict[str, Any], ...] = (
    {"format": "hybrid", "to": "sharding=4"},
    {"format": "hybrid-plain", "to": "tp=1"},
    {"format": "flex"},
    {"format": "unified"},
    {"format": "huggingface"},
)


def test_degrees_beside_two_flexcheckpoints_are_said_not_to_be_compared(tmp_path: Path) -> None:
    source, a, b = sound("mp2pp2sh2_s1v2_meta_ema"), tmp_path / "a", tmp_path / "b"
    paddle_reshard.convert(source, a, format="flex", to="tp=2")
    shutil.copytree(a, b, copy_function=shutil.copyfile)
    assert not paddle_reshard.verify(a, b).remarks
    edit_json(b, "model_meta.json", lambda meta: meta["parallel_config"].update(mp_degree=4))
    report = paddle_reshard.verify(a, b)
    assert report
    assert any("model_meta.json is not compared, and differs" in remark for remark in report.remarks)


def _cells(meta: Meta) -> list[Meta]:
    return list(meta["sharding_metas"].values())


def _retyped(code: int, *keys: str) -> Callable[[Meta], object]:
    """Another dtype for some parameters, or for all, in every cell."""

    def edit(meta: Meta) -> None:
        for cell in _cells(meta):
            for key, described in cell["param_meta"].items():
                if not keys or key in keys:
                    described[DTYPE] = code

    return edit


def _without(degree: str, meta: Meta) -> None:
    del meta["parallel_config"][degree]


CONTRADICTIONS: dict[str, tuple[str, Callable[[Meta], object], str]] = {
    "stored parameters": ("sh2_s1v1_meta_fp32", _retyped(BFLOAT16, KEY),
        rf"{KEY}: bfloat16 in model_meta.json \(tp00_pp00\), but float32 in model_state.shard0[01].pdparams"),
    "float32 with master weights": ("sh2_s1v2_meta", _retyped(FLOAT32, KEY),
        rf"{KEY}: float32 in model_meta.json \(tp00_pp00\), but optimizer.shard0[01].pdopt holds a master weight"),
    "float32 throughout": ("mp2sh2_s1v1_meta", _retyped(FLOAT32),
        r"float32 in model_meta.json \(tp00_pp00\), but optimizer.tp00_shard0[01].pdopt holds a master weight"),
    "two dtypes with master weights": ("sh2_s1v1_meta", _retyped(FLOAT16, KEY),
        rf"model_meta.json says that \S+ is bfloat16 and {KEY} float16"),
    "another dtype throughout": ("sh2_s1v2_meta", _retyped(FLOAT16),
        r"float16 in model_meta.json, but the model is bfloat16 in config.json"),
    "columns in another order": ("sh2_s1v1_meta", lambda meta: [cell["param_meta_keys"].reverse()
        for cell in _cells(meta)],
        r"tp00_pp00: param_meta_keys is \['no_sync', 'is_distributed', 'dtype', 'shape'\], only"),
    "no names of columns": ("sh2_s1v1_meta", lambda meta: [cell.pop("param_meta_keys") for cell in _cells(meta)],
        r"tp00_pp00: \S+: \[\[128, 64\], 16, False, False\] are not values of the columns \['shape'"),
    "a column that one parameter lacks": ("sh2_s1v1_meta",
        lambda meta: [cell["param_meta"][KEY].pop() for cell in _cells(meta)],
        rf"tp00_pp00: {KEY}: .* are not values of the columns"),
    "more elements than 64 bits count": ("sh2_s1v2_meta",
        lambda meta: [cell["param_meta"][KEY][0].__setitem__(slice(None), [1 << 36] * 2) for cell in _cells(meta)],
        rf"tp00_pp00: {KEY}: .* is not \[local shape"),
    "no owners": ("sh2_s1v2_meta", lambda meta: [cell.pop("param2rank") for cell in _cells(meta)],
        "tp00_pp00 has no param2rank, which trainers always write"),
    "a parameter without owner": ("sh2_s1v1_meta",
        lambda meta: [cell["param2rank"].pop(cell["structure_name_mapping"][KEY]) for cell in _cells(meta)],
        rf"{KEY} \(\w+\): param2rank says no rank holds it, not this file"),
    "no comm overlap": ("sh2_s1v1_meta", lambda meta: [cell.pop("enable_overlap") for cell in _cells(meta)],
        "tp00_pp00 has no enable_overlap, which trainers always write"),
    **{f"no {degree}": ("sh2_s1v1_meta", partial(_without, degree),
        f"model_meta.json: parallel_config has no {degree}, which trainers always write")
        for degree in ("mp_degree", "pp_degree", "sharding_degree", "ep_degree", "moe_sharding_degree")},
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_contradicts_the_files_is_refused(name: str, tmp_path: Path) -> None:
    case, edit, told = CONTRADICTIONS[name]
    source = copied(case, tmp_path / "source")
    assert paddle_reshard.inspect(source)
    edit_json(source, "model_meta.json", edit)
    with pytest.raises(CheckpointError) as refused:
        paddle_reshard.inspect(source)
    assert re.search(told, str(refused.value)), str(refused.value)


def _idle(meta: Meta) -> None:
    """``moe_sharding_degree`` without experts, ``enable_overlap``, and ``is_distributed`` without tp."""
    meta["parallel_config"].update(moe_sharding_degree=7)
    for cell in _cells(meta):
        cell.update(enable_overlap=True)
        for described in cell["param_meta"].values():
            described[2] = True


@pytest.mark.parametrize("case", ["sh2_s1v1_meta", "sh2_s1v1_meta_fp32", "sh2_s1v2_meta"])
def test_what_no_file_can_prove_changes_no_byte(case: str, tmp_path: Path) -> None:
    source = copied(case, tmp_path / "source")

    def made() -> list[str]:
        return [paddle_reshard.plan(source, tmp_path / "target", **target).plan.plan_id for target in TARGETS]

    before = made()
    edit_json(source, "model_meta.json", _idle)
    assert made() == before
    report = paddle_reshard.verify(sound(case), source)
    found = [*(difference.tensor for difference in report.differences), *report.remarks]
    assert found
    assert all(entry.startswith("model_meta.json") for entry in found)


def test_the_order_of_entries_is_no_difference(tmp_path: Path) -> None:
    source = copied("sh2_s1v1_meta", tmp_path / "source")
    edit_json(
        source,
        "model_meta.json",
        lambda meta: [
            cell.update(param_meta=dict(reversed([*cell.pop("param_meta").items()]))) for cell in _cells(meta)
        ],
    )
    report = paddle_reshard.verify(sound("sh2_s1v1_meta"), source)
    assert report.equal
    assert not report.remarks


# -------------------------------------------------------------------------------------------------- every entry


NAMED = {r"tp\d+_pp\d+(_ep\d+)?": "a cell", r".*\.(weight|bias)": "a parameter", r".*\.[wb]_\d+.*": "a name"}
"""What keys of dicts are called in a description."""


NOBODY_READS = {
    (
        "states/lora_sh2_s1v2_meta",
        "sharding_metas / a cell / structure_name_mapping / a parameter changed",
    ): "the name of a parameter of the base: no file of the checkpoint holds it or a state of it",
}


def _entries(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every entry, of those with entries too."""
    if at:
        yield at
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, entry in inner:
        yield from _entries(entry, (*at, key))


def _described(at: tuple[Any, ...]) -> str:
    words = [next((word for of, word in NAMED.items() if re.fullmatch(of, str(step))), step) for step in at]
    return " / ".join(map(str, words))


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return f"{value}x" if isinstance(value, str) else None


def _at(meta: Meta, at: tuple[Any, ...]) -> Any:
    for step in at:
        meta = meta[step]
    return meta


@pytest.mark.parametrize(
    "case",
    [
        "sh2_s1v1_meta",
        exhaustive("sh2_s1v2_meta"),
        exhaustive("small-families/qwen2_mp2pp2sh2_s1v2_meta"),
        exhaustive("small-families/nlp_qwen2_mp2pp2sh2_s1v2_meta"),
        exhaustive("moe/ep2_sh2_s1v2_meta_ema"),
        exhaustive("moe/nlp_dsv2_ep_dp2sh2_s1v2_meta"),
        exhaustive("states/lora_sh2_s1v2_meta"),
    ],
)
def test_no_entry_is_changed_or_removed_unnoticed(case: str, tmp_path: Path) -> None:
    """One of every kind: ``verify A B`` refuses the other, or names the file."""
    source = copied(case, tmp_path / "source")
    meta = json.loads((source / "model_meta.json").read_bytes())
    one_of_each = {_described(at): at for at in reversed([*_entries(meta)])}
    unnoticed = []
    for what, at in one_of_each.items():
        for deed in ("removed", "changed"):
            odd = edited(meta, at, REMOVED if deed == "removed" else _another(_at(meta, at)))
            (source / "model_meta.json").write_text(json.dumps(odd))
            try:
                report = paddle_reshard.verify(sound(case), source)
            except ReshardError:
                continue
            found = [*(difference.tensor for difference in report.differences), *report.remarks]
            if not any(entry.startswith("model_meta.json") for entry in found):
                unnoticed.append(f"{what} {deed}")
    assert len(one_of_each) > 15
    assert unnoticed == [what for of, what in NOBODY_READS if of == case]
