"""Small files that a user gives along with a checkpoint: a rule table, a config, AOA statements."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.storage.documents.strict_json import parse_json


@dataclass(frozen=True, slots=True)
class GivenFile:
    """A small file as it was read; two are equal if their contents are."""

    path: str = field(compare=False)
    """Where it was read, for messages; its name alone if a session kept it."""
    sha256: str
    text: str | None = field(compare=False)
    """``None`` if a session found it too large to keep."""

    @classmethod
    def read(cls, path: PathLike) -> GivenFile:
        """Read a file.

        Raises
        ------
        UsageError
            If it cannot be read or is not UTF-8.
        """
        return cls.of(str(path), read_text(path))

    @classmethod
    def of(cls, path: str, text: str) -> GivenFile:
        """A file of this text."""
        import hashlib  # commands that are given no file do not load it

        return cls(path, hashlib.sha256(text.encode()).hexdigest(), text)

    @property
    def name(self) -> str:
        """Its name, without its folder."""
        return PurePath(self.path).name

    def __str__(self) -> str:
        return self.path


def read_text(file: PathLike | GivenFile) -> str:
    """The text of a small file.

    Raises
    ------
    UsageError
        If it cannot be read or is not UTF-8.
    """
    if isinstance(file, GivenFile):
        return file.text or ""
    try:
        return Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: cannot be read: {error}") from error


def read_object(file: PathLike | GivenFile) -> dict[str, Any]:
    """The JSON object in a small file.

    Raises
    ------
    UsageError
        If it cannot be read or holds something else.
    """
    try:
        value = parse_json(read_text(file))
    except ValueError as error:
        raise UsageError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{file}: expected a JSON object")
    return value
