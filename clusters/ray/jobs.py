"""Conversions as Ray jobs, through Ray's own client. A conversion has one submission id: submitted twice, it runs once.

::

    arguments of `convert` ─► submission id ─► latest attempt on the cluster?
                                                ├─ runs or has succeeded ─► attach to it
                                                └─ none, failed, stopped ─► submit `<id>`, `<id>-2`, `<id>-3`, …

The cluster's token authentication applies: Ray reads ``RAY_AUTH_MODE`` and ``RAY_AUTH_TOKEN``. Credentials of stores
are never part of an entrypoint, an id, a message or what Ray shows of a job: they are environment variables, which are
sent in a file that the job reads (:mod:`paddle_reshard.clusters.ray.environment`).
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ray.exceptions import RayError
from ray.job_submission import JobStatus, JobSubmissionClient

from paddle_reshard.clusters.ray import environment
from paddle_reshard.clusters.ray.head import TOKEN_HINT
from paddle_reshard.pipeline.core.errors import JobError, ReshardError, UsageError
from paddle_reshard.pipeline.core.version import __version__
from paddle_reshard.storage.session.holder import user_at_host

PACKAGE = Path(__file__).parents[2]
POLL_SECONDS = 1.0
LOST_CONTACT_SECONDS = 600.0
_CHATTY = ("ray", "ray.dashboard.modules.dashboard_sdk")
"""Loggers that report every package that Ray uploads; the second has a level of its own."""
_ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
_NO_SUCH_JOB = re.compile(r"status code 404\b.*\bdoes not exist", re.DOTALL)
"""What Ray's client raises when the head answers that it does not know a job."""
_WANTS_TOKEN = re.compile("(?i)authentication|RAY_AUTH_MODE")
"""In what it raises when the head wants another token, or any."""
_LOG_IN_MESSAGE = ", last available logs"
"""Text after which Ray's message repeats the log."""


@dataclass(frozen=True, slots=True)
class ConversionJob:
    """A conversion to run as a job."""

    arguments: tuple[str, ...]
    """Arguments of ``paddle-reshard convert``, without secrets; first the source and the target."""
    submission_id: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Name → contents of the small files that the arguments name; they are sent with the job."""
    upload: str = "always"
    """``always``: the job runs this package, which is uploaded. Ray caches uploads by their hash. ``never``: it runs
    the package that is installed on the cluster."""
    pip: tuple[str, ...] = ()
    """Requirements to install for the job."""
    env: tuple[str, ...] = ()
    """Names of this process's environment variables to pass to the job; ``*`` matches anything."""
    cpus: float | None = None
    """CPUs that the converter itself reserves; ``None``: it runs on the head and reserves none."""
    again: bool = False
    """Run it even if an earlier job with this id has succeeded. A job in progress is attached to in any case."""


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A job on a cluster."""

    client: JobSubmissionClient
    submission_id: str
    attached: bool
    """Whether the job existed before."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended: its status, and Ray's message without the log."""

    submission_id: str
    status: str
    message: str

    @property
    def succeeded(self) -> bool:
        """Whether it did what it was submitted for."""
        return self.status == JobStatus.SUCCEEDED


def entrypoint_of(arguments: Sequence[str], with_environment: bool = False) -> str:
    """The shell command of a job; ``python`` is the one on the head's ``PATH``."""
    line = shlex.join(["python", "-m", "paddle_reshard", "convert", *arguments])
    return f". ./{environment.FILE} && {line}" if with_environment else line


def metadata_of(request: ConversionJob) -> dict[str, str]:
    """What Ray's dashboard and ``list_jobs`` show of a job besides its id: a name, and what becomes of what."""
    source, target = request.arguments[:2]
    name = f"paddle-reshard {PurePosixPath(source).name} to {target}"
    shown = {"job_name": name, "source": source, "target": target}
    return {**shown, "submitted_by": user_at_host(), "version": __version__}


def submit_conversion(request: ConversionJob, address: str | None) -> SubmittedJob:
    """Submit a conversion, or attach to its existing job.

    Raises
    ------
    JobError
        If the cluster cannot be reached, or rejects the job.
    UsageError
        As :func:`~.environment.chosen_variables`.
    """
    variables = environment.chosen_variables(request.env)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    with _failing(variables.values()), tempfile.TemporaryDirectory(prefix="paddle-reshard-") as staging:
        client = connect(address)
        submission_id, exists = _attempt(client, request)
        if not exists:
            try:
                client.submit_job(
                    entrypoint=entrypoint_of(request.arguments, bool(variables)),
                    submission_id=submission_id,
                    runtime_env=_runtime_env(request, variables, Path(staging)),
                    entrypoint_num_cpus=request.cpus,
                    metadata=metadata_of(request),
                )
            except RuntimeError as error:
                exists = "already exists" in str(error)  # another process was faster
                if not exists:
                    raise
    return SubmittedJob(client, submission_id, attached=exists)


