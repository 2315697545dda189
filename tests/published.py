"""What commands print with ``--json``, held against the schema in ``docs/schemas``."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import jsonschema

from tests.conftest import REPO

SCHEMA = json.loads((REPO / "docs" / "schemas" / "output-1.json").read_text())


def checked(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the only object that a command printed, which is as the published schema says."""
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    jsonschema.validate(found, SCHEMA)
    return found
