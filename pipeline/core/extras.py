"""Packages that are installed only by those who need them, as extras of this one."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec

from paddle_reshard.pipeline.core.errors import UnsupportedError


def require(package: str, extra: str, purpose: str) -> None:
    """Refuse unless a package is installed, before it is imported; the error says which command installs it.

    >>> require("sys", "s3", "anything")
    """
    if find_spec(package) is None:
        # On a Ray head `python` need not be Ray's own.
        pip = f"{shlex.quote(sys.executable or 'python')} -m pip install"
        raise UnsupportedError(
            f"{purpose} needs the package {package}, which is not installed: {pip} 'paddle-reshard[{extra}]'"
        )
