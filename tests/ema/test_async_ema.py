"""The average during training against NumPy's and Paddle's arithmetic, and files against ``paddle.load``."""

from __future__ import annotations

import json
import logging
import os
import signal
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_reshard.clusters.companion import CompanionLost
from paddle_reshard.pipeline.core.errors import CheckpointError, UsageError
from paddle_reshard.pipeline.training.async_ema import AsyncEma
from paddle_reshard.pipeline.training.stretches import Weights

FILE = "ema.tp00_pp01_shard03.pdopt"
SHAPES = {"linear_0.w_0": (300, 257), "linear_1.w_0": (1000,), "empty.w_0": (0,), "norm.w_0": (64,)}


class Job:
    """Weights that change at every step, as arrays or as Paddle tensors."""

    def __init__(self, tensors: bool = False) -> None:
        self.random = np.random.default_rng(7)
        self.tensors = tensors
        self.step()

    def step(self) -> None:
        self.masters = {k: self.random.standard_normal(s, dtype=np.float32) for k, s in SHAPES.items()}
        self.gate = self.random.standard_normal((8, 4), dtype=np.float32)

    def weights(self) -> Weights:
        if not self.tensors:
            return Weights(self.masters, {"mlp.gate.weight": self.gate})
        masters = {}
        for key, value in self.masters.items():
            masters[key] = paddle.to_tensor(value)
            masters[key].name = f"{key}_fp32_master_0"
        return Weights(masters, {"mlp.gate.weight": paddle.to_tensor(self.gate)})

    def run(self, ema: AsyncEma, steps: int, first: int = 1) -> list[dict[str, np.ndarray]]:
        """Train and update; every step's values."""
        seen = []
        for step in range(first, first + steps):
            self.step()
            seen.append(dict(self.masters))
            assert ema.update(step)
        return seen


def by_paddle(seen: list[dict[str, np.ndarray]], decay: float) -> dict[str, np.ndarray]:
    """The same average as PaddleFormers' callback computes it."""
    average = {key: paddle.to_tensor(value) for key, value in seen[0].items()}
    for values in seen[1:]:
        for key, value in values.items():
            average[key] = decay * average[key] + (1 - decay) * paddle.to_tensor(value)
    return {key: tensor.numpy() for key, tensor in average.items()}


def same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        np.asarray(one[k]).shape == other[k].shape and np.asarray(one[k]).tobytes() == other[k].tobytes()
        for k in one
    )


def held(ema: AsyncEma) -> dict[str, np.ndarray]:
    return {key: np.array(value) for key, value in ema.state().master_weights.items()}


def kill(ema: AsyncEma) -> None:
    assert ema.companion is not None
    ema.companion.process.kill()
    ema.companion.process.wait()


@pytest.mark.parametrize("tensors", [False, True], ids=["arrays", "paddle"])
def test_the_average_equals_paddles_arithmetic_bit_for_bit(tensors: bool) -> None:
    job = Job(tensors)
    with AsyncEma(job.weights, decay=0.987) as ema:
        seen = job.run(ema, 9)
        assert same_bits(by_paddle(seen, 0.987), held(ema))
        assert ema.progress.updates == 9
        assert ema.counts.handed_over == 9


