"""The nodes of a job agree on what they resume from, before a trainer starts on any of them.

Through small records beside the checkpoints, on a disk that they share or in a store::

    RUN/.paddle_reshard/resume/node-0.json    the proposal of the first node, and then its confirmation
    RUN/.paddle_reshard/resume/node-3.json    what node 3 has answered

Each has one writer, which replaces it as a whole; the others read it again and again. Nothing is locked, no clocks are
compared, and no launcher has to number its starts:

1. The first node writes a proposal: a fresh random *nonce*, a checkpoint, and the digest of the whole that all nodes
   together resume from.
2. Every other node finds the newest complete checkpoint itself. If that is the one proposed, it plans its portion, and
   compares the digest of the whole before it moves anything. When its files are there, it answers with the nonce of the
   proposal and a fresh one of its own. A node that sees another listing says so and looks again: it never starts from
   what it has not seen.
3. When all nodes have answered this proposal, the first adds their nonces to it, and starts the trainer. Another node
   starts only by such a confirmation that contains its own nonce.

What is left of earlier starts therefore starts nobody: nobody has its nonces any more. If the first node dies before
it confirms, all wait, and answer the proposal of its next start; if another dies, its next start answers again. If one
dies after the confirmation, the others start, and wait for it as trainers do: their launcher starts the job again. Of
two processes that take themselves for the same node the later goes on; the earlier finds its record replaced, and ends.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from paddle_reshard.pipeline.core.errors import AgreementError, ReshardError
from paddle_reshard.pipeline.core.file_names import AGREEMENT
from paddle_reshard.pipeline.core.ranks import ranks_in_words
from paddle_reshard.pipeline.training.resume_point import ResumePoint, Start, files_digest
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json
from paddle_reshard.storage.documents.typed_json import typed
from paddle_reshard.storage.listing import CheckpointRoot

POLL_SECONDS = 1.0
LOOK_AGAIN_SECONDS = 5.0
"""Pause before a checkpoint is indexed again that another node sees otherwise."""
WAIT_SECONDS = 1800.0
"""The slowest node may take this much longer for its files than the others."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Proposal:
    """The record of the first node."""

    nonce: str
    nodes: int
    checkpoint: str = ""
    """Name of a checkpoint; empty: the job begins."""
    files: str = ""
    """Digest of its listing."""
    whole: str = ""
    """Digest of the whole; empty: the first node is still looking."""
    confirmed: tuple[str, ...] = ()
    """Nonces of the other nodes in order, if they all have answered."""
    ended: str = ""
    """Why this start of the first node has ended."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The record of another node."""

    nonce: str
    nodes: int
    to: str = ""
    """Nonce of the proposal that it is about."""
    whole: str = ""
    """Digest of the whole of which this node makes its part, as soon as it is planned."""
    ready: bool = False
    """Whether its part is there."""
    sees: str = ""
    """The newest complete checkpoint that it sees, if that is another."""
    waits: str = ""
    """Why it cannot agree yet."""
    ended: str = ""
    """Why this start of the node has ended."""


@dataclass(frozen=True)
class Records:
    """The records beside the checkpoints of a run."""

    root: CheckpointRoot

    def read(self, node: int, kind: type[T]) -> T | None:
        """The record of a node; ``None`` if there is none, or none that can be read."""
        data = self.root.read(self._path(node))
        try:
            return None if data is None else typed(parse_json(data), kind)
        except JsonError:
            return None

    def write(self, node: int, record: Proposal | Reply) -> None:
        """Replace the record of a node."""
        self.root.replace(self._path(node), json.dumps(asdict(record)).encode())

    def _path(self, node: int) -> str:
        return f"{AGREEMENT}/node-{node}.json"


