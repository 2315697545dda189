"""Ids and arguments of jobs, without a cluster."""

from __future__ import annotations

import json
import shlex
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click
import pytest

from paddle_reshard.clusters.answers import answer_of_job, failure_of_job
from paddle_reshard.clusters.ray import jobs
from paddle_reshard.clusters.ray.environment import chosen_variables
from paddle_reshard.clusters.ray.jobs import ConversionJob, entrypoint_of, metadata_of
from paddle_reshard.pipeline.cli.commands import conversion
from paddle_reshard.pipeline.cli.commands.forwarded import OF_ONE_PROCESS, ConvertArguments
from paddle_reshard.pipeline.cli.options import Option
from paddle_reshard.pipeline.core.errors import JobError, ReshardError, StaleSessionError, UsageError
from paddle_reshard.pipeline.request.options import Decides
from tests.jobs.command import invoke, run
from tests.published import checked

FILE = object()


def read(*arguments: object, convert: click.Command = conversion.convert) -> ConvertArguments:
    return ConvertArguments.read(convert, [str(argument) for argument in arguments])


def identity(*arguments: object) -> str:
    request = read(*arguments)
    return request.identify(request.values["source"], request.values["target"])


def test_the_id_is_that_of_the_conversion_however_it_is_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    same = identity("a", "b", "--to", "tp=2,pp=2")
    assert same.startswith("paddle-reshard-")
    assert len(same) == len("paddle-reshard-") + 16
    for spelling in (
        [tmp_path / "a", "b/", "--to", "pp=2,tp=2"],
        ["--to=tp=2,pp=2,sharding=1", "a", tmp_path / "b"],
        ["a", "b", "--to", "tp=2,pp=2", "--format", "hybrid", "--replicas", "compare"],
        ["a", "b", "--to", "tp=2,pp=2", "--memory", "4GiB", "--cluster", "ray", "--quiet", "--json"],
    ):
        assert identity(*spelling) == same, spelling


DECIDES = {
    Decides.OUTCOME: {
        "to": "tp=2,pp=4", "sharding_strategy": "stage2", "format": "hybrid-plain", "state": "ema",
        "dtype": "float32", "paddle_version": "3.2", "max_shard_size": "1GB", "rules": FILE, "config": FILE,
        "layout": FILE, "aoa": FILE, "expected_plan": FILE, "allow_missing": "lm_head.*",
        "replicas": "first",
        "vocab_size": 128, "overwrite": True, "drop": "ema", "allow_links": True,
        "targets": "/c:hybrid:tp=1", "lora_config": FILE, "convention": "paddlefleet",
        "master_weights": "from-parameters", "ranks": "0",
    },
    Decides.LOCATION: {"fill": "/lost.safetensors", "merge_into": "/base", "like": "/donor"},
    Decides.EXECUTION: {
        "memory": "4GiB", "cluster": "ray", "workers": 2,
        "device": "gpu",
        "resume": True, "as_json": True, "quiet": True,
        "report_path": "page.html",
    },
    Decides.ACCESS: {
        "storage_options": '{"key": "k"}',
    },
}  # fmt: skip
"""Every option of ``convert``, by what it decides, with a value that is not its default."""


def test_every_option_of_convert_says_what_it_decides() -> None:
    options = [option for option in conversion.convert.params if isinstance(option, click.Option)]
    silent = [option.opts[0] for option in options if not isinstance(option, Option)]
    assert not silent, "declare these in convert/options.py, or with outcome_option or execution_option"
    declared = {
        role: {o.name for o in options if o.decides is role} - set(OF_ONE_PROCESS) for role in Decides
    }
    assert declared.pop(Decides.EXECUTION) == set(DECIDES[Decides.EXECUTION])
    assert declared == {role: set(values) for role, values in DECIDES.items() if role in declared}


