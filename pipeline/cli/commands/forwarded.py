"""Arguments of ``convert`` for a conversion that runs elsewhere or later: as a job, or for each checkpoint of a run.

``convert`` parses them itself: mistakes are reported before anything is submitted, and new options of ``convert`` work
here too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from paddle_reshard.pipeline.cli.commands.conversion import convert
from paddle_reshard.pipeline.cli.options import WITHOUT_VARIABLES, all_of, decides, given
from paddle_reshard.pipeline.core.choices import UPLOADS
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.request.options import ConvertOptions, Decides, flag_of
from paddle_reshard.pipeline.request.parse import parse_request

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from paddle_reshard.clusters.ray.jobs import ConversionJob

OF_ONE_PROCESS = ("events",)
"""Options of ``convert`` that ``submit`` and ``watch`` do not take."""
REPORT = "report_path"
"""An option with a local file that is not sent with a job: the job writes it."""


class ForConvert(click.Command):
    """A command that hands the options that it does not know to ``convert``, and completes those too."""

    ignore_unknown_options = True

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completions of this command and of ``convert``."""
        own = super().shell_complete(ctx, incomplete)
        of_convert = convert.make_context("convert", [], parent=ctx, resilient_parsing=True)
        apart = {"--target", *map(flag_of, OF_ONE_PROCESS), *(item.value for item in own)}
        further = convert.shell_complete(of_convert, incomplete)
        return [*own, *(item for item in further if item.value not in apart)]


def _context(command: click.Command, arguments: Sequence[str]) -> click.Context:
    """Arguments as ``convert`` parses them; mistakes are told with the usage of the command that was called."""
    try:
        return command.make_context("convert", list(arguments))
    except click.MissingParameter as error:
        raise UsageError("give a source and a target") from error
    except click.UsageError as error:
        error.ctx = click.get_current_context(silent=True) or error.ctx
        raise


job_options = all_of(
    click.option(
        "--upload",
        type=click.Choice(UPLOADS),
        default="always",
        show_default=True,
        help="Upload this package with the job, or use the one installed on the cluster.",
    ),
    click.option(
        "--pip",
        multiple=True,
        metavar="REQUIREMENT",
        help="Package to install for the job. Can be repeated.",
    ),
    click.option(
        "--env",
        multiple=True,
        metavar="NAME",
        help="Pass this environment variable to the job, for example with credentials; * matches anything, as in "
        "'AWS_*'. Can be repeated.",
    ),
    click.option(
        "--cpus",
        type=click.FloatRange(min=0, min_open=True),
        help="Reserve this number of CPUs for the converter, on any node. Default: it runs on the head.",
    ),
)
"""Options of a job, with the names that :class:`~paddle_reshard.clusters.ray.jobs.ConversionJob` has for them."""