@dataclass(frozen=True)
class Agreement:
    """The nodes of one start of a job, as one of them sees it."""

    start: Start
    records: Records
    wait_seconds: float = WAIT_SECONDS
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))

    @classmethod
    def of(cls, start: Start, wait_seconds: float = WAIT_SECONDS) -> Agreement:
        """The agreement of the nodes of ``start``."""
        said: set[str] = set()
        tell = start.say

        def once(message: str) -> None:
            if message not in said:
                said.add(message)
                tell(message)

        start = replace(start, say=once)
        return cls(start, Records(start.root()), wait_seconds)

    def agree(self) -> ResumePoint:
        """What this node goes on from, as soon as all nodes have agreed on it.

        Raises
        ------
        AgreementError
            If a node has ended, has not answered in time, or makes something else.
        """
        return self._lead() if self.start.node.number == 0 else self._follow()

    @property
    def _others(self) -> range:
        return range(1, self.start.node.nodes)

    @contextmanager
    def _saying_why(self, kind: type[Proposal] | type[Reply]) -> Iterator[None]:
        """If this node ends, say why in its record, unless a later start has replaced that."""
        try:
            yield
        except BaseException as error:
            why = str(error) if isinstance(error, ReshardError | OSError) else type(error).__name__
            with suppress(ReshardError, OSError):
                record = self.records.read(self.start.node.number, kind)
                if record is not None and record.nonce == self.nonce:
                    self.records.write(self.start.node.number, replace(record, ended=why))
            raise

    def _check_alone(self, record: Proposal | Reply | None) -> None:
        """Refuse to go on where the record of this node is that of another process."""
        if record is None or record.nonce != self.nonce:
            raise AgreementError(
                f"another process has started as node {self.start.node.number} of this run since: two nodes have the "
                "same number, or this start was given up"
            )

    # ------------------------------------------------------------------------------------- the first node

    def _lead(self) -> ResumePoint:
        """Propose until all nodes see the same."""
        while True:
            agreement = replace(self, nonce=secrets.token_hex(16))
            with agreement._saying_why(Proposal):
                if (point := agreement._propose()) is not None:
                    return point

    def _propose(self) -> ResumePoint | None:
        """Propose the newest checkpoint, and confirm it; ``None`` if another node sees a newer one that is there."""
        proposal = Proposal(self.nonce, self.start.node.nodes)
        self.records.write(0, proposal)  # what is left of an earlier start is nobody's proposal any more
        found = self.start.find()
        if found is not None:
            proposal = replace(proposal, checkpoint=found.name, files=files_digest(found))
        point = self.start.make_ready(
            found, lambda whole: self.records.write(0, replace(proposal, whole=whole))
        )
        proposal = replace(proposal, whole=point.whole)
        end, look_at = self.clock() + self.wait_seconds, self.clock()
        while True:
            self._check_alone(self.records.read(0, Proposal))
            answers = self._answers(proposal)
            if self.clock() >= look_at and any(answer.sees for answer in answers.values()):
                found = self.start.find()
                if found is not None and found.name != proposal.checkpoint:
                    self.start.say(f"{found.name} has appeared: all nodes look again")
                    return None
                look_at = self.clock() + LOOK_AGAIN_SECONDS
            waiting = [node for node in self._others if node not in answers or not answers[node].ready]
            if not waiting:
                nonces = tuple(answers[node].nonce for node in self._others)
                self.records.write(0, replace(proposal, confirmed=nonces))
                return point
            self.start.say(f"waiting for {_named(waiting)}")
            if self.clock() >= end:
                each = "; ".join(f"node {node} {_state(answers.get(node))}" for node in waiting)
                raise AgreementError(
                    f"after {self.wait_seconds:g} s {each}: the trainer is started on no node; --wait gives them longer"
                )
            self.sleep(POLL_SECONDS)

    def _answers(self, proposal: Proposal) -> dict[int, Reply]:
        """The answers to a proposal; refused if one cannot become agreement."""
        read = {node: self.records.read(node, Reply) for node in self._others}
        answers = {node: one for node, one in read.items() if one is not None and one.to == proposal.nonce}
        for node, answer in answers.items():
            if answer.ended:
                raise AgreementError(f"node {node} has ended: {answer.ended}")
            if answer.nodes != proposal.nodes:
                raise AgreementError(
                    f"node {node} was started for {answer.nodes} nodes, this one for {proposal.nodes}"
                )
            if answer.whole and answer.whole != proposal.whole:
                raise AgreementError(
                    f"node {node} makes {answer.whole} of {proposal.checkpoint or 'a beginning'}, this one "
                    f"{proposal.whole}: their options, or the versions of paddle-reshard, differ"
                )
        return answers

    # ------------------------------------------------------------------------------------- the other nodes

    def _follow(self) -> ResumePoint:
        """Reply to the first node until it confirms."""
        with self._saying_why(Reply):
            return self._answer_until_confirmed()

    def _answer_until_confirmed(self) -> ResumePoint:
        before = self.records.read(0, Proposal)
        self._answer("")  # what is left of an earlier start is no answer any more
        considered, point, differs = "", None, False
        end = self.clock() + self.wait_seconds
        while True:
            proposal = self.records.read(0, Proposal)
            if proposal is not None and proposal.ended and proposal != before:  # while this node watched
                raise AgreementError(f"node 0 has ended: {proposal.ended}")
            if proposal is not None and self._is_open(proposal):
                if proposal.nonce != considered:
                    considered, point, differs = proposal.nonce, None, False
                    end = self.clock() + self.wait_seconds
                    self._answer(considered)  # so that why this node ends, if it does, is told as an answer
                if point is not None and self.nonce in proposal.confirmed:
                    return point
                if point is None and not differs:
                    try:
                        point = self._take(proposal)
                    except _DiffersError:
                        differs = True
                    if point is not None:
                        end = self.clock() + self.wait_seconds
            own = self.records.read(self.start.node.number, Reply)
            self._check_alone(own)
            self.start.say("waiting for node 0" if point is None else "waiting for the other nodes")
            if self.clock() >= end:
                mine = f"; this node {own.waits}" if own is not None and own.waits else ""
                raise AgreementError(f"after {self.wait_seconds:g} s {self._of_first(proposal)}{mine}")
            self.sleep(POLL_SECONDS)

    def _is_open(self, proposal: Proposal) -> bool:
        """Whether this node can answer a proposal, or has; one that was confirmed to others is of an earlier start."""
        return bool(proposal.whole) and (not proposal.confirmed or self.nonce in proposal.confirmed)

    def _take(self, proposal: Proposal) -> ResumePoint | None:
        """Make what is proposed, and answer; ``None`` if this node does not see it (yet)."""
        found = self.start.find()
        name, files = ("", "") if found is None else (found.name, files_digest(found))
        if (name, files) != (proposal.checkpoint, proposal.files):
            first = proposal.checkpoint or "no checkpoint"
            mine = (
                f"other files in {name}" if name == proposal.checkpoint else name or "no complete checkpoint"
            )
            waits = f"sees {mine}, node 0 {first}"
            self.start.say(f"{waits}; looking again until both see the same")
            self._answer(proposal.nonce, sees=name if name != proposal.checkpoint else "", waits=waits)
            self.sleep(LOOK_AGAIN_SECONDS)
            return None

        def agree(whole: str) -> None:
            self._answer(proposal.nonce, whole=whole)
            if whole != proposal.whole:
                raise _DiffersError

        point = self.start.make_ready(found, agree)
        self._answer(proposal.nonce, whole=point.whole, ready=True)
        return point

    def _answer(self, to: str, **more: Any) -> None:
        node = self.start.node
        self.records.write(node.number, Reply(self.nonce, node.nodes, to, **more))

    def _of_first(self, proposal: Proposal | None) -> str:
        """What the first node has done, in words."""
        where = self.records.root.at(AGREEMENT)
        if proposal is None:
            return (
                f"node 0 has written nothing to {where}: do all nodes have the same RUN, and does node 0 run?"
            )
        if proposal.ended:
            return f"node 0 has not started again; it had ended: {proposal.ended}"
        if proposal.confirmed:
            return f"node 0 has not started again: what it wrote to {where} is of an earlier start"
        if proposal.whole:
            return "node 0 has not confirmed: it waits for other nodes, or has died"
        return "node 0 has proposed nothing yet: it is still looking, or has died"


class _DiffersError(Exception):
    """This node would make another whole than the first."""


def _named(nodes: Sequence[int]) -> str:
    """Nodes in words.

    >>> _named([1]), _named([1, 2, 3, 7])
    ('node 1', 'nodes 1-3,7')
    """
    return f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {ranks_in_words(nodes)}"


def _state(answer: Reply | None) -> str:
    if answer is None:
        return "did not answer"
    return answer.waits or "has not finished its files"
