"""Attempts of one process: decide from earlier ones, claim the next, run it, and record how it ended."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from paddle_reshard.pipeline.watch.claims import (
    Attempt,
    Basis,
    Decision,
    Observation,
    Policy,
    State,
    decide,
    next_attempt,
)
from paddle_reshard.pipeline.watch.records import Records
from paddle_reshard.storage.session.holder import Holder, is_gone, process_start, this_process


@dataclass(frozen=True)
class Attempts:
    """What this process does about conversions, each known by its id."""

    records: Records
    policy: Policy
    clock: Callable[[], float] = time.time
    me: Holder = field(default_factory=this_process)

    def decide(self, conversion_id: str, seen: Observation) -> tuple[Decision, Basis]:
        """What to do, given the earlier attempts."""
        attempts = self.records.attempts(conversion_id)
        gone = bool(attempts) and is_gone(attempts[-1].holder, self.me, process_start)
        return decide(seen, attempts, gone, self.policy, self.clock()), Basis(seen, tuple(attempts))

    def following(self, conversion_id: str, target: str, basis: Basis) -> Attempt:
        """The attempt after those that the decision was based on."""
        return next_attempt(conversion_id, target, basis, self.me, uuid.uuid4().hex, self.clock())

    def run(self, attempt: Attempt, work: Callable[[], Attempt]) -> Attempt:
        """Run a claimed attempt with heartbeats, and record its end, which ``work`` returns."""
        ended = None
        try:
            with self.records.renewed(attempt, self.policy.heartbeat_seconds, lambda: self.clock()):
                ended = work()
        except KeyboardInterrupt:
            ended = replace(attempt, state=State.RELEASED, reason="interrupted", seen_at=self.clock())
            raise
        finally:
            if ended is not None:
                self.records.write(ended)
        return ended
