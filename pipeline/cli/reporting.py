"""``--report FILE``: a page with what a command found, to open in a browser."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paddle_reshard.pipeline.cli.options import execution_option

if TYPE_CHECKING:
    from paddle_reshard.pipeline.convert.cards import CardsPlan
    from paddle_reshard.pipeline.convert.conversion import ConversionReport
    from paddle_reshard.pipeline.convert.coverage import Coverage
    from paddle_reshard.pipeline.convert.diff import DiffReport
    from paddle_reshard.pipeline.convert.integrity import IntegrityReport
    from paddle_reshard.pipeline.convert.plan import ConversionPlan
    from paddle_reshard.pipeline.convert.verify import VerifyReport
    from paddle_reshard.pipeline.core.events import Observer
    from paddle_reshard.pipeline.planning.plan import Plan
    from paddle_reshard.pipeline.planning.simulate import Simulation
    from paddle_reshard.pipeline.report.html_report import HtmlReport

log = logging.getLogger(__name__)

report_option = execution_option(
    "--report",
    "report_path",
    type=click.Path(path_type=Path),
    metavar="FILE.html",
    help="Also write the result as a page that a browser shows without a network.",
)


class Reporting:
    """The report of a command, if one is wanted."""

    def __init__(self, page: HtmlReport | None, observe: Observer) -> None:
        self.page = page
        self.observe: Observer = observe if page is None else page

    def planned(self, conversion: ConversionPlan, proof: Coverage | None) -> None:
        """Write what a plan says, and its proof if there is one."""
        if self.page is not None:
            self.page.show(conversion, proof=proof)

    def compared_cards(self, found: CardsPlan) -> None:
        """Write which topologies a number of cards can have."""
        if self.page is not None:
            self.page.show(found)

    def converted(self, report: ConversionReport) -> None:
        """Write what a conversion did. It is done, so that a file that cannot be written is only reported."""
        from paddle_reshard.pipeline.core.errors import UsageError

        try:
            if self.page is not None:
                self.page.show(report)
        except UsageError as unwritten:
            log.warning("paddle-reshard: %s", unwritten)

    def compared(self, report: VerifyReport | IntegrityReport | DiffReport, *compared: str) -> None:
        """Write what a comparison found."""
        if self.page is not None:
            self.page.show(report, *compared)

    def simulated(self, name: str, plan: Plan, found: Sequence[Simulation]) -> None:
        """Write how long a saved plan would take."""
        if self.page is not None:
            from paddle_reshard.pipeline.report.describe import describe_simulation, picture_of_plan
            from paddle_reshard.pipeline.report.writing import save_report

            save_report(describe_simulation(name, plan, found, picture_of_plan(plan)), self.page.path)


@contextmanager
def reporting(path: Path | None, observe: Observer) -> Iterator[Reporting]:
    """The report of a command, which is also written if the block fails after it has planned a conversion."""
    if path is None:
        yield Reporting(None, observe)
        return
    from paddle_reshard.pipeline.report.html_report import HtmlReport

    with HtmlReport(path, observe) as page:
        yield Reporting(page, observe)
