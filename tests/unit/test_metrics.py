"""``--metrics-port``: what Prometheus reads of a watcher."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from paddle_reshard.pipeline.core.outcome import Outcome
from paddle_reshard.pipeline.progress.metrics import LOOPBACK, Address, CheckpointFigures, serving
from paddle_reshard.pipeline.progress.stream import Checked
from tests.jobs.command import copy_checkpoint, run_here


def samples(port: int) -> dict[str, float]:
    """Name → the sum of its samples, as Prometheus would read them."""
    found: dict[str, float] = {}
    with urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=60) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def test_those_of_a_watch_count_checkpoints() -> None:
    figures = CheckpointFigures()
    with serving(figures, Address(LOOPBACK, 0)) as port:
        assert samples(port)["process_resident_memory_bytes"] > 1 << 20
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
    with pytest.raises(ConnectionRefusedError), socket.create_connection((LOOPBACK, port)):
        pass


def test_a_watch_listens_on_this_machine_alone_and_refuses_an_address_in_use(tmp_path: Path) -> None:
    copy_checkpoint(tmp_path / "run" / "checkpoint-3")
    watching = ("watch", tmp_path / "run", tmp_path / "out", "--to", "tp=1", "--once")
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        refused = run_here(*watching, "--metrics-port", port)
        assert refused.returncode == 2
        assert f"--metrics-port {LOOPBACK}:{port}: Address already in use" in refused.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    done = run_here(*watching, "--metrics-port", port)
    assert done.returncode == 0, done.stderr
    assert run_here(*watching, "--metrics-port", "localhost").returncode == 2