@dataclass(frozen=True, slots=True)
class ConvertArguments:
    """The parsed arguments of ``convert``."""

    context: click.Context
    defaults: Mapping[str, Any]
    given: Mapping[str, Any]
    """The options that were given, as keyword arguments of :func:`paddle_reshard.convert`."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Option or argument → value."""
        return self.context.params

    @classmethod
    def read(cls, command: click.Command, arguments: Sequence[str]) -> ConvertArguments:
        """Let ``convert`` read its arguments; click reports mistakes."""
        from paddle_reshard.storage.locate import check_scheme, source_access, target_access

        context = _context(command, arguments)
        values = context.params
        if values["targets"]:
            raise UsageError("submit and watch take one target, without --target")
        if values["target"] is None:
            raise UsageError("give a source and a target")
        for name in OF_ONE_PROCESS:
            if values[name] is not None:
                raise UsageError(f"{flag_of(name)} is not for the conversions of submit and watch")
        plain = command.make_context("convert", ["SRC", "DST"], obj=WITHOUT_VARIABLES)
        request = cls(context, plain.params, given(context))
        parse_request(cast(ConvertOptions, request.given))
        locations = (value for option, value in request.options() if decides(option) is Decides.LOCATION)
        for location in (values["source"], *locations):
            check_scheme(location, source_access(values).options)
        check_scheme(values["target"], target_access(values).options)
        return request

    def options(self) -> Iterator[tuple[click.Option, Any]]:
        """Every option with a value other than its default."""
        for option in self.context.command.params:
            if isinstance(option, click.Option) and option.name is not None:
                value = self.values[option.name]
                if value != self.defaults[option.name]:
                    yield option, value

    @property
    def variables(self) -> dict[str, str]:
        """Option that holds secrets → the environment variable that gives it."""
        return {
            str(option.name): str(option.envvar)
            for option, _ in self.options()
            if decides(option) is Decides.ACCESS
            and self.context.get_parameter_source(str(option.name)) is ParameterSource.ENVIRONMENT
        }

    def files(self) -> dict[str, bytes]:
        """Name of option → contents, for every option with a local file that is sent with a job."""
        return {
            str(option.name): value.read_bytes()
            for option, value in self.options()
            if _is_sent(option, value) and decides(option) is not Decides.ACCESS
        }

    def identify(self, source: str, target: str) -> str:
        """The id of this conversion of ``source`` to ``target``: a hash of everything that affects the outcome."""
        import hashlib

        from paddle_reshard.pipeline.watch.records import conversion_id

        identity: dict[str, Any] = {"source": absolute(source), "target": absolute(target)}
        for option, value in self.options():
            role, name = decides(option), str(option.name)
            if role is Decides.LOCATION:
                identity[name] = absolute(value)
            elif role is Decides.OUTCOME and _is_sent(option, value):
                identity[name] = hashlib.sha256(value.read_bytes()).hexdigest()
            elif role is Decides.OUTCOME:
                identity[name] = str(Topology.parse(value)) if name == "to" else value
        return conversion_id(identity)

    def spell(self, source: str, target: str, *further_flags: str) -> tuple[str, ...]:
        """The command line of a job: local files by name alone, and the job's own cluster by default.

        Refused if an option holds credentials.
        """
        spelled = [absolute(source), absolute(target)]
        for option, value in self.options():
            if option.name not in self.variables:  # a job reads the variable itself
                spelled += self._spelled(option, value)
        if "cluster" not in self.given:
            spelled += ["--cluster", "ray"]
        return (*spelled, *(flag for flag in further_flags if flag not in spelled))

    @staticmethod
    def _spelled(option: click.Option, value: Any) -> Iterator[str]:
        flag = option.opts[0]
        if decides(option) is Decides.ACCESS:
            raise UsageError(
                f"{flag} would be readable in the job's command line; put its contents into the environment "
                f"variable {option.envvar} and give --env {option.envvar}"
            )
        if option.is_flag:
            yield flag if value else option.secondary_opts[0]
            return
        if _is_sent(option, value):
            value = f"{option.name}.json"
        elif option.name == REPORT or decides(option) is Decides.LOCATION:
            value = absolute(str(value))
        for item in value if isinstance(value, tuple) else (value,):
            yield from (flag, str(item))

    def job(
        self,
        options: Mapping[str, Any],
        *flags: str,
        source: str | None = None,
        target: str | None = None,
        again: bool,
        report: Path | None = None,
    ) -> ConversionJob:
        """A job that converts, with ``options`` of a job and these ``flags`` of ``convert`` too."""
        from paddle_reshard.clusters.ray.environment import chosen_variables
        from paddle_reshard.clusters.ray.jobs import ConversionJob

        passed = chosen_variables(options["env"])
        for name, variable in self.variables.items():
            if variable not in passed:
                raise UsageError(
                    f"{variable} gives {flag_of(name)} here; give --env {variable} to pass it to the job"
                )
        source, target = source or self.values["source"], target or self.values["target"]
        written = () if report is None else ("--report", absolute(str(report)))
        return ConversionJob(
            arguments=(*self.spell(source, target, *flags), *written),
            submission_id=self.identify(source, target),
            files={f"{name}.json": data for name, data in self.files().items()},
            again=again,
            **options,
        )


def _is_sent(option: click.Option, value: object) -> bool:
    """Whether a value is a local file that is sent with a job."""
    return isinstance(value, Path) and option.name != REPORT


def absolute(location: str) -> str:
    """A location that is valid in every working directory."""
    from paddle_reshard.storage.locate import is_local, local_path

    if is_local(location):
        return os.path.abspath(local_path(location))
    if urlsplit(location).password is not None:
        raise UsageError(f"{urlsplit(location).scheme}:// URL with a password: it would be readable in logs")
    return location.rstrip("/")
