"""Newer kinds of checkpoints and families: each is converted to its truth, or refused with the reason.

All that is not in the table of refusals is converted.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import pytest

import paddle_reshard
from tests import oracle
from tests.conftest import case_directory, case_names
from tests.golden.compare_one_card import read_one_card
from tests.golden.test_muon import AVERAGES, MUON

LOST = {"dsv3": "*.gate.e_score_correction_bias", "ernie45": "*.moe_statics.e_score_correction_bias"}
"""Family → buffers that the trainer loses where it writes ``model_meta.json``."""
RENAMED = {"families/qwen2_5_vl": {"model.visual.": "visual.", "model.language_model.": "model."}}
"""Family → beginnings of keys in the model → in its files, where the trainer renames them."""
DRIFTED = ("states/dsv3_mtp_mp2", "states/nlp_dsv2_mtp_mp2", "families/qwen3_next_mp2")
"""Cases whose tensors drift apart between tp ranks, in the trainer."""

REFUSED = ("states/uc_quantO1_sh2_s1v1",)
"""Quantised optimizer states (``tests/hostile/refusals.py``)."""
CONVERTED = [
    name
    for name in (*case_names("states"), *case_names("families"))
    if name not in REFUSED and name.partition("/")[2] not in (*MUON, *AVERAGES)  # what test_muon.py shows
]
CONFIGS = {
    "states/dsv3_mtp_fc_sh2_s1v2_ema": "states/dsv3_mtp_small_single",
    "states/fc_replicas_sh2_s1v2": "states/opt_custom_single",
    "states/hfsteps_fc_single": "states/opt_custom_single",
}
"""Case without ``config.json`` → one of the same model, where its name does not tell which."""


def checkpoint(name: str) -> Path:
    (found,) = case_directory(name).glob("checkpoint-*")
    return found


def config_of(name: str) -> Path | None:
    """A FlexCheckpoint holds none; that of the same model on one card."""
    if (checkpoint(name) / "config.json").exists():
        return None
    group, _, case = name.partition("/")
    siblings = {"lora": "lora_single"}
    family = case.partition("_fc_")[0]
    sibling = CONFIGS.get(name) or f"{group}/{siblings.get(family, f'{family}_single')}"
    return checkpoint(sibling) / "config.json"


def truth_of(name: str) -> oracle.Tensors:
    """What the trainer had in memory, by the keys that its files have."""
    truth = oracle.read_truth(case_directory(name) / "truth.safetensors")
    for of_model, of_files in RENAMED.get(
        name.partition("_single")[0].partition("_mp2")[0].partition("_fc")[0], {}
    ).items():
        truth = {
            of_files + key.removeprefix(of_model) if key.startswith(of_model) else key: array
            for key, array in truth.items()
        }
    return truth


@pytest.mark.parametrize("name", CONVERTED)
def test_on_one_card_it_equals_the_truth(name: str, tmp_path: Path) -> None:
    truth = truth_of(name)
    lost = LOST.get(name.partition("/")[2].partition("_")[0], "") if "_meta" in name else ""
    paddle_reshard.convert(
        checkpoint(name),
        tmp_path / "one",
        to="tp=1",
        config=config_of(name),
        allow_missing=[lost] if lost else (),
        replicas="report" if name in DRIFTED else "compare",
    )
    truth = {key: array for key, array in truth.items() if not fnmatchcase(key, lost)}
    if "gemma3" in name:  # its head is its word embedding, whose states lie under one of their keys
        for head in [key for key in truth if key.startswith("lm_head.weight.")]:
            words = head.replace("lm_head", "model.embed_tokens")
            assert truth.pop(head).tobytes() == truth[words].tobytes()
    if "noopt" in name:  # saved without its optimizer
        truth = {key: truth[key] for key in oracle.shapes_of(truth)}
    if "rmmaster" in name:  # saved without master weights, which the loader then makes of the weights
        for key in oracle.shapes_of(truth):
            truth[f"{key}.w_0"] = (truth[key].astype(np.uint32) << 16).view(np.float32)
    assert read_one_card(tmp_path / "one") == {key: array.tobytes() for key, array in truth.items()}
