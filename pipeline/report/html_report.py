"""A page about a plan, a conversion or a comparison: what happened while it ran, and then its result."""

from __future__ import annotations

import logging
import os
import platform
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from paddle_reshard.pipeline.convert.conversion import ConversionReport
from paddle_reshard.pipeline.convert.integrity import IntegrityReport
from paddle_reshard.pipeline.convert.plan import ConversionPlan
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.events import Event, Observer, Planned, ignore_events
from paddle_reshard.pipeline.core.heap import private_bytes
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.examine.cards import CardsPlan
from paddle_reshard.pipeline.examine.coverage import Coverage, prove
from paddle_reshard.pipeline.examine.diff import DiffReport
from paddle_reshard.pipeline.examine.verify import VerifyReport
from paddle_reshard.pipeline.report.cards import describe_cards
from paddle_reshard.pipeline.report.command import Command
from paddle_reshard.pipeline.report.data import Made, ReportData
from paddle_reshard.pipeline.report.describe import (
    describe_comparison,
    describe_conversion,
    describe_failure,
    describe_plan,
    picture_of,
)
from paddle_reshard.pipeline.report.next_steps import (
    NextSteps,
    after_cards,
    after_comparison,
    after_conversion,
    after_failure,
    after_plan,
)
from paddle_reshard.pipeline.report.page import render
from paddle_reshard.pipeline.report.picture import Picture
from paddle_reshard.pipeline.report.run_record import RunRecord
from paddle_reshard.storage.local.folders import check_writable, written_whole

log = logging.getLogger(__name__)


class HtmlReport:
    """The page that ``--report`` writes, for one call of a function that takes ``observe``.

    It is that observer, and records what happens; :meth:`show` writes the page with the result. As a context, it also
    writes a page if a conversion fails after it was planned, which says how far it came, and why it ended.

    ::

        with HtmlReport("conversion.html") as page:
            page.show(convert("checkpoint-1000", "one-card", to="tp=1", observe=page))

    Parameters
    ----------
    path
        A local file, which is replaced. Its folder must exist.
    observe
        Called with every event afterwards.
    command
        The command line that the page shows, and of which it makes that of the next step.

    Raises
    ------
    UsageError
        If ``path`` is a folder, or its folder does not exist.
    """

    def __init__(
        self, path: PathLike, observe: Observer = ignore_events, command: Command | None = None
    ) -> None:
        self.path = Path(os.fspath(path))
        self.command = command
        check_writable(self.path, UsageError)
        self._record, self._observe = RunRecord(private_bytes), observe
        self._conversion: ConversionPlan | None = None
        self._picture: Picture | None = None
        self._proof: Coverage | None = None

    def __call__(self, event: Event) -> None:
        """Record an event, and pass it on. A plan is drawn and proven while it still has its ops."""
        if isinstance(event, Planned) and isinstance(event.conversion, ConversionPlan):
            self._conversion, self._picture = event.conversion, picture_of(event.conversion)
            self._proof = prove(event.conversion)
        self._record(event)
        self._observe(event)

    def show(
        self,
        result: CardsPlan | ConversionPlan | ConversionReport | VerifyReport | IntegrityReport | DiffReport,
        *compared: PathLike,
        proof: Coverage | None = None,
    ) -> None:
        """Write the page.

        Parameters
        ----------
        result
            What the function has returned.
        compared
            Of a comparison: the locations that were compared. URLs are shown without credentials.
        proof
            Of a plan: what :func:`~paddle_reshard.prove` found, to be shown too.

        Raises
        ------
        UsageError
            If the file cannot be written.
        """
        if isinstance(result, CardsPlan):
            self._write(describe_cards(result), after_cards(result))
        elif isinstance(result, ConversionPlan):
            self.show_plan(result, proof)
        elif isinstance(result, ConversionReport):
            run = self._record.data(finished=True)
            page = describe_conversion(result, self._picture, run, self._proof)
            self._write(page, after_conversion(result))
        else:
            page = describe_comparison(result, compared, self._record.data(finished=True))
            self._write(page, after_comparison(result, compared, self.command))

    def show_done(self, report: ConversionReport) -> None:
        """Write the page of a conversion. It is done, so that a file that cannot be written is only reported."""
        try:
            self.show(report)
        except UsageError as unwritten:
            log.warning("paddle-reshard: %s", unwritten)

    def show_plan(self, plan: ConversionPlan, proof: Coverage | None) -> None:
        """Write the page of a plan, with its proof if there is one.

        Raises
        ------
        UsageError
            If the file cannot be written.
        """
        page = describe_plan(plan, picture_of(plan), proof=proof)
        self._write(page, after_plan(self.command))

    def _write(self, page: ReportData, steps: NextSteps) -> None:
        made = Made(time.time(), platform.node(), self.command)
        save_report(replace(page, made=made, next_steps=steps), self.path)

    def __enter__(self) -> HtmlReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._conversion is not None and isinstance(error, (Exception, KeyboardInterrupt)):
            run = self._record.data()
            said = describe_failure(error, self._conversion, self._picture, run, self._proof)
            try:
                self._write(said, after_failure(error, self.command))
            except UsageError as unwritten:  # the conversion's own error counts
                log.warning("paddle-reshard: %s", unwritten)


def save_report(report: ReportData, path: Path) -> None:
    """Write a report; it replaces an existing file, and appears as a whole or not at all."""
    page = render(report).encode("utf-8", errors="replace")
    with written_whole(path, UsageError) as file:
        file.write(page)
