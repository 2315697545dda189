"""How does a watcher have a checkpoint converted: in this process, or as a job of a Ray cluster?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import paddle_reshard
from paddle_reshard.pipeline.claims import State
from paddle_reshard.pipeline.errors import JobError, StaleSessionError
from paddle_reshard.pipeline.workflow import Event, StepEnded, StepStarted
from paddle_reshard.storage.formats.strict_json import parse_json
from paddle_reshard.storage.locate import target_access

if TYPE_CHECKING:
    from paddle_reshard.clusters.jobs import JobRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conversion:
    """What every checkpoint is converted to."""

    options: Mapping[str, Any]
    """Keyword arguments of :func:`paddle_reshard.convert`."""
    identify: Callable[[str, str], str]
    """Source and target → conversion id."""


class Outcome(Exception):
    """A conversion did not come about; ``state`` says whether another try makes sense."""

    def __init__(self, state: State, reason: str) -> None:
        super().__init__(state, reason)
        self.state, self.reason = state, reason


Convert = Callable[[str, str, Callable[[], None]], None]
"""``(source, target, check)``: convert, calling ``check`` last before publishing; raises what went wrong."""


def convert_inline(conversion: Conversion) -> Convert:
    """Conversions in this process."""

    def convert(source: str, target: str, check: Callable[[], None]) -> None:
        def observe(event: Event) -> None:
            if isinstance(event, StepStarted) and event.step == "publish":
                check()
            elif isinstance(event, StepEnded):
                log.info("%s: %s: %s", source.rsplit("/", 1)[-1], event.step, event.summary)

        options = {**conversion.options, "observe": observe, "resume": True}
        try:
            paddle_reshard.convert(source, target, **options)
        except StaleSessionError as error:
            _discard(target, conversion, error)
            paddle_reshard.convert(source, target, **options)

    return convert


def _discard(target: str, conversion: Conversion, reason: object) -> None:
    """Remove what an earlier attempt left that cannot be gone on with: who has the claim may begin anew."""
    log.info("%s", reason)
    options, schemes, _ = target_access(conversion.options)
    paddle_reshard.clean(target, storage_options=options, allow_scheme=schemes)


def convert_as_job(
    conversion: Conversion, request_of: Callable[[str, str], JobRequest], address: str | None
) -> Convert:
    """Conversions as jobs of a Ray cluster, one at a time. Their arguments must ask for ``--json --resume``."""
    from paddle_reshard.clusters.jobs import follow_job, submit_conversion

    def convert(source: str, target: str, check: Callable[[], None]) -> None:
        check()
        try:
            run(source, target)
        except StaleSessionError as error:
            _discard(target, conversion, error)
            run(source, target)

    def run(source: str, target: str) -> None:
        lines: list[str] = []

        def write(text: str) -> None:
            lines.extend(line for line in text.splitlines() if line.strip())

        try:
            job = submit_conversion(request_of(source, target), address)
            log.info(
                "%s: %s job %s", source, "attached to" if job.attached else "submitted", job.submission_id
            )
            end = follow_job(job, write)
        except JobError as error:
            raise Outcome(State.FAILED, str(error)) from error
        if not end.succeeded:
            raise outcome_of_job(lines, f"job {end.submission_id} {end.status}: {end.message}")

    return convert


def outcome_of_job(lines: Sequence[str], message: str) -> Outcome | StaleSessionError:
    """What a failed conversion said: its one JSON object tells a refusal from a crash."""
    for line in reversed(lines):
        try:
            said = parse_json(line)
        except ValueError:
            continue
        if isinstance(said, dict) and said.get("error") and "kind" in said:
            if said["kind"] == StaleSessionError.__name__:
                return StaleSessionError(str(said["error"]))
            return Outcome(State.FAILED if said.get("retryable") else State.REFUSED, str(said["error"]))
    return Outcome(State.FAILED, f"{message} {lines[-1] if lines else ''}".strip())
