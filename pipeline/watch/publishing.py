"""Published versions behind a run (``watch --publish VERSIONS``).

::

    DST_ROOT/checkpoint-<step>     a converted checkpoint
    VERSIONS/weight_v<number>      its parameters, as what changed since the version before

Versions follow the steps of the run: a converted checkpoint is published when nothing older waits to be converted, and
one that is converted after a newer one was published is not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paddle_reshard.pipeline.core.errors import BusyError, ReshardError
from paddle_reshard.pipeline.versions.publish import sources
from paddle_reshard.pipeline.versions.reports import PublishReport
from paddle_reshard.pipeline.watch.attempts import Attempts
from paddle_reshard.pipeline.watch.claims import Action, step_of, steps_of
from paddle_reshard.pipeline.watch.notices import Notice, Notices, Result
from paddle_reshard.storage.listing import CheckpointRoot
from paddle_reshard.storage.locate import absolute

Publish = Callable[[str], PublishReport]
"""Publishes a converted checkpoint. Raises a ``ReshardError``."""


@dataclass
class Publisher:
    """Publishes the targets of a watcher."""

    attempts: Attempts
    versions: CheckpointRoot
    publish: Publish
    notices: Notices

    def update(self, order: Sequence[str], results: Mapping[str, Result]) -> dict[str, Result]:
        """Publish what is due, oldest first. Name → result; the first failure ends it.

        Parameters
        ----------
        order
            The checkpoints of the run, by step.
        results
            Checkpoint → result of this pass, as far as there are results.
        """
        published: dict[str, Result] = {}
        for name in self.due(order, results):
            published[f"{name} published"] = result = self._publish(name)
            if result is not Result.CONVERTED:
                break
        return published

    def due(self, order: Sequence[str], results: Mapping[str, Result]) -> list[str]:
        """The converted checkpoints to be published, ascending: newer than the last, and before any that waits."""
        records = self.attempts.records
        last = self._last_step()
        waiting = [step_of(name) for name in order if self._waits(name)]
        return [
            name
            for step, name in steps_of(records.out.folders())
            if last < step
            and not any(last < other < step for other in waiting)
            and results.get(name) is not Result.FAILED
            and records.plan_id(name) is not None
        ]

    def needed(self, order: Sequence[str], results: Mapping[str, Result]) -> set[str]:
        """The converted checkpoints that must stay, because they have yet to be published."""
        return set(self.due(order, results))

    def _last_step(self) -> int:
        """The step of the newest version that was made from a converted checkpoint of this run; -1 if none was."""
        folder = absolute(self.attempts.records.out.at("checkpoint-0")).rpartition("/")[0]
        places = (location.rpartition("/") for location in sources(self.versions))
        return next((step_of(name) for above, _, name in places if above == folder and steps_of([name])), -1)

    def _waits(self, name: str) -> bool:
        """Whether a checkpoint is being converted, or will be tried again."""
        records = self.attempts.records
        decision, _ = self.attempts.decide(records.conversion_id(name), records.observe(name))
        return decision.action is Action.WAIT

    def _publish(self, name: str) -> Result:
        try:
            report = self.publish(self.attempts.records.out.at(name))
        except BusyError as error:
            notice = Notice(Result.WAITING, logging.INFO, f"{name}: not published yet: {error}")
        except (ReshardError, OSError, MemoryError) as error:
            notice = Notice(Result.FAILED, logging.ERROR, f"{name}: not published: {error}")
        else:
            notice = Notice(
                Result.CONVERTED, logging.INFO, f"{name}: published: {dict(report.facts())['version']}"
            )
        return self.notices.give(f"{name} published", notice)
