"""The commands ``submit`` and ``watch``: conversions as Ray jobs, and as checkpoints finish.

Both take the arguments of ``convert``, which parses them itself: mistakes are reported before anything is submitted,
and new options of ``convert`` work here too.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import click
from click.core import ParameterSource

from paddle_reshard.pipeline.cli.command import command_of, running
from paddle_reshard.pipeline.cli.conversion import convert
from paddle_reshard.pipeline.cli.ends import End
from paddle_reshard.pipeline.cli.options import (
    LOCATION,
    WITHOUT_VARIABLES,
    decides,
    events_option,
    given,
    metrics_option,
    notify_option,
)
from paddle_reshard.pipeline.cli.signals import exit_status, sentence, signal_of
from paddle_reshard.pipeline.cli.terminal import log_formatter, print_answer, print_object, relay, say
from paddle_reshard.pipeline.core.answer import Answer
from paddle_reshard.pipeline.core.choices import UPLOADS
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.request.options import (
    ConvertOptions,
    Decides,
    declarations,
    flag_of,
)
from paddle_reshard.pipeline.request.parse import read_request, read_settings

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from paddle_reshard.clusters.ray.jobs import JobRequest
    from paddle_reshard.pipeline.core.events import Observer
    from paddle_reshard.pipeline.watch.decisions import Policy
    from paddle_reshard.pipeline.watch.notices import Result
    from paddle_reshard.pipeline.watch.runners import MakePage
    from paddle_reshard.pipeline.watch.watcher import Watcher

OF_ONE_PROCESS: Mapping[str, str] = {
    "events": "--events",
    "metrics_port": "--metrics-port",
    "notify": "--notify",
}
"""Options of ``convert`` that ``submit`` and ``watch`` do not take."""
REPORT = "report_path"
"""An option with a local file that is not sent with a job: the job writes it."""
NO_ACCESS = ("no credentials were found", "access denied")
"""What the conversion of a job says that lacks credentials, or has those of the machine on which it runs."""


class ForConvert(click.Command):
    """A command that hands the options that it does not know to ``convert``, and completes those too."""

    ignore_unknown_options = True

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """What may stand here."""
        own = super().shell_complete(ctx, incomplete)
        of_convert = convert.make_context("convert", [], parent=ctx, resilient_parsing=True)
        apart = {"--target", *OF_ONE_PROCESS.values(), *(item.value for item in own)}
        further = convert.shell_complete(of_convert, incomplete)
        return [*own, *(item for item in further if item.value not in apart)]


@dataclass(frozen=True, slots=True)
class Request:
    """The parsed arguments of ``convert``."""

    command: click.Command
    context: click.Context
    values: Mapping[str, Any]
    """Option or argument → value."""
    defaults: Mapping[str, Any]
    given: Mapping[str, Any]
    """The options that were given, as keyword arguments of :func:`paddle_reshard.convert`."""

    @classmethod
    def read(cls, command: click.Command, arguments: Sequence[str]) -> Request:
        """Let ``convert`` read its arguments; click reports mistakes."""
        context = command.make_context("convert", list(arguments))
        values = context.params
        if values["targets"]:
            raise UsageError("submit and watch take one target, without --target")
        if values["target"] is None:
            raise UsageError("give a source and a target")
        for name, flag in OF_ONE_PROCESS.items():
            if values[name] is not None:
                raise UsageError(f"{flag} is not for the conversions of submit and watch")
        options = given(context)
        read_settings(cast(ConvertOptions, options))
        from paddle_reshard.storage.locate import check_scheme

        flags = (option for option in command.params if isinstance(option, click.Option))
        locations = (option.name or "" for option in flags if decides(option) is Decides.LOCATION)
        for name in ("source", "target", *locations):
            check_scheme(values[name] or "", values["allow_scheme"])
        plain = command.make_context("convert", ["SRC", "DST"], obj=WITHOUT_VARIABLES)
        return cls(command, context, values, plain.params, options)

    @property
    def variables(self) -> dict[str, str]:
        """Option that holds secrets → the environment variable that gives it."""
        return {
            option.name: str(option.envvar)
            for option in self.command.params
            if isinstance(option, click.Option)
            and option.name is not None
            and decides(option) is Decides.ACCESS
            and self.context.get_parameter_source(option.name) is ParameterSource.ENVIRONMENT
        }

    def options(self) -> Iterator[tuple[click.Option, Any]]:
        """Every option with a value other than its default."""
        for option in self.command.params:
            if isinstance(option, click.Option) and option.name is not None:
                value = self.values[option.name]
                if value != self.defaults[option.name]:
                    yield option, value

    def files(self) -> dict[str, bytes]:
        """Name of option → contents, for every option with a local file that is sent with a job."""
        paths = ((option, value) for option, value in self.options() if _is_sent(option, value))
        return {
            option.name or "": path.read_bytes()
            for option, path in paths
            if decides(option) is not Decides.ACCESS
        }

    def identify(self, source: str, target: str) -> str:
        """The id of this conversion of ``source`` to ``target``: a hash of everything that affects the outcome."""
        import hashlib

        from paddle_reshard.pipeline.watch.records import conversion_id

        identity: dict[str, Any] = {"source": _absolute(source), "target": _absolute(target)}
        files = self.files()
        for option, value in self.options():
            name, role = option.name or "", decides(option)
            if role in (Decides.EXECUTION, Decides.ACCESS):
                continue
            if name in files:
                identity[name] = hashlib.sha256(files[name]).hexdigest()
            elif name == "to":
                identity[name] = str(Topology.parse(value))
            elif role is Decides.LOCATION:
                identity[name] = _absolute(value)
            else:
                identity[name] = list(value) if isinstance(value, tuple) else value
        return conversion_id(identity)

    def spell(self, source: str, target: str, *further_flags: str) -> tuple[str, ...]:
        """The command line of a job: local files by name alone, and the job's own cluster by default.

        Raises
        ------
        UsageError
            If an option holds credentials.
        """
        spelled = [_absolute(source), _absolute(target)]
        for option, value in self.options():
            flag = option.opts[0]
            if option.name in self.variables:  # a job reads the variable itself
                continue
            if decides(option) is Decides.ACCESS:
                raise UsageError(
                    f"{flag} would be readable in the job's command line; put its contents into the environment "
                    f"variable {option.envvar} and give --env {option.envvar}"
                )
            if option.is_flag:
                spelled.append(flag if value else option.secondary_opts[0])
            elif _is_sent(option, value):
                spelled += [flag, f"{option.name}.json"]
            elif option.name == REPORT:
                spelled += [flag, _absolute(str(value))]
            elif decides(option) is Decides.LOCATION:
                spelled += [flag, _absolute(value)]
            else:
                for item in value if isinstance(value, tuple) else (value,):
                    spelled += [flag, str(item)]
        if "cluster" not in self.given:
            spelled += ["--cluster", "ray"]
        return (*spelled, *(flag for flag in further_flags if flag not in spelled))


def _is_sent(option: click.Option, value: object) -> bool:
    """Whether a value is a local file that is sent with a job."""
    return isinstance(value, Path) and option.name != REPORT


def _absolute(location: str) -> str:
    """A location that is valid in every working directory."""
    from paddle_reshard.storage.locate import is_local, local_path

    if is_local(location):
        return os.path.abspath(local_path(location))
    if urlsplit(location).password is not None:
        raise UsageError(f"{urlsplit(location).scheme}:// URL with a password: it would be readable in logs")
    return location.rstrip("/")


def read_duration(text: str) -> float:
    """A duration like 90s, 30m, 2h or 1d in seconds; a bare number is in seconds.

    >>> read_duration("2h")
    7200.0

    Raises
    ------
    click.BadParameter
        If it is none.
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhd]?)", text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a duration: give a number with s, m, h or d, as in 30m")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


