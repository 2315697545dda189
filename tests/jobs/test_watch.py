"""``watch`` on a training run: converted when whole, once, whatever is killed in between. More: ``test_watch_once``."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.request.parse import parse_request
from paddle_reshard.pipeline.watch import watcher as watch
from paddle_reshard.pipeline.watch.decisions import Policy
from paddle_reshard.pipeline.watch.notices import Result
from paddle_reshard.pipeline.watch.records import conversion_id
from paddle_reshard.pipeline.watch.runners import Conversion, convert_inline
from paddle_reshard.pipeline.watch.watcher import Watcher
from tests.conftest import case_directory
from tests.jobs.command import GOLDEN, command_line, copy_checkpoint, invoke, run_here, snapshot
from tests.jobs.training import Run
from tests.published import checked
from tests.report.pages import Page
from tests.spoiled import of_another_step


def test_each_conversion_has_a_page(training: Run, tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    copy_checkpoint(training.run / "checkpoint-3")
    of_another_step(tmp_path).rename(training.run / "checkpoint-2")
    done = training.watch("--report-dir", pages, "--settle", 0)
    assert (done.returncode, training.converted()) == (1, ["checkpoint-3"]), done.stderr
    sound, refused = Page(pages / "checkpoint-3.html"), Page(pages / "checkpoint-2.html")
    source, target = training.run / "checkpoint-3", training.out / "checkpoint-3"
    assert f"paddle-reshard convert {source} {target} --to tp=1" in sound.text
    assert "not converted" in refused.text
    assert training.records()[0]["reason"] in refused.text
    assert "1 converted, 0 converted before, 0 waiting, 1 failed" in done.stderr
    for options, message in (
        (["--report", pages / "one.html"], "--report-dir"),
        (["--report-dir", pages / "checkpoint-3.html"], "cannot be written"),
    ):
        wrong = training.watch(*options)
        assert (wrong.returncode, message in wrong.stderr) == (2, True), wrong.stderr


def test_once_waits_then_converts_then_does_nothing(training: Run, one_card: dict[str, bytes]) -> None:
    folder = copy_checkpoint(training.run / "checkpoint-3", leave_out=("saved_signal_5",))
    before = snapshot(training.run)
    waiting = training.watch()
    assert waiting.returncode == 0
    assert "checkpoint-3: waiting: 7 saved_signal_* files for 8 ranks" in waiting.stderr
    assert [path.name for path in (training.out / ".paddle_reshard").iterdir()] == ["seen"]
    shutil.copy(GOLDEN / "saved_signal_5", folder)
    before["checkpoint-3/saved_signal_5"] = (GOLDEN / "saved_signal_5").read_bytes()
    done = training.watch()
    assert done.returncode == 0
    assert "1 converted, 0 converted before, 0 waiting, 0 failed" in done.stderr
    assert snapshot(training.out / "checkpoint-3") == one_card
    stamp = snapshot(training.out)
    again = training.watch()
    assert again.returncode == 0
    assert "0 converted, 1 converted before, 0 waiting, 0 failed" in again.stderr
    assert "converting" not in again.stderr
    assert snapshot(training.out) == stamp
    assert snapshot(training.run) == before


def test_what_has_not_changed_is_known_from_its_listing_for_a_while(training: Run) -> None:
    left_out = "optimizer.tp00_pp00_shard00", "saved_signal_0"
    folder = copy_checkpoint(training.run / "checkpoint-3", leave_out=left_out)
    conversion, now = Conversion(parse_request({"to": "tp=1"}), lambda source, target: "id"), [1e9]

    def look() -> str:
        watcher = Watcher(str(training.run), str(training.out), conversion, Policy(), clock=lambda: now[0])
        assert watcher.once() == {"checkpoint-3": Result.WAITING}
        return watcher.notices.messages["checkpoint-3"]

    told = look()
    damaged = folder / "model_meta.json"
    times = damaged.stat()
    damaged.write_bytes(b"?" * times.st_size)
    os.utime(damaged, ns=(times.st_atime_ns, times.st_mtime_ns))
    for seconds, unread in ((0, True), (599, True), (600, False)):
        now[0] = 1e9 + seconds
        assert (look() == told) is unread, seconds


def test_without_signals_it_must_stay_the_same_between_two_looks(training: Run) -> None:
    folder = copy_checkpoint(training.run / "checkpoint-3", leave_out=("saved_signal",))
    told = training.watch("--settle", 0.1)
    assert "waiting: no saved_signal file marks it as finished; converted if nothing changes" in told.stderr
    (folder / "scheduler.pdparams").touch()
    time.sleep(0.15)
    assert training.watch("--settle", 0.1).stderr.count("waiting:") == 1
    time.sleep(0.15)
    assert "1 converted" in training.watch("--settle", 0.1).stderr


def test_a_temporary_signal_that_an_interruption_left_behind_does_not_hold_a_checkpoint(
    training: Run,
) -> None:
    folder = copy_checkpoint(training.run / "checkpoint-3")
    shutil.copy(folder / "saved_signal_3", folder / "save_signal_TMP_3")
    assert "1 converted" in training.watch("--settle", 600).stderr
    other = copy_checkpoint(training.run / "checkpoint-6")
    (other / "saved_signal_3").rename(other / "save_signal_TMP_3")
    told = "save_signal_TMP_3: the trainer has not finished merging the EMA; converted if nothing changes"
    assert told in training.watch("--settle", 0.1).stderr
    time.sleep(0.15)
    assert "1 converted, 1 converted before" in training.watch("--settle", 0.1).stderr


# ------------------------------------------------------------------------------------------- other formats


@pytest.fixture
def flex_case() -> Path:
    return case_directory("small-flex/fc_pp2sh2_s1v2_tied")


def test_a_growing_flex_checkpoint_becomes_a_model_when_it_is_whole(training: Run, flex_case: Path) -> None:
    options = {"format": "huggingface", "config": flex_case / "config.json"}
    conversion = Conversion(parse_request(options), lambda source, target: conversion_id({"source": source}))
    watcher = Watcher(str(training.run), str(training.out), conversion, Policy())
    whole, folder = flex_case / "checkpoint-3", training.run / "checkpoint-3"
    order = (
        "model_state/",
        "optimizer_state/",
        "master_weight/",
        "saved_signal",
        "scheduler",
        "trainer_state",
    )
    names = sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())
    written = [name for prefix in order for name in reversed(names) if name.startswith(prefix)]
    assert sorted(written) == names
    for name in written:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        assert watcher.once() == {"checkpoint-3": Result.WAITING}, name
        shutil.copy(whole / name, folder / name)
    assert watcher.once() == {"checkpoint-3": Result.CONVERTED}
    assert watcher.once() == {"checkpoint-3": Result.DONE}
    made = training.out / "checkpoint-3"
    assert (made / "model.safetensors").exists()
    assert paddle_reshard.verify(folder, made, states=["param"]).equal


def test_a_flex_checkpoint_without_the_config_of_its_model_is_no_reason_to_wait(
    training: Run, flex_case: Path
) -> None:
    shutil.copytree(flex_case / "checkpoint-3", training.run / "checkpoint-3", copy_function=shutil.copyfile)
    done = run_here("watch", training.run, training.out, "--format", "unified", "--once")
    assert done.returncode == 1
    assert "config.json is missing, and the other files do not tell which keys" in done.stderr
    assert not (training.out / "checkpoint-3").exists()


# -------------------------------------------------------------------------------- killed, and more than one


def test_killed_within_it_is_continued_by_the_next(training: Run, one_card: dict[str, bytes]) -> None:
    copy_checkpoint(training.run / "checkpoint-3")
    with training.start_interrupted("within") as process:
        training.wait_for_begin()
        held = training.watch()
        assert held.returncode == 0
        told = (
            f"checkpoint-3: waiting: {training.out}/checkpoint-3: another conversion is writing it: process "
        )
        assert told + str(process.pid) in held.stderr
        assert training.records()[0]["failures"] == 0  # to wait for another is none
        seen: list[object] = []
        conversion = Conversion(parse_request({"to": "tp=1"}), lambda source, target: "id")
        also = Watcher(
            str(training.run),
            str(training.out),
            conversion,
            Policy(),
            convert_inline(conversion, seen.append),
        )
        assert also.once() == {"checkpoint-3": Result.WAITING}
        assert seen == []  # nothing was planned to find that out
        (training.out / ".paddle_reshard" / "seen" / "id.json").unlink(missing_ok=True)
        assert training.converted() == []
        process.kill()
    assert training.states() == ["converting"]
    assert "1 converted" in (done := training.watch()).stderr
    assert "checkpoint-3: converting, attempt 2" in done.stderr
    assert training.states() == ["done"]
    assert snapshot(training.out / "checkpoint-3") == one_card


def test_a_watcher_that_waits_goes_on_when_the_other_is_killed(
    training: Run, one_card: dict[str, bytes]
) -> None:
    """Two processes on one folder."""
    for step in (3, 6):
        copy_checkpoint(training.run / f"checkpoint-{step}")
    with training.start_interrupted("within") as process:
        training.wait_for_begin()
        command = command_line("watch", training.run, training.out, "--to", "tp=1", "--every", 0.2)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as other:
            assert other.stderr is not None
            said = [""]
            for step, end in ((6, process.kill), (3, other.terminate)):
                while f"checkpoint-{step}: converted in" not in said[-1]:
                    said.append(other.stderr.readline())
                    assert said[-1]
                end()
    assert sum("checkpoint-3: waiting" in line for line in said) == 1
    for step in (3, 6):
        assert snapshot(training.out / f"checkpoint-{step}") == one_card


def test_what_kills_every_process_is_given_up(training: Run) -> None:
    copy_checkpoint(training.run / "checkpoint-3")
    for _ in range(2):
        with training.start_interrupted("within") as process:
            training.wait_for_begin()
            process.kill()
        (training.root / "told").unlink()
    given_up = training.watch("--retries", 1)
    assert given_up.returncode == 1
    assert "given up after 2 attempts: its process ended unexpectedly" in given_up.stderr
    assert training.states() == ["refused"]
    assert "1 converted" in training.watch("--retry-failed").stderr


def test_killed_after_publishing_it_is_not_done_again(training: Run) -> None:
    copy_checkpoint(training.run / "checkpoint-3")
    with training.start_interrupted("after") as process:
        assert process.wait(60) == -signal.SIGKILL
    assert (training.converted(), training.states()) == (["checkpoint-3"], ["converting"])
    target = snapshot(training.out / "checkpoint-3")
    told = training.watch()
    assert "checkpoint-3: converted already; recorded" in told.stderr
    assert "0 converted, 1 converted before" in told.stderr
    assert training.states() == ["done"]
    assert snapshot(training.out / "checkpoint-3") == target


def test_a_termination_is_no_failure(training: Run) -> None:
    copy_checkpoint(training.run / "checkpoint-3")
    with training.start_interrupted("within") as process:
        training.wait_for_begin()
        process.terminate()
        assert process.wait(30) == 143
    (record,) = training.records()
    assert (record["state"], record["failures"]) == ("seen", 0)
    assert training.converted() == []
    assert "1 converted" in training.watch().stderr


def test_without_once_a_termination_is_a_normal_end(training: Run) -> None:
    copy_checkpoint(training.run / "checkpoint-3")
    command = command_line("watch", training.run, training.out, "--to", "tp=1", "--every", 0.1)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "checkpoint-3: converted in" not in (line := process.stderr.readline()):
            assert line
        time.sleep(0.3)
        process.terminate()
        assert process.wait(30) == 0
        assert process.stderr.read() == ("paddle-reshard: interrupted by SIGTERM; the next watcher goes on\n")


def test_watchers_at_once_convert_each_once(training: Run) -> None:
    for step in (3, 6, 9):
        copy_checkpoint(training.run / f"checkpoint-{step}")
    command = command_line("watch", training.run, training.out, "--to", "tp=1", "--once")
    watchers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    said = "".join(watcher.communicate(timeout=120)[1] for watcher in watchers)
    assert [watcher.returncode for watcher in watchers] == [0, 0, 0], said
    for step in (3, 6, 9):
        assert said.count(f"checkpoint-{step}: converted in") == 1
    assert training.states() == ["done"] * 3


# ------------------------------------------------------------------------------------------- keep, and not touch


def test_keep_removes_the_oldest_conversions_only(training: Run) -> None:
    for step in (3, 6, 20):
        copy_checkpoint(training.run / f"checkpoint-{step}")
    source = snapshot(training.run)
    by_hand = training.out / "checkpoint-1"
    paddle_reshard.convert(GOLDEN, by_hand, to="tp=1")
    notes = training.out / "checkpoint-2"
    notes.mkdir()
    (notes / "notes.txt").write_text("mine")
    first = training.watch("--keep", 2)
    assert "checkpoint-3: skipped, --keep 2 has newer checkpoints" in first.stderr
    assert training.converted() == ["checkpoint-1", "checkpoint-20", "checkpoint-6"]
    copy_checkpoint(training.run / "checkpoint-100")
    source |= {f"checkpoint-100/{name}": data for name, data in snapshot(GOLDEN).items()}
    second = training.watch("--keep", 2)
    assert second.stderr.index("checkpoint-100: converted") < second.stderr.index("checkpoint-6: removed")
    assert training.converted() == ["checkpoint-1", "checkpoint-100", "checkpoint-20"]
    assert (notes / "notes.txt").read_text() == "mine"
    assert snapshot(training.run) == source
    shutil.rmtree(training.run / "checkpoint-100")
    third = training.watch("--keep", 2)
    assert "converting" not in third.stderr  # what was removed is not made again
    assert training.converted() == ["checkpoint-1", "checkpoint-100", "checkpoint-20"]


def test_keep_does_not_touch_files_next_to_a_conversion(
    training: Run, caplog: pytest.LogCaptureFixture
) -> None:
    conversion = Conversion(
        parse_request({"to": "tp=1"}), lambda one, other: f"id-{other.rpartition('-')[2]}"
    )
    watcher = Watcher(str(training.run), str(training.out), conversion, Policy(keep=1, settle_seconds=0))
    copy_checkpoint(training.run / "checkpoint-3")
    assert watcher.once() == {"checkpoint-3": Result.CONVERTED}
    made = training.out / "checkpoint-3"
    (made / "finetuned").mkdir()
    (made / "finetuned" / "model.safetensors").write_bytes(b"months of work")
    before = snapshot(made)
    copy_checkpoint(training.run / "checkpoint-6")
    for _ in range(2):
        watcher.once()
        assert snapshot(made) == before
    assert "checkpoint-3: not removed: there is also finetuned/" in caplog.text
    assert training.states() == ["done", "done"]
    shutil.rmtree(made / "finetuned")
    watcher.once()
    assert not made.exists()
    assert training.states() == ["removed", "done"]


@pytest.mark.parametrize(
    ("run_link", "out"), [("run/checkpoint-3", "link"), (".", "run"), ("run", "link")], ids=str
)
def test_locations_are_compared_by_identity_not_by_name(run_link: str, out: str, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    if out == "link":
        (tmp_path / "link").symlink_to(tmp_path / run_link)
    with pytest.raises(UsageError, match=r"run directory itself|inside a checkpoint"):
        watch.check_locations(str(tmp_path / "run"), str(tmp_path / out))


def test_a_removal_that_was_cut_short_is_finished(training: Run) -> None:
    for step in (3, 6):
        copy_checkpoint(training.run / f"checkpoint-{step}")
    training.watch()
    records = (training.out / ".paddle_reshard" / "seen").iterdir()
    (path,) = (path for path in records if '"checkpoint-3"' in path.read_text())
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "state": "removing"}))
    os.rename(training.out / "checkpoint-3", training.out / ".checkpoint-3.removing")
    training.watch("--keep", 1)
    assert sorted(p.name for p in training.out.iterdir()) == [".paddle_reshard", "checkpoint-6"]
    assert training.states() == ["removed", "done"]


def test_a_foreign_folder_is_refused_and_left_until_it_is_gone(training: Run) -> None:
    copy_checkpoint(training.run / "checkpoint-3")
    foreign = training.out / "checkpoint-3"
    foreign.mkdir(parents=True)
    (foreign / "model.bin").write_text("somebody's")
    for _ in range(2):
        refused = training.watch()
        assert refused.returncode == 1
        assert "is not empty" in refused.stderr
    assert training.states() == ["refused"]  # tried once only
    assert snapshot(foreign) == {"model.bin": b"somebody's"}
    shutil.rmtree(foreign)
    assert training.watch().returncode == 0
    assert training.states() == ["done"]


def test_a_different_conversion_at_the_target_is_refused_and_kept(training: Run) -> None:
    copy_checkpoint(training.run / "checkpoint-3")
    assert training.watch().returncode == 0
    before = snapshot(training.out / "checkpoint-3")
    for _ in range(2):
        other = training.watch(to="pp=2")
        assert other.returncode == 1
        assert "holds the result of a different conversion" in other.stderr
    assert snapshot(training.out / "checkpoint-3") == before
    replaced = training.watch("--overwrite", to="pp=2")
    assert replaced.returncode == 0, replaced.stderr
    assert (
        json.loads((training.out / "checkpoint-3" / "paddle_reshard.json").read_bytes())["topology"] == "pp=2"
    )


# ------------------------------------------------------------------------------------------- refused and failed


def test_a_refused_conversion_is_not_tried_again_until_the_source_changes(training: Run) -> None:
    folder = copy_checkpoint(training.run / "checkpoint-3")
    first = training.watch(to="tp=3")
    assert first.returncode == 1
    assert "checkpoint-3: refused: " in first.stderr
    second = training.watch(to="tp=3")
    assert second.returncode == 1
    assert "converting" not in second.stderr
    assert "checkpoint-3: not converted: " in second.stderr
    assert training.states() == ["refused"]
    assert "does not divide" in training.records()[0]["reason"]
    os.utime(folder / "config.json")
    for options in ((), ("--retry-failed",)):
        assert "checkpoint-3: refused: " in training.watch(*options, to="tp=3").stderr
        assert "checkpoint-3: not converted: " in training.watch(to="tp=3").stderr
    assert training.converted() == []


@pytest.mark.parametrize("complete", [True, False])
def test_records_that_cannot_be_written_are_told_in_a_sentence(training: Run, complete: bool) -> None:
    """Nothing is wrong with the checkpoint, so it is not refused, and looked at again."""
    copy_checkpoint(training.run / "checkpoint-3")
    if not complete:
        (training.run / "checkpoint-3" / "saved_signal_5").unlink()
    training.out.mkdir()
    records = training.out / ".paddle_reshard"
    records.symlink_to(training.root / "nowhere")
    done = training.watch()
    assert done.returncode == 1
    assert (
        f"ERROR checkpoint-3: {training.out}: file exists ({records}); will be checked again" in done.stderr
    )
    assert "refused" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["run", "out"], 2, "--to"),
        (["run", "run", "--to", "tp=1"], 2, "cannot be written into the run directory itself"),
        (["run", "run/checkpoint-3/x", "--to", "tp=1"], 2, "is inside a checkpoint"),
        (["run", "out", "--to", "tp=1", "--env", "HOME"], 2, "--env applies only to jobs"),
        (["run", "out", "--to", "tp=1", "--submit", "http://x", "--env", "NOT_SET_X"], 2, "NOT_SET_X"),
        (["run", "out", "--to", "tq=1"], 2, "unknown axis 'tq'"),
        (["run", "out", "--to", "tp=1", "--nonsense"], 2, "--nonsense"),
        (["run", "out", "--to", "tp=1", "--keep", "0"], 2, "--keep"),
        (["run"], 2, "give a source and a target"),
        (["run", "--target", "out:flex"], 2, "without --target"),
        (["run", "out", "--to", "tp=1", "--plan", __file__], 2, "--plan is the plan of one conversion"),
        (
            ["run", "out", "--format", "flex", "--layout", '{"sequence_parallel": true}'],
            2,
            "--layout (sequence_parallel) without --to",
        ),
        (["run", "out", "--format", "flex", "--paddle-version", "9"], 2, "--paddle-version 9: "),
    ],
)
def test_wrong_use_is_told_before_anything_happens(
    tmp_path: Path, arguments: list[str], status: int, message: str
) -> None:
    (tmp_path / "run").mkdir()
    places = [str(tmp_path / text) if text.startswith(("run", "out")) else text for text in arguments]
    done = invoke("watch", "--once", *places)
    assert done.exit_code == status
    assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# ------------------------------------------------------------------------------ runs that are not what they should be


def test_a_run_that_is_not_there_is_an_error_unless_it_is_waited_for(training: Run) -> None:
    training.run.rmdir()
    missing = training.watch()
    assert missing.returncode == 2
    assert missing.stderr == (
        f"paddle-reshard: {training.run}: no such folder; use --wait if the run has not started yet "
        "[UsageError]\n"
    )
    assert not training.out.exists()
    waiting = training.watch("--wait")
    assert waiting.returncode == 0
    assert f"{training.run}: no checkpoint-<step> folder yet" in waiting.stderr


def test_a_checkpoint_whose_job_died_is_reported_and_ends_the_watch(training: Run) -> None:
    copy_checkpoint(training.run / "checkpoint-3")
    left_out = "optimizer.tp00_pp00_shard00.pdopt", "saved_signal_0"
    copy_checkpoint(training.run / "checkpoint-6", leave_out=left_out)
    first = training.watch("--stale", "2h")
    assert first.returncode == 0
    assert "checkpoint-3: converted in " in first.stderr
    assert "checkpoint-6: waiting: " in first.stderr
    records = (training.out / ".paddle_reshard" / "seen").iterdir()
    (seen,) = (path for path in records if '"checkpoint-6"' in path.read_text())
    known = json.loads(seen.read_bytes())
    three_hours_ago = time.time() - 3 * 3600
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(three_hours_ago))
    seen.write_text(json.dumps({**known, "since": three_hours_ago}))
    patient = training.watch()
    assert patient.returncode == 0
    assert f"; unchanged since {since}\n" in patient.stderr
    for options in (["--once", "--stale", "2h"], ["--stale", "7200", "--every", 0.1]):
        stale = run_here("watch", training.run, training.out, "--to", "tp=1", *options)
        assert stale.returncode == 1, stale.stderr
        assert (
            f"checkpoint-6: incomplete, and has not changed since {since}, longer than --stale"
            in stale.stderr
        )
        assert "1 stale" in stale.stderr
    for name in left_out:
        shutil.copy(GOLDEN / name, training.run / "checkpoint-6" / name)
    for signal_file in (training.run / "checkpoint-6").glob("saved_signal_*"):
        signal_file.touch()
    assert training.watch("--stale", "2h").returncode == 0
    assert training.converted() == ["checkpoint-3", "checkpoint-6"]


def make_older(folder: Path, by_seconds: float) -> None:
    """As if all files had been written earlier."""
    for path in folder.iterdir():
        times = path.stat()
        os.utime(path, (times.st_atime - by_seconds, times.st_mtime - by_seconds))


@pytest.mark.parametrize("before", ["seen", "not seen"])
def test_a_step_that_is_saved_again_waits_for_new_signals(before: str, training: Run) -> None:
    folder = copy_checkpoint(training.run / "checkpoint-3")
    make_older(folder, 3600)
    if before == "seen":
        assert training.watch().returncode == 0
    saved = sorted(folder.glob("optimizer.*"))
    for path in saved[:3]:
        path.touch()
    again = training.watch("--overwrite")
    assert re.search(
        r"checkpoint-3: waiting: saved_signal_\d is (59 min \d\d s|1 h 00 min) older than optimizer",
        again.stderr,
    )
    # Some ranks are done, others have not begun: nothing is out of order, and nothing proves that it is whole.
    for rank in range(4):
        (folder / f"saved_signal_{rank}").touch()
    again = training.watch("--overwrite")
    told = r"saved_signal_[4-7] is older than optimizer\S+, of another rank; converted if nothing changes for 60 s"
    assert re.search(told, again.stderr)
    for path in saved[3:]:
        path.touch()
    for rank in range(8):
        (folder / f"saved_signal_{rank}").touch()
    assert "checkpoint-3: converted in " in training.watch("--overwrite").stderr


def test_with_json_stdout_is_one_object_and_quiet_is_quiet(training: Run) -> None:
    copy_checkpoint(training.run / "checkpoint-3")
    copy_checkpoint(training.run / "checkpoint-6", leave_out=("optimizer.tp00_pp00_shard00",))
    done = training.watch("--json")
    assert done.returncode == 0
    said = checked(done)
    assert (said["command"], said["run"], said["targets"]) == ("watch", str(training.run), str(training.out))
    results = {name: found["result"] for name, found in said["checkpoints"].items()}
    assert results == {"checkpoint-3": "converted", "checkpoint-6": "waiting"}
    assert said["checkpoints"]["checkpoint-6"]["message"].startswith("checkpoint-6: waiting: ")
    quiet = training.watch("--quiet")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    training.run.joinpath("checkpoint-3", "config.json").write_text("{}")
    refused = run_here("watch", training.root / "nope", training.out, "--to", "tp=1", "--json", "--once")
    said = checked(refused)
    assert (refused.returncode, said["command"], said["kind"]) == (2, "watch", "UsageError")
    assert refused.stderr == f"paddle-reshard: {said['error']} [UsageError]\n"


@pytest.mark.parametrize("kind", ["other kinds", "folder", "full folder"])
def test_an_invalid_record_is_reported_or_rewritten(kind: str, training: Run) -> None:
    """What is no record: ``test_decisions.py``, and ``test_strict_json.py`` in `hostile`."""
    copy_checkpoint(training.run / "checkpoint-3", leave_out=("optimizer.tp00_pp00_shard00",))
    training.watch()
    (seen,) = (training.out / ".paddle_reshard" / "seen").iterdir()
    seen.unlink()
    if kind == "other kinds":
        seen.write_text('{"target": "checkpoint-3", "source_stamp": [], "since": {}}')
    else:
        seen.mkdir()
        if kind == "full folder":
            (seen / "file.json").write_text("{}")
    found = training.watch("--keep", 1)
    assert "Traceback" not in found.stderr
    assert "defect" not in found.stderr
    assert found.returncode == (0 if kind == "other kinds" else 1), found.stderr
    if kind == "other kinds":
        assert "checkpoint-3: waiting: " in found.stderr
        assert training.states() == ["seen"]
    else:
        assert f"{seen}: is a folder where a small file of this name is needed; remove it" in found.stderr


@pytest.mark.parametrize("state", ["seen", "failed", "failed, and it is to be forgotten"])
def test_a_record_of_tomorrow_counts_as_of_now(state: str, training: Run) -> None:
    copy_checkpoint(training.run / "checkpoint-3", leave_out=("saved_signal",))
    training.watch()
    tomorrow = time.time() + 86400
    failed = {"state": "failed", "failures": 1, "reason": "no space", "ended_at": tomorrow}
    training.change_record(since=tomorrow, looked_at=tomorrow, **({} if state == "seen" else failed))
    if state.endswith("forgotten"):
        assert training.watch("--retry-failed", "--settle", 0).returncode == 0
        assert training.converted() == ["checkpoint-3"]
        return
    told = training.watch("--backoff", 1).stderr
    assert "86" not in told.replace(str(training.root), "")
    (record,) = training.records()
    assert max(record["since"], record["looked_at"], record["ended_at"]) <= time.time()
    time.sleep(1.1)
    training.watch("--backoff", 1, "--settle", 1)
    assert training.converted() == ["checkpoint-3"]
