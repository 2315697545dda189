"""The command ``watch``: conversions of the checkpoints of a run, as they finish."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from paddle_reshard.pipeline.cli.command import command_of, running
from paddle_reshard.pipeline.cli.commands.conversion import convert
from paddle_reshard.pipeline.cli.commands.forwarded import (
    REPORT,
    ConvertArguments,
    ForConvert,
    absolute,
    job_options,
)
from paddle_reshard.pipeline.cli.options import LOCATION, ON_STDERR, events_option, read_duration
from paddle_reshard.pipeline.cli.signals import exit_status, sentence, signal_of
from paddle_reshard.pipeline.cli.terminal import log_formatter, print_answer, print_object, say
from paddle_reshard.pipeline.core.answer import Answer
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.progress.metrics import CheckpointFigures, read_address
from paddle_reshard.pipeline.request.options import ConvertOptions, declarations, flag_of
from paddle_reshard.pipeline.request.parse import parse_request

if TYPE_CHECKING:
    from paddle_reshard.clusters.ray.jobs import ConversionJob
    from paddle_reshard.pipeline.core.events import Observer
    from paddle_reshard.pipeline.watch.notices import Result
    from paddle_reshard.pipeline.watch.runners import Conversion, Convert, MakePage
    from paddle_reshard.pipeline.watch.watcher import Watcher

OF_A_JOB = ("upload", "pip", "env", "cpus")
"""Names of the options of a job."""


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
@click.option(
    "--metrics-port",
    type=read_address,
    metavar="[HOST:]PORT",
    help="Serve metrics for Prometheus at this port, on 127.0.0.1 unless HOST is given.",
)
@job_options
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
    with _told_of_interrupts("--json" in arguments, service=not once):
        from paddle_reshard.pipeline.watch.decisions import Policy
        from paddle_reshard.pipeline.watch.watcher import Watcher

        request = ConvertArguments.read(convert, arguments)
        policy = Policy(
            keep=settings["keep"],
            retries=settings["retries"],
            backoff_seconds=settings["backoff"],
            settle_seconds=settings["settle"],
            overwrite=bool(request.values.get("overwrite")),
            forget_before=time.time() if retry_failed else 0.0,
            stale_seconds=settings["stale"],
        )
        if settings["events"] == ON_STDERR:
            raise UsageError("--events - prints on stderr, and watch writes a log there; give a file")
        with running(figures=CheckpointFigures(), silent=True) as run:
            conversion = _conversion(request)
            job = {name: settings[name] for name in OF_A_JOB}
            runner = _runner(request, conversion, address, job, run, report_dir)
            source, target = (absolute(request.values[place]) for place in ("source", "target"))
            watcher = Watcher(source, target, conversion, policy, runner)
            if not wait and not watcher.run.is_there():
                raise UsageError(
                    f"{watcher.run.location}: no such folder; use --wait if the run has not started yet"
                )
            _log_to_stderr(logging.ERROR if request.values["quiet"] else logging.INFO)
            watcher.tell = run
            results = watcher.once() if once else watcher.repeat(every)
        sys.exit(_end(watcher, results, request.values["as_json"]))


def _conversion(request: ConvertArguments) -> Conversion:
    """How every checkpoint is converted; mistakes are reported once, not for each."""
    from paddle_reshard.pipeline.watch.runners import Conversion

    for name in request.given:
        if reason := declarations()[name].not_scheduled:
            raise UsageError(f"{flag_of(name)} {reason}")
    if request.values[REPORT] is not None:
        raise UsageError(
            "--report is the page of one conversion; watch writes one for each with --report-dir DIR"
        )
    asked = parse_request(cast(ConvertOptions, request.given))
    asked.check()
    return Conversion(asked, request.identify)


def _runner(
    request: ConvertArguments,
    conversion: Conversion,
    address: str | None,
    job: Mapping[str, Any],
    observe: Observer,
    report_dir: Path | None,
) -> Convert:
    """What converts a checkpoint: this process, or a job of the cluster at ``address``."""
    from paddle_reshard.pipeline.convert.conversion import engine_of
    from paddle_reshard.pipeline.watch.runners import convert_as_job, convert_inline

    if address is None:
        if flags := [f"--{name}" for name in ("env", "pip", "cpus") if job[name]]:
            raise UsageError(f"{flags[0]} applies only to jobs: give --submit ADDRESS too")
        engine_of(conversion.request)  # refuses at once what none can have
        return convert_inline(conversion, observe, _pages(request, report_dir))

    def job_of(source: str, target: str) -> ConversionJob:
        page = None if report_dir is None else _page(report_dir, target)
        flags = ("--json", "--resume")
        return request.job(job, *flags, source=source, target=target, again=True, report=page)

    job_of(request.values["source"], request.values["target"])  # refuse what no job can have at once
    return convert_as_job(conversion, job_of, address)


def _page(report_dir: Path, target: str) -> Path:
    return report_dir / f"{target.rsplit('/', 1)[-1]}.html"


def _pages(request: ConvertArguments, report_dir: Path | None) -> MakePage | None:
    """Pages of conversions in this process. Each shows the command that converts its checkpoint alone."""
    if report_dir is None:
        return None

    from paddle_reshard.pipeline.report.html_report import HtmlReport
    from paddle_reshard.storage.local.folders import check_writable
    from paddle_reshard.storage.os_errors import writing

    with writing(report_dir, UsageError):
        report_dir.mkdir(parents=True, exist_ok=True)
    check_writable(report_dir / "checkpoint.html", UsageError)
    command = command_of(request.context)

    def make(source: str, target: str, observe: Observer) -> HtmlReport:
        return HtmlReport(_page(report_dir, target), observe, replace(command, arguments=(source, target)))

    return make


def _end(watcher: Watcher, results: Mapping[str, Result], as_json: bool) -> int:
    """Report the results of the last pass. Returns the exit status."""
    from paddle_reshard.pipeline.watch.notices import Result

    words = {Result.DONE: "converted before"}
    every = list(results.values())
    counts = ", ".join(
        f"{every.count(result)} {words.get(result, result.value)}"
        for result in Result
        if result is not Result.STALE or result in every
    )
    logging.getLogger(__name__).info("%s", counts)
    if as_json:
        messages = watcher.notices.messages
        checkpoints = {
            name: {"result": result.value, "message": messages.get(name)} for name, result in results.items()
        }
        locations = {"run": watcher.run.location, "targets": watcher.out.location}
        print_object("watch", {**locations, "checkpoints": checkpoints})
    return 1 if {Result.FAILED, Result.STALE} & {*every} else 0


@contextmanager
def _told_of_interrupts(as_json: bool, service: bool) -> Iterator[None]:
    """Tell an interrupt and its consequence. A ``service`` ends with status 0 after SIGTERM."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        message = f"{sentence(interrupt)}; the next watcher goes on"
        if as_json:
            print_answer(Answer("watch", message, "Interrupted", True))
        say(f"paddle-reshard: {message}", err=True)
        stopped = service and signal_of(interrupt) is signal.SIGTERM
        sys.exit(0 if stopped else exit_status(interrupt))


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
