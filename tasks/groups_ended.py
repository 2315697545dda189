"""From the reports of groups to events."""

from __future__ import annotations

from collections.abc import Sequence

from paddle_reshard.pipeline.core.events import GroupEnded
from paddle_reshard.pipeline.planning.plan import Plan
from paddle_reshard.tasks.figures import add_retries
from paddle_reshard.tasks.group import GroupReport


def groups_ended(plan: Plan, reports: Sequence[GroupReport]) -> list[GroupEnded]:
    """What ``reports`` say, in order. Groups that are reported together ran one after the other."""
    events: list[GroupEnded] = []
    later_seconds = 0.0
    for report in reversed(reports):
        figures = report.read_bytes, report.written_bytes, report.copied_bytes
        peak_bytes = int(plan.group_peaks[report.group])
        retries = add_retries(worker.retries for worker in report.figures)
        event = GroupEnded(
            report.group, report.worker, report.seconds, later_seconds, peak_bytes, *figures, retries
        )
        events.append(event)
        later_seconds += report.seconds
    return events[::-1]