def test_the_file_is_what_paddle_load_reads(tmp_path: Path) -> None:
    job = Job(tensors=True)
    with AsyncEma(job.weights, decay=0.9) as ema:
        seen = job.run(ema, 3)
        ema.save(tmp_path, FILE)
    loaded = paddle.load(str(tmp_path / FILE))
    masters = loaded.pop("master_weights")
    assert same_bits({k: t.numpy() for k, t in masters.items()}, by_paddle(seen, 0.9))
    assert {t.name for t in masters.values()} == {f"{key}_fp32_master_0" for key in SHAPES}
    assert list(loaded) == ["mlp.gate.weight"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ema.json", FILE]
    described = json.loads((tmp_path / "ema.json").read_text())
    assert [described[name] for name in ("decay", "updates", "step", "divide_by")] == [0.9, 3, 3, 1.0]


def test_ranks_that_save_at_once_on_two_hosts_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of two hosts or containers may have one number, as these two ranks have."""
    job, write_through = Job(), os.fsync
    with AsyncEma(job.weights, decay=0.9) as ema, AsyncEma(job.weights, decay=0.9) as other:
        for rank in (ema, other):
            job.run(rank, 2)

        def meanwhile(descriptor: int) -> None:
            monkeypatch.setattr(os, "fsync", write_through)
            other.save(tmp_path, "ema.tp00.pdopt")
            write_through(descriptor)

        monkeypatch.setattr(os, "fsync", meanwhile)
        ema.save(tmp_path, "ema.tp01.pdopt")
    made = sorted(path.name for path in tmp_path.iterdir())
    assert made == ["ema.json", "ema.tp00.pdopt", "ema.tp01.pdopt"]


def test_a_loaded_average_continues_as_if_never_interrupted(tmp_path: Path) -> None:
    job = Job()
    with AsyncEma(job.weights, decay=0.95, warm_up=True) as ema:
        job.run(ema, 4)
        ema.save(tmp_path, FILE)
        seen = job.run(ema, 4, first=5)
        undisturbed = held(ema)
    with AsyncEma(job.weights, decay=0.95, warm_up=True) as ema:
        ema.load(tmp_path, FILE)
        assert (ema.progress.updates, ema.progress.step) == (4, 4)
        for step, job.masters in enumerate(seen, 5):
            ema.update(step)
        assert same_bits(undisturbed, held(ema))


def test_a_file_of_other_tensors_is_refused(tmp_path: Path) -> None:
    job = Job()
    with AsyncEma(job.weights, decay=0.9) as ema:
        job.run(ema, 1)
        ema.save(tmp_path, FILE)
    job.masters["linear_1.w_0"] = np.zeros(999, np.float32)
    with (
        AsyncEma(job.weights, decay=0.9) as ema,
        pytest.raises(CheckpointError, match=r"linear_1.w_0 is \(1000,\)"),
    ):
        ema.load(tmp_path, FILE)


@pytest.mark.parametrize("text", ["[]", '{"start": "weights"}', '{"start": "weights", "updates": "x"}', "{"])
def test_a_damaged_ema_json_is_refused_naming_it(tmp_path: Path, text: str) -> None:
    job = Job()
    with AsyncEma(job.weights, decay=0.9) as ema:
        job.run(ema, 1)
        ema.save(tmp_path, FILE)
        (tmp_path / "ema.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"ema\.json"):
            ema.load(tmp_path, FILE)


def test_from_zero_the_correction_makes_a_weighted_mean() -> None:
    job = Job()
    with AsyncEma(job.weights, decay=0.9, start="zero") as ema:
        seen = job.run(ema, 5)
        weights = [0.1 * 0.9 ** (4 - i) for i in range(5)]
        corrected = ema.state().master_weights["linear_0.w_0"] / ema.progress.correction(ema.averaging)
    mean = sum(w * v["linear_0.w_0"].astype(np.float64) for w, v in zip(weights, seen, strict=True)) / sum(
        weights
    )
    np.testing.assert_allclose(corrected, mean, rtol=2e-5, atol=1e-6)


def test_interval_and_loss_decide_which_steps_count() -> None:
    job = Job()
    with AsyncEma(job.weights, decay=0.9, interval=2, loss_threshold=1.0) as ema:
        given = [(1, 0.5), (2, 0.5), (4, 1.0), (6, float("nan")), (8, 0.9)]
        assert [ema.update(step, loss) for step, loss in given] == [False, True, False, False, True]
        assert (ema.counts.not_due, ema.counts.loss_too_high, ema.progress.step) == (1, 2, 8)
        with pytest.raises(UsageError, match="needs the loss"):
            ema.update(10)


def tell(ema: AsyncEma, what: signal.Signals) -> None:
    assert ema.companion is not None
    os.kill(ema.companion.process.pid, what)


def test_a_skipped_update_is_owed_by_the_next_one() -> None:
    job = Job()
    with AsyncEma(job.weights, decay=0.5, when_behind="skip") as ema:
        (first,) = job.run(ema, 1)
        ema.state()
        tell(ema, signal.SIGSTOP)
        job.step()
        assert ema.update(2)
        second = dict(job.masters)
        job.step()
        assert not ema.update(3)
        tell(ema, signal.SIGCONT)
        ema.state()
        job.step()
        assert ema.update(4)
        expected = first["norm.w_0"] * np.float32(0.5) + second["norm.w_0"] * np.float32(0.5)
        expected = expected * np.float32(0.25) + job.masters["norm.w_0"] * np.float32(0.75)
        assert ema.state().master_weights["norm.w_0"].tobytes() == expected.tobytes()
        assert (ema.progress.updates, ema.counts.skipped) == (4, 1)


def test_training_continues_without_the_worker_and_the_average_survives(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job()
    with AsyncEma(job.weights, decay=0.5) as ema, caplog.at_level(logging.WARNING):
        seen = job.run(ema, 3)
        ema.state()
        kill(ema)
        seen += job.run(ema, 2, first=4)
        assert same_bits(by_paddle(seen, 0.5), held(ema))
    assert "the average is intact and continues" in caplog.text


def test_an_update_that_the_lost_worker_had_not_begun_is_made_by_the_next(tmp_path: Path) -> None:
    job = Job()
    with AsyncEma(job.weights, decay=0.5) as ema:
        seen = job.run(ema, 2)
        ema.state()
        tell(ema, signal.SIGSTOP)
        seen += job.run(ema, 1, first=3)
        kill(ema)
        ema.save(tmp_path, FILE)
        assert same_bits(by_paddle(seen, 0.5), held(ema))
        assert (ema.progress.updates, ema.counts.lost_workers) == (3, 1)


def test_an_average_restarts_after_an_interrupted_update(caplog: pytest.LogCaptureFixture) -> None:
    job = Job()
    with AsyncEma(job.weights, decay=0.5) as ema, caplog.at_level(logging.WARNING):
        job.run(ema, 3)
        ema.state()
        kill(ema)
        ema.shared.counts[0] += 1  # as if it had been killed while it averaged
        seen = job.run(ema, 2, first=4)
        assert same_bits(by_paddle(seen, 0.5), held(ema))
        assert ema.progress.updates == 2
    assert "so the average restarts" in caplog.text


def test_a_lost_worker_can_be_an_error() -> None:
    job = Job()
    with AsyncEma(job.weights, decay=0.5, when_lost="raise") as ema:
        job.run(ema, 1)
        ema.state()
        kill(ema)
        with pytest.raises(CompanionLost, match="status -9"):
            for step in (2, 3):
                ema.update(step)


def test_a_failing_disk_is_reported_and_training_continues(tmp_path: Path) -> None:
    job = Job()
    (tmp_path / f"{FILE}.unfinished").mkdir()
    with AsyncEma(job.weights, decay=0.5) as ema:
        job.run(ema, 2)
        with pytest.raises(Exception, match="cannot be written"):
            ema.save(tmp_path, FILE)
        job.run(ema, 1, first=3)
        assert not (tmp_path / FILE).exists()


def test_what_cannot_be_averaged_is_named() -> None:
    with AsyncEma(lambda: Weights({"w": np.zeros(3, np.float16)}), decay=0.5) as ema:
        with pytest.raises(UsageError, match="w: is float16"):
            ema.update(1)
        with pytest.raises(UsageError, match="no average yet"):
            ema.state()
    with pytest.raises(UsageError, match="decay 1 must be"):
        AsyncEma(lambda: Weights({}), decay=1)