@pytest.mark.parametrize(
    ("name", "value", "changes"),
    [
        (name, value, role in (Decides.OUTCOME, Decides.LOCATION))
        for role, values in DECIDES.items()
        for name, value in values.items()
        if name != "targets"  # takes the place of the one target that a job has
    ],
)
def test_the_id_changes_with_what_comes_out_and_with_nothing_else(
    name: str, value: object, changes: bool, tmp_path: Path
) -> None:
    (option,) = (option for option in conversion.convert.params if option.name == name)
    if value is FILE:
        value = tmp_path / "file.json"
        value.write_text("{}")
    plain = ["/a", "/b", "--to", "tp=2"] if name != "to" else ["/a", "/b"]
    if name in ("state", "dtype", "max_shard_size"):
        plain = ["/a", "/b", "--format", "huggingface"]
    if name == "paddle_version":
        plain = ["/a", "/b", "--format", "flex"]
    given = [option.opts[0]] if value is True else [option.opts[0], value]
    base = identity(*plain, *(["--to", "tp=2"] if name == "to" else []))
    assert (identity(*plain, *given) != base) == changes


def test_what_decides_the_outcome_decides_the_id(tmp_path: Path) -> None:
    layout = tmp_path / "layout.json"
    layout.write_text("{}")
    with_layout = identity("/a", "/b", "--to", "tp=2", "--layout", layout)
    layout.write_text('{"segmentation": "uniform"}')
    ids = [
        identity("/a", "/b", "--to", "tp=2"),
        identity("/a2", "/b", "--to", "tp=2"),
        identity("/a", "/b2", "--to", "tp=2"),
        identity("s3://a", "/b", "--to", "tp=2"),
        identity("/a", "/b", "--to", "tp=2", "--layout", '{"sequence_parallel": true}'),
        identity("/a", "/b", "--to", "tp=2", "--layout", '{"sequence_parallel": false}'),
        with_layout,
        identity("/a", "/b", "--to", "tp=2", "--layout", layout),
    ]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        ([], ["--cluster", "ray"]),
        (["--cluster", "inline"], []),
        (["--cluster", "ray:head:6379"], ["--cluster", "ray:head:6379"]),
    ],
)
def test_a_job_uses_its_cluster_by_default(given: list[str], spelled: list[str]) -> None:
    request = read("/a", "/b", "--to", "tp=1", *given)
    assert list(request.spell("/a", "/b")) == ["/a", "/b", "--to", "tp=1", *spelled]


def test_a_job_gets_exactly_what_convert_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my rules.json").write_text('{"a": 1}')
    request = read(
        *("a b", "s3://bucket/out/", "--to", "tp=2", "--rules", "my rules.json"),
        *("--vocab-size", 128, "--layout", '{"segmentation": "layer:Llama Decoder"}', "--replicas", "report"),
    )
    spelled = request.spell(request.values["source"], request.values["target"])
    again = read(*(argument.replace("rules.json", str(tmp_path / "my rules.json")) for argument in spelled))
    changed = {
        "source": str(tmp_path / "a b"),
        "target": "s3://bucket/out",
        "rules": tmp_path / "my rules.json",
    }
    assert dict(again.values) == {**request.values, **changed, "cluster": "ray"}
    assert request.files() == {"rules": b'{"a": 1}'}
    line = entrypoint_of(spelled)
    assert line.startswith("python -m paddle_reshard convert ")
    assert shlex.split(line)[4:] == list(spelled)


def test_a_report_is_written_by_the_job_and_changes_no_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = read("/a", "/b", "--to", "tp=1", "--report", "page.html")
    spelled = request.spell("/a", "/b")
    assert spelled[spelled.index("--report") + 1] == str(tmp_path / "page.html")
    assert request.files() == {}
    assert request.identify("/a", "/b") == identity("/a", "/b", "--to", "tp=1")


def test_credentials_are_refused_before_they_are_seen() -> None:
    options = [*conversion.convert.params, Option(["--storage-options-x"], decides=Decides.ACCESS)]
    convert = click.Command("convert", params=options, callback=conversion.convert.callback)
    request = read("/a", "/b", "--to", "tp=1", "--storage-options-x", "hunter2", convert=convert)
    with pytest.raises(UsageError, match="--env") as refused:
        request.spell("/a", "/b")
    assert "hunter2" not in str(refused.value)
    assert request.identify("/a", "/b") == identity("/a", "/b", "--to", "tp=1")
    with pytest.raises(UsageError, match="password") as refused:
        identity("s3://user:hunter2@host/a", "/b", "--to", "tp=1")
    assert "hunter2" not in str(refused.value)