def connect(address: str | None) -> JobSubmissionClient:
    """Ray's client of the cluster at ``address``, or of the one in ``RAY_ADDRESS``.

    Ray prefers its variables to an explicit address; here the explicit address takes precedence.
    """
    if address is not None and re.fullmatch(r"[^/]+:[0-9]+", address):
        raise UsageError(
            f"{address!r} is no address of the jobs of a cluster: give http://HOST:8265, with the port of its dashboard"
        )
    names = () if address is None else _ADDRESS_VARIABLES
    saved = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        return JobSubmissionClient(address)
    finally:
        os.environ.update(saved)


def _attempt(client: JobSubmissionClient, request: ConversionJob) -> tuple[str, bool]:
    """The submission id to use, and whether it is that of a job to attach to. The latest attempt decides."""
    pattern = re.compile(rf"{re.escape(request.submission_id)}(?:-([0-9]{{1,9}}))?")
    attempts = {
        int(match[1] or 1): job.status
        for job in client.list_jobs()
        if (match := pattern.fullmatch(job.submission_id or ""))
    }
    number, attach = max(attempts, default=0), False
    if attempts:
        status = attempts[number]
        attach = not status.is_terminal() or (status == JobStatus.SUCCEEDED and not request.again)
    number += not attach
    return (request.submission_id if number == 1 else f"{request.submission_id}-{number}"), attach


def _runtime_env(request: ConversionJob, variables: Mapping[str, str], staging: Path) -> dict[str, Any]:
    """Ray's description of what the job needs. Folders to upload are created in ``staging``.

    A job always has a working directory of its own, because Python and Ray search that directory for modules, and the
    head's own directory is not ours. Only its owner can read the variables in it.
    """
    folder = staging / "files"
    folder.mkdir()
    for name, data in request.files.items():
        (folder / name).write_bytes(data)
    if variables:
        (folder / environment.FILE).touch(mode=0o600)
        (folder / environment.FILE).write_bytes(environment.shell_file(variables))
    runtime_env: dict[str, Any] = {"working_dir": str(folder)}
    if request.pip:
        runtime_env["pip"] = list(request.pip)
    if request.upload == "always":
        package = shutil.copytree(
            PACKAGE, staging / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__")
        )
        runtime_env["py_modules"] = [str(package)]
    return runtime_env


def follow_job(job: SubmittedJob, write: Callable[[str], None]) -> JobEnd:
    """Write a job's output, in whole lines, until the job ends.

    The log is asked for again and again: a conversion writes few lines, and this survives proxies without websockets,
    which Ray's ``tail_job_logs`` needs, a restarted dashboard and a lost connection. An interrupt does not affect the
    job.

    Raises
    ------
    JobError
        If the cluster says that it has no such job, or has not answered for ten minutes.
    """
    shown, heard_at = 0, time.monotonic()
    while True:
        try:
            info = job.client.get_job_info(job.submission_id)
            log = job.client.get_job_logs(job.submission_id)
        except (OSError, RuntimeError) as error:
            if _NO_SUCH_JOB.search(str(error)):
                raise JobError(
                    f"{job.submission_id}: the cluster answers that it has no such job: it was deleted, or the head "
                    "has come back without its state; submit it again, which continues the conversion"
                ) from error
            if time.monotonic() - heard_at > LOST_CONTACT_SECONDS:
                raise JobError(f"{job.submission_id}: lost contact with the cluster: {error}") from error
        else:
            heard_at, ended = time.monotonic(), info.status.is_terminal()
            end = len(log) if ended else log.rfind("\n") + 1
            if end > shown:
                write(log[shown:end])
                shown = end
            if ended:
                message = " ".join((info.message or "").split(_LOG_IN_MESSAGE)[0].split())
                return JobEnd(job.submission_id, str(info.status.value), message)
        time.sleep(POLL_SECONDS)


@contextmanager
def _failing(secrets: Iterable[str]) -> Iterator[None]:
    """Turn errors of Ray's client into one sentence without secrets."""
    try:
        yield
    except ReshardError:
        raise
    except (RayError, OSError, RuntimeError, ValueError) as error:
        message = " ".join(str(error).split())
        for secret in filter(None, secrets):
            message = message.replace(secret, "…")
        if isinstance(error, ConnectionError):
            raise JobError(f"the cluster cannot be reached: {message}") from None
        raise JobError(
            f"the cluster rejected the job: {message}{TOKEN_HINT if _WANTS_TOKEN.search(message) else ''}"
        ) from None
