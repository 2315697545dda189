"""Arrays in files whose logical tensors are not known."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from paddle_reshard.pipeline.core.geometry import Shape


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """An array as stored in a file: a whole tensor, or the part of a rank."""

    file: str
    key: str
    """Key in the file; keys of nested dicts are joined by ``/``."""
    state: str
    """State according to its key and the name of the file."""
    shape: Shape
    dtype: str

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)
