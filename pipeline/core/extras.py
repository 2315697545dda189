"""Packages that are installed only by those who need them, as extras of this one."""

from __future__ import annotations

from importlib.util import find_spec

from paddle_reshard.pipeline.core.errors import UnsupportedError


def require(package: str, extra: str, purpose: str) -> None:
    """Refuse unless a package is installed, before it is imported; the error says which command installs it.

    >>> require("sys", "s3", "anything")
    """
    if find_spec(package) is None:
        raise UnsupportedError(
            f"{purpose} needs the package {package}, which is not installed: pip install 'paddle-reshard[{extra}]'"
        )