# ----------------------------------------------------------------------------------------------- commands


OF_A_JOB = ("upload", "pip", "env", "cpus")
"""Names of the options that :func:`_job_options` declares."""


def _job_options(function: Any) -> Any:
    """Options for jobs on a cluster."""
    for option in reversed(
        (
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
                help="Pass this environment variable to the job, for example with credentials; * matches anything, as "
                "in 'AWS_*'. Can be repeated.",
            ),
            click.option(
                "--cpus",
                type=click.FloatRange(min=0, min_open=True),
                help="Reserve this number of CPUs for the converter, on any node. Default: it runs on the head.",
            ),
        )
    ):
        function = option(function)
    return function


@click.command("submit", cls=ForConvert, short_help="Run a conversion as a Ray job.")
@click.option(
    "--address",
    metavar="URL",
    help="Address of the cluster, http://HEAD:8265. Default: RAY_ADDRESS, or a local cluster.",
)
@click.option(
    "--follow/--no-follow",
    default=True,
    show_default=True,
    help="Show the job's output and wait until it ends.",
)
@click.option("--again", is_flag=True, help="Run the conversion again even if it has succeeded.")
@_job_options
@click.argument("arguments", nargs=-1, type=LOCATION, metavar="SRC DST")
def submit(address: str | None, follow: bool, again: bool, arguments: tuple[str, ...], **job: Any) -> None:
    """Run `paddle-reshard convert SRC DST …` as a job of a Ray cluster.

    Takes every option of convert except --target; --report is written by the job, on the machine where it runs. The
    submission id is a hash of the conversion: submitted twice, it
    runs once, and the second call follows the first job. The exit status is 0 if the job succeeded and 1 if not. SRC
    and DST must be reachable under the same names on the cluster. For token authentication set RAY_AUTH_MODE and
    RAY_AUTH_TOKEN.
    """
    consequence = "submit the same conversion again to follow its job, if it was started"
    with _reporting("submit", consequence, "--json" in arguments):
        request = Request.read(convert, arguments)
        output = _Output(request.values["as_json"], request.values["quiet"])
        afresh = again and request.values["overwrite"]
        asked = _job_request(request, job, *([] if afresh else ["--resume"]), again=again)
        status = _run_job(asked, address, follow, output)
    sys.exit(status)


