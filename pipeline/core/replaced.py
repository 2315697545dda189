"""Names of an earlier release → what replaces them, for one release. Only the error about such a name uses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_VERSIONS = "docs/deltas.md"

COMMANDS: Final[Mapping[str, str]] = {
    "delta": f"publish replaces it: {_VERSIONS}",
    "apply": f"pull replaces it: {_VERSIONS}",
    "simulate": "plan SRC … --workers 1,8,64 replaces it: docs/guides/clusters.md",
    "explain --source": "explain SRC … --to … replaces it: docs/proof.md",
    "watch --delta": f"--publish VERSIONS replaces it: {_VERSIONS}",
    "watch --claim-timeout": "the lock of a conversion, which expires by itself, replaces it: docs/operations.md",
    "--log-file": "--events FILE replaces it: docs/operations.md",
}
"""Of the command line: a command, an option, or a command and its option."""
NAMES: Final[Mapping[str, str]] = {
    "checkpoints": "ls: docs/api.md",
    "delta": f"publish and pull: {_VERSIONS}",
    "apply_delta": f"publish and pull: {_VERSIONS}",
    "plan_again": "plan, with the options that a manifest states: docs/proof.md#what-was-asked",
}
"""Of the package in Python."""
