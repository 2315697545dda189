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
    from paddle_reshard.pipeline.convert.conversion import ConversionReport
    from paddle_reshard.pipeline.convert.coverage import Coverage
    from paddle_reshard.pipeline.convert.diff import DiffReport
    from paddle_reshard.pipeline.convert.integrity import IntegrityReport
    from paddle_reshard.pipeline.convert.plan import ConversionPlan
    from paddle_reshard.pipeline.convert.verify import VerifyReport
    from paddle_reshard.pipeline.core.events import Observer
    from paddle_reshard.pipeline.planning.plan import Plan
    from paddle_reshard.pipeline.planning.simulate import Simulation
    from paddle_reshard.pipeline.report.data import ReportData
    from paddle_reshard.pipeline.report.picture import Picture

log = logging.getLogger(__name__)

report_option = execution_option(
    "--report",
    "report_path",
    type=click.Path(path_type=Path),
    metavar="FILE.html",
    help="Also write the result as a page that a browser shows without a network.",
)


class Reporting:
    """The report of a command, if one is wanted: what happens while it runs, and then its result."""

    def __init__(self, path: Path | None, command: str, observe: Observer) -> None:
        self.path, self.command = path, command
        self.observe = observe
        self.conversion: ConversionPlan | None = None
        self.picture: Picture | None = None
        self.proof: Coverage | None = None
        if path is not None:
            from paddle_reshard.pipeline.core.heap import private_bytes
            from paddle_reshard.pipeline.report.run_record import RunRecord
            from paddle_reshard.pipeline.report.writing import check_writable

            check_writable(path)
            self.record = RunRecord(observe, self._on_plan, private_bytes)
            self.observe = self.record

    def _on_plan(self, conversion: object) -> None:
        from paddle_reshard.pipeline.convert.coverage import prove
        from paddle_reshard.pipeline.convert.plan import ConversionPlan
        from paddle_reshard.pipeline.report.describe import picture_of

        if isinstance(conversion, ConversionPlan):
            self.conversion, self.picture = conversion, picture_of(conversion)
            self.proof = prove(conversion)

    def planned(self, conversion: ConversionPlan, proof: Coverage | None) -> None:
        """Write what a plan says, and its proof if there is one."""
        if self.path is not None:
            from paddle_reshard.pipeline.report.describe import describe_plan, picture_of

            self._save(describe_plan(conversion, picture_of(conversion), self.command, proof))

    def converted(self, report: ConversionReport) -> None:
        """Write what a conversion did. It is done, so that a file that cannot be written is only reported."""
        if self.path is None:
            return
        from paddle_reshard.pipeline.core.errors import UsageError
        from paddle_reshard.pipeline.report.describe import describe_conversion

        said = describe_conversion(
            report, self.picture, self.record.data(finished=True), self.command, self.proof
        )
        try:
            self._save(said)
        except UsageError as unwritten:
            log.warning("paddle-reshard: %s", unwritten)

    def compared(self, report: VerifyReport | IntegrityReport | DiffReport, *compared: str) -> None:
        """Write what a comparison found."""
        if self.path is not None:
            from paddle_reshard.pipeline.report.describe import describe_comparison

            self._save(describe_comparison(report, compared, self.record.data(finished=True)))

    def simulated(self, name: str, plan: Plan, found: Sequence[Simulation]) -> None:
        """Write how long a saved plan would take."""
        if self.path is not None:
            from paddle_reshard.pipeline.report.describe import describe_simulation, picture_of_plan

            self._save(describe_simulation(name, plan, found, picture_of_plan(plan)))

    def _save(self, report: ReportData) -> None:
        from paddle_reshard.pipeline.report.writing import save_report

        if self.path is not None:
            save_report(report, self.path)

    def save_failure(self, error: BaseException) -> None:
        """Write the report of a conversion that failed after it was planned."""
        from paddle_reshard.pipeline.core.errors import UsageError
        from paddle_reshard.pipeline.report.describe import describe_failure
        from paddle_reshard.pipeline.report.writing import save_report

        if self.path is None or self.conversion is None:
            return
        try:
            said = describe_failure(
                self.command, error, self.conversion, self.picture, self.record.data(), self.proof
            )
            save_report(said, self.path)
        except UsageError as unwritten:  # the conversion's own error counts
            log.warning("paddle-reshard: %s", unwritten)


@contextmanager
def reporting(path: Path | None, command: str, observe: Observer) -> Iterator[Reporting]:
    """The report of a command, which is also written if the block fails after it has planned a conversion."""
    report = Reporting(path, command, observe)
    try:
        yield report
    except (Exception, KeyboardInterrupt) as error:
        report.save_failure(error)
        raise
