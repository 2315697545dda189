"""What earlier attempts mean for the next one: pure decisions."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, replace

import pytest

from paddle_reshard.pipeline.core.errors import (
    CheckpointError,
    GroupFailedError,
    JobError,
    RefusedJobError,
    TargetError,
)
from paddle_reshard.pipeline.core.trainer_files import steps_of
from paddle_reshard.pipeline.core.version import __version__
from paddle_reshard.pipeline.indexing.finished import Incomplete, lacking, merging, settling
from paddle_reshard.pipeline.watch.decisions import (
    Action,
    Policy,
    begun,
    decide,
    ended,
    given_up,
    same_content,
)
from paddle_reshard.pipeline.watch.notices import Notice, Notices, Result, of_incomplete
from paddle_reshard.pipeline.watch.records import CheckpointRecord, Observation, State
from paddle_reshard.storage.remote.folder import FsspecFolder
from paddle_reshard.storage.session.holder import Holder, is_gone, process_start, this_process

HERE = Holder("gpu-1", "m1", "boot-1", "pid:[1]", 100, "5000")
NEW = Observation("source-a", "", None)
MADE = Observation("source-a", "target-a", "plan-a")
POLICY = Policy(retries=2, backoff_seconds=60)
SEEN = CheckpointRecord("checkpoint-3", "source-a", 900.0)


def notice_of(
    seen: Observation, record: CheckpointRecord, now: float = 1000.0, **policy: object
) -> tuple[Result, str]:
    """What is said about a checkpoint for which there is nothing to do."""
    decision = decide(seen, record, replace(POLICY, **policy), now)
    assert isinstance(decision, Notice)
    return decision.result, decision.message


def test_nothing_tried_yet_is_looked_at() -> None:
    assert decide(NEW, SEEN, POLICY, 1000.0) is Action.LOOK
    assert (
        decide(NEW, replace(SEEN, state=State.CONVERTING), POLICY, 1000.0) is Action.LOOK
    )  # its lock decides


def test_a_target_that_no_record_explains_is_compared() -> None:
    assert decide(MADE, SEEN, POLICY, 1000.0) is Action.COMPARE
    assert decide(MADE, replace(SEEN, plan_id="another"), POLICY, 1000.0) is Action.COMPARE


def test_converted_once_is_converted_until_its_source_changes() -> None:
    done = ended(begun(SEEN), None, MADE, 1000.0)
    assert (done.state, done.plan_id, done.made_of) == (State.DONE, "plan-a", "source-a")
    assert notice_of(MADE, done) == (Result.DONE, "converted")
    changed = replace(MADE, source_stamp="source-b")
    result, message = notice_of(changed, done)
    assert result is Result.DONE
    assert "give --overwrite" in message
    assert decide(changed, done, replace(POLICY, overwrite=True), 1000.0) is Action.LOOK


@pytest.mark.parametrize(
    "trouble",
    [
        OSError(28, "No space left"),
        GroupFailedError("w (param)", 7, 4, "No space left on its node"),
        FsspecFolder("memory://c", {}, TargetError).explain(OSError("No space left in the bucket"), "file"),
    ],
    ids=lambda trouble: type(trouble).__name__,
)
def test_failures_wait_longer_each_time_and_end(trouble: Exception) -> None:
    record = SEEN
    for number, pause in enumerate((60, 120), 1):
        record = ended(begun(record), trouble, NEW, 1000.0)
        assert (record.state, record.failures) == (State.FAILED, number)
        assert notice_of(NEW, record, 1000.0 + pause - 1)[0] is Result.WAITING
        assert decide(NEW, record, POLICY, 1000.0 + pause) is Action.LOOK
    record = ended(begun(record), JobError("lost"), NEW, 1000.0)
    assert notice_of(NEW, record, 1e9) == (Result.FAILED, "not converted: given up after 3 attempts: lost")
    assert decide(NEW, record, replace(POLICY, forget_before=1000.1), 1e9) is Action.LOOK
    long = replace(record, failures=50)
    assert notice_of(NEW, long, 4599.0, retries=99)[0] is Result.WAITING
    assert decide(NEW, long, replace(POLICY, retries=99), 4600.0) is Action.LOOK


def test_processes_that_died_count_as_failures() -> None:
    record = begun(begun(begun(SEEN)))
    assert record.failures == 2
    assert given_up(record) == "given up after 2 attempts: its process ended unexpectedly"


@pytest.mark.parametrize("error", [RefusedJobError("no"), CheckpointError("no")])
def test_a_refusal_stands_until_something_changes(error: Exception) -> None:
    refused = ended(begun(SEEN), error, NEW, 1000.0)
    assert (refused.state, refused.failures) == (State.REFUSED, 0)
    assert notice_of(NEW, refused) == (Result.FAILED, "not converted: no")
    assert decide(replace(NEW, target_stamp="b"), refused, POLICY, 1000.0) is Action.LOOK
    assert refused.version == __version__
    assert decide(NEW, replace(refused, version="0.0"), POLICY, 1000.0) is Action.LOOK


def test_what_keep_has_removed_is_not_made_again() -> None:
    for state in (State.REMOVING, State.REMOVED):
        assert notice_of(NEW, replace(SEEN, state=state)) == (Result.DONE, "converted, and removed by --keep")
    again = replace(SEEN, state=State.REMOVED, plan_id="plan-a", made_of="source-a")
    assert notice_of(MADE, again) == (Result.DONE, "converted")


def test_an_attempt_without_a_target_has_failed() -> None:
    record = ended(begun(SEEN), None, NEW, 1000.0)
    assert (record.state, record.reason) == (State.FAILED, "the conversion ended without a target")
    assert ended(begun(SEEN), MemoryError("x"), NEW, 1000.0).reason == "MemoryError: x"


def test_targets_are_compared_by_what_they_hold() -> None:
    source = {"files": {"a": 1}, "versions": {"a": "1:2"}}
    manifest = {"plan_id": "p", "version": "0.1", "files": {"x": 9}, "source": source}
    assert same_content(manifest, {**manifest, "plan_id": "q", "version": "0.2", "etags": {}})
    assert not same_content(manifest, {**manifest, "files": {"x": 8}})
    assert not same_content(manifest, {**manifest, "source": {**source, "files": {"a": 2}}})


def test_records_survive_json() -> None:
    record = ended(begun(SEEN), OSError("é"), NEW, 1000.0)
    data = json.dumps(asdict(record)).encode()
    assert CheckpointRecord.parse(data) == record
    odd_kinds = b'{"target": "checkpoint-3", "source_stamp": [], "since": {}}'
    garbage = (b"", b"\0\xff\xfe", b"[]", b"{}", b'{"holder": {}, "state": "running"}', b" " * (1 << 17))
    for broken in (data[:-1], data.replace(b"checkpoint-3", b"../x"), odd_kinds, *garbage):
        with pytest.raises(ValueError, match="not a record"):
            CheckpointRecord.parse(broken)


def test_a_process_is_gone_only_if_that_can_be_known() -> None:
    def running(pid: int) -> str | None:
        return {100: "5000", 101: "7000"}.get(pid)

    assert not is_gone(HERE, HERE, running)
    assert is_gone(replace(HERE, pid=99), HERE, running)
    assert is_gone(replace(HERE, pid=101), HERE, running)  # its pid is another's now
    assert is_gone(replace(HERE, boot="boot-0"), HERE, running)
    assert not is_gone(replace(HERE, host="gpu-2", boot="boot-0"), HERE, running)
    assert not is_gone(replace(HERE, machine="m2", boot="boot-0"), HERE, running)
    assert not is_gone(replace(HERE, pid_space="pid:[2]", pid=99), HERE, running)


def test_this_process_is_found_alive() -> None:
    me = this_process()
    assert not is_gone(me, me, process_start)
    child = os.fork()
    if child == 0:
        os._exit(0)
    try:
        for _ in range(1000):
            if process_start(child) is None:  # it has ended, though nobody has reaped it
                break
            os.sched_yield()
    finally:
        os.waitpid(child, 0)
    assert process_start(child) is None


def test_steps_ascend_as_numbers() -> None:
    names = [
        "checkpoint-100",
        "checkpoint-20",
        "checkpoint",
        "xcheckpoint-1",
        "checkpoint-3.tmp",
        ".checkpoint-4",
    ]
    assert steps_of(names) == [(20, "checkpoint-20"), (100, "checkpoint-100")]


def test_what_the_trainer_still_has_to_write() -> None:
    whole = {"saved_signal_0", "trainer_state.bin", "scheduler.pdparams"}
    assert lacking(whole, set()) is None
    assert lacking(whole - {"saved_signal_0"}, set()) == "no saved_signal file marks it as finished"
    assert lacking(whole - {"trainer_state.bin"}, set()) == "trainer_state is not there yet"
    assert lacking(whole, whole | {"ema.pdopt"}) == "ema.pdopt is not there yet"
    assert lacking(whole, whole | {"my_notes.txt"}) is None
    assert lacking(whole, whole | {"ema_state/0.metadata"}) == "ema_state/0.metadata is not there yet"
    assert lacking(whole, whole | {"optimizer.safetensors.index.json"}) is not None
    two_ranks = {
        *whole,
        "saved_signal_1",
        "model_state.tp00.pdparams",
        "model_state.tp01.pdparams",
        "model_meta.json",
    }
    one_rank = whole | {"model_state.pdparams"}
    assert lacking(one_rank, two_ranks) is None
    assert lacking(two_ranks, one_rank) is None
    assert lacking(one_rank, two_ranks | {"ema.tp00.pdopt"}) == "ema.tp00.pdopt is not there yet"
    assert lacking(two_ranks - {"saved_signal_1"}, two_ranks) == "saved_signal_1 is not there yet"
    for of_rank in ("rng_state_1.pth", "model_state/1_0.distcp", "model_state/1_0.safetensors"):
        assert lacking(whole | {of_rank}, set()) == "saved_signal_1 is not there yet"
        assert lacking(whole | {of_rank, "saved_signal_1"}, set()) is None


def test_an_ema_is_merged_while_a_temporary_signal_is_there_alone() -> None:
    assert merging({"saved_signal_0", "model_state.pdparams"}) is None
    assert str(merging({"save_signal_TMP_1", "save_signal_TMP_0"})).startswith(
        "save_signal_TMP_0: the trainer"
    )
    assert str(merging({"save_signal_TMP_10", "saved_signal_1"})).startswith(
        "save_signal_TMP_10: the trainer"
    )
    assert merging({"save_signal_TMP_1", "saved_signal_1"}) is None


def test_a_checkpoint_settles_and_goes_stale_to_the_second() -> None:
    assert settling("x", since=100, now=159.9, settle_seconds=60) == Incomplete(
        "x; converted if nothing changes for 60 s", 100
    )
    assert settling("x", since=100, now=160, settle_seconds=60) is None
    assert not Incomplete("x", 100).is_stale(1e9, None)
    assert not Incomplete("x", 100).is_stale(199.9, 100)
    assert Incomplete("x", 100).is_stale(200, 100)


def test_what_a_checkpoint_waits_for_is_reported_in_utc() -> None:
    incomplete = Incomplete("scheduler.pdparams is not there yet", 0.0)
    notice = of_incomplete(incomplete, 10.0, 11.0)
    assert notice.result is Result.WAITING
    assert (
        notice.message == "waiting: scheduler.pdparams is not there yet; unchanged since 1970-01-01T00:00:00Z"
    )
    assert of_incomplete(incomplete, 11.0, 11.0).result is Result.STALE


def test_only_news_is_logged_and_the_last_words_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    given = Notices()
    with caplog.at_level(logging.INFO):
        for age in (10, 20):
            notice = Notice(Result.WAITING, logging.INFO, f"busy for {age} s", "busy")
            assert given.give("checkpoint-3", notice) is Result.WAITING
        given.give("checkpoint-3", Notice(Result.FAILED, logging.ERROR, "failed"))
    said = [record.getMessage() for record in caplog.records]
    assert said == ["checkpoint-3: busy for 10 s", "checkpoint-3: failed"]
    assert given.messages == {"checkpoint-3": "checkpoint-3: failed"}
