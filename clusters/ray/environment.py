"""Pass environment variables with credentials to a job and its workers.

They must not be part of a Ray job's environment, which is shown to everybody who may see the job, logged on every node,
and part of the command lines of Ray's own processes. They are sent in a small file that the job's shell sources; the
driver passes them to its workers along with their settings.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from paddle_reshard.pipeline.core.errors import UsageError

FILE = "environment.sh"
WORKER_ENV = "PADDLE_RESHARD_WORKER_ENV"
"""Variable with the names of the driver's variables to pass to its workers, separated by commas."""


def chosen_variables(names: Sequence[str]) -> dict[str, str]:
    """The variables of this process with these names; ``*`` in a name matches anything, as in ``AWS_*``.

    Raises
    ------
    UsageError
        If none has a name.
    """
    chosen: dict[str, str] = {}
    for name in names:
        matching = {known: value for known, value in os.environ.items() if fnmatchcase(known, name)}
        if not matching:
            what = (
                "no environment variable matches" if "*" in name else "this environment variable is not set"
            )
            raise UsageError(f"--env {name}: {what}")
        chosen |= matching
    return chosen


def shell_file(variables: Mapping[str, str]) -> bytes:
    """The file that the shell of a job sources. It exports the variables and has them passed to workers.

    >>> print(shell_file({"A": "two words"}).decode(), end="")
    export PADDLE_RESHARD_WORKER_ENV=A
    export A='two words'
    """
    exported = {WORKER_ENV: ",".join(variables), **variables}
    lines = (f"export {name}={shlex.quote(value)}\n" for name, value in exported.items())
    return "".join(lines).encode()


def worker_variables() -> dict[str, str]:
    """The variables of this process to pass to its workers.

    Raises
    ------
    UsageError
        If one of them is not set.
    """
    names = [name for name in os.environ.get(WORKER_ENV, "").split(",") if name]
    if missing := [name for name in names if name not in os.environ]:
        raise UsageError(f"{WORKER_ENV} names {missing[0]}, but this environment variable is not set")
    return {name: os.environ[name] for name in names}
