"""``resume`` on several nodes: they start from one checkpoint, or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import AgreementError, UsageError
from paddle_reshard.pipeline.core.file_names import AGREEMENT
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.training import agreement
from paddle_reshard.pipeline.training.agreement import Agreement, Proposal, Records, Reply
from paddle_reshard.pipeline.training.launcher import Node
from paddle_reshard.pipeline.training.resume_point import BEGINNING, ResumePoint, Start
from tests.conftest import case_directory
from tests.jobs.command import command_line
from tests.storage.contents import SMALL, fill_bucket, in_folder
from tests.storage.servers import Store

SOURCE = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
SAVED_WITH = "tp=2,pp=2,sharding=2"
PRINT = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"]


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(agreement, "LOOK_AGAIN_SECONDS", 0.02)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return saved(tmp_path / "run", 3)


def saved(run: Path, step: int) -> Path:
    shutil.copytree(
        SOURCE, run / f"checkpoint-{step}"
    )  # with its times, by which nodes see that it is the same
    return run


def agreement_of(
    run: Path, node: int, to: str = SAVED_WITH, wait: float = 300, say: Callable[[str], Any] = lambda _: None
) -> Agreement:
    """One that moves nothing, unless another topology is asked for."""
    local = run.parent / f"local-{node}"
    start = Start(
        *(str(run), str(local), Node(node, 2), Topology.parse(to), None, {}),
        check=lambda *_: None,
        say=say,
    )
    return Agreement.of(start, wait)


class Elsewhere(threading.Thread):
    """A node that agrees at the same time."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__()
        self.agreement, self.point, self.error = agreement, None, None  # type: ignore[assignment]
        self.point: ResumePoint | None
        self.error: BaseException | None
        self.start()

    def run(self) -> None:
        try:
            self.point = self.agreement.agree()
        except BaseException as error:  # noqa: BLE001
            self.error = error

    def result(self) -> ResumePoint:
        self.join()
        if self.error is not None:
            raise self.error
        assert self.point is not None
        return self.point


def record(run: Path, node: int, kind: type[Any]) -> Any:
    return Records(agreement_of(run, 0).start.root()).read(node, kind)


def until(run: Path, node: int, kind: type[Any], holds: Callable[[Any], bool]) -> Any:
    """The record of a node, as soon as something is true of it."""
    end = time.monotonic() + 300
    while (found := record(run, node, kind)) is None or not holds(found):
        assert time.monotonic() < end, found
        time.sleep(0.02)
    return found


class Process:
    """A node as a process of its own, of the command line."""

    def __init__(self, run: Path | str, local: Path, node: int, to: str, **variables: str) -> None:
        words = ["resume", run, "--to", to, "--local", local, "--nodes", 2, "--node", node, "--wait", "5m"]
        command = command_line(*words, "--quiet", "--", *PRINT)
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )

    def words(self) -> list[str]:
        """The arguments that the trainer was started with."""
        output, errors = self.process.communicate(timeout=300)
        assert self.process.returncode == 0, errors
        found = json.loads(output)
        assert isinstance(found, list)
        return found


def test_each_node_makes_the_files_of_its_ranks_of_one_thing(run: Path, tmp_path: Path) -> None:
    to = "tp=2,sharding=2"
    second = Process(run, tmp_path / "b", 1, to)
    first = Process(run, tmp_path / "a", 0, to)
    places = (tmp_path / "a/ranks-0-1/checkpoint-3", tmp_path / "b/ranks-2-3/checkpoint-3")
    for process, place in zip((first, second), places, strict=True):
        assert process.words() == paddle_reshard.launch(place).command_line().split()
    paddle_reshard.convert(run / "checkpoint-3", tmp_path / "whole", to=to)
    whole, made = in_folder(tmp_path / "whole"), [in_folder(place) for place in places]
    for files in (whole, *made):
        del files["paddle_reshard.json"]
    assert {**made[0], **made[1]} == whole
    for number, (own, other) in enumerate((made, made[::-1])):
        assert own.keys() - other.keys() == {name for name in whole if f"shard0{number}" in name}


@pytest.mark.full  # the records are those of a disk, which the other tests keep
def test_nodes_find_checkpoints_and_each_other_in_a_store(store: Store, bucket: str, tmp_path: Path) -> None:
    fill_bucket(store, bucket, "run/checkpoint-3/", SMALL)
    variables = {
        "AWS_ACCESS_KEY_ID": store.key,
        "AWS_SECRET_ACCESS_KEY": store.secret,
        "AWS_ENDPOINT_URL": store.url,
    }
    nodes = [Process(f"s3://{bucket}/run", tmp_path / str(n), n, SAVED_WITH, **variables) for n in (0, 1)]
    for number, node in enumerate(nodes):
        place = tmp_path / str(number) / f"ranks-{4 * number}-{4 * number + 3}" / "checkpoint-3"
        assert node.words()[:2] == ["--resume_from_checkpoint", str(place)]


def test_what_is_left_of_an_earlier_start_starts_nobody(run: Path) -> None:
    other = Elsewhere(agreement_of(run, 1))
    assert agreement_of(run, 0).agree() == other.result()
    for node in (0, 1):  # the other one does not start again
        with pytest.raises(AgreementError, match=r"node 1 did not answer|node 0 has not started again"):
            agreement_of(run, node, wait=0.5).agree()


