"""The settings of a private Ray, which Ray reads from the environment while it is imported, and then never again.

With them Ray calls this machine 127.0.0.1, listens nowhere else, and answers only clients that know a token, which is
in the environment of its processes and in no file. Nothing here imports Ray, nor needs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

SETTINGS: Mapping[str, str] = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_K8S_TOKEN_AUTH": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # where it is 0, as by default on macOS, nodes are on the loopback alone
}
_TOKEN = "RAY_AUTH_TOKEN"


def prepare() -> None:
    """Have this process start only private Rays, unless it has imported Ray already. Its token stays the same."""
    if "ray" not in sys.modules:
        import secrets

        os.environ.update({**SETTINGS, _TOKEN: secrets.token_hex(32)})


def is_prepared() -> bool:
    """Whether the environment has the settings of a private Ray."""
    return _TOKEN in os.environ and all(os.environ.get(name) == value for name, value in SETTINGS.items())
