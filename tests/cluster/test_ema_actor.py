"""The average during training, computed by a Ray actor."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from paddle_reshard.clusters.companion import CompanionLost
from paddle_reshard.clusters.ray.ema_actor import ActorCompanion
from paddle_reshard.pipeline.training.async_ema import AsyncEma
from paddle_reshard.pipeline.training.stretches import Weights
from tests.cluster.conftest import is_running

pytestmark = pytest.mark.usefixtures("cluster")
KEEP, TAKE = np.float32(0.9), np.float32(1 - 0.9)


class Job:
    """Weights that change at every step."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(11)
        self.expected: np.ndarray | None = None

    def weights(self) -> Weights:
        return Weights({"linear_0.w_0": self.values})

    def run(self, ema: AsyncEma, steps: range) -> None:
        for step in steps:
            self.values = self.random.standard_normal((500, 300), dtype=np.float32)
            self.expected = (
                self.values if self.expected is None else KEEP * self.expected + TAKE * self.values
            )
            assert ema.update(step)


def average(ema: AsyncEma) -> np.ndarray:
    return np.array(ema.state().master_weights["linear_0.w_0"])


def pid_of(ema: AsyncEma) -> int:
    assert isinstance(ema.companion, ActorCompanion)
    return ema.companion.pid


def kill(ema: AsyncEma) -> int:
    pid = pid_of(ema)
    os.kill(pid, signal.SIGKILL)
    return pid


def test_an_actor_averages_survives_its_loss_and_ends(tmp_path: Path) -> None:
    job = Job()
    with AsyncEma(job.weights, decay=0.9, worker="ray") as ema:
        job.run(ema, range(1, 6))
        assert average(ema).tobytes() == job.expected.tobytes()
        first = kill(ema)
        job.run(ema, range(6, 9))
        assert average(ema).tobytes() == job.expected.tobytes()
        assert (ema.counts.lost_workers, ema.progress.updates) == (1, 8)
        last = pid_of(ema)
        assert last != first
        ema.save(tmp_path, "ema.pdopt")
        assert job.expected.tobytes() in (tmp_path / "ema.pdopt").read_bytes()
    assert not is_running(last)


def test_its_loss_can_be_an_error() -> None:
    job = Job()
    with AsyncEma(job.weights, decay=0.9, worker="ray", when_lost="raise") as ema:
        job.run(ema, range(1, 3))
        ema.state()
        kill(ema)
        with pytest.raises(CompanionLost, match="the averaging actor has ended"):
            job.run(ema, range(3, 9))