def test_a_first_node_that_dies_before_it_confirms_starts_again(run: Path, tmp_path: Path) -> None:
    first = Process(run, tmp_path / "a", 0, SAVED_WITH)
    proposed = until(run, 0, Proposal, lambda proposal: bool(proposal.whole))
    first.process.kill()
    first.process.communicate()
    second = Elsewhere(agreement_of(run, 1))
    answer = until(run, 1, Reply, lambda answer: answer.ready)
    assert answer.to == proposed.nonce and second.is_alive()
    again = agreement_of(run, 0).agree()
    assert again.checkpoint == "checkpoint-3" and second.result() == again
    confirmed = record(run, 0, Proposal)
    assert confirmed.nonce != proposed.nonce and confirmed.confirmed == (answer.nonce,)


def test_another_node_that_dies_answers_again(run: Path) -> None:
    records = agreement_of(run, 0).records
    first = Elsewhere(agreement_of(run, 0))
    proposed = until(run, 0, Proposal, lambda proposal: bool(proposal.whole))
    records.write(1, Reply("of a start that died", 2, proposed.nonce, proposed.whole))  # not ready yet
    assert agreement_of(run, 1).agree() == first.result()


def following(run: Path) -> Path:
    """A run as another node sees it: the same records, and the same checkpoint as far as it is listed there."""
    seen = run.parent / "seen" / "run"
    seen.mkdir(parents=True)
    (run / AGREEMENT).mkdir(parents=True)
    (seen / ".paddle_reshard").symlink_to(run / ".paddle_reshard")
    return saved(seen, 3)


def test_a_node_that_does_not_see_the_newest_yet_waits_for_it(run: Path) -> None:
    late, told = following(run), list[str]()
    saved(run, 6)
    other, first = Elsewhere(agreement_of(late, 1, say=told.append)), Elsewhere(agreement_of(run, 0))
    answer = until(run, 1, Reply, lambda answer: bool(answer.waits))
    assert (answer.sees, answer.waits) == ("checkpoint-3", "sees checkpoint-3, node 0 checkpoint-6")
    assert not answer.ready and first.is_alive() and other.is_alive()
    assert told.count(f"{answer.waits}; looking again until both see the same") == 1
    shutil.copytree(run / "checkpoint-6", late.parent / "coming")
    (late.parent / "coming").rename(late / "checkpoint-6")
    assert other.result().checkpoint == first.result().checkpoint == "checkpoint-6"


def test_a_first_node_that_does_not_see_the_newest_looks_again(run: Path) -> None:
    late = following(run)
    saved(run, 6)
    other, first = Elsewhere(agreement_of(run, 1)), Elsewhere(agreement_of(late, 0))
    until(run, 1, Reply, lambda answer: answer.sees == "checkpoint-6")
    shutil.copytree(run / "checkpoint-6", late.parent / "coming")
    (late.parent / "coming").rename(late / "checkpoint-6")
    assert other.result().checkpoint == first.result().checkpoint == "checkpoint-6"


def test_nodes_that_see_different_things_start_nothing(run: Path) -> None:
    late = following(run)
    saved(run, 6)
    other = Elsewhere(agreement_of(late, 1))
    with pytest.raises(
        AgreementError, match="node 1 sees checkpoint-3, node 0 checkpoint-6: the trainer is started"
    ):
        agreement_of(run, 0, wait=3).agree()
    with pytest.raises(AgreementError, match="node 0 has ended: after 3 s"):
        other.result()


def test_a_job_begins_only_if_no_node_sees_a_checkpoint(run: Path) -> None:
    empty = run.parent / "empty"
    other = Elsewhere(agreement_of(empty, 1))
    begun = agreement_of(empty, 0).agree()
    assert begun == other.result() == ResumePoint(None) and begun.whole == BEGINNING
    late = following(run)
    shutil.rmtree(late / "checkpoint-3")
    other = Elsewhere(agreement_of(run, 1))
    with pytest.raises(AgreementError, match="node 1 sees checkpoint-3, node 0 no checkpoint"):
        agreement_of(late, 0, wait=3).agree()
    with pytest.raises(AgreementError, match="node 0 has ended"):
        other.result()


def test_nodes_that_would_make_different_things_are_told(run: Path) -> None:
    other = Elsewhere(agreement_of(run, 1, to="pp=4"))
    with pytest.raises(AgreementError, match=r"node 1 makes sha256:.*, this one sha256:.* differ"):
        agreement_of(run, 0, to="sharding=4").agree()
    with pytest.raises(AgreementError, match="node 0 has ended: node 1 makes"):
        other.result()
    assert not list(run.parent.glob("local-1/*/checkpoint-3"))


def test_why_a_node_ends_is_told_to_the_others(run: Path) -> None:
    def refuse(*_: object) -> None:
        raise UsageError("COMMAND contradicts")

    mistaken = agreement_of(run, 1)
    other = Elsewhere(replace(mistaken, start=replace(mistaken.start, check=refuse)))
    with pytest.raises(AgreementError, match="node 1 has ended: COMMAND contradicts"):
        agreement_of(run, 0).agree()
    with pytest.raises(UsageError):
        other.result()


def test_of_two_that_take_themselves_for_one_node_the_later_goes_on(run: Path) -> None:
    first = Elsewhere(agreement_of(run, 0))
    until(run, 0, Proposal, lambda proposal: bool(proposal.whole))
    later = Elsewhere(agreement_of(run, 0))
    with pytest.raises(AgreementError, match="another process has started as node 0"):
        first.result()
    assert agreement_of(run, 1).agree() == later.result()


@pytest.mark.parametrize(
    "damage", [b"", b"{", b'{"nonce": 3}', json.dumps([asdict(Proposal("a", 2))]).encode()]
)
def test_a_record_that_cannot_be_read_is_none(run: Path, damage: bytes) -> None:
    for node in (0, 1):
        agreement_of(run, 0).records.root.replace(f"{AGREEMENT}/node-{node}.json", damage)
    other = Elsewhere(agreement_of(run, 1))
    assert agreement_of(run, 0).agree() == other.result()
