"""Packages that are installed only by those who need them, as extras of this one."""

from __future__ import annotations

from importlib.util import find_spec

from paddle_reshard.pipeline.core.errors import UnsupportedError


def require(package: str, extra: str, purpose: str) -> None:
    """Check that a package is installed, before it is imported.

    >>> require("sys", "s3", "anything")

    Raises
    ------
    UnsupportedError
        If it is not, with the command that installs it.
    """
    if find_spec(package) is None:
        raise UnsupportedError(
            f"{purpose} needs the package {package}, which is not installed: pip install 'paddle-reshard[{extra}]'"
        )
