"""Jobs on a real Ray head with token authentication, whose Python does not have this package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import paddle_reshard
from tests.conftest import REPO
from tests.jobs.command import GOLDEN, command_line, copy_checkpoint, run, snapshot
from tests.jobs.head import Head, running_head

SECRET = "hunter2-do-not-show"


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with running_head() as started:
        yield started


@pytest.fixture(scope="module")
def one_card(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    target = tmp_path_factory.mktemp("expected") / "target"
    paddle_reshard.convert(GOLDEN, target, to="tp=1")
    return snapshot(target)


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


def test_a_conversion_runs_once_however_often_it_is_submitted(
    head: Head, tmp_path: Path, one_card: dict[str, bytes]
) -> None:
    layout = tmp_path / "target-job.json"
    layout.write_text('{"segmentation": "uniform"}')
    arguments = [GOLDEN, tmp_path / "out", "--to", "tp=1", "--layout", layout, "--env", "STORE_SECRET"]
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
    assert "the head does not have this version of the package: uploading it" in said
    assert f"the job goes on; follow it with: ray job logs --follow {submission_id}" in said

    second = submit(head, *arguments, STORE_SECRET=SECRET)
    assert second.returncode == 0, second.stderr
    assert f"attached to {submission_id}" in second.stderr
    assert "publish: " in second.stdout
    assert snapshot(tmp_path / "out") == one_card
    job = jobs(head)[submission_id]
    assert job["entrypoint"].endswith(f"convert {GOLDEN} {tmp_path / 'out'} --to tp=1 --layout layout.json")
    assert job["runtime_env"]["env_vars"] == {"STORE_SECRET": SECRET}
    del job["runtime_env"]
    assert SECRET not in "".join((json.dumps(job), said, second.stdout, second.stderr))


def test_a_failing_conversion_gives_1_and_its_own_sentence(head: Head, tmp_path: Path) -> None:
    arguments = [GOLDEN, tmp_path / "out", "--to", "tp=3", "--env", "PYTHONPATH"]
    source = str(REPO / "src")
    first = submit(head, *arguments, PYTHONPATH=source)
    assert first.returncode == 1
    assert "does not divide num_attention_heads=4" in first.stdout
    assert "FAILED: Job entrypoint command failed with exit code 1\n" in first.stderr
    assert "uploading" not in first.stderr  # with PYTHONPATH the head's python has the package
    second = submit(head, *arguments, "--no-follow", PYTHONPATH=source)
    assert second.returncode == 0
    one, two = first.stderr.split("submitted ")[1].split()[0], second.stdout.strip()
    assert two == f"{one}-2"
    assert not (tmp_path / "out").exists()


def test_without_the_package_and_without_an_upload_it_fails(head: Head, tmp_path: Path) -> None:
    done = submit(head, GOLDEN, tmp_path / "out", "--to", "tp=1", "--upload", "never")
    assert done.returncode == 1
    assert "No module named paddle_reshard" in done.stdout


def test_the_wrong_token_is_told_in_one_sentence(head: Head, tmp_path: Path) -> None:
    done = submit(head, GOLDEN, tmp_path / "out", "--to", "tp=1", RAY_AUTH_TOKEN="0" * 64)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "the cluster did not take the job: " in done.stderr


def test_an_address_that_nobody_listens_at_is_told_in_one_sentence(head: Head, tmp_path: Path) -> None:
    done = run(
        *("submit", "--address", "http://127.0.0.1:9", GOLDEN, tmp_path / "out", "--to", "tp=1"),
        env={**head.env, "RAY_ADDRESS": head.address},
    )
    assert done.returncode == 1
    assert "Failed to connect to Ray at address: http://127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


def test_watch_submits_each_checkpoint(head: Head, tmp_path: Path, one_card: dict[str, bytes]) -> None:
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
    assert "does not divide num_attention_heads=4" in refused.stderr
