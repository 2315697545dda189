"""What earlier attempts mean for the next one: pure decisions."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import pytest

from paddle_reshard.pipeline.core.errors import CheckpointError, JobError, RefusedJobError
from paddle_reshard.pipeline.watch.claims import (
    Action,
    Attempt,
    Basis,
    Cause,
    Decision,
    Observation,
    Policy,
    State,
    claim_path,
    compare_manifests,
    decide,
    end_of,
    next_attempt,
    recorded_as,
    steps_of,
    superfluous,
)
from paddle_reshard.pipeline.watch.finished import Incomplete, lacking, merging, settling
from paddle_reshard.pipeline.watch.notices import (
    Notice,
    Notices,
    Result,
    of_attempt,
    of_decision,
    of_incomplete,
)
from paddle_reshard.storage.session.holder import Holder, is_gone, process_start, this_process

HERE = Holder("gpu-1", "m1", "boot-1", "pid:[1]", 100, "5000")
NEW = Observation("source-a", "", None, "0.1.0")
MADE = replace(NEW, target_stamp="target-a", plan_id="plan-a")
POLICY = Policy(retries=2, backoff_seconds=60, claim_timeout_seconds=3600)


def attempt(state: State, number: int = 1, seen_at: float = 1000.0, **changes: object) -> Attempt:
    made = Attempt(
        conversion_id="paddle-reshard-0123456789abcdef",
        number=number,
        target="checkpoint-3",
        holder=HERE,
        nonce="n",
        state=state,
        started_at=900.0,
        seen_at=seen_at,
        source_stamp="source-a",
        target_stamp="",
        version="0.1.0",
        reason="the reason",
    )
    return replace(made, **changes)


def action(
    seen: Observation, attempts: list[Attempt], gone: bool = False, now: float = 1010.0, **policy: object
):
    return decide(seen, attempts, gone, replace(POLICY, **policy), now).action


def test_nothing_tried_yet_is_looked_at() -> None:
    assert action(NEW, []) is Action.LOOK


def test_a_live_claim_is_respected_a_dead_or_silent_one_is_not() -> None:
    running = attempt(State.RUNNING)
    assert action(NEW, [running]) is Action.WAIT
    assert action(NEW, [running], gone=True) is Action.LOOK
    assert action(NEW, [running], now=1000.0 + 3599) is Action.WAIT
    assert action(NEW, [running], now=1000.0 + 3600) is Action.LOOK
    told = decide(NEW, [running], False, POLICY, 1010.0).reason
    assert told == "claimed by process 100 on gpu-1, last heartbeat 10 s ago"


def test_a_claim_is_respected_even_while_its_target_has_just_appeared() -> None:
    assert action(MADE, [attempt(State.RUNNING)]) is Action.WAIT


def test_converted_once_is_converted() -> None:
    done = attempt(State.DONE, plan_id="plan-a")
    assert action(MADE, [done]) is Action.NOTHING
    assert action(NEW, [done]) is Action.LOOK  # somebody has deleted the target
    assert action(MADE, []) is Action.COMPARE
    assert action(MADE, [attempt(State.DONE, plan_id="plan-b")]) is Action.COMPARE


def test_a_source_that_changed_afterwards_is_converted_again_only_with_overwrite() -> None:
    done, changed = attempt(State.DONE, plan_id="plan-a"), replace(MADE, source_stamp="source-b")
    decision = decide(changed, [done], False, POLICY, 1010.0)
    assert decision.action is Action.NOTHING
    assert "changed since" in decision.reason
    assert action(changed, [done], overwrite=True) is Action.LOOK
    refused = attempt(State.REFUSED, 2, source_stamp="source-b", target_stamp="target-a")
    assert action(changed, [done, refused], overwrite=True) is Action.FAIL


def test_failures_wait_longer_each_time_and_end() -> None:
    one, two = attempt(State.FAILED), attempt(State.FAILED, 2, seen_at=2000.0)
    assert action(NEW, [one], now=1059) is Action.WAIT
    assert action(NEW, [one], now=1060) is Action.LOOK
    assert action(NEW, [one, two], now=2119) is Action.WAIT
    assert action(NEW, [one, two], now=2120) is Action.LOOK
    three = [one, two, attempt(State.FAILED, 3)]
    assert decide(NEW, three, False, POLICY, 9e9).reason == "given up after 3 attempts: the reason"
    assert action(NEW, three, now=9e9, forget_before=5000.0) is Action.LOOK
    assert action(replace(NEW, source_stamp="source-b"), three) is Action.LOOK


def test_processes_that_died_count_as_failures_but_nobody_waits_for_them() -> None:
    dead = [attempt(State.RUNNING, number) for number in (1, 2, 3)]
    assert action(NEW, dead[:2], gone=True) is Action.LOOK
    assert decide(NEW, dead, True, POLICY, 1010.0).action is Action.FAIL


@pytest.mark.parametrize("changed", ["source_stamp", "target_stamp", "version"])
def test_a_refusal_stands_until_something_changes(changed: str) -> None:
    refused = [attempt(State.REFUSED)]
    assert decide(NEW, refused, False, POLICY, 9e9) == decide(NEW, refused, False, POLICY, 1001.0)
    assert decide(NEW, refused, False, POLICY, 1001.0).reason == "the reason"
    assert action(replace(NEW, **{changed: "another"}), refused) is Action.LOOK


def test_a_claim_that_was_given_back_does_not_count() -> None:
    assert action(NEW, [attempt(State.RELEASED, n) for n in range(1, 20)]) is Action.LOOK


def test_what_keep_has_removed_is_not_made_again() -> None:
    assert action(NEW, [attempt(State.REMOVED, plan_id="plan-a")]) is Action.NOTHING
    assert action(MADE, [attempt(State.REMOVING, plan_id="plan-a")]) is Action.NOTHING
    assert action(MADE, [attempt(State.REMOVED, plan_id="plan-a")]) is Action.COMPARE


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (JobError("lost contact"), State.FAILED, "lost contact"),
        (RefusedJobError("tp=3 does not divide"), State.REFUSED, "tp=3 does not divide"),
        (CheckpointError("half"), State.REFUSED, "half"),
        (OSError(28, "No space left"), State.FAILED, "OSError: [Errno 28] No space left"),
        (None, State.FAILED, "the conversion ended without a target"),
    ],
)
def test_how_an_attempt_ends_with_an_error_or_without_a_target(
    error: Exception | None, state: State, reason: str
) -> None:
    ended = end_of(attempt(State.RUNNING, plan_id="old"), error, None, 2000.0)
    assert (ended.state, ended.reason, ended.plan_id, ended.seen_at) == (state, reason, "", 2000.0)


def test_an_attempt_ends_with_the_plan_of_its_target() -> None:
    ended = end_of(attempt(State.RUNNING), None, "plan-a", 2000.0)
    assert (ended.state, ended.reason, ended.plan_id) == (State.DONE, "", "plan-a")


def test_the_next_attempt_is_the_one_after_those_that_were_seen() -> None:
    first = next_attempt("id", "checkpoint-3", Basis(NEW, ()), HERE, "n", 5.0)
    assert (first.number, first.state, first.started_at, first.seen_at) == (1, State.RUNNING, 5.0, 5.0)
    basis = Basis(MADE, (attempt(State.FAILED), attempt(State.FAILED, number=4)))
    later = next_attempt("id", "checkpoint-3", basis, HERE, "n", 5.0)
    assert (later.number, later.plan_id, later.target_stamp) == (5, "plan-a", "target-a")


def test_a_target_is_an_attempts_own_if_that_was_killed_before_there_was_one() -> None:
    assert recorded_as([attempt(State.RUNNING)]) is State.DONE
    assert recorded_as([attempt(State.RUNNING, target_stamp="target-z")]) is State.ADOPTED
    assert recorded_as([attempt(State.RUNNING), attempt(State.FAILED, number=2)]) is State.ADOPTED
    assert recorded_as([]) is State.ADOPTED


def test_a_target_without_a_record_is_compared_by_what_it_holds() -> None:
    ours = {"format": "m", "files": {"a": 1}, "plan_id": "x", "source": {"files": {"s": 2}, "versions": {}}}
    elsewhere_planned = {**ours, "plan_id": "y", "version": "9", "source": {"files": {"s": 2}}}
    elsewhere_planned |= {"request": {"overwrite": True}, "limits": {}, "fingerprints": {"root": "r"}}
    other = {**ours, "source": {"files": {"s": 3}}}
    assert compare_manifests(ours, elsewhere_planned, "t", False).action is Action.NOTHING
    assert compare_manifests(ours, other, "t", True).action is Action.LOOK
    assert compare_manifests(ours, {}, "t", False).action is Action.FAIL


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


def test_records_survive_json() -> None:
    made = attempt(State.DONE, 3, plan_id="p")
    assert Attempt.parse(made.data()) == made
    assert claim_path(made) == ".paddle_reshard/claims/paddle-reshard-0123456789abcdef.3.json"
    for broken in (b"", b"[]", b"{}", b'{"holder": 3, "state": "done"}', made.data()[:-9]):
        with pytest.raises(ValueError, match=r"not a claim|Expecting|Invalid|delimiter|Unterminated"):
            Attempt.parse(broken)


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
    assert superfluous(["checkpoint-100", "checkpoint-20", "checkpoint-3"], 2) == ["checkpoint-3"]
    assert superfluous(["checkpoint-3"], None) == superfluous(["checkpoint-3"], 1) == []


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
    for of_rank in ("rng_state_1.pth", "model_state/1_0.distcp"):
        assert lacking(whole | {of_rank}, set()) == "saved_signal_1 is not there yet"
        assert lacking(whole | {of_rank, "saved_signal_1"}, set()) is None


def test_an_ema_is_merged_while_a_temporary_signal_is_there() -> None:
    assert merging({"saved_signal_0", "model_state.pdparams"}) is None
    assert merging({"save_signal_TMP_1", "save_signal_TMP_0"}) == "save_signal_TMP_0"


def test_a_checkpoint_settles_and_goes_stale_to_the_second() -> None:
    assert settling("x", since=100, now=159.9, settle_seconds=60) == Incomplete(
        "x; converted if nothing changes for 60 s", 100
    )
    assert settling("x", since=100, now=160, settle_seconds=60) is None
    assert not Incomplete("x", 100).is_stale(1e9, None)
    assert not Incomplete("x", 100).is_stale(199.9, 100)
    assert Incomplete("x", 100).is_stale(200, 100)


@pytest.mark.parametrize(
    ("decision", "result", "level"),
    [
        (Decision(Action.NOTHING, "converted"), Result.DONE, logging.DEBUG),
        (Decision(Action.NOTHING, "changed", Cause.SOURCE_CHANGED), Result.DONE, logging.WARNING),
        (Decision(Action.NOTHING, "its name has changed"), Result.DONE, logging.DEBUG),
        (Decision(Action.WAIT, "claimed", Cause.CLAIMED), Result.WAITING, logging.INFO),
        (Decision(Action.FAIL, "refused"), Result.FAILED, logging.ERROR),
    ],
)
def test_what_is_said_follows_from_values_and_not_from_words(
    decision: Decision, result: Result, level: int
) -> None:
    notice = of_decision("checkpoint-3", decision)
    assert notice is not None
    assert (notice.result, notice.level) == (result, level)
    assert decision.reason in notice.message


def test_nothing_is_printed_before_work_begins() -> None:
    assert of_decision("checkpoint-3", Decision(Action.LOOK)) is None
    assert of_decision("checkpoint-3", Decision(Action.COMPARE)) is None


def test_what_a_checkpoint_waits_for_is_reported_in_utc() -> None:
    incomplete = Incomplete("scheduler.pdparams is not there yet", 0.0)
    waiting = of_incomplete("checkpoint-3", incomplete, 10.0, 11.0)
    assert waiting.result is Result.WAITING
    assert waiting.message == (
        "checkpoint-3: waiting: scheduler.pdparams is not there yet; unchanged since 1970-01-01T00:00:00Z"
    )
    assert of_incomplete("checkpoint-3", incomplete, 11.0, 11.0).result is Result.STALE


@pytest.mark.parametrize(
    ("state", "result", "words"),
    [
        (State.DONE, Result.CONVERTED, "converted in 7 s"),
        (State.RELEASED, Result.WAITING, "waiting: the reason"),
        (State.FAILED, Result.FAILED, "failed: the reason"),
        (State.REFUSED, Result.FAILED, "refused: the reason"),
    ],
)
def test_the_end_of_an_attempt_is_described(state: State, result: Result, words: str) -> None:
    notice = of_attempt("checkpoint-3", attempt(state), 7.2)
    assert (notice.result, notice.message) == (result, f"checkpoint-3: {words}")


def test_only_news_is_logged_and_the_last_words_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    given = Notices()
    with caplog.at_level(logging.INFO):
        for age in (10, 20):
            notice = Notice(Result.WAITING, logging.INFO, f"claimed, silent for {age} s", "claimed")
            assert given.give("checkpoint-3", notice) is Result.WAITING
        given.give("checkpoint-3", Notice(Result.FAILED, logging.ERROR, "failed"))
    assert [record.getMessage() for record in caplog.records] == ["claimed, silent for 10 s", "failed"]
    assert given.messages == {"checkpoint-3": "failed"}
