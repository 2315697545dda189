"""The average of a series of checkpoints, against NumPy's float32 arithmetic on the truth."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError, DriftError, UnsupportedError, UsageError
from paddle_reshard.pipeline.planning import plan as planning
from paddle_reshard.pipeline.training.async_ema import AsyncEma
from paddle_reshard.pipeline.training.stretches import Weights
from tests import oracle
from tests.conftest import REPO, case_directory
from tests.ema.scaled import scale_master_weights
from tests.jobs.command import run_here
from tests.sampling import exhaustive
from tests.sized import in_groups

CASE = "mp2pp2sh2_s1v2_meta_ema"
SCALES = (1.7, -0.3, 1.0)
"""What the weights of the case are multiplied with in each checkpoint of the series."""
MASTER, AVERAGE = ".w_0", ".ema_w_0"
Tensors = dict[str, np.ndarray]


def truth() -> Tensors:
    return oracle.read_truth(case_directory(CASE) / "truth.safetensors")


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three checkpoints of one model, each in another topology."""
    folder, source = tmp_path_factory.mktemp("series"), case_directory(CASE) / "checkpoint-3"
    paddle_reshard.convert(
        source, folder / "checkpoint-1", to="tp=2,sharding=2", sharding_strategy="stage1v2"
    )
    paddle_reshard.convert(source, folder / "checkpoint-2", to="pp=2")
    for place, scale in enumerate(SCALES[:2], 1):
        scale_master_weights(folder / f"checkpoint-{place}", scale)
    return [folder / "checkpoint-1", folder / "checkpoint-2", source]


def weights() -> list[Tensors]:
    """The master weights of every checkpoint of the series, by key."""
    whole = {key.removesuffix(MASTER): value for key, value in truth().items() if key.endswith(MASTER)}
    return [{key: value * np.float32(scale) for key, value in whole.items()} for scale in SCALES]


def by_decay(decay: float) -> Tensors:
    keep, take = np.float32(decay), np.float32(1 - decay)
    first, *others = weights()
    for values in others:
        first = {key: keep * first[key] + take * values[key] for key in first}
    return first


def by_weights(given: Sequence[float]) -> Tensors:
    found: Tensors = {}
    for weight, values in zip(given, weights(), strict=True):
        for key, value in values.items():
            product = value * np.float32(weight)
            found[key] = found[key] + product if key in found else product
    return found


SMALL = in_groups(40_000, pass_bytes=4_000)
"""Many groups, and several passes in most of them."""


@pytest.mark.parametrize(
    ("to", "strategy"), [("tp=1", None), ("tp=2,pp=2,sharding=2", "stage1v2"), ("sharding=3", "stage3")]
)
def test_the_last_checkpoint_with_the_average_of_all(
    series: list[Path], to: str, strategy: str | None, tmp_path: Path
) -> None:
    report = SMALL.average(series, tmp_path / "made", decay=0.7, to=to, sharding_strategy=strategy)
    assert report.plan.plan.bands["pass"].max() > 0
    expected = truth() | {f"{key}{AVERAGE}": value for key, value in by_decay(0.7).items()}
    oracle.assert_same_tensors(oracle.read_checkpoint(tmp_path / "made", oracle.shapes_of(truth())), expected)
    said = json.loads((tmp_path / "made" / "ema.json").read_bytes())
    assert (said["decay"], said["updates"], said["step"], said["divide_by"]) == (0.7, 3, 3, 1.0)


GIVEN = {"weights": (0.5, 0.2, 0.3), "uniform": (1 / 3, 1 / 3, 1 / 3)}


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        ("weights", None),
        exhaustive("weights", "float16"),
        exhaustive("weights", "float32"),
        exhaustive("uniform", None),
        ("uniform", "float16"),
        exhaustive("uniform", "float32"),
    ],
)
def test_a_model_of_the_average_is_rounded_once(
    series: list[Path], how: str, dtype: str | None, tmp_path: Path
) -> None:
    given = {how: list(GIVEN[how]) if how == "weights" else True}
    SMALL.average(series, tmp_path / "hf", **given, format="huggingface", dtype=dtype)
    made = oracle.read_truth(tmp_path / "hf" / "model.safetensors")
    rounded = {None: oracle.round_to_bfloat16, "float16": np.float16, "float32": np.float32}[dtype]
    expected = {key: rounded(value) for key, value in by_weights(GIVEN[how]).items()}
    made = {key: np.ascontiguousarray(value.T) if "_proj" in key else value for key, value in made.items()}
    oracle.assert_same_tensors(made, expected)


