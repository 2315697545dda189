"""How do variables that hold credentials reach a job, and its workers?

Not as the environment of a job of Ray: that is shown to everybody who may see the job, logged on every node, and
part of the command line of Ray's own processes. They travel in a small file that the job's shell reads first; the
driver hands them to its workers as it hands them their settings.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

from paddle_reshard.pipeline.core.errors import UsageError

FILE = "environment.sh"
WORKER_ENV = "PADDLE_RESHARD_WORKER_ENV"
"""Names of the driver's variables that its workers get, separated by commas."""


def shell_file(variables: Mapping[str, str]) -> bytes:
    """What the shell of a job reads: the variables, and that the workers get them too.

    >>> print(shell_file({"A": "two words"}).decode(), end="")
    export PADDLE_RESHARD_WORKER_ENV=A
    export A='two words'
    """
    exported = {WORKER_ENV: ",".join(variables), **variables}
    lines = (f"export {name}={shlex.quote(value)}\n" for name, value in exported.items())
    return "".join(lines).encode()


def handed_on() -> dict[str, str]:
    """The variables of this process that its workers get.

    Raises
    ------
    UsageError
        If one of them is not set.
    """
    names = [name for name in os.environ.get(WORKER_ENV, "").split(",") if name]
    if missing := [name for name in names if name not in os.environ]:
        raise UsageError(f"{WORKER_ENV} names {missing[0]}, and no such variable is set here")
    return {name: os.environ[name] for name in names}