def test_mistakes_are_reported_before_a_cluster_is_contacted() -> None:
    for arguments, message in (
        (["/a", "/b"], "--to"),
        (["/a", "/b", "--to", "tq=1"], "unknown axis 'tq'"),
        (["/a", "/b", "--to", "tp=1", "--nonsense"], "--nonsense"),
        (["/a", "/b", "--to", "tp=1", "--nonsense"], "submit [OPTIONS] SRC DST"),
        ([], "give a source and a target"),
        (
            ["/a", "/b", "--to", "tp=1", "--env", "NOT_SET_X"],
            "--env NOT_SET_X: this environment variable is not set",
        ),
    ):
        done = invoke("submit", "--address", "http://127.0.0.1:9", *arguments)
        assert (done.exit_code, message in done.stderr) == (2, True), done.stderr


def test_an_explicit_address_takes_precedence_and_a_silent_one_is_reported_in_one_sentence() -> None:
    arguments = ["submit", "--address", "http://127.0.0.1:9", "/a", "/b", "--to", "tp=1"]
    done = run(*arguments, env={"RAY_ADDRESS": "http://127.0.0.1:7"})
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "paddle-reshard: the cluster cannot be reached: Failed to connect to Ray at address: http://127.0.0.1:9. "
        "[JobError]"
    ]


def failure(lines: list[str], message: str = "FAILED") -> ReshardError:
    return failure_of_job(answer_of_job(lines), message)


def said_by_convert(error: str, kind: str, retryable: bool) -> str:
    """As docs/schemas/output-1.json has it, which is what the cluster's version of this package prints."""
    head = {"schema_version": 1, "command": "convert"}
    return json.dumps({**head, "error": error, "kind": kind, "retryable": retryable})


def test_a_refusal_is_distinguished_from_a_crash() -> None:
    said = said_by_convert("tp=3 does not divide", "UnsupportedError", False)
    refused = failure(["plan: …", said, "paddle-reshard: …"])
    assert (refused.retryable, str(refused)) == (False, "tp=3 does not divide")
    passing = said_by_convert("the store is throttling requests", "TargetError", True)
    assert failure([passing]).retryable
    crashed = failure(["plan: …", "Killed"], "job x FAILED: Killed")
    assert (crashed.retryable, str(crashed)) == (True, "job x FAILED: Killed")
    assert failure([], "job x STOPPED:").retryable


def test_what_was_left_by_another_conversion_is_known_by_the_kind_of_the_error() -> None:
    stale = failure([said_by_convert("left by another plan", "StaleSessionError", True)])
    assert type(stale) is StaleSessionError
    assert str(stale) == "left by another plan"


@pytest.mark.parametrize(
    "line",
    [
        "[" * 5000,
        '{"error": "a", "error": "b", "kind": "StaleSessionError"}',
        '["error", "kind"]',
        '{"error": 5, "kind": ["StaleSessionError"]}',
        '{"error": "x", "kind": "StaleSessionError", "retryable": false}',
        '{"schema_version": 1, "command": "plan", "error": "x", "kind": "RuleError", "retryable": false}',
        '{"schema_version": 2, "command": "convert", "error": "x", "kind": "RuleError", "retryable": false}',
        '{"schema_version": 1, "command": "convert", "error": 5, "kind": "RuleError", "retryable": false}',
        '{"schema_version": 1, "command": "convert", "error": "x", "kind": "RuleError", "retryable": "no"}',
        '{"schema_version": 1, "command": "convert", "error": "x", "kind": "RuleError"}',
        'WARNING {"error": "x", "kind": "StaleSessionError"}',
        '{"error": null, "kind": null}',
    ],
)
def test_a_log_without_an_answer_is_a_retryable_failure(line: str) -> None:
    found = failure(["plan: …", line], "job x FAILED")
    assert (type(found), str(found), found.retryable) == (JobError, "job x FAILED", True)


