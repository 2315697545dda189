"""A parameter that is stored with its master weight equals it, rounded; otherwise the files are of different steps."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError, DriftError, MasterDriftError
from paddle_reshard.pipeline.core.part_limits import CopyLimits
from paddle_reshard.storage.local import target as local
from tests.conftest import case_directory
from tests.ema.scaled import paddle
from tests.jobs.command import run_here
from tests.spoiled import EMBEDDING, SPOILED, flip_one_bit, of_another_step, one_card

TARGETS: tuple[dict[str, Any], ...] = (
    {"format": "hybrid-plain", "to": "pp=2"}, {"format": "flex"}, {"format": "unified"}, {"format": "huggingface"}
)  # fmt: skip


@pytest.fixture(params=TARGETS, ids=lambda target: target["format"])
def target(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A target that takes parameters and master weights, or only the first."""
    return dict(request.param)


@pytest.fixture(params=[None, CopyLimits(100, 5_000)], ids=["moved", "copied"])
def _copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the storage copies what it can, however short it is."""
    monkeypatch.setattr(local, "COPIES", request.param)


@pytest.mark.usefixtures("_copies")
@pytest.mark.parametrize("spoil", SPOILED)
def test_states_of_other_parameters_are_refused(
    spoil: Callable[[Path], Path], target: dict[str, Any], tmp_path: Path
) -> None:
    source = spoil(tmp_path)
    with pytest.raises(MasterDriftError) as refused:
        paddle_reshard.convert(source, tmp_path / "target", **target)
    told = str(refused.value)
    assert re.match(
        r"\S+ \(param\): element \(\d+,[ \d]*\) is \S+ \(0x[0-9a-f]{4}\), its master weight \S+ \(0x[0-9a-f]{8}\) is "
        r"rounded to \S+ \(0x[0-9a-f]{4}\) \(model_state\S*\.pdparams and optimizer\S*\.pdopt\)",
        told,
    ), told
    assert "--master-weights report" in told
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_source_alone_is_compared_with_itself(tmp_path: Path) -> None:
    """Every element, and nothing is changed; what was made by us is still held against its manifest."""
    source = one_card(tmp_path)
    found = paddle_reshard.verify(source)
    parameters = paddle.load(str(source / "model_state.pdparams")).values()
    assert found
    assert found.compared_elements == sum(parameter.size for parameter in parameters)
    assert 1 <= found.read_amplification <= 1.05
    flip_one_bit(source, 1500)
    different = run_here("verify", source)
    assert different.returncode == 1
    assert f"{EMBEDDING} (param): element (62, 12) is " in different.stdout
    assert "contradicts itself: 1 difference;" in different.stdout
    assert run_here("verify", source, "--subset").returncode == 2
    paddle_reshard.convert(
        source, tmp_path / "made", to="pp=2", format="hybrid-plain", master_weights="report"
    )
    assert run_here("verify", tmp_path / "made").stdout.startswith("intact")


def test_copies_of_a_source_alone_are_compared(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(case_directory("mp2_tied") / "checkpoint-3", source, copy_function=shutil.copyfile)
    assert paddle_reshard.verify(source)
    norm = (
        paddle.load(str(source / "model_state.tp01.pdparams"))["model.norm.weight"].astype("float32").numpy()
    )
    stored = (norm.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    file = source / "model_state.tp01.pdparams"
    content = bytearray(file.read_bytes())
    content[content.index(stored)] ^= 1
    file.write_bytes(content)
    assert [found.tensor for found in paddle_reshard.verify(source).differences] == [
        "model.norm.weight (param)"
    ]
    assert paddle_reshard.verify(source, replicas="first")


@pytest.mark.usefixtures("_copies")
def test_what_differs_is_kept_where_that_is_allowed(target: dict[str, Any], tmp_path: Path) -> None:
    source = of_another_step(tmp_path)
    report = paddle_reshard.convert(source, tmp_path / "made", master_weights="report", **target)
    manifest = json.loads((tmp_path / "made" / "paddle_reshard.json").read_bytes())
    assert manifest["source"]["replica_drift"] == list(report.moved.replica_drift)
    assert any(line.startswith(f"{EMBEDDING} (param): element (") for line in report.moved.replica_drift)
    with pytest.raises(DriftError, match="the target would keep the master weight only"):
        paddle_reshard.convert(source, tmp_path / "sharded", to="sharding=2", master_weights="report")
    with_both: dict[str, Any] = {"format": "hybrid-plain", "master_weights": "report"}
    paddle_reshard.convert(source, tmp_path / "sharded", to="sharding=2", **with_both)


def _retyped(source: Path, names: tuple[str, ...], dtype: str) -> None:
    """Store one array of the optimizer file as another dtype."""
    file = source / "optimizer.pdopt"
    states = pickle.loads(file.read_bytes())
    holder = states
    for name in names[:-1]:
        holder = holder[name]
    name, values = holder[names[-1]]
    holder[names[-1]] = (name, values.astype(dtype))
    file.write_bytes(pickle.dumps(states, protocol=4))


@pytest.mark.parametrize(
    ("names", "dtype", "told"),
    [
        (
            ("master_weights", "linear_0.w_0"),
            "int32",
            r"\(master_weight\) is int32, \S+ \(master_weight\) is float32",
        ),
        (("master_weights", "linear_0.w_0"), "float16", r"\(master_weight\) is float16, .* is float32"),
        (("linear_0.w_0_fp32_master_0_moment1_0",), "float64", r"\(moment1\) is float64, \S+ \(moment1\) is float32"),
    ],
)  # fmt: skip
def test_a_state_of_several_dtypes_is_refused(
    names: tuple[str, ...], dtype: str, told: str, target: dict[str, Any], tmp_path: Path
) -> None:
    source = one_card(tmp_path)
    _retyped(source, names, "float32")
    assert paddle_reshard.plan(source, tmp_path / "target", **target)
    _retyped(source, names, dtype)
    with pytest.raises(CheckpointError, match=rf"model\.layers\.0\.\S+ {told}"):
        paddle_reshard.plan(source, tmp_path / "target", **target)


def test_master_weights_made_from_parameters_are_reported(tmp_path: Path) -> None:
    source = case_directory("small-unified/uc_sh2_s1v1_removemw") / "checkpoint-3"
    told = run_here("plan", source, tmp_path / "a", "--format", "unified").stdout
    assert re.search(r"made\t\d+ master weights from parameters: the source stores none", told)
    data = paddle_reshard.plan(source, tmp_path / "a", format="hybrid-plain", to="tp=2")
    assert data.master_weights_made == len(data.source.model.tensors)
    model = run_here("plan", source, tmp_path / "a", "--format", "huggingface").stdout
    assert "Hugging Face" in model
    assert "master weights from parameters" not in model