def test_a_budget_too_small_for_a_tensor_and_what_it_is_mixed_in(
    series: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest matrix is stored the other way round in the model: 12 kB, and 24 kB of float32 beside it."""
    monkeypatch.setattr("paddle_reshard.pipeline.core.units.SMALLEST_BUDGET_BYTES", 0)
    smaller = in_groups(20_000, pass_bytes=4_000)
    options = {"decay": 0.7, "format": "huggingface"}

    def budget(nbytes: int) -> str:
        return str(planning.FOOTPRINT_BYTES + nbytes)

    again = smaller.average(series, tmp_path / "again", **options, memory=budget(32_000))
    assert again.plan.plan.peak_bytes <= 32_000
    once = smaller.average(
        series, tmp_path / "hf", **options, memory=str(again.plan.plan.read_once_budget_bytes)
    )
    assert once.moved.read_bytes < again.moved.read_bytes
    made, same = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "again"))
    assert made == same


def test_float32_parameters_without_master_weights(tmp_path: Path) -> None:
    case = case_directory("sh2_s1v1_meta_fp32")
    source = case / "checkpoint-3"
    paddle_reshard.average([source, source], tmp_path / "made", weights=[0.3, 0.7], to="tp=2")
    values = oracle.read_truth(case / "truth.safetensors")
    made = oracle.read_checkpoint(tmp_path / "made", oracle.shapes_of(values))
    averages = {key: value for key, value in made.items() if key.endswith(".ema")}
    assert len(averages) == len(oracle.shapes_of(values))
    for key, value in averages.items():
        whole = values[key.removesuffix(".ema")]
        assert (value == whole * np.float32(0.3) + whole * np.float32(0.7)).all(), key


SCRIPT = """
import os, signal, sys
from tests.sized import in_groups
write, left = os.pwrite, 40
def counted(*arguments):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*arguments)
os.pwrite = counted
*sources, target = sys.argv[1:]
in_groups(40_000, pass_bytes=4_000).average(sources, target, decay=0.7, to="tp=2,sharding=2", workers=1)
"""


def test_a_killed_average_is_resumed(series: list[Path], tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    done = subprocess.run([sys.executable, "-c", SCRIPT, *series, killed], cwd=REPO, timeout=120)
    assert done.returncode == -signal.SIGKILL
    options = {"decay": 0.7, "to": "tp=2,sharding=2"}
    with pytest.raises(paddle_reshard.ReshardError, match="resume"):
        SMALL.average(series, killed, **options)
    report = SMALL.average(series, killed, **options, resume=True)
    assert 0 < report.moved.resumed_groups < report.plan.plan.groups
    SMALL.average(series, whole, **options)
    assert {p.name: p.read_bytes() for p in killed.iterdir()} == {
        p.name: p.read_bytes() for p in whole.iterdir()
    }


def test_what_is_no_series_is_refused(series: list[Path], tmp_path: Path) -> None:
    def refused(
        error: type[Exception], message: str, sources: Sequence[Path] = series, **options: object
    ) -> None:
        with pytest.raises(error, match=message):
            paddle_reshard.average(sources, tmp_path / "made", **{"to": "tp=1", **options})
        assert not (tmp_path / "made").exists()

    refused(UsageError, "one of --decay, --weights and --uniform")
    refused(UsageError, "one of --decay, --weights and --uniform", decay=0.5, uniform=True)
    refused(UsageError, "at least two", series[:1], uniform=True)
    refused(UsageError, "2 weights are given for 3", weights=[0.5, 0.5])
    refused(UsageError, r"add up to 0\.8", weights=[0.5, 0.2, 0.1])
    refused(UsageError, "add up to nan", weights=[0.5, float("nan"), 0.5])
    for large in (1e308, float("inf")):
        refused(
            UsageError, f"the weight {re.escape(str(large))} is out of the range", weights=[large, -large, 1]
        )
    refused(UsageError, "decay 1 must be", decay=1)
    refused(
        UsageError, "an average requires --state ema", to=None, format="huggingface", state="param", decay=0.5
    )
    refused(UsageError, "the format unified cannot hold", to=None, format="unified", decay=0.5)
    for option, value in (("aoa", tmp_path / "file"), ("fill", tmp_path), ("convention", "paddlenlp")):
        refused(UsageError, f"--{option} does not apply to averages", decay=0.5, **{option: value})
    other = case_directory("mp2_tied") / "checkpoint-3"
    refused(CheckpointError, "checkpoints of one model", [other, series[-1]], uniform=True)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"num_attention_heads": 2}, "num_attention_heads is 2 in"),
        ({"rope_theta": 500000.0}, "rope_theta is 500000.0 in"),
        ({"rope_parameters": {"rope_theta": 1.0, "rope_type": "default"}}, "rope_parameters.rope_theta is 1.0 in"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu' in"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05 in"),
        ({"of_tomorrow": 1}, "of_tomorrow is 1 in"),
    ],
)  # fmt: skip
def test_checkpoints_of_models_that_compute_something_else_have_no_average(
    entries: dict[str, object], told: str, series: list[Path], tmp_path: Path
) -> None:
    first = Path(shutil.copytree(series[0], tmp_path / "checkpoint-1", copy_function=shutil.copyfile))
    config = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps({**config, **entries}))
    with pytest.raises(CheckpointError) as refused:
        paddle_reshard.average([first, *series[1:]], tmp_path / "x", decay=0.9, to="tp=1")
    assert f"config.json: {told} {first}" in str(refused.value)
    assert str(series[1]) in str(refused.value)
    trained_otherwise = {"attention_dropout": 0.5, "use_cache": True, "initializer_range": 1.0}
    (first / "config.json").write_text(json.dumps({**config, **trained_otherwise}))
    SMALL.plan_average([first, *series[1:]], tmp_path / "x", decay=0.9, to="tp=1")


def test_an_average_has_the_room_for_metadata_that_a_conversion_has(
    series: list[Path], tmp_path: Path
) -> None:
    average = SMALL.plan_average(series, tmp_path / "average", decay=0.9, to="tp=1")
    conversion = paddle_reshard.plan(series[-1], tmp_path / "converted", to="tp=1")
    assert average.spare_bytes == conversion.spare_bytes
    assert conversion.same_values
    assert not average.same_values


def test_copies_that_differ_in_any_of_them_are_found(series: list[Path], tmp_path: Path) -> None:
    drifted = tmp_path / "checkpoint-1"
    shutil.copytree(series[0], drifted, copy_function=shutil.copyfile)
    norm = truth()["model.norm.weight.w_0"] * np.float32(SCALES[0])
    (path,) = (p for p in drifted.glob("optimizer.tp01_*") if norm.tobytes() in p.read_bytes())
    path.write_bytes(path.read_bytes().replace(norm.tobytes(), (norm * 2).tobytes()))
    with pytest.raises(DriftError, match=r"model\.norm\.weight \(master_weight of .*checkpoint-1\)"):
        paddle_reshard.average([drifted, series[-1]], tmp_path / "made", decay=0.5, to="tp=1")


def test_an_average_of_averages_during_training_continues(series: list[Path], tmp_path: Path) -> None:
    paddle_reshard.average(series, tmp_path / "checkpoint-3", decay=0.7, to="tp=1")
    key, whole = "model.norm.weight", by_decay(0.7)["model.norm.weight"]
    pieces = paddle_reshard.RankPieces({"w": paddle_reshard.Piece(key, whole.shape)})
    with AsyncEma(lambda: Weights({"w": np.zeros(whole.shape, np.float32)}), decay=0.7) as ema:
        ema.load(tmp_path / "checkpoint-3", pieces)
        assert np.asarray(ema.state().master_weights["w"]).tobytes() == whole.tobytes()
        assert (ema.progress.updates, ema.progress.step) == (3, 3)


def test_the_command(series: list[Path], tmp_path: Path) -> None:
    places = [*series, tmp_path / "made"]
    ran = run_here("ema", *places, "--weights", "0.5,0.2,0.3", "--to", "tp=1", "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["moved"]["groups"] > 0
    made = oracle.read_checkpoint(tmp_path / "made", oracle.shapes_of(truth()))
    expected = by_weights(GIVEN["weights"])
    assert all(made[f"{key}{AVERAGE}"].tobytes() == value.tobytes() for key, value in expected.items())
    assert run_here("ema", *places, "--weights", "x", "--to", "tp=1").returncode == 2


def test_devices_that_may_round_otherwise_are_not_asked() -> None:
    from paddle_reshard.pipeline.core.mixture import Term
    from paddle_reshard.tasks.device import DeviceBox, PaddleMover

    mover = PaddleMover("cpu")
    box = DeviceBox(mover.zeros(8), 0, np.dtype("<f4"), (2,), (4,))
    with pytest.raises(UnsupportedError, match="averages are computed on the CPU"):
        mover.mix(box, box, Term(0, 0.5, 0.5), first=False)


def test_an_average_says_of_what_it_is_and_what_follows(tmp_path: Path) -> None:
    source, target = case_directory(CASE) / "checkpoint-3", tmp_path / "model"
    told = run_here("ema", source, source, target, "--decay", 0.9, "--format", "huggingface").stdout
    assert f"average\tof {source}, {source}, with decay 0.9\n" in told
    assert f"next\tpaddle-reshard launch {target}\n" in told
    one = run_here("ema", "run", target, "--decay", 0.9, "--to", "tp=1")
    assert "at least two checkpoints; for all of a run give RUN/checkpoint-*" in one.stderr