@pytest.mark.parametrize("line", ['{"level": "info", "message": "driver exits"}', "{}", '{"error": "x"}'])
def test_json_of_a_library_does_not_hide_the_answer_of_the_conversion(line: str) -> None:
    refused = failure([said_by_convert("tp=3 does not divide", "UnsupportedError", False), line])
    assert (refused.retryable, str(refused)) == (False, "tp=3 does not divide")


def test_with_json_stdout_is_one_object_also_where_there_is_no_cluster() -> None:
    done = run("submit", "--address", "http://127.0.0.1:9", "/a", "/b", "--to", "tp=1", "--json")
    assert done.returncode == 1
    said = checked(done)
    assert said["command"] == "submit"
    assert (said["kind"], said["retryable"]) == ("JobError", True)
    assert f"paddle-reshard: {said['error']} [JobError]\n" == done.stderr


def test_secrets_of_a_variable_reach_a_job_as_that_variable_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_RESHARD_STORAGE_OPTIONS", '{"secret": "hunter2"}')
    monkeypatch.setenv("PADDLE_RESHARD_MEMORY", "4GiB")
    request = read("/a", "/b", "--to", "tp=1")
    assert " ".join(request.spell("/a", "/b")) == "/a /b --to tp=1 --memory 4GiB --cluster ray"
    assert request.identify("/a", "/b") == identity("/a", "/b", "--to", "tp=1")
    refused = invoke("submit", "--address", "http://127.0.0.1:9", "/a", "/b", "--to", "tp=1")
    assert (refused.exit_code, "give --env PADDLE_RESHARD_STORAGE_OPTIONS" in refused.stderr) == (2, True)


def test_variables_of_a_job_are_chosen_by_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {"OF_THE_STORE_KEY": "a", "OF_THE_STORE_SECRET": "b"}
    for name, value in {**chosen, "NOT_OF_IT": "c"}.items():
        monkeypatch.setenv(name, value)
    assert chosen_variables(["OF_THE_STORE_*"]) == chosen
    assert chosen_variables(["NOT_OF_IT", "OF_THE_STORE_KEY"]).keys() == {"NOT_OF_IT", "OF_THE_STORE_KEY"}
    with pytest.raises(UsageError, match=r"--env NONE_\*: no environment variable matches"):
        chosen_variables(["NONE_*"])


def test_a_job_has_a_name_and_says_what_becomes_of_what() -> None:
    found = metadata_of(
        ConversionJob(("s3://b/run/checkpoint-3", "/out", "--to", "tp=1"), "paddle-reshard-1")
    )
    assert found["job_name"] == "paddle-reshard checkpoint-3 to /out"
    assert (found["source"], found["target"]) == ("s3://b/run/checkpoint-3", "/out")
    assert all(isinstance(value, str) for value in found.values())  # Ray takes nothing else


class _Head(BaseHTTPRequestHandler):
    """The jobs interface of a head that knows no job."""

    def do_GET(self) -> None:
        is_version = self.path.startswith("/api/version")
        told = (
            json.dumps({"version": "4", "ray_version": "2", "ray_commit": "0"})
            if is_version
            else "Job x does not exist"
        )
        self.send_response(200 if is_version else 404)
        self.end_headers()
        self.wfile.write(told.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a test prints nothing."""


def test_a_job_that_the_cluster_does_not_know_is_told_at_once() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Head) as head:
        threading.Thread(target=head.serve_forever, daemon=True).start()
        client = jobs.connect(f"http://127.0.0.1:{head.server_port}")
        with pytest.raises(JobError, match="x: the cluster answers that it has no such job"):
            jobs.follow_job(jobs.SubmittedJob(client, "x", attached=True), lambda text: None)
        head.shutdown()


def test_an_address_without_a_scheme_and_one_that_nobody_answers() -> None:
    with pytest.raises(UsageError, match="give http://HOST:8265"):
        jobs.connect("127.0.0.1:8266")
    request = jobs.ConversionJob(("a", "b"), "x")
    with pytest.raises(JobError, match="the cluster cannot be reached"):
        jobs.submit_conversion(request, "http://127.0.0.1:9")
