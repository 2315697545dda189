"""Jobs on a real Ray head with token authentication, whose Python does not have this package.

``make full`` runs a job to its end; ``make cluster`` shows the rest, on a head for all of it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.events import StepStarted
from tests.conftest import REPO
from tests.jobs.command import GOLDEN, command_line, copy_checkpoint, run, snapshot
from tests.jobs.head import Head, running_head
from tests.published import checked

SECRET = "hunter2-do-not-show"


def submit(head: Head, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    return run("submit", "--address", head.address, *arguments, env={**head.env, **env})


def jobs(head: Head) -> dict[str, dict]:
    """Submission id → what the head tells about its job."""
    code = (
        "import json\nfrom ray.job_submission import JobSubmissionClient as C\n"
        f"print(json.dumps([j.dict() for j in C({head.address!r}).list_jobs()], default=str))"
    )
    line = [command_line()[0], "-W", "ignore", "-c", code]
    done = subprocess.run(line, capture_output=True, text=True, check=True, env={**os.environ, **head.env})
    return {job["submission_id"]: job for job in json.loads(done.stdout.splitlines()[-1])}


@pytest.fixture
def one_card(tmp_path: Path) -> dict[str, bytes]:
    paddle_reshard.convert(GOLDEN, tmp_path / "one-card", to="tp=1")
    return snapshot(tmp_path / "one-card")


def test_a_job_on_a_real_head_runs_once(tmp_path: Path) -> None:
    """Continued from where it was killed, interrupted while it follows, and submitted again: one job, without visible
    secrets.
    """
    with running_head() as head:
        check_that_it_runs_once(head, tmp_path)


@pytest.mark.cluster
def test_jobs_on_a_real_head(tmp_path: Path, one_card: dict[str, bytes]) -> None:
    with running_head() as head:
        check_that_the_end_is_told_again(head, tmp_path / "again", one_card)
        check_that_a_failure_is_told(head, tmp_path / "fails")
        check_that_a_driver_without_the_token_is_told(head, tmp_path)
        check_that_watch_submits(head, tmp_path / "watch", one_card)


def leave_unfinished(target: Path, layout: Path) -> None:
    """A conversion that ended when everything was moved and nothing published."""

    def stop(event: object) -> None:
        if isinstance(event, StepStarted) and event.step == "verify":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        paddle_reshard.convert(GOLDEN, target, to="tp=1", layout=layout, memory="256MiB", observe=stop)


def check_that_it_runs_once(head: Head, tmp_path: Path) -> None:
    layout = tmp_path / "target-job.json"
    layout.write_text('{"segmentation": "uniform"}')
    arguments = [GOLDEN, tmp_path / "out", "--to", "tp=1", "--layout", layout, "--env", "STORE_SECRET"]
    arguments += ["--memory", "256MiB"]
    leave_unfinished(tmp_path / "out", layout)
    command = command_line("submit", "--address", head.address, *arguments)
    env = {**os.environ, **head.env, "STORE_SECRET": SECRET}
    with subprocess.Popen(command, stdout=-1, stderr=subprocess.PIPE, text=True, env=env) as first:
        assert first.stderr is not None
        said = ""
        while "submitted paddle-reshard-" not in said:
            line = first.stderr.readline()
            assert line, said
            said += line
        first.send_signal(signal.SIGINT)
        said += first.stderr.read()
        assert first.wait(30) == 130, said
    submission_id = said.split("submitted ")[1].split()[0]
    assert f"the job continues; follow it with: ray job logs --follow {submission_id}" in said

    second = submit(head, *arguments, STORE_SECRET=SECRET)
    assert second.returncode == 0, second.stdout + second.stderr
    assert f"attached to {submission_id}" in second.stderr
    assert "publish: " in second.stdout
    assert re.search(r"^reused\t2 of 2 groups", second.stdout, re.MULTILINE), second.stdout
    paddle_reshard.convert(GOLDEN, tmp_path / "here", to="tp=1", layout=layout, memory="256MiB")
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "here")
    known = jobs(head)
    assert list(known) == [submission_id], "another job than the conversion was left behind"
    job = known[submission_id]
    assert job["entrypoint"].startswith(". ./environment.sh && python -m paddle_reshard convert ")
    line = f"convert {GOLDEN} {tmp_path / 'out'} --to tp=1 --layout layout.json --memory 256MiB --cluster ray"
    line += " --resume"
    assert job["entrypoint"].endswith(line)
    assert job["metadata"]["job_name"] == f"paddle-reshard {GOLDEN.name} to {tmp_path / 'out'}"
    assert SECRET not in "".join((json.dumps(job), said, second.stdout, second.stderr))
    logs = [path for path in head.folder.rglob("*") if path.is_file() and "logs" in path.parts]
    assert logs
    assert [path for path in logs if SECRET.encode() in path.read_bytes()] == []
    sent = [path for path in head.folder.rglob("environment.sh") if SECRET.encode() in path.read_bytes()]
    assert sent
    assert {path.stat().st_mode & 0o777 for path in sent} == {0o600}


def check_that_the_end_is_told_again(head: Head, tmp_path: Path, one_card: dict[str, bytes]) -> None:
    """Submitted again when it has succeeded, with ``--json`` and without a word."""
    arguments = [GOLDEN, tmp_path / "out", "--to", "tp=1"]
    first = submit(head, *arguments)
    assert first.returncode == 0, first.stderr
    assert snapshot(tmp_path / "out") == one_card
    second = submit(head, *arguments, "--json")
    end = checked(second)
    submission_id = first.stderr.split("submitted ")[1].split()[0]
    assert (end["command"], end["submission_id"], end["attached"]) == ("submit", submission_id, True)
    assert end["status"] == "SUCCEEDED"
    assert (second.returncode, "publish: " in second.stderr) == (0, True)
    third = submit(head, *arguments, "--quiet")
    assert (third.returncode, third.stdout, third.stderr) == (0, "", "")


def check_that_a_failure_is_told(head: Head, tmp_path: Path) -> None:
    """Exit status 1 and the converter's own sentence; submitted again, it is another attempt."""
    arguments = [GOLDEN, tmp_path / "out", "--to", "tp=3", "--upload", "never", "--env", "PYTHONPATH"]
    source = str(REPO / "src")
    first = submit(head, *arguments, PYTHONPATH=source)
    assert first.returncode == 1
    assert "tp=3 does not divide" in first.stdout
    assert "FAILED: Job entrypoint command failed with exit code 1\n" in first.stderr
    told = submit(head, *arguments, "--json", PYTHONPATH=source)
    said = checked(told)
    one = first.stderr.split("submitted ")[1].split()[0]
    assert (told.returncode, said["status"], said["submission_id"]) == (1, "FAILED", f"{one}-2")
    assert "tp=3 does not divide" in said["error"]
    assert not said["retryable"]
    third = submit(head, *arguments, "--no-follow", PYTHONPATH=source)
    assert (third.returncode, third.stdout.strip()) == (0, f"{one}-3")
    assert not (tmp_path / "out").exists()

    never = submit(head, GOLDEN, tmp_path / "out", "--to", "tp=1", "--upload", "never")
    assert never.returncode == 1
    assert "No module named paddle_reshard" in never.stdout
    stranger = submit(head, GOLDEN, tmp_path / "out", "--to", "tp=1", RAY_AUTH_TOKEN="0" * 64)
    assert stranger.returncode == 1
    assert "the cluster rejected the job: " in stranger.stderr
    assert "Traceback" not in stranger.stderr
    without = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": ""}
    nobody = submit(head, GOLDEN, tmp_path / "out", "--to", "tp=1", **without)
    assert nobody.returncode == 1
    assert "; if it wants a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to that" in nobody.stderr


