"""The command ``submit``: a conversion as a Ray job."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from paddle_reshard.pipeline.cli.commands.conversion import convert
from paddle_reshard.pipeline.cli.commands.forwarded import ConvertArguments, ForConvert, job_options
from paddle_reshard.pipeline.cli.options import LOCATION
from paddle_reshard.pipeline.cli.signals import exit_status
from paddle_reshard.pipeline.cli.terminal import print_answer, print_object, relay, say
from paddle_reshard.pipeline.core.answer import Answer

if TYPE_CHECKING:
    from paddle_reshard.clusters.ray.jobs import ConversionJob, JobEnd

NO_ACCESS = ("no credentials were found", "access denied")
"""Errors of a job without credentials, or with those of the machine on which it runs."""


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
@job_options
@click.argument("arguments", nargs=-1, type=LOCATION, metavar="SRC DST")
def submit(address: str | None, follow: bool, again: bool, arguments: tuple[str, ...], **job: Any) -> None:
    """Run `paddle-reshard convert SRC DST …` as a job of a Ray cluster.

    Takes every option of convert except --target; --report is written by the job, on the machine where it runs. The
    submission id is a hash of the conversion: submitted twice, it
    runs once, and the second call follows the first job. The exit status is 0 if the job succeeded and 1 if not. SRC
    and DST must be reachable under the same names on the cluster. For token authentication set RAY_AUTH_MODE and
    RAY_AUTH_TOKEN.
    """
    request = ConvertArguments.read(convert, arguments)
    afresh = again and request.values["overwrite"]
    asked = request.job(job, *([] if afresh else ["--resume"]), again=again)
    sys.exit(_run(asked, address, follow, request.values["as_json"], request.values["quiet"]))


def _run(request: ConversionJob, address: str | None, follow: bool, as_json: bool, quiet: bool) -> int:
    """Submit a job, follow it, and tell how it ended. Returns the exit status."""
    from paddle_reshard.clusters.ray.jobs import follow_job, submit_conversion

    job = submit_conversion(request, address)
    facts: dict[str, Any] = {"submission_id": job.submission_id, "attached": job.attached}
    lines: list[str] = []

    def write(text: str) -> None:
        lines.extend(text.splitlines())
        if not quiet:
            relay(text, err=as_json)  # stdout is for one object

    try:
        if not quiet:
            _say(f"{'attached to' if job.attached else 'submitted'} {job.submission_id}")
        if not follow:
            if as_json:
                print_object("submit", {**facts, "status": None, "result": None})
            elif not quiet:
                click.echo(job.submission_id)
            return 0
        end = follow_job(job, write)
    except KeyboardInterrupt as interrupt:
        _say(f"the job continues; follow it with: ray job logs --follow {job.submission_id}")
        _say(f"or submit the same conversion again; stop it with: ray job stop {job.submission_id}")
        if as_json:
            facts |= {"status": None, "result": None}
            print_answer(Answer("submit", "interrupted; the job continues", "Interrupted", True, facts))
        return exit_status(interrupt)
    _tell_end(end, [] if as_json or not quiet else lines, quiet)
    if not (end.succeeded or request.env) and any(reason in line for line in lines for reason in NO_ACCESS):
        _say("the job has none of this shell's environment variables; pass credentials with --env 'AWS_*'")
    if as_json:
        print_answer(_answer_about(end, lines, facts))
    return 0 if end.succeeded else 1


def _tell_end(end: JobEnd, untold: Sequence[str], quiet: bool) -> None:
    """Tell how a job ended; of a failure the last of the lines that were not shown, which gives the reason."""
    if end.succeeded and quiet:
        return
    for line in [line for line in untold if line.strip()][-1:]:
        relay(f"{line}\n", err=True)
    _say(f"{end.submission_id} {end.status}{'' if end.succeeded else f': {end.message}'}")


def _answer_about(end: JobEnd, lines: Sequence[str], facts: Mapping[str, Any]) -> Answer:
    """The JSON object about a job that ended, with that of the conversion in its log as ``result``."""
    from paddle_reshard.clusters.answers import answer_of_job, failure_of_job

    answer = answer_of_job(lines)
    if end.succeeded:
        result = None if answer is None else answer.data()
        return Answer("submit", facts={**facts, "status": end.status, "result": result})
    failure = failure_of_job(answer, end.message)
    told = {**facts, "status": end.status, "result": None}
    return Answer("submit", str(failure), type(failure).__name__, failure.retryable, told)


def _say(message: str) -> None:
    say(f"paddle-reshard: {message}", err=True)
