"""Which store does a path or URL belong to?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paddle_reshard.pipeline.errors import UnsupportedError
from paddle_reshard.storage.local import LocalSource, LocalTarget
from paddle_reshard.storage.store import Source, Target

StorageOptions = Mapping[str, Any]


def open_source(location: str, options: StorageOptions) -> Source:
    """Look at a checkpoint: its files and their sizes."""
    return LocalSource(local_path(location))


def open_target(location: str, overwrite: bool, options: StorageOptions) -> Target:
    """Check that a place for a new checkpoint is free; nothing is written yet."""
    return LocalTarget(local_path(location), overwrite)


def is_local(location: str) -> bool:
    """Whether a location is a path on this machine's file system."""
    return "://" not in location


def local_path(location: str) -> Path:
    """The path of a local location."""
    if not is_local(location):
        scheme = location.split("://", 1)[0]
        raise UnsupportedError(f"{scheme}:// is not supported: this version works on local folders")
    return Path(location)
