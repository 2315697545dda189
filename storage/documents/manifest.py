"""Whether a file is the manifest of a target of ours. :mod:`paddle_reshard.pipeline.convert` reads what it says."""

from __future__ import annotations

from typing import Any

from paddle_reshard.pipeline.core.file_names import MANIFEST_FORMAT
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json


def own_manifest(data: bytes | None) -> dict[str, Any] | None:
    """The entries of a manifest; ``None`` where there is none, or another program's file of that name.

    >>> own_manifest(b'{"format": "paddle-reshard manifest", "plan_id": "a"}')["plan_id"]
    'a'
    >>> own_manifest(b'{"format": "another"}') is None
    True
    """
    try:
        values = None if data is None else parse_json(data)
    except JsonError:
        return None
    return values if isinstance(values, dict) and values.get("format") == MANIFEST_FORMAT else None
