"""``--notify`` and the audit log: how conversions ended, for those who did not watch."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from paddle_reshard.pipeline.progress import notify
from paddle_reshard.storage.documents.strict_json import parse_json
from tests.conftest import COMMITTED, REPO
from tests.jobs.command import copy_checkpoint, run_here

DEMO = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
SCHEMA = json.loads((REPO / "docs" / "schemas" / "outcome-1.json").read_text())


class Hook:
    """A webhook on this machine that answers as it is told, and then with 200."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.received: list[tuple[str, str | None, dict[str, Any]]] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = parse_json(self.rfile.read(int(self.headers["Content-Length"])))
                hook.received.append((self.path, self.headers["Authorization"], body))
                status = hook.answers.pop(0) if hook.answers else 200
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        self.address = f"127.0.0.1:{self.server.server_port}"

    def events(self) -> list[dict[str, Any]]:
        """What was received, each as the published schema says."""
        for _, _, event in self.received:
            jsonschema.validate(event, SCHEMA, format_checker=jsonschema.FormatChecker())
        return [event for _, _, event in self.received]


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(notify, "PAUSES", (0.0, 0.0))
    made = Hook()
    yield made
    made.server.shutdown()
    made.thread.join()
    made.server.server_close()


def test_a_webhook_learns_of_success_and_refusal_and_not_of_wrong_usage(hook: Hook, tmp_path: Path) -> None:
    target = tmp_path / "t"
    given = ("--json", "--fingerprint", "full", "--notify", f"http://me:hunter2@{hook.address}/hook?key=1")
    done = run_here("convert", DEMO, target, "--to", "tp=1", *given)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    again = run_here("convert", DEMO, target, "--to", "tp=1", "--resume", *given)
    assert again.returncode == 0
    assert run_here("convert", DEMO, tmp_path / "u", "--to", "tq=1", *given).returncode == 2
    refused = run_here("convert", DEMO, tmp_path / "u", "--to", "tp=3", *given)
    assert refused.returncode == 1
    first, found, second = hook.events()
    assert [path for path, _, _ in hook.received] == ["/hook?key=1"] * 3
    assert hook.received[0][1] == "Basic bWU6aHVudGVyMg=="
    assert (first["event"], first["source"], first["target"]) == ("converted", str(DEMO), str(target))
    manifest = json.loads((target / "paddle_reshard.json").read_text())
    assert first["plan_id"] == manifest["plan_id"]
    assert first["root"] == next(iter(answer["moved"]["fingerprint_roots"].values()))
    assert (found["event"], found["plan_id"]) == ("converted", first["plan_id"])
    assert (second["event"], second["plan_id"]) == ("refused", None)
    assert second["error"] == json.loads(refused.stdout)["error"]


@pytest.mark.parametrize(
    ("answers", "tries", "warned"),
    [
        ([503, 429], 3, None),
        ([500] * 3, 3, "HTTP 500"),
        ([404], 1, "HTTP 404"),
        ([302], 1, "HTTP 302"),
    ],
    ids=["busy", "down", "gone", "redirected"],
)
def test_a_webhook_that_fails_is_a_warning(
    answers: list[int],
    tries: int,
    warned: str | None,
    hook: Hook,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook.answers = answers
    secret = f"http://me:hunter2@{hook.address}/services/T000"
    done = run_here("convert", DEMO, tmp_path / "t", "--to", "tp=1", "--quiet", "--notify", secret)
    assert done.returncode == 0
    assert len(hook.received) == tries
    expected = [] if warned is None else [f"not notified: {warned}"]
    assert [message.partition(f"{hook.address}: ")[2] for message in caplog.messages] == expected
    assert all(f"http://{hook.address}: " in message for message in caplog.messages)
    assert "hunter2" not in caplog.text + done.stderr
    assert "T000" not in caplog.text + done.stderr


def test_a_command_gets_the_outcome_without_a_shell(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told, script = tmp_path / "told $(x).json", tmp_path / "tell.py"
    script.write_text("import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.stdin.read())")
    file = tmp_path / "notify"
    file.write_text(f"{sys.executable} {script} '{told}'\n")
    done = run_here("convert", DEMO, tmp_path / "t", "--to", "tp=1", "--notify", f"@{file}")
    assert done.returncode == 0
    jsonschema.validate(json.loads(told.read_text()), SCHEMA)
    for command, warned in (
        (f"{sys.executable} -c 'exit(3)'", "exit status 3"),
        ("/not/there", "No such file"),
    ):
        failed = run_here("convert", DEMO, tmp_path / "u", "--to", "tp=3", "--notify", command)
        assert failed.returncode == 1
        assert f"not notified: {warned}" in caplog.messages[-1]
    for wrong in ("", "'", "http://", f"@{tmp_path}/none"):
        assert run_here("convert", DEMO, tmp_path / "u", "--to", "tp=1", "--notify", wrong).returncode == 2


def test_a_watch_tells_and_keeps_a_log(hook: Hook, tmp_path: Path) -> None:
    for step in (3, 6):
        copy_checkpoint(tmp_path / "run" / f"checkpoint-{step}")
    (tmp_path / "run" / "checkpoint-9").mkdir()
    arguments = ("watch", tmp_path / "run", tmp_path / "out", "--to", "tp=1", "--once", "--stale", "0s")
    notified = ("--notify", f"http://{hook.address}/", "--settle", 0)
    done = run_here(*arguments, *notified)
    assert done.returncode == 1
    assert [(event["event"], Path(event["target"]).name) for event in hook.events()] == [
        ("converted", "checkpoint-3"),
        ("converted", "checkpoint-6"),
        ("stale", "checkpoint-9"),
    ]
    log = tmp_path / "out" / ".paddle_reshard" / "audit.jsonl"
    first = log.read_text()
    assert [parse_json(line) for line in first.splitlines()] == hook.events()[:2]
    (tmp_path / "run" / "checkpoint-9").rmdir()
    assert run_here(*arguments, "--keep", 1).returncode == 0
    assert log.read_text().startswith(first)
    (removed,) = (parse_json(line) for line in log.read_text()[len(first) :].splitlines())
    jsonschema.validate(removed, SCHEMA)
    kept = [removed[name] for name in ("event", "source", "target", "plan_id")]
    assert kept == ["removed", None, str(tmp_path / "out" / "checkpoint-3"), hook.events()[0]["plan_id"]]
