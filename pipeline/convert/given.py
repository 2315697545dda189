"""A small file that a user gives beside a checkpoint: a path, or what a session has kept of it."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_reshard.pipeline.core.units import PathLike


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A small file that a conversion was begun with, as its session has kept it."""

    name: str
    text: str

    def __str__(self) -> str:
        return self.name


GivenFile = PathLike | KeptFile
