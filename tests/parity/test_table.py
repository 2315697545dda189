"""One row of the table of losses, with the real trainer; and that the comparison sees a single wrong bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.lab.laboratory import Laboratory
from tests.parity.lab import PARITY
from tests.parity.table import Bench, follow, slug
from tests.parity.table_report import is_exact
from tests.parity.table_rows import Row
from tests.parity.tensors import Tensor, differences, read_tensors

GIVEN = os.environ.get("PARITY_LAB")
TRAINER = (Path(GIVEN) if GIVEN else PARITY / "lab") / "venv-pf"


@pytest.mark.skipif(
    not (GIVEN or (TRAINER / "complete").exists()),
    reason="needs the real trainer, whose environment `make parity` makes (Python 3.11)",
)
def test_the_trainer_continues_with_another_strategy(tmp_path):
    row = Row("llama", "sharding2 v1", "sharding2 v2", ema=True)
    with Laboratory() as lab:
        assert follow(Bench(lab, tmp_path), row)

    found = json.loads((tmp_path / "rows" / f"{slug(row.name)}.json").read_bytes())
    assert is_exact(found)
    assert found["losses"].keys() == {"4", "5", "6"}
    ended = read_tensors(
        tmp_path / "llama" / "ours" / "sharding2-v1-to-sharding2-v2-ema" / "out" / "truth.safetensors"
    )
    began = read_tensors(tmp_path / "llama" / "base" / "sharding2-v1" / "out" / "truth.safetensors")
    assert ended.keys() == began.keys()
    assert any(key.endswith(".ema_w_0") for key in ended)
    # The job has trained: what it holds is not what it was given.
    states = [key for key in ended if key.endswith((".w_0", ".moment1_0"))]
    assert states
    assert all(ended[key] != began[key] for key in states)


def test_a_wrong_bit_is_seen():
    right = {"a": Tensor("F32", (2,), b"\0\0\x80\x3f\0\0\0\0"), "b": Tensor("BF16", (1,), b"\x80\x3f")}
    wrong = {"a": Tensor("F32", (2,), b"\0\0\x80\x3f\0\0\0\x80"), "b": Tensor("BF16", (1,), b"\x80\x3f")}

    assert differences(right, wrong) == ["a: 1 of 2 elements, the first at 1"]
    assert differences(right, right) == []
