"""Quantised weights in safetensors files: how they and their scales are stored, and as what they are served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from paddle_reshard.pipeline.core.errors import CoverageError
from paddle_reshard.storage.files.paddle_pickle import ArrayRef
from paddle_reshard.storage.files.safetensors import SafetensorsPayload


class Scales(NamedTuple):
    """The scales of an FP8 weight: a matrix in C order, one row for each 128 rows of the weight."""

    path: str
    byte_offset: int
    code: str
    """NumPy's code of the stored bytes: float32, or bfloat16 as bit patterns."""
    columns: int
    width: int
    """Columns of the weight."""


class Packed(NamedTuple):
    """The scales of MXFP4 experts, and how those are stored: ``[experts, columns, groups, 16]``, all in bytes."""

    path: str
    """File of the scales, ``[experts, columns, groups]``."""
    byte_offset: int
    columns: int
    """Columns of an expert as it is served."""
    groups: int
    """Groups of 32 rows of an expert as it is served."""


class Integers(NamedTuple):
    """The scales of a weight of integers, and how both are stored, in C order."""

    path: str
    """File of the scales."""
    byte_offset: int
    """Where the scales begin."""
    code: str
    """NumPy's code of the stored scales and of the values as they are served: float16, or bfloat16 as bit patterns."""
    columns: int
    """Scales of a row."""
    width: int
    """Columns of the weight."""
    group: int
    """Columns that share a scale."""
    bits: int
    row_bytes: int
    """Stored bytes of a row of integers."""
    packed: bool
    """Whether half their range was added to the integers."""

    def byte_of(self, element: int) -> int:
        """Offset of the stored byte that holds an element, numbered in C order."""
        row, column = divmod(element, self.width)
        return row * self.row_bytes + column * self.bits // 8


class ServedTensor(NamedTuple):
    """A tensor as it is served."""

    key: str
    shape: tuple[int, ...]
    tag: str
    scales: Scales | Packed | Integers | None
    """``None``: it is served as it is stored."""


@dataclass(frozen=True)
class StoredTensors:
    """The tensors of all safetensors files of a checkpoint, by key."""

    payloads: Mapping[str, SafetensorsPayload]
    """Path → header."""
    shapes: Mapping[str, tuple[int, int]]
    """Key → values of the tensors that hold the shape of a packed weight."""

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

        ``expected`` is the shape of the scales; ``codes`` maps the tags of the dtypes that they can have to codes. A
        ``CoverageError`` if no file holds them, or they have another shape or dtype.
        """
        self.check_scales(key, weight)
        path, array, tag = self.held[key], self.array(key), self.tag(key)
        if array.shape != expected:
            detail = f"shape {array.shape}, but a weight of shape {shape} has scales of shape {expected}"
            raise CoverageError(key, detail, (path,))
        if tag not in codes:
            raise CoverageError(key, f"scales stored as {tag}; supported: {', '.join(codes)}", (path,))
        return path, array.byte_offset, codes[tag]


class Scheme(NamedTuple):
    """How the quantised weights of a checkpoint are stored, and their scales."""

    method: str
    """``quant_method``."""
    kind: str
    """What is stored, in words."""
    scaled: str
    """What has a scale of its own, in words."""
    stored: str
    """What the key of a stored weight ends with."""
    served: str
    """What replaces it in the key of the weight as it is served."""
    companions: tuple[str, ...]
    """What replaces it in the keys of its scales, and of what else belongs to it."""
    tag: str | None
    """Stored dtype, where the key does not tell quantised weights from others."""
    weight: Callable[[str, str, StoredTensors], ServedTensor]
    """The weight that is stored under the first key and served under the second; raises a ``ReshardError``."""