def _job_request(
    request: Request,
    job: Mapping[str, Any],
    *flags: str,
    source: str | None = None,
    target: str | None = None,
    again: bool,
    report: Path | None = None,
) -> JobRequest:
    """A job that converts, with these ``flags`` of ``convert`` too."""
    from paddle_reshard.clusters.ray.environment import chosen_variables
    from paddle_reshard.clusters.ray.jobs import JobRequest

    passed = chosen_variables(job["env"])
    for name, variable in request.variables.items():
        if variable not in passed:
            raise UsageError(
                f"{variable} gives {flag_of(name)} here; give --env {variable} to pass it to the job"
            )
    source, target = source or request.values["source"], target or request.values["target"]
    written = () if report is None else ("--report", _absolute(str(report)))
    return JobRequest(
        arguments=(*request.spell(source, target, *flags), *written),
        submission_id=request.identify(source, target),
        files={f"{name}.json": data for name, data in request.files().items()},
        again=again,
        **job,
    )


@dataclass(frozen=True, slots=True)
class _Output:
    """Output of ``submit`` while a job runs."""

    as_json: bool
    quiet: bool

    def say(self, message: str) -> None:
        """One line about the job."""
        if not self.quiet:
            _say(message)

    def relay(self, text: str) -> None:
        """Print the job's output, on stderr with ``--json``: stdout is for one object."""
        if not self.quiet:
            relay(text, err=self.as_json)


def _run_job(request: JobRequest, address: str | None, follow: bool, output: _Output) -> int:
    """Submit a job, follow it, and report how it ended. Returns the exit status."""
    from paddle_reshard.clusters.ray.jobs import follow_job, submit_conversion
    from paddle_reshard.pipeline.watch.runners import answer_of_job, failure_of_job

    job = submit_conversion(request, address)
    facts: dict[str, Any] = {"submission_id": job.submission_id, "attached": job.attached}
    lines: list[str] = []

    def write(text: str) -> None:
        lines.extend(text.splitlines())
        output.relay(text)

    try:
        output.say(f"{'attached to' if job.attached else 'submitted'} {job.submission_id}")
        if not follow:
            if output.as_json:
                print_object("submit", {**facts, "status": None, "result": None})
            elif not output.quiet:
                click.echo(job.submission_id)
            return 0
        end = follow_job(job, write)
    except KeyboardInterrupt as interrupt:
        _say(f"the job continues; follow it with: ray job logs --follow {job.submission_id}")
        _say(f"or submit the same conversion again; stop it with: ray job stop {job.submission_id}")
        if output.as_json:
            facts |= {"status": None, "result": None}
            print_answer(Answer("submit", "interrupted; the job continues", "Interrupted", True, facts))
        return exit_status(interrupt)
    answer = answer_of_job(lines)
    if end.succeeded:
        output.say(f"{end.submission_id} {end.status}")
    else:
        _say(f"{end.submission_id} {end.status}: {end.message}")
        if not request.env and any(reason in line for line in lines for reason in NO_ACCESS):
            _say(
                "the job has none of this shell's environment variables; pass credentials with --env 'AWS_*'"
            )
    if output.as_json:
        result = answer.data() if end.succeeded and answer is not None else None
        facts |= {"status": end.status, "result": result}
        if end.succeeded:
            print_object("submit", facts)
        else:
            failure = failure_of_job(answer, end.message)
            kind = type(failure).__name__
            print_answer(Answer("submit", str(failure), kind, failure.retryable, facts))
    return end.exit_status


