"""``--resume`` alone: what a conversion was begun with is known where it stopped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from paddle_reshard.pipeline.cli.commands.conversion import convert as convert_command
from paddle_reshard.pipeline.cli.options import decides
from paddle_reshard.pipeline.core.errors import FinishedError, OccupiedError, StaleSessionError, UsageError
from paddle_reshard.pipeline.request.options import CONVERSION_OPTIONS, Decides
from paddle_reshard.pipeline.request.record import KEPT, LARGEST_KEPT_BYTES
from tests.golden.fp8 import store_as_fp8
from tests.golden.wide import write_wide
from tests.jobs.command import run_here as run
from tests.resume.conftest import GROUP_BYTES, SIZED, Stop, begin, stopping
from tests.sized import in_groups
from tests.storage.contents import in_bucket, in_folder
from tests.storage.servers import Store
from tests.unit.test_output import checked

SECRET = "hunter2-of-the-store"


def session(target: Path) -> Path:
    return target.parent / f".{target.name}.reshard" / "session.json"


def undisturbed(source: Path, folder: Path, **options: Any) -> Any:
    SIZED.convert(source, folder, **options)
    return in_folder(folder)


# ------------------------------------------------------------------------------------------------ goes on


def _request(tmp_path: Path, source: Path) -> dict[str, dict[str, Any]]:
    config, layout = tmp_path / "config.json", tmp_path / "layout.json"
    config.write_bytes((source / "config.json").read_bytes())
    layout.write_text('{"segmentation": [0, 2], "sequence_parallel": true}')
    return {
        "memory": {"to": "tp=1", "memory": "300MiB"},
        "strategy": {"to": "tp=1,sharding=2", "sharding_strategy": "stage1v1"},
        "layout": {"to": "pp=2", "layout": layout},
        "format": {"format": "huggingface", "dtype": "float32", "max_shard_size": "1MB"},
        "flex": {"format": "flex", "max_shard_size": "200KB", "paddle_version": "3.2"},
        "config": {"to": "tp=1", "config": config, "replicas": "first"},
    }


@pytest.mark.parametrize("case", ["memory", "strategy", "layout", "format", "flex", "config"])
def test_a_request_is_known_where_it_stopped(case: str, source: Path, tmp_path: Path) -> None:
    options = _request(tmp_path, source)[case]
    wanted = undisturbed(source, tmp_path / "wanted", **options)
    target = tmp_path / "t"
    begin(source, target, **options)
    for file in ("config.json", "layout.json"):
        (tmp_path / file).unlink()
    report = SIZED.convert(source, target, resume=True)
    assert in_folder(target) == wanted
    moved = report.moved
    assert moved.resumed_groups > 0
    total = report.plan.plan.written_bytes
    assert 0 < moved.resumed_bytes == total - moved.written_bytes
    reused = dict(report.facts())["reused"]
    assert reused.startswith(f"{moved.resumed_groups} of {report.plan.plan.groups} groups, ")


def test_the_names_of_a_job_are_known_where_it_stopped(source: Path, tmp_path: Path) -> None:
    """A layout with a ``model_meta.json`` in it is kept as a file, with the settings that were added."""
    to, target = "sharding=2", tmp_path / "t"
    SIZED.convert(source, tmp_path / "job", to=to)
    layout = tmp_path / "layout.json"
    meta = (tmp_path / "job/model_meta.json").read_text().replace('"linear_', '"of_job_')
    layout.write_text(meta[:-1] + ', "comm_buffer_size_MB": 1}')
    wanted = undisturbed(source, tmp_path / "wanted", to=to, layout=layout)
    assert b'"of_job_0.w_0"' in wanted["model_meta.json"]
    begin(source, target, to=to, layout=layout)
    with pytest.raises(
        StaleSessionError, match=r"layout\.json \(SHA-256 \w+…\), which is not given; give it, or"
    ):
        SIZED.convert(source, target, resume=True, to=to)
    with pytest.raises(
        StaleSessionError, match=r"^--layout model_meta\.json \(SHA.* with --layout layout\.json"
    ):
        SIZED.convert(source, target, resume=True, layout=tmp_path / "job/model_meta.json")
    layout.unlink()
    assert SIZED.convert(source, target, resume=True).moved.resumed_groups > 0
    assert in_folder(target) == wanted


@pytest.mark.full
@pytest.mark.parametrize("name", ["from fp8", "like"])
def test_what_is_dequantised_or_taken_from_a_donor_is_resumed(
    name: str, source: Path, tmp_path: Path
) -> None:
    small, options = in_groups(100_000), {"to": "tp=2"}
    if name == "like":
        options = {"format": "huggingface", "like": tmp_path / "donor", "max_shard_size": "200KB"}
        small.convert(source, options["like"], format="huggingface", max_shard_size="200KB")
        (options["like"] / "tokenizer.json").write_text('{"version": "1.0"}')
    else:
        source = store_as_fp8(write_wide(tmp_path / "fp8"))
    small.convert(source, tmp_path / "wanted", **options)
    with pytest.raises(Stop):
        small.convert(source, tmp_path / "t", **options, observe=stopping())
    if name == "like":
        with pytest.raises(StaleSessionError, match="started with --like, which must be given again"):
            small.convert(source, tmp_path / "t", resume=True)
    again = {"like": options["like"]} if name == "like" else {}
    assert small.convert(source, tmp_path / "t", resume=True, **again).moved.resumed_groups > 0
    assert in_folder(tmp_path / "t") == in_folder(tmp_path / "wanted")


def test_what_changes_no_byte_may_differ(source: Path, tmp_path: Path) -> None:
    begin(source, tmp_path / "t", to="tp=1", memory="512MiB", workers=1)
    report = SIZED.convert(source, tmp_path / "t", resume=True, to="tp=1", workers=2)
    assert report.moved.resumed_groups > 0
    assert report.plan.plan.budget_bytes == 512 << 20  # --memory was left out: as it was begun


def test_memory_may_differ_as_long_as_the_plan_is_the_same(source: Path, tmp_path: Path) -> None:
    begin(source, tmp_path / "t", to="tp=1", memory="512MiB")
    told = r"started with --memory 512MiB, this is --memory 256MiB; omit --memory"
    smaller = in_groups(GROUP_BYTES // 2)  # what a smaller budget does to a checkpoint that is large
    with pytest.raises(StaleSessionError, match=told):
        smaller.convert(source, tmp_path / "t", resume=True, memory="256MiB")
    report = SIZED.convert(source, tmp_path / "t", resume=True, memory="256MiB")
    assert report.moved.resumed_groups > 0


def test_several_targets_resume_by_their_paths(source: Path, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    begin(source, {a: {"to": "tp=1"}, b: {"to": "tp=1", "format": "hybrid-plain"}})
    with pytest.raises(StaleSessionError, match="started with 2 targets, not 1"):
        SIZED.convert(source, a, resume=True)
    with pytest.raises(StaleSessionError, match="give the targets in their original order"):
        SIZED.convert(source, {b: {}, a: {}}, resume=True)
    with pytest.raises(StaleSessionError, match="started with --format hybrid-plain, which is not given"):
        SIZED.convert(source, {a: {"to": "tp=1"}, b: {"to": "tp=1"}}, resume=True)
    report = SIZED.convert(source, {a: {}, b: {}}, resume=True)
    assert report.moved.resumed_groups > 0
    for place, form in ((a, "hybrid"), (b, "hybrid-plain")):
        made, wanted = in_folder(place), undisturbed(source, tmp_path / form, to="tp=1", format=form)
        del made["paddle_reshard.json"], wanted["paddle_reshard.json"]  # the plan is of both
        assert made == wanted


def test_on_s3(source: Path, store: Store, bucket: str) -> None:
    reach = {"storage_options": store.options}
    SIZED.convert(source, f"s3://{bucket}/wanted", format="flex", max_shard_size="200KB", **reach)
    secret = {**store.options, "config_kwargs": {"user_agent_extra": SECRET}}
    begin(source, f"s3://{bucket}/t", format="flex", max_shard_size="200KB", storage_options=secret)
    record = store.client.get_object(Bucket=bucket, Key="t/.paddle_reshard_session.json")["Body"].read()
    assert json.loads(record)["identity"]["request"]["targets"] == [
        {"format": "flex", "max_shard_size": "200KB"}
    ]
    assert SECRET not in record.decode()
    report = SIZED.convert(source, f"s3://{bucket}/t", resume=True, **reach)
    assert report.moved.resumed_groups > 0
    assert in_bucket(store, bucket, "t") == in_bucket(store, bucket, "wanted")
    with pytest.raises(FinishedError, match="nothing to do"):
        SIZED.convert(source, f"s3://{bucket}/t", resume=True, **reach)


# ---------------------------------------------------------------------------------------------- is refused


@pytest.mark.parametrize(
    ("begun", "asked", "told"),
    [
        ({"to": "tp=2"}, {"to": "tp=4"}, r"^--to tp=4.* started with --to tp=2.*; omit the option .*clean"),
        ({"to": "tp=2"}, {"format": "flex"}, r"^--format flex: .*was started without --format"),
        ({"to": "tp=2"}, {"vocab_size": 4096}, r"^--vocab-size 4096: .*was started without --vocab-size"),
        ({"to": "tp=2", "overwrite": True}, {"to": "tp=2"}, r"started with --overwrite, which is not given"),
        ({"to": "pp=2"}, {"layout": {"sequence_parallel": True}}, r"^--layout \(sequence_parallel: True\): "),
        ({"to": "tp=1", "allow_links": True}, {}, r"started with --allow-links, which must be given again"),
    ],
)
def test_a_contradiction_is_refused_naming_both(
    begun: dict, asked: dict, told: str, source: Path, tmp_path: Path
) -> None:
    begin(source, tmp_path / "t", **begun)
    with pytest.raises(StaleSessionError, match=told):
        SIZED.convert(source, tmp_path / "t", resume=True, **asked)
    SIZED.convert(source, tmp_path / "t", resume=True, **begun)


def test_another_file_is_refused_and_a_large_one_is_given_again(source: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    values = json.loads((source / "config.json").read_text())
    config.write_text(json.dumps(values) + " " * LARGEST_KEPT_BYTES)
    begin(source, tmp_path / "t", to="tp=1", config=config)
    with pytest.raises(UsageError, match="too large to be kept; give it again: --config FILE"):
        SIZED.convert(source, tmp_path / "t", resume=True)
    with pytest.raises(
        StaleSessionError, match=r"--config config\.json \(SHA-256 \w+…\): .*started with --config"
    ):
        SIZED.convert(source, tmp_path / "t", resume=True, config=source / "config.json")
    SIZED.convert(source, tmp_path / "t", resume=True, config=config)


@pytest.mark.parametrize("options", [{}, {"drop": ["ema"]}])
def test_the_checkpoint_of_a_trainer_is_nothing_to_resume(
    options: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "t"
    shutil.copytree(source, target)
    with pytest.raises(
        OccupiedError, match=r"holds a checkpoint of paddleformers.*are SRC and DST exchanged"
    ):
        SIZED.convert(source, target, resume=True, **options)
    assert not list(tmp_path.glob(".*"))


def test_a_session_without_a_request_needs_all_options(source: Path, tmp_path: Path) -> None:
    """So earlier versions have left them."""
    target = tmp_path / "t"
    begin(source, target, to="tp=1", memory="512MiB")
    record = json.loads(session(target).read_text())
    for name in ("request", "target"):
        del record["identity"][name]
    session(target).write_text(json.dumps(record))
    with pytest.raises(
        UsageError, match=r"options of the unfinished conversion here are not on record; give them again"
    ):
        SIZED.convert(source, target, resume=True)
    report = SIZED.convert(source, target, resume=True, to="tp=1", memory="512MiB")
    assert report.moved.resumed_groups > 0


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"targets": 1, "memory": "1GiB"},
        {"targets": [{"to": ["tp=1"]}], "memory": "1GiB"},
        {"targets": [{"to": "tp=1"}], "memory": 7},
        {"targets": [{"to": "tp=1"}], "memory": "1GiB", "storage_options": {"key": "x"}},
        {"targets": [{"to": "tp=1"}], "memory": "1GiB", "config": "/etc/passwd"},
        {"targets": [{"to": "tp=1"}], "aoa": {"name": "a", "sha256": 5}, "memory": "1GiB"},
        {"targets": [{"to": "tp=1"}], "memory": "1GiB", "drop": [["ema"]]},
    ],
)
def test_a_record_that_says_nonsense_is_refused(request_: Any, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "t"
    begin(source, target, to="tp=1")
    record = json.loads(session(target).read_text())
    record["identity"]["request"] = request_
    session(target).write_text(json.dumps(record))
    with pytest.raises(StaleSessionError, match="holds no valid options"):
        SIZED.convert(source, target, resume=True)


# ----------------------------------------------------------------------------------------- what is finished


def test_a_finished_target_is_looked_at(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "t"
    SIZED.convert(source, target, to="tp=1")
    for verify in (False, True):
        with pytest.raises(FinishedError, match=f"^{target}: already finished, and matches its manifest"):
            SIZED.convert(source, target, resume=True, verify=verify)
    for options in ({"drop": ["ema"]}, {"vocab_size": 512}, {"fill": source}):
        with pytest.raises(UsageError, match=r"nothing to resume here that --.* could belong to"):
            SIZED.convert(source, target, resume=True, **options)
    path = source / "trainer_state.bin"
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    try:
        with pytest.raises(
            Exception, match=r"already finished, but made from a different source: trainer_state\.bin"
        ):
            SIZED.convert(source, target, resume=True)
    finally:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    os.truncate(target / "optimizer.pdopt", 5)
    with pytest.raises(Exception, match=r"finished, but damaged: optimizer\.pdopt"):
        SIZED.convert(source, target, resume=True)


# ------------------------------------------------------------------------------------------ the command line


def test_the_command_line_resumes_with_its_original_options(source: Path, tmp_path: Path) -> None:
    """A process that is killed, and a second one with nothing but --resume."""
    target = tmp_path / "t"
    layout = '{"segmentation": [0, 2], "sequence_parallel": true}'
    options = ["--to", "pp=2", "--memory", "256MiB", "--layout", layout]
    kill = (
        "import os, signal, sys; from paddle_reshard.storage.session.ledger import Session; note = Session.note\n"
        "def noted(self, records): note(self, records); os.kill(os.getpid(), signal.SIGKILL)\n"
        "Session.note = noted; import paddle_reshard; from tests.sized import size_commands; "
        f"size_commands({GROUP_BYTES}); "
        "from paddle_reshard.pipeline.cli.main import main; main()"
    )
    arguments = [sys.executable, "-c", kill, "convert", str(source), str(target), *options]
    assert subprocess.run(arguments, capture_output=True, timeout=300).returncode == -9
    refused = run("convert", source, target, "--resume", "--to", "tp=2")
    assert refused.returncode == 1
    assert "--to tp=2: the unfinished conversion" in refused.stderr.replace("pp=1,", "")
    assert "started with --to pp=2" in refused.stderr.replace("tp=1,", "")
    again = [sys.executable, "-c", kill.replace("os.kill(os.getpid(), signal.SIGKILL)", "pass"), "convert"]
    done = subprocess.run(
        [*again, str(source), str(target), "--resume", "--json"], capture_output=True, text=True, timeout=300
    )
    found = checked(done)
    assert found["moved"]["resumed_groups"] == 1
    assert found["moved"]["resumed_bytes"] > 0
    given = {"to": "pp=2", "memory": "256MiB", "layout": {"segmentation": [0, 2], "sequence_parallel": True}}
    assert in_folder(target) == undisturbed(source, tmp_path / "wanted", **given)
    done = run("convert", source, target, "--resume")
    assert (done.returncode, done.stdout.startswith(f"{target}: already finished")) == (0, True)
    assert checked(run("convert", source, target, "--resume", "--json"))["finished"] is True
    missing = run("convert", source, tmp_path / "other", "--resume", "--json")
    assert (missing.returncode, checked(missing)["kind"]) == (2, "UsageError")


def test_everything_that_decides_the_outcome_is_kept_and_no_way_to_a_store() -> None:
    for option in convert_command.params:
        name = option.name
        if isinstance(option, click.Option) and name in CONVERSION_OPTIONS:
            role = decides(option)
            assert name in KEPT or role in (Decides.EXECUTION, Decides.ACCESS), name
            assert name not in KEPT or role is not Decides.ACCESS, name
