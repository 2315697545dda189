"""What an explanation says: stretches of a target file, boxes of values and where they come from, tensors and rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.shown import Facts, Result
from paddle_reshard.pipeline.core.tensors import DTYPES


@dataclass(frozen=True, slots=True)
class Origin:
    """A box of values: where it lies in a target file, and where in a source file it comes from.

    An element at index ``i`` of the tensor lies at byte ``target_byte + Σ (i - offset) · target_strides``, and the same
    on the other side.
    """

    key: str
    state: str
    offset: Shape
    """First element of the box in the tensor."""
    extents: Shape
    target_file: str
    target_byte: int
    """Byte of the first element in the target file."""
    target_strides: Shape
    """Bytes from one element to the next along each dim."""
    target_dtype: str
    source_file: str
    source_byte: int
    source_strides: Shape
    source_dtype: str
    source_state: str
    """State of the tensor that is read: differs for parameters that are made from master weights, and reverse."""
    rank: Mapping[str, int]
    """Axis → coordinate of the rank that wrote the source file; empty if ranks have no files of their own."""
    copied: bool
    """Whether the storage copies it by itself."""

    @property
    def target_range(self) -> tuple[int, int]:
        """First byte, and one past the last, in the target file."""
        return _hull(self.target_byte, self.extents, self.target_strides, self.target_dtype)

    @property
    def source_range(self) -> tuple[int, int]:
        """First byte, and one past the last, in the source file."""
        return _hull(self.source_byte, self.extents, self.source_strides, self.source_dtype)

    @property
    def how(self) -> str:
        """What happens to the values on the way; empty if their bytes stay as they are, in the same order."""
        words = []
        if self.source_state != self.state:
            words.append(f"from {self.source_state}")
        if self.source_dtype != self.target_dtype:
            words.append(f"{self.source_dtype} → {self.target_dtype}")
        source_order, target_order = (
            [dim for dim in np.argsort([-step for step in strides], kind="stable") if self.extents[dim] > 1]
            for strides in (self.source_strides, self.target_strides)
        )
        if source_order != target_order:
            words.append("transposed")
        return ", ".join(words)

    def at(self, element: Sequence[int]) -> Origin | None:
        """The same of a single element; ``None`` if it is not in the box."""
        inside = [index - first for index, first in zip(element, self.offset, strict=True)]
        if any(not 0 <= index < extent for index, extent in zip(inside, self.extents, strict=True)):
            return None
        steps = [
            sum(index * step for index, step in zip(inside, strides, strict=True))
            for strides in (self.target_strides, self.source_strides)
        ]
        return replace(
            self,
            offset=tuple(element),
            extents=(1,) * len(self.extents),
            target_byte=self.target_byte + steps[0],
            source_byte=self.source_byte + steps[1],
        )


def _hull(byte: int, extents: Shape, strides: Shape, dtype: str) -> tuple[int, int]:
    size = next(known.itemsize for known in DTYPES if known.name == dtype)
    return byte, byte + sum((e - 1) * s for e, s in zip(extents, strides, strict=True)) + size


@dataclass(frozen=True, slots=True)
class Stretch:
    """A range of a target file."""

    start: int
    stop: int
    """One past the last byte."""
    kind: str
    """``literal``, ``padding``, ``value``, or ``file`` for a file that is copied whole."""
    content: bytes = b""
    """The bytes of a literal."""
    origins: tuple[Origin, ...] = ()
    """The boxes of values, by first byte in the target. They may interleave, as those of matrices cut by columns do."""
    source_file: str = ""
    """The file that is copied whole."""


@dataclass(frozen=True, slots=True)
class ExplainedTensor:
    """A tensor of the source or target, and what is known of it."""

    key: str
    state: str
    dtype: str
    shape: Shape
    rules: tuple[str, ...]
    """What said how it is cut, named and made: the row of the rule table, statements, definitions of the format."""
    left_out: str = ""
    """Why no target has it; empty if one does."""


@dataclass(frozen=True, repr=False)
class Explanation(Result):
    """A file of a target, or a tensor on both sides."""

    source: str
    """Location of the source."""
    source_in_words: str
    target_in_words: str
    file: str | None
    """The explained file; ``None`` for a tensor in all files."""
    size_bytes: int | None
    """Size of the file; ``None`` for a tensor."""
    stretches: tuple[Stretch, ...]
    """The stretches of the file, in order; for a tensor, only the boxes of its values, by file."""
    tensors: tuple[ExplainedTensor, ...]

    @property
    def origins(self) -> tuple[Origin, ...]:
        """All boxes of values."""
        return tuple(origin for stretch in self.stretches for origin in stretch.origins)

    def _in_short(self) -> str:
        what = self.file or ", ".join(dict.fromkeys(tensor.key for tensor in self.tensors))
        return f"{what}: {len(self.stretches)} stretches, {len(self.origins)} boxes of values"

    def facts(self) -> Facts:
        """Source and target; of a single key also its tensors and their rules."""
        facts = [("from", f"{self.source}: {self.source_in_words}"), ("to", self.target_in_words)]
        if self.file is not None:
            facts.append(("file", f"{self.file}, {self.size_bytes:,} bytes"))
        if len({tensor.key for tensor in self.tensors}) > 1:
            return [*facts, ("tensors", str(len(self.tensors)))]
        for tensor in self.tensors:
            shown = f"{tensor.key} ({tensor.state}), {tensor.dtype} {list(tensor.shape)}"
            facts.append(("tensor", shown))
            if tensor.left_out:
                facts.append(("left out", f"{tensor.state}: {tensor.left_out}"))
        rules = dict.fromkeys(rule for tensor in self.tensors for rule in tensor.rules)
        return [*facts, *(("rule", rule) for rule in rules)]
