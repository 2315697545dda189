"""Conversions as Ray jobs. A conversion has one submission id, so submitting it twice runs it once.

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
from paddle_reshard.pipeline.core.errors import JobError, ReshardError
from paddle_reshard.pipeline.core.version import __version__
from paddle_reshard.storage.session.holder import user_at_host

PACKAGE = Path(__file__).parents[2]
POLL_SECONDS = 1.0
LOST_CONTACT_SECONDS = 600.0
_CHATTY = ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging")
"""Loggers that report every package that Ray uploads; this module reports what matters."""
_API_ADDRESS = "RAY_API_SERVER_ADDRESS"
_ADDRESS_VARIABLES = (_API_ADDRESS, "RAY_ADDRESS")
_LOG_IN_MESSAGE = ", last available logs"
"""Text after which Ray's message repeats the log."""


@dataclass(frozen=True, slots=True)
class JobRequest:
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
class Job:
    """A job on a cluster."""

    client: JobSubmissionClient
    submission_id: str
    attached: bool
    """Whether the job existed before."""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended."""

    submission_id: str
    succeeded: bool
    status: str
    message: str

    @property
    def exit_status(self) -> int:
        """Exit status for a command that waited for the job."""
        return 0 if self.succeeded else 1


def entrypoint_of(arguments: Sequence[str], with_environment: bool = False) -> str:
    """The shell command of a job; ``python`` is the one on the head's ``PATH``."""
    line = shlex.join(["python", "-m", "paddle_reshard", "convert", *arguments])
    return f". ./{environment.FILE} && {line}" if with_environment else line


def metadata_of(request: JobRequest) -> dict[str, str]:
    """What Ray's dashboard and ``list_jobs`` show of a job besides its id: a name, and what becomes of what."""
    source, target = request.arguments[:2]
    return {
        "job_name": f"paddle-reshard {PurePosixPath(source).name} to {target}",
        "source": source,
        "target": target,
        "submitted_by": user_at_host(),
        "version": __version__,
    }


# ----------------------------------------------------------------------------------------------- submitting


def submit_conversion(request: JobRequest, address: str | None) -> Job:
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
    with _failing(variables.values()):
        client = connect(address)
        submission_id, attach = _find_attempt(client, request)
        if attach:
            return Job(client, submission_id, attached=True)
        with tempfile.TemporaryDirectory(prefix="paddle-reshard-") as staging:
            runtime_env = _runtime_env(request, variables, Path(staging))
            try:
                client.submit_job(
                    entrypoint=entrypoint_of(request.arguments, bool(variables)),
                    submission_id=submission_id,
                    runtime_env=runtime_env,
                    entrypoint_num_cpus=request.cpus,
                    metadata=metadata_of(request),
                )
            except RuntimeError as error:
                if "already exists" not in str(error):
                    raise
                return Job(client, submission_id, attached=True)  # another process was faster
    return Job(client, submission_id, attached=False)


def connect(address: str | None) -> JobSubmissionClient:
    """A client of the cluster at ``address``, or of the one in ``RAY_ADDRESS``.

    Ray prefers its variables to an explicit address; here the explicit address takes precedence.
    """
    if address is None:
        return JobSubmissionClient()
    saved = {name: os.environ.pop(name) for name in _ADDRESS_VARIABLES if name in os.environ}
    try:
        return JobSubmissionClient(address)
    finally:
        os.environ.update(saved)


def _find_attempt(client: JobSubmissionClient, request: JobRequest) -> tuple[str, bool]:
    """The id to use, and whether to attach to its job. The latest attempt decides."""
    latest: tuple[str, JobStatus] | None = None
    number = 1
    while True:
        name = request.submission_id if number == 1 else f"{request.submission_id}-{number}"
        status = _status(client, name)
        if status is None:
            break
        latest, number = (name, status), number + 1
    if latest is not None:
        done = latest[1] == JobStatus.SUCCEEDED and not request.again
        if done or not latest[1].is_terminal():
            return latest[0], True
    return name, False


def _status(client: JobSubmissionClient, submission_id: str) -> JobStatus | None:
    try:
        return client.get_job_status(submission_id)
    except RuntimeError as error:
        if "404" in str(error) or "does not exist" in str(error):
            return None
        raise


def _runtime_env(request: JobRequest, variables: Mapping[str, str], staging: Path) -> dict[str, Any]:
    """Ray's description of what the job needs. Folders to upload are created in ``staging``.

    A job always has a working directory of its own, because Python and Ray search that directory for modules, and the
    head's own directory is not ours.
    """
    folder = _folder(staging / "files", request.files, variables)
    runtime_env: dict[str, Any] = {"working_dir": str(folder)}
    if request.pip:
        runtime_env["pip"] = list(request.pip)
    if request.upload == "always":
        package = staging / PACKAGE.name
        shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
        runtime_env["py_modules"] = [str(package)]
    return runtime_env


def _folder(folder: Path, files: Mapping[str, bytes], variables: Mapping[str, str]) -> Path:
    """Create the working directory of a job. Only its owner can read the variables."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    if variables:
        (folder / environment.FILE).touch(mode=0o600)
        (folder / environment.FILE).write_bytes(environment.shell_file(variables))
    return folder


# ------------------------------------------------------------------------------------------------ following


def follow_job(job: Job, write: Callable[[str], None], poll_seconds: float = POLL_SECONDS) -> JobEnd:
    """Write a job's output, in whole lines, until the job ends.

    The log is polled: a conversion writes few lines, and polling survives proxies without websockets, a restarted
    dashboard and a lost connection. An interrupt does not affect the job.
    """
    shown, silent_since = 0, time.monotonic()
    while True:
        try:
            info = job.client.get_job_info(job.submission_id)
            ended = info.status.is_terminal()
            log = job.client.get_job_logs(job.submission_id)
        except (OSError, RuntimeError) as error:
            if time.monotonic() - silent_since > LOST_CONTACT_SECONDS:
                raise JobError(f"{job.submission_id}: lost contact with the cluster: {error}") from error
        else:
            silent_since = time.monotonic()
            end = len(log) if ended else log.rfind("\n") + 1
            if end > shown:
                write(log[shown:end])
                shown = end
            if ended:
                message = " ".join((info.message or "").split(_LOG_IN_MESSAGE)[0].split())
                succeeded = info.status == JobStatus.SUCCEEDED
                return JobEnd(job.submission_id, succeeded, str(info.status.value), message)
        time.sleep(poll_seconds)


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
        raise JobError(f"the cluster rejected the job: {message}") from None
