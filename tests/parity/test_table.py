"""One row of the table of losses, with the real trainer; and that the comparison sees a single wrong bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.parity.lab import PARITY, open_lab
from tests.parity.measure import largest_ulps
from tests.parity.table import Bench, follow, slug
from tests.parity.table_report import is_exact
from tests.parity.table_rows import Row
from tests.parity.tensors import Tensor, read_tensors

GIVEN = os.environ.get("PARITY_LAB")
TRAINER = (Path(GIVEN) if GIVEN else PARITY / "lab") / "venv-pf"


@pytest.mark.skipif(
    not (GIVEN or (TRAINER / "complete").exists()),
    reason="needs the real trainer, whose environment `make parity` makes (Python 3.11)",
)
def test_the_trainer_continues_with_another_strategy(tmp_path):
    row = Row("llama", "sharding2 v1", "sharding2 v2", ema=True)
    bench = Bench(open_lab(), tmp_path)

    assert follow(bench, row)

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
    assert largest_ulps(ended, began).keys() >= {key for key in ended if key.endswith((".w_0", ".moment1_0"))}


def test_a_wrong_bit_is_counted_in_ulps():
    right = {"a": Tensor("F32", (2,), b"\0\0\x80\x3f\0\0\0\0"), "b": Tensor("BF16", (1,), b"\x80\x3f")}
    wrong = {"a": Tensor("F32", (2,), b"\x02\0\x80\x3f\x01\0\0\x80"), "b": Tensor("BF16", (1,), b"\x80\x3f")}

    assert largest_ulps(right, wrong) == {"a": 2}
    assert largest_ulps(right, right) == {}
