"""How far checkpoints are apart, against the same figures computed from what the training run held in memory."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import paddle_reshard
from paddle_reshard import UsageError
from tests import oracle
from tests.conftest import COMMITTED

CASE = COMMITTED / "mp2pp2sh2_s1v2_meta_ema"
SOURCE = CASE / "checkpoint-3"


@pytest.fixture(scope="module")
def truth() -> dict[str, np.ndarray]:
    return oracle.read_truth(CASE / "truth.safetensors")


def test_an_average_is_measured_against_what_it_was_made_of(
    truth: dict[str, np.ndarray], tmp_path: Path
) -> None:
    paddle_reshard.convert(SOURCE, tmp_path / "flex", format="flex", max_shard_size="200KB")
    report = paddle_reshard.diff(
        tmp_path / "flex", SOURCE, states=["ema_master_weight:master_weight"], rtol=0.01
    )
    assert len(report.differing) == 39
    for found in report.differing:
        a, b = (truth[f"{found.key}.{state}"].astype(np.float64) for state in ("ema_w_0", "w_0"))
        apart = np.abs(a - b)
        assert found.changed == np.count_nonzero(apart)
        assert found.outside == np.count_nonzero(~np.isclose(a, b, rtol=0.01, atol=0))
        assert found.largest == apart.max()
        assert found.mean == pytest.approx(apart.mean(), rel=1e-12)
        with np.errstate(invalid="ignore"):
            assert found.relative == np.nanmax(apart / np.maximum(np.abs(a), np.abs(b)))
        first = np.unravel_index(np.flatnonzero(apart)[0], a.shape)
        assert (found.first, found.values) == (tuple(map(int, first)), (a[first], b[first]))
    assert [found.relative for found in report.differing] == sorted(
        (found.relative for found in report.differing), reverse=True
    )
    assert sum(layer.tensors for layer in report.by_layer()) == 39
    assert [state.name for state in report.by_state()] == ["ema_master_weight"]
    assert not report


def test_an_export_in_another_dtype_is_the_master_weights_rounded(tmp_path: Path) -> None:
    paddle_reshard.convert(SOURCE, tmp_path / "model", format="huggingface")
    report = paddle_reshard.diff(SOURCE, tmp_path / "model", states=["master_weight:param"], rtol=2**-8)
    assert report
    assert {found.dtypes for found in report.differing} == {("float32", "bfloat16")}
    assert {found.ulps for found in report.differing} == {0}
    assert paddle_reshard.diff(SOURCE, tmp_path / "model", states=["param"]).differing == ()


def test_one_changed_bit_is_one_ulp(tmp_path: Path) -> None:
    paddle_reshard.convert(SOURCE, tmp_path / "model", format="huggingface")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-2] ^= 1  # the last bit of the last bfloat16
    file.write_bytes(content)
    report = paddle_reshard.diff(SOURCE, tmp_path / "model", states=["param"])
    (found,) = report.differing
    assert (found.changed, found.ulps, found.outside) == (1, 1, 1)
    whole = paddle_reshard.diff(SOURCE, tmp_path / "model")
    assert len(whole.unmatched) == 273 - 39
    assert whole.differing == report.differing


def test_a_tolerance_counts_what_is_outside_of_it(tmp_path: Path) -> None:
    """Two norms far apart, and all weights that a cast rounds: only what exceeds the tolerance is counted and named."""
    paddle_reshard.convert(SOURCE, tmp_path / "a", format="huggingface", dtype="float32")
    paddle_reshard.convert(SOURCE, tmp_path / "b", format="huggingface", dtype="float16")
    (file,) = (tmp_path / "b").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][:37] += 1
    save_file(tensors, file)
    report = paddle_reshard.diff(tmp_path / "a", tmp_path / "b", atol=1e-2)
    assert (report.differing[0].key, report.differing[0].outside) == ("model.norm.weight", 37)
    within = len(report.differing) - 1
    assert within > 10
    assert report.verdict.startswith(
        "1 of 39 tensors outside atol=0.01 (37 of 139,840 elements): model.norm.weight (param); "
        f"{within} more differ within it; 39 tensors compared"
    )
    assert sum(tensor.outside for tensor in report.differing) == 37


def test_the_verdict_tells_tensors_without_a_counterpart_from_those_that_differ(tmp_path: Path) -> None:
    """The tolerance is of values: a tensor that one side lacks is neither within nor outside of it."""
    paddle_reshard.convert(SOURCE, tmp_path / "without", to="tp=1", drop=["ema"])
    whole = paddle_reshard.diff(SOURCE, tmp_path / "without")
    assert not whole
    assert whole.verdict.startswith("39 tensors have no counterpart, no others differ; 234 tensors compared")
    paddle_reshard.convert(SOURCE, tmp_path / "model", format="huggingface", dtype="float16")
    both = paddle_reshard.diff(SOURCE, tmp_path / "model", atol=1.0)
    assert not both
    assert re.match(
        r"\d+ of 39 tensors differ in [\d,]+ elements, within atol=1; 234 tensors have no counterpart; 39 ",
        both.verdict,
    )


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean moment1 or moment2"):
        paddle_reshard.diff(SOURCE, SOURCE, states=["moment"])
    with pytest.raises(UsageError, match="cannot be negative"):
        paddle_reshard.diff(SOURCE, SOURCE, atol=-1.0)


def test_a_choice_of_no_state_is_refused() -> None:
    """Of nothing, any two checkpoints are equal."""
    for compare in (paddle_reshard.diff, paddle_reshard.verify):
        with pytest.raises(UsageError, match=r"no state is chosen; known: .*moment1, moment2"):
            compare(SOURCE, SOURCE, states=[])
