"""A small file given by the user, as a path or as text kept in a session."""

from __future__ import annotations

from dataclasses import dataclass

from paddle_reshard.pipeline.core.units import PathLike


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A small file of an interrupted conversion, kept in its session."""

    name: str
    text: str

    def __str__(self) -> str:
        return self.name


GivenFile = PathLike | KeptFile
