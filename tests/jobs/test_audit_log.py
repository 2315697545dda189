"""The audit log of ``watch``: how conversions ended, for those who did not watch."""

from __future__ import annotations

import json
from pathlib import Path

from paddle_reshard.storage.documents.strict_json import parse_json
from tests.jobs.command import copy_checkpoint, run_here
from tests.published import hold


def test_a_watch_keeps_a_log(tmp_path: Path) -> None:
    for step in (3, 6):
        copy_checkpoint(tmp_path / "run" / f"checkpoint-{step}")
    (tmp_path / "run" / "checkpoint-9").mkdir()
    out = tmp_path / "out"
    arguments = ("watch", tmp_path / "run", out, "--to", "tp=1", "--once", "--stale", "0s", "--settle", 0)
    assert run_here(*arguments).returncode == 1  # checkpoint-9 is stale
    log = out / ".paddle_reshard" / "audit.jsonl"
    first = log.read_text()
    converted = [parse_json(line) for line in first.splitlines()]
    for entry, step in zip(converted, (3, 6), strict=True):
        hold(entry, "outcome-1")
        manifest = json.loads((out / f"checkpoint-{step}" / "paddle_reshard.json").read_text())
        assert (entry["event"], entry["plan_id"]) == ("converted", manifest["plan_id"])
        places = str(tmp_path / "run" / f"checkpoint-{step}"), str(out / f"checkpoint-{step}")
        assert (entry["source"], entry["target"]) == places
    (tmp_path / "run" / "checkpoint-9").rmdir()
    assert run_here(*arguments, "--keep", 1).returncode == 0
    assert log.read_text().startswith(first)
    (removed,) = (parse_json(line) for line in log.read_text()[len(first) :].splitlines())
    hold(removed, "outcome-1")
    kept = [removed[name] for name in ("event", "source", "target", "plan_id")]
    assert kept == ["removed", None, str(out / "checkpoint-3"), converted[0]["plan_id"]]
