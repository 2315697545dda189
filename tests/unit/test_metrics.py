"""``--metrics-port``: what Prometheus reads while a conversion runs."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

import paddle_reshard
from paddle_reshard.pipeline.core.events import Event, StepEnded, StepStarted
from paddle_reshard.pipeline.core.outcome import Outcome
from paddle_reshard.pipeline.core.run_state import RunState
from paddle_reshard.pipeline.progress.metrics import (
    LOOPBACK,
    Address,
    CheckpointFigures,
    RunFigures,
    serving,
)
from paddle_reshard.pipeline.progress.stream import Checked
from tests.conftest import COMMITTED
from tests.jobs.command import copy_checkpoint, run_here

DEMO = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"


def samples(port: int) -> dict[str, float]:
    """Name → the sum of its samples, as Prometheus would read them."""
    found: dict[str, float] = {}
    with urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=60) as answer:  # the run waits for it
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                name = f"{sample.name}:{sample.labels['step']}" if "step" in sample.labels else sample.name
                found[name] = found.get(name, 0) + sample.value
    return found


def test_figures_can_be_read_while_a_conversion_runs(tmp_path: Path) -> None:
    state = RunState(dict)
    read: dict[str, dict[str, float]] = {}
    with serving(RunFigures(state), Address(LOOPBACK, 0)) as port:

        def observe(event: Event) -> None:
            state(event)
            if isinstance(event, (StepStarted, StepEnded)):
                read[f"{type(event).__name__} {event.step}"] = samples(port)

        report = paddle_reshard.convert(DEMO, tmp_path / "t", to="tp=1", observe=observe)
    before, after = read["StepStarted move"], read["StepEnded move"]
    assert "paddle_reshard_groups_total" not in before
    assert before["paddle_reshard_plan_groups"] == report.plan.plan.groups
    assert before["paddle_reshard_step_done_bytes"] == 0
    assert before["paddle_reshard_step_bytes"] == report.plan.plan.written_bytes
    assert before["paddle_reshard_step:move"] == 1
    assert before["process_resident_memory_bytes"] > 1 << 20
    assert after["paddle_reshard_groups_total"] == after["paddle_reshard_plan_done_groups"]
    assert after["paddle_reshard_groups_total"] == report.moved.groups
    assert after["paddle_reshard_step_done_bytes"] == report.moved.written_bytes
    assert 0 < after["paddle_reshard_written_bytes_total"] <= report.moved.written_bytes
    assert after["paddle_reshard_busy_seconds_total"] > 0
    with pytest.raises(ConnectionRefusedError), socket.create_connection((LOOPBACK, port)):
        pass


def test_those_of_a_watch_count_checkpoints() -> None:
    figures = CheckpointFigures()
    with serving(figures, Address(LOOPBACK, 0)) as port:
        assert "paddle_reshard_last_success_timestamp_seconds" not in samples(port)
        for event, at in (("converted", 100.0), ("failed", 200.0), ("refused", 300.0), ("converted", 400.5)):
            figures(Outcome(event, "run/checkpoint-3", "out/checkpoint-3", at, "me@here"))
        figures(Checked({"checkpoint-3": "converted", "checkpoint-4": "waiting", "checkpoint-5": "waiting"}))
        found = {name: value for name, value in samples(port).items() if name.startswith("paddle_reshard_")}
    assert found == {
        "paddle_reshard_checkpoints_converted_total": 2,
        "paddle_reshard_checkpoints_failed_total": 2,
        "paddle_reshard_checkpoints_waiting": 2,
        "paddle_reshard_last_success_timestamp_seconds": 400.5,
    }


def test_commands_listen_on_this_machine_alone_and_refuse_an_address_in_use(tmp_path: Path) -> None:
    copy_checkpoint(tmp_path / "run" / "checkpoint-3")
    converting = ("convert", DEMO, tmp_path / "t", "--to", "tp=1")
    watching = ("watch", tmp_path / "run", tmp_path / "out", "--to", "tp=1", "--once")
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        for arguments in (converting, watching, ("verify", DEMO)):
            refused = run_here(*arguments, "--metrics-port", port)
            assert refused.returncode == 2
            assert f"--metrics-port {LOOPBACK}:{port}: Address already in use" in refused.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    for arguments in (converting, watching):
        done = run_here(*arguments, "--metrics-port", port)
        assert done.returncode == 0, done.stderr
    assert run_here(*converting, "--metrics-port", "localhost").returncode == 2
