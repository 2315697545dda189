"""How a watcher converts a checkpoint: in this process, or as a job of a Ray cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from paddle_reshard.clusters.answers import answer_of_job, failure_of_job
from paddle_reshard.pipeline import api
from paddle_reshard.pipeline.convert.conversion import convert_with
from paddle_reshard.pipeline.core.errors import StaleSessionError
from paddle_reshard.pipeline.core.events import Event, Observer, StepEnded, StepStarted, ignore_events
from paddle_reshard.pipeline.request.parse import ConversionRequest, locations_of
from paddle_reshard.storage.locate import target_access

if TYPE_CHECKING:
    from paddle_reshard.clusters.ray.jobs import ConversionJob
    from paddle_reshard.pipeline.report.html_report import HtmlReport

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Conversion:
    """How every checkpoint is converted."""

    request: ConversionRequest
    identify: Callable[[str, str], str]
    """Source and target → conversion id."""


Convert = Callable[[str, str, Callable[[bool], None], Callable[[], None]], None]
"""``(source, target, begin, check)``: convert, call ``begin`` once nobody else can, unless nothing is left to do, and
``check`` immediately before publishing. ``begin`` is told whether an attempt that has not ended must have died: a job
goes on without its watcher. A ``ReshardError`` says in ``retryable`` whether to try again; a ``BusyError`` is raised
while another process converts."""


MakePage = Callable[[str, str, Observer], "HtmlReport"]
"""``(source, target, observe)``: the page about this conversion."""


def convert_inline(
    conversion: Conversion, also_observe: Observer = ignore_events, make_page: MakePage | None = None
) -> Convert:
    """Conversions in this process, each with a page if there is ``make_page``."""

    def convert(source: str, target: str, begin: Callable[[bool], None], check: Callable[[], None]) -> None:
        waits = False

        def observe(event: Event) -> None:
            nonlocal waits
            also_observe(event)
            if isinstance(event, StepStarted):
                waits = event.step == "move"  # for the lock; whatever follows is done under it
                if event.step == "publish":
                    check()
            elif waits:
                waits = False
                begin(True)
            if isinstance(event, StepEnded):
                log.info("%s: %s: %s", source.rsplit("/", 1)[-1], event.step, event.summary)

        request = replace(conversion.request, resume=True)
        locations = locations_of((source,), target, request)
        with nullcontext() if make_page is None else make_page(source, target, observe) as page:
            convert_it = partial(convert_with, locations, request, page or observe)
            report = _resumed_or_afresh(convert_it, target, conversion)
            if page is not None:
                page.show_done(report)

    return convert


def _resumed_or_afresh(convert: Callable[[], Result], target: str, conversion: Conversion) -> Result:
    """Convert; an unfinished target of an earlier attempt that cannot be resumed is removed."""
    try:
        return convert()
    except StaleSessionError as error:
        log.info("%s", error)
        api.clean(target, storage_options=target_access(conversion.request.options).options)
        return convert()


def convert_as_job(
    conversion: Conversion, request_of: Callable[[str, str], ConversionJob], address: str | None
) -> Convert:
    """Conversions as jobs of a Ray cluster, one at a time. Their arguments must include ``--json --resume``."""
    from paddle_reshard.clusters.ray.jobs import follow_job, submit_conversion

    def convert(source: str, target: str, begin: Callable[[bool], None], check: Callable[[], None]) -> None:
        check()
        begin(False)
        _resumed_or_afresh(partial(run, source, target), target, conversion)

    def run(source: str, target: str) -> None:
        lines: list[str] = []

        def write(text: str) -> None:
            lines.extend(line for line in text.splitlines() if line.strip())

        job = submit_conversion(request_of(source, target), address)
        log.info("%s: %s job %s", source, "attached to" if job.attached else "submitted", job.submission_id)
        end = follow_job(job, write)
        if not end.succeeded:
            message = f"job {end.submission_id} {end.status}: {end.message} {lines[-1] if lines else ''}"
            raise failure_of_job(answer_of_job(lines), message.strip())

    return convert
