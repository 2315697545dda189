"""Every real checkpoint is planned as it was: the same reads, the same groups, the same bytes."""

from __future__ import annotations

import pytest

from tests.planned import COLUMNS, cells, recorded, rows

FORMATS = (
    *("dense/mp2pp2sh2_s1v2_meta_ema", "dense/fc_mp2pp2", "dense/uc_single", "dense/sh2_s3_seg512"),
    *("moe/ep2_mp2sh2_s1v2_meta", "exports/llama", "states/muon_fc_sh2_split"),
)
MODELS = (
    *("moe/gptoss_single", "families/glm_ocr_single", "small-families/nlp_gpt_mp2pp2sh2_s1v2_meta"),
    *("states/lora_single merge_into", "families/qwen3_vl_moe_single", "states/dsv3_mtp_small_single"),
    "dense/single vocab_pad",
)
"""Rows that differ most; `make exhaustive` compares all."""


def marks(row: str) -> tuple[pytest.MarkDecorator, ...]:
    if row in FORMATS:
        return ()
    return (pytest.mark.full if row in MODELS else pytest.mark.exhaustive,)


def test_the_table_has_a_row_for_every_checkpoint() -> None:
    assert tuple(recorded()) == rows()


@pytest.mark.parametrize("row", [pytest.param(row, marks=marks(row)) for row in rows()])
def test_the_plan_is_the_recorded_one(row: str) -> None:
    """If it is to be another one, ``python -m tests.planned`` records it, and the commit says why."""
    assert dict(zip(COLUMNS, cells(row), strict=True)) == dict(zip(COLUMNS, recorded()[row], strict=True))