def check_that_a_driver_without_the_token_is_told(head: Head, tmp_path: Path) -> None:
    """At once: Ray itself asks for minutes, and tells only its log that the token is refused."""
    for of_driver in (
        {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": ""},
        {"RAY_AUTH_TOKEN": "0" * 64},
        {"RAY_AUTH_TOKEN": "", "HOME": str(tmp_path)},
    ):
        arguments = ("convert", GOLDEN, tmp_path / "no", "--to", "tp=1", "--cluster", f"ray:{head.cluster}")
        refused = run(*arguments, env={**head.env, **of_driver})
        assert refused.returncode == 1
        assert f"cannot join Ray at '{head.cluster}': " in refused.stderr
        assert (
            "; if it wants a token, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to that [Clust"
            in refused.stderr
        )
        assert "gcs_client" not in refused.stderr


def check_that_watch_submits(head: Head, tmp_path: Path, one_card: dict[str, bytes]) -> None:
    """Each checkpoint is a job, and a refusal is recorded as one."""
    copy_checkpoint(tmp_path / "run" / "checkpoint-3")
    command = [
        "watch",
        "--once",
        "--submit",
        head.address,
        "--upload",
        "always",
        tmp_path / "run",
        tmp_path / "out",
    ]
    done = run(*command, "--to", "tp=1", env=head.env)
    assert done.returncode == 0, done.stderr
    assert "checkpoint-3: submitted job paddle-reshard-" in done.stderr
    assert snapshot(tmp_path / "out" / "checkpoint-3") == one_card
    refused = run(*command[:-1], tmp_path / "other", "--to", "tp=3", env=head.env)
    assert refused.returncode == 1
    assert "checkpoint-3: refused: " in refused.stderr
    assert "tp=3 does not divide" in refused.stderr
