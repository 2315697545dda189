"""Published versions behind a run (``watch --publish VERSIONS``).

::

    DST_ROOT/checkpoint-<step>     a converted checkpoint
    VERSIONS/weight_v<number>      its parameters, as what changed since the version before

Versions follow the steps of the run: a converted checkpoint is published when nothing older waits to be converted, and
one that is converted after a newer one was published is not.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from paddle_reshard.pipeline.core.errors import BusyError, ReshardError
from paddle_reshard.pipeline.core.trainer_files import steps_of
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY
from paddle_reshard.pipeline.request.options import ConversionOptions
from paddle_reshard.pipeline.versions.publish import complete_versions, publish
from paddle_reshard.pipeline.watch.notices import Notice, Notices, Result, failed
from paddle_reshard.pipeline.watch.records import Records
from paddle_reshard.pipeline.watch.runners import Conversion
from paddle_reshard.storage.listing import CheckpointRoot
from paddle_reshard.storage.locate import absolute, target_access


@dataclass
class Publisher:
    """Publishes the targets of a watcher."""

    records: Records
    versions: CheckpointRoot
    conversion: Conversion
    notices: Notices

    def update(self, held: Collection[str], results: Mapping[str, Result]) -> dict[str, Result]:
        """Publish what is due, oldest first. Name → result; the first failure ends it.

        ``held`` are checkpoints that are being converted or will be tried again, ``results`` those of this pass so far.
        """
        published: dict[str, Result] = {}
        for name in self.due(held, results):
            published[f"{name} published"] = result = self._publish(name)
            if result is not Result.PUBLISHED:
                break
        return published

    def due(self, held: Collection[str], results: Mapping[str, Result]) -> list[str]:
        """The converted checkpoints to be published, ascending: newer than the last, and before any that is held."""
        last = self._last_step()
        waiting = [step for step, _ in steps_of([*held])]
        return [
            name
            for step, name in steps_of(self.records.out.folders())
            if last < step
            and not any(last < other < step for other in waiting)
            and results.get(name) is not Result.FAILED
            and self.records.plan_id(name) is not None
        ]

    def _last_step(self) -> int:
        """The step of the newest version that was made from a converted checkpoint of this run; -1 if none was."""
        folder = absolute(self.records.out.at("checkpoint-0")).rpartition("/")[0]
        sources = (str(manifest["source"]["location"]) for _, manifest in complete_versions(self.versions))
        places = (source.rpartition("/") for source in sources)
        mine = (step for above, _, name in places if above == folder for step, _ in steps_of([name]))
        return next(mine, -1)

    def _publish(self, name: str) -> Result:
        given = self.conversion.settings.asked.shared
        access = target_access(given)
        options: ConversionOptions = {
            "memory": str(given.get("memory") or DEFAULT_MEMORY),
            "no_space_check": bool(given.get("no_space_check")),
            "storage_options": access.options,
            "allow_scheme": access.schemes,
        }
        try:
            report = publish(self.records.out.at(name), self.versions.location, **options)
        except BusyError as error:
            notice = Notice(Result.WAITING, logging.INFO, f"not published yet: {error}")
        except (ReshardError, OSError, MemoryError) as error:
            notice = failed(str(error), "not published: ")
        else:
            version = dict(report.facts())["version"]
            notice = Notice(Result.PUBLISHED, logging.INFO, f"published: {version}")
        return self.notices.give(name, notice, about=f"{name} published")
