"""What commands print and write as JSON, held against the schemas in ``docs/schemas``."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from typing import Any

import jsonschema

from tests.conftest import REPO


@cache
def schema(name: str = "output-1") -> dict[str, Any]:
    """A published schema, which is one; to check that takes longer than to check what it describes."""
    found: dict[str, Any] = json.loads((REPO / "docs" / "schemas" / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def hold(found: object, name: str = "output-1") -> None:
    """Hold an object against the schema of this name."""
    validator = jsonschema.Draft202012Validator(schema(name), format_checker=jsonschema.FormatChecker())
    validator.validate(found)


def checked(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the only object that a command printed, which is as the published schema says."""
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    hold(found)
    return found
