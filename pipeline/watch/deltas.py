"""Deltas between converted checkpoints of a run (``watch --delta``).

::

    DST_ROOT/checkpoint-<new>                a converted checkpoint
    DST_ROOT/delta-<old>-<new>               what changed since the converted checkpoint before it

At most one delta leads to each converted checkpoint. It is made from the newest older one as soon as nothing between
them waits to be converted; a checkpoint in between that is converted later gets a delta of its own. Deltas are claimed
and recorded like conversions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from paddle_reshard.pipeline.core.errors import ReshardError
from paddle_reshard.pipeline.watch import notices
from paddle_reshard.pipeline.watch.attempts import Attempts
from paddle_reshard.pipeline.watch.claims import (
    DELTA,
    Action,
    Attempt,
    Basis,
    Decision,
    delta_name,
    end_of,
    step_of,
    steps_of,
)
from paddle_reshard.pipeline.watch.notices import Notice, Notices, Result

log = logging.getLogger(__name__)

MakeDelta = Callable[[str, str, str], None]
"""``(old, new, target)``: store the difference between two converted checkpoints. Raises a ``ReshardError``."""


class Pair(NamedTuple):
    """Two converted checkpoints that follow each other."""

    old: str
    new: str

    @property
    def name(self) -> str:
        """Name of the folder of their delta."""
        return delta_name(self.old, self.new)


def pairs_of(converted: Iterable[str], waiting: Iterable[str], deltas: Iterable[str]) -> list[Pair]:
    """The pairs of converted checkpoints whose delta exists or is to be made, ascending.

    Parameters
    ----------
    converted
        Names of converted checkpoints.
    waiting
        Names of checkpoints that are being converted, or will be tried again.
    deltas
        Names of existing deltas.

    Examples
    --------
    >>> pairs_of(["checkpoint-3", "checkpoint-9", "checkpoint-20"], ["checkpoint-12"], [])
    [Pair(old='checkpoint-3', new='checkpoint-9')]
    >>> pairs_of(["checkpoint-3", "checkpoint-6", "checkpoint-9"], [], ["delta-3-9"])
    [Pair(old='checkpoint-3', new='checkpoint-6')]
    """
    names = [name for _, name in steps_of(list(converted))]
    between = [step_of(name) for name in waiting]
    made = {int(match[2]): int(match[1]) for name in deltas if (match := DELTA.fullmatch(name))}
    return [
        Pair(old, new)
        for old, new in pairwise(names)
        if made.get(step_of(new), step_of(old)) == step_of(old)
        and not any(step_of(old) < step < step_of(new) for step in between)
    ]


@dataclass
class Deltas:
    """Makes the deltas between the targets of a watcher."""

    attempts: Attempts
    make: MakeDelta
    notices: Notices

    def update(self, order: Sequence[str], results: Mapping[str, Result]) -> dict[str, Result]:
        """Make the deltas that are missing. Delta → result.

        Parameters
        ----------
        order
            The checkpoints of the run.
        results
            Checkpoint → result of this pass, as far as there are results.
        """
        return {pair.name: self._handle(pair) for pair in self._pairs(order, results)}

    def needed(self, order: Sequence[str], results: Mapping[str, Result]) -> set[str]:
        """The converted checkpoints that must stay: a delta from them has yet to be made."""
        settled = (Action.NOTHING, Action.FAIL)
        bases = {
            pair.old for pair in self._pairs(order, results) if self._decide(pair)[0].action not in settled
        }
        waiting = [step_of(name) for name in order if self._waits(name)]
        converted = self._converted(results)
        for step in waiting:
            older = [name for name in converted if step_of(name) < step]
            bases |= set(older[-1:])
        return bases

    def _pairs(self, order: Sequence[str], results: Mapping[str, Result]) -> list[Pair]:
        records = self.attempts.records
        deltas = [
            name
            for name in records.out.folders()
            if DELTA.fullmatch(name) and records.plan_id(name) is not None
        ]
        return pairs_of(self._converted(results), [name for name in order if self._waits(name)], deltas)

    def _converted(self, results: Mapping[str, Result]) -> list[str]:
        """The converted checkpoints, ascending, without those that this watcher has refused."""
        records = self.attempts.records
        found = [
            name for _, name in steps_of(records.out.folders()) if results.get(name) is not Result.FAILED
        ]
        return [name for name in found if records.plan_id(name) is not None]

    def _waits(self, name: str) -> bool:
        """Whether a checkpoint is being converted, or will be tried again."""
        records = self.attempts.records
        decision, _ = self.attempts.decide(records.conversion_id(name), records.observe(name))
        return decision.action is Action.WAIT

    def _id(self, pair: Pair) -> str:
        return f"{self.attempts.records.conversion_id(pair.new)}-{pair.name}"

    def _decide(self, pair: Pair) -> tuple[Decision, Basis]:
        """What to do about a delta; its source are the plans of both checkpoints."""
        records = self.attempts.records
        plans = [records.plan_id(name) for name in pair]
        seen = replace(records.observe(pair.name), source_stamp=" ".join(map(str, plans)))
        return self.attempts.decide(self._id(pair), seen)

    def _handle(self, pair: Pair) -> Result:
        """Decide what to do about a delta, and do it."""
        decision, basis = self._decide(pair)
        notice = notices.of_decision(pair.name, decision, "compared")
        if notice is not None:
            return self.notices.give(pair.name, notice)
        attempt = self.attempts.following(self._id(pair), pair.name, basis)
        if not self.attempts.records.create(attempt):
            message = f"{pair.name}: waiting: another watcher has just claimed it"
            return self.notices.give(pair.name, Notice(Result.WAITING, logging.INFO, message))
        log.info("%s: comparing (attempt %d)", pair.name, attempt.number)
        started = self.attempts.clock()
        ended = self.attempts.run(attempt, lambda: self._make(pair, attempt))
        seconds = self.attempts.clock() - started
        return self.notices.give(pair.name, notices.of_attempt(pair.name, ended, seconds, "compared"))

    def _make(self, pair: Pair, attempt: Attempt) -> Attempt:
        """Make a claimed delta. Returns the attempt after its end."""
        records = self.attempts.records
        error: Exception | None = None
        try:
            self.make(*(records.out.at(name) for name in (*pair, pair.name)))
        except (ReshardError, OSError, MemoryError) as raised:
            error = raised
        plan_id = records.plan_id(pair.name) if error is None else None
        return end_of(attempt, error, plan_id, self.attempts.clock())