@click.command("watch", cls=ForConvert, short_help="Convert the checkpoints of a run as they finish.")
@click.option(
    "--once",
    is_flag=True,
    help="Check once and exit, for cron and CI. The exit status is 1 if a checkpoint failed.",
)
@click.option(
    "--every",
    type=click.FloatRange(0.1),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="Pause between two checks.",
)
@click.option(
    "--settle",
    type=click.FloatRange(0),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="Convert a checkpoint without saved_signal files or trainer state once it has not changed for this time.",
)
@click.option("--keep", type=click.IntRange(1), metavar="N", help="Keep the newest N converted checkpoints.")
@click.option(
    "--publish",
    metavar="VERSIONS",
    help="Also publish the parameters of each converted checkpoint as the next version in this folder, for inference "
    "engines.",
)
@click.option(
    "--submit", "address", metavar="ADDRESS", help="Run the conversions as jobs of this Ray cluster."
)
@click.option(
    "--retries",
    type=click.IntRange(0),
    default=3,
    show_default=True,
    help="Number of retries after a failure.",
)
@click.option(
    "--backoff",
    type=click.FloatRange(0),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="Pause before the first retry; doubles each time.",
)
@click.option("--retry-failed", is_flag=True, help="Retry checkpoints that failed or were refused before.")
@click.option("--wait", is_flag=True, help="Wait for RUN_DIR if it does not exist yet.")
@click.option(
    "--stale",
    type=read_duration,
    metavar="DURATION",
    help="Exit with status 1 when an incomplete checkpoint has not changed for this time: 90s, 30m, 2h, 1d.",
)
@click.option(
    "--report-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write what each conversion did as DIR/checkpoint-<step>.html, a page that a browser shows without a network.",
)
@events_option
@metrics_option
@notify_option
@_job_options
@click.argument("arguments", nargs=-1, type=LOCATION, metavar="RUN_DIR DST_ROOT")
def watch(
    once: bool,
    every: float,
    address: str | None,
    report_dir: Path | None,
    retry_failed: bool,
    wait: bool,
    arguments: tuple[str, ...],
    **settings: Any,
) -> None:
    """Convert each RUN_DIR/checkpoint-<step> to DST_ROOT/checkpoint-<step> once it is complete.

    Takes every option of convert except --target, --plan and --report. A checkpoint is complete when the files of all
    ranks are there and every rank has signalled that it has finished. Each checkpoint is converted once, however many
    watchers run.
    """
    with _reporting("watch", "the next watcher goes on", "--json" in arguments, service=not once):
        from paddle_reshard.pipeline.progress.metrics import CheckpointFigures
        from paddle_reshard.pipeline.watch.decisions import Policy

        request = Request.read(convert, arguments)
        policy = Policy(
            keep=settings["keep"],
            retries=settings["retries"],
            backoff_seconds=settings["backoff"],
            settle_seconds=settings["settle"],
            overwrite=bool(request.values.get("overwrite")),
            forget_before=time.time() if retry_failed else 0.0,
            stale_seconds=settings["stale"],
        )
        with running(figures=CheckpointFigures(), silent=True) as run:
            job = {name: settings[name] for name in OF_A_JOB}
            watcher = _watcher(request, policy, address, job, run, report_dir, settings["publish"])
            if not wait and not watcher.run.is_there():
                raise UsageError(
                    f"{watcher.run.location}: no such folder; use --wait if the run has not started yet"
                )
            _log_to_stderr(logging.ERROR if request.values["quiet"] else logging.INFO)
            watcher.tell = run
            results = watcher.once() if once else watcher.repeat(every)
        sys.exit(_end_watch(watcher, results, request.values["as_json"]))


