"""``--report FILE``: a page with what a command found, to open in a browser."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from paddle_reshard.pipeline.cli.notify import Program, Webhook
from paddle_reshard.pipeline.cli.options import decides, execution_option
from paddle_reshard.pipeline.convert.options import Decides

if TYPE_CHECKING:
    from paddle_reshard.pipeline.convert.cards import CardsPlan
    from paddle_reshard.pipeline.convert.conversion import ConversionReport
    from paddle_reshard.pipeline.convert.coverage import Coverage
    from paddle_reshard.pipeline.convert.diff import DiffReport
    from paddle_reshard.pipeline.convert.integrity import IntegrityReport
    from paddle_reshard.pipeline.convert.plan import ConversionPlan
    from paddle_reshard.pipeline.convert.verify import VerifyReport
    from paddle_reshard.pipeline.core.events import Observer
    from paddle_reshard.pipeline.planning.simulate import Simulation
    from paddle_reshard.pipeline.report.command import Command
    from paddle_reshard.pipeline.report.html_report import HtmlReport

log = logging.getLogger(__name__)

report_option = execution_option(
    "--report",
    "report_path",
    type=click.Path(path_type=Path),
    metavar="FILE.html",
    help="Also write the result as a page that a browser shows without a network.",
)


SECRET = "@FILE"
"""Stands for the value of an option that may hold secrets, all of which can be given in a file."""


def command_of(context: click.Context) -> Command:
    """The command line of a context, as a page may show it: without secrets, and options as they were given."""
    from paddle_reshard.pipeline.report.command import Command

    arguments: list[str] = []
    options: list[tuple[str, ...]] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        if isinstance(parameter, click.Option):
            options += _given(parameter, value)
        else:
            arguments += map(_shown, value if isinstance(value, tuple) else (value,))
    return Command(context.info_name or "", tuple(arguments), tuple(options))


def _given(option: click.Option, value: Any) -> Iterator[tuple[str, ...]]:
    if option.is_flag:
        yield (option.opts[0] if value else option.secondary_opts[0],)
    elif decides(option) is Decides.ACCESS or isinstance(value, (Webhook, Program)):
        yield option.opts[0], SECRET
    else:
        for one in value if isinstance(value, tuple) else (value,):
            yield option.opts[0], _shown(one)


def _shown(value: object) -> str:
    """A value as text; of a URL, also within DST:FORMAT:…, neither user and password nor query."""
    from paddle_reshard.storage.remote.folder import without_secrets

    return without_secrets(str(value))


class Reporting:
    """The report of a command, if one is wanted."""

    def __init__(self, page: HtmlReport | None, observe: Observer) -> None:
        self.page = page
        self.observe: Observer = observe if page is None else page

    def planned(
        self, conversion: ConversionPlan, proof: Coverage | None, simulations: Sequence[Simulation]
    ) -> None:
        """Write what a plan says, with its proof and its estimates if there are any."""
        if self.page is not None:
            self.page.show_plan(conversion, proof, simulations)

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


@contextmanager
def reporting(path: Path | None, observe: Observer) -> Iterator[Reporting]:
    """The report of a command, which is also written if the block fails after it has planned a conversion."""
    if path is None:
        yield Reporting(None, observe)
        return
    from paddle_reshard.pipeline.report.html_report import HtmlReport

    with HtmlReport(path, observe, command_of(click.get_current_context())) as page:
        yield Reporting(page, observe)
