"""The tensors of safetensors files as they are stored, and the scales of those that are quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from paddle_reshard.pipeline.core.errors import CoverageError
from paddle_reshard.storage.files.paddle_pickle import ArrayRef
from paddle_reshard.storage.files.safetensors import SafetensorsPayload


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of all safetensors files of a checkpoint, by key."""

    payloads: Mapping[str, SafetensorsPayload]
    """Path → header."""

    @cached_property
    def held(self) -> dict[str, str]:
        """Key → path."""
        return {key: path for path, payload in self.payloads.items() for key in payload.tensors}

    def array(self, key: str) -> ArrayRef:
        """Where a tensor lies in its file, and its shape."""
        return self.payloads[self.held[key]].tensors[key]

    def tag(self, key: str) -> str:
        """The stored dtype of a tensor."""
        return self.payloads[self.held[key]].tags[key]

    def check_once(self) -> None:
        """Raise ``CoverageError`` if two files hold one tensor."""
        for path, payload in self.payloads.items():
            for key in payload.tensors:
                if self.held[key] != path:
                    raise CoverageError(key, "two files hold it", (path, self.held[key]))

    def check_scales(self, key: str, weight: str) -> None:
        """Raise ``CoverageError`` if no file holds the scales ``key`` of the ``weight``."""
        if key not in self.held:
            raise CoverageError(key, f"no file holds the scales of {weight}", (self.held[weight],))

    def scales(
        self,
        key: str,
        weight: str,
        shape: tuple[int, ...],
        expected: tuple[int, ...],
        codes: Mapping[str, str],
    ) -> tuple[str, int, str]:
        """File, first byte and NumPy's code of the scales of a weight of this ``shape``.

        Parameters
        ----------
        expected
            Shape of the scales.
        codes
            Tag → code, of the dtypes that they can have.

        Raises
        ------
        CoverageError
            If no file holds them, or they have another shape or dtype.
        """
        self.check_scales(key, weight)
        path, array, tag = self.held[key], self.array(key), self.tag(key)
        if array.shape != expected:
            detail = f"shape {array.shape}, but a weight of shape {shape} has scales of shape {expected}"
            raise CoverageError(key, detail, (path,))
        if tag not in codes:
            raise CoverageError(key, f"scales stored as {tag}; supported: {', '.join(codes)}", (path,))
        return path, array.byte_offset, codes[tag]