def _watcher(
    request: Request,
    policy: Policy,
    address: str | None,
    job: Mapping[str, Any],
    observe: Observer,
    report_dir: Path | None,
    versions: str | None,
) -> Watcher:
    from paddle_reshard.pipeline.watch.runners import Conversion, convert_as_job, convert_inline
    from paddle_reshard.pipeline.watch.watcher import open_watcher

    for name in request.given:
        if reason := declarations()[name].not_scheduled:
            raise UsageError(f"{flag_of(name)} {reason}")
    if request.values["progress"] != "auto":
        raise UsageError("watch does not take --progress: it writes a log")
    if request.values[REPORT] is not None:
        raise UsageError(
            "--report is the page of one conversion; watch writes one for each with --report-dir DIR"
        )
    settings = read_settings(cast(ConvertOptions, request.given))
    read_request((), (), settings.asked)  # report mistakes once, not for every checkpoint
    conversion = Conversion(settings, request.identify)
    convert = convert_inline(conversion, observe, _pages(request, report_dir) if address is None else None)
    if address is not None:
        _job_request(request, job, again=True)  # refuse what no job can have before the first one
        convert = convert_as_job(
            conversion,
            lambda s, t: _job_request(
                request,
                job,
                *("--json", "--resume"),
                source=s,
                target=t,
                again=True,
                report=_page_path(report_dir, t),
            ),
            address,
        )
    elif flags := [f"--{name}" for name in ("env", "pip", "cpus") if job[name]]:
        raise UsageError(f"{flags[0]} applies only to jobs: give --submit ADDRESS too")
    run, out = (_absolute(request.values[name]) for name in ("source", "target"))
    published = None if versions is None else _absolute(versions)
    return open_watcher(run, out, conversion, policy, convert, published)


def _page_path(report_dir: Path | None, target: str) -> Path | None:
    return None if report_dir is None else report_dir / f"{target.rsplit('/', 1)[-1]}.html"


def _pages(request: Request, report_dir: Path | None) -> MakePage | None:
    """Pages of conversions in this process. Each shows the command that converts its checkpoint alone."""
    if report_dir is None:
        return None

    from paddle_reshard.pipeline.report.html_report import HtmlReport
    from paddle_reshard.pipeline.report.writing import check_writable

    check_writable(report_dir / "checkpoint.html")
    command = command_of(request.context)

    def make(source: str, target: str, observe: Observer) -> HtmlReport:
        path = cast(Path, _page_path(report_dir, target))
        return HtmlReport(path, observe, replace(command, arguments=(source, target)))

    return make


def _end_watch(watcher: Watcher, results: Mapping[str, Result], as_json: bool) -> int:
    """Report the results of the last pass. Returns the exit status."""
    from paddle_reshard.pipeline.watch.notices import Result

    words = {
        Result.CONVERTED: "converted",
        Result.DONE: "converted before",
        Result.WAITING: "waiting",
        Result.STALE: "stale",
        Result.FAILED: "failed",
    }
    every = list(results.values())
    counts = ", ".join(
        f"{every.count(result)} {text}"
        for result, text in words.items()
        if result is not Result.STALE or result in every
    )
    logging.getLogger(__name__).info("%s", counts)
    if as_json:
        checkpoints = {
            name: {"result": result.value, "message": watcher.notices.messages.get(name)}
            for name, result in results.items()
        }
        locations = {"run": watcher.run.location, "targets": watcher.out.location}
        print_object("watch", {**locations, "checkpoints": checkpoints})
    return 1 if {Result.FAILED, Result.STALE} & {*every} else 0


# ------------------------------------------------------------------------------------------------- output


def _say(message: str) -> None:
    say(f"paddle-reshard: {message}", err=True)


@contextmanager
def _reporting(command: str, consequence: str, as_json: bool, service: bool = False) -> Iterator[None]:
    """Report an interrupt and its consequence. A ``service`` ends with status 0 after SIGTERM."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        status = 0 if service and signal_of(interrupt) is signal.SIGTERM else exit_status(interrupt)
        end = End(status, f"{sentence(interrupt)}; {consequence}", "Interrupted", True)
        if as_json:
            print_answer(Answer(command, end.message, end.kind, end.retryable))
        _say(end.message)
        sys.exit(end.status)


def _log_to_stderr(level: int) -> None:
    """Log to stderr, with times in UTC."""
    handler = logging.StreamHandler()
    handler.setFormatter(log_formatter())
    handler.setLevel(level)
    root = logging.getLogger()
    if logging.lastResort is not None:
        root.removeHandler(logging.lastResort)
    root.addHandler(handler)
    logging.getLogger("paddle_reshard").setLevel(logging.INFO)
