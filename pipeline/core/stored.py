"""What a file holds, where nobody can say of which tensor."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from paddle_reshard.pipeline.core.geometry import Shape


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """An array as a file holds it: a whole tensor, or the piece of a rank."""

    file: str
    key: str
    """In the file; keys of nested dicts are joined by ``/``."""
    state: str
    """What it is by its key and the name of the file."""
    shape: Shape
    dtype: str

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return prod(self.shape)
