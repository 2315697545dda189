"""Fingerprints: a number for each tensor of a checkpoint and one for all, whatever its topology and format.

The fingerprint of a tensor is the CRC-64/NVME of its values: all of them, row-major, little-endian, bfloat16 as its two
bytes. Its *line* is compact ASCII JSON: key, state, dtype, global shape, and the checksum in 16 hexadecimal digits::

    ["model.norm.weight","param","bfloat16",[64],"cf11e4a0c42f8b0c"]

The *root* is the SHA-256 Merkle tree hash of RFC 9162, section 2.1.1, over the lines of all tensors, sorted by key and
then by state, both by code point.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.numbers import same_fields
from paddle_reshard.pipeline.core.shown import only_in
from paddle_reshard.pipeline.core.tensor_columns import Tensors

if TYPE_CHECKING:
    from paddle_reshard.pipeline.core.tensors import Tensor

ROOT_PREFIX = "sha256:"


@dataclass(frozen=True, eq=False)
class Fingerprints:
    """The fingerprints of the tensors of a checkpoint."""

    tensors: Tensors
    """Sorted by key, then by state."""
    checksums: npt.NDArray[np.uint64]
    """The checksum of each tensor."""

    @classmethod
    def of(cls, tensors: Tensors, checksums: npt.NDArray[np.uint64]) -> Fingerprints:
        """The fingerprints of ``tensors``, which may be in any order."""
        order = tensors.order(np.arange(len(tensors)))
        return cls(Tensors(tensors[number] for number in order.tolist()), checksums[order])

    def __eq__(self, other: object) -> bool:
        return same_fields(self, other)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def root(self) -> str:
        """The Merkle root over all tensors."""
        return self._roots[0]

    @property
    def states(self) -> Mapping[str, str]:
        """State → the root over the tensors of this state alone."""
        return self._roots[1]

    @cached_property
    def _roots(self) -> tuple[str, Mapping[str, str]]:
        """All roots, in one pass over the lines, which are not kept."""
        whole, states = _Tree(), {state: _Tree() for state in sorted(self.tensors.states)}
        for number, line in enumerate(self.lines()):
            leaf = hashlib.sha256(b"\0" + line).digest()
            whole.add(leaf)
            states[self.tensors.identity(number)[1]].add(leaf)
        return whole.root(), {state: tree.root() for state, tree in states.items()}

    def lines(self) -> Iterator[bytes]:
        """The line of every tensor, in order."""
        return map(self.line, range(len(self.tensors)))

    def line(self, number: int) -> bytes:
        """The line of a tensor: its key, state, dtype, shape and checksum."""
        tensor, checksum = self.tensors[number], int(self.checksums[number])
        entries = [tensor.key, tensor.state, tensor.dtype.name, list(tensor.global_shape), f"{checksum:016x}"]
        return json.dumps(entries, separators=(",", ":")).encode("ascii")

    def find(self, key: str, state: str) -> int | None:
        """The checksum of a tensor, or ``None``."""
        number = self.tensors.find(key, state)
        return None if number is None else int(self.checksums[number])

    def only(self, states: Iterable[str]) -> Fingerprints:
        """The fingerprints of some states."""
        chosen = set(states)
        kept = [n for n in range(len(self.tensors)) if self.tensors.identity(n)[1] in chosen]
        return Fingerprints(Tensors(self.tensors[n] for n in kept), self.checksums[kept])


class _Tree:
    """The Merkle tree of RFC 9162, to which leaves are added.

    A leaf is the hash of a zero byte and its line; a node that of a one byte and its two children, of which the first
    has the largest power of two of leaves that is smaller than those of both.

    >>> tree = _Tree()
    >>> tree.root()
    'sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855'
    >>> for line in (b"a", b"b", b"c"):
    ...     tree.add(hashlib.sha256(b"\\0" + line).digest())
    >>> tree.root()
    'sha256:36642e73c2540ab121e3a6bf9545b0a24982cd830eb13d3cd19de3ce6c021ec1'
    """

    __slots__ = ("_complete",)

    def __init__(self) -> None:
        self._complete: list[tuple[int, bytes]] = []
        """Roots of complete trees, with their heights, which decrease."""

    def add(self, digest: bytes) -> None:
        """Add the hash of a leaf."""
        height, complete = 0, self._complete
        while complete and complete[-1][0] == height:
            height, digest = height + 1, _node(complete.pop()[1], digest)
        complete.append((height, digest))

    def root(self) -> str:
        """The hash of all leaves."""
        if not self._complete:
            return ROOT_PREFIX + hashlib.sha256().hexdigest()
        *rest, (_, digest) = self._complete
        for _, left in reversed(rest):
            digest = _node(left, digest)
        return ROOT_PREFIX + digest.hex()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor whose fingerprints differ, or that only one side has."""

    tensor: str
    detail: str


def mismatches(
    a: Fingerprints, b: Fingerprints, names: Sequence[str], subset: bool = False
) -> list[Mismatch]:
    """The tensors in which two sets differ. ``names`` are those of the two sides in messages.

    With ``subset``, ``b`` may lack tensors.
    """
    mismatched = []
    for number, tensor in enumerate(a.tensors):
        other = b.tensors.find(tensor.key, tensor.state)
        if other is None:
            if not subset:
                mismatched.append(Mismatch(tensor.label, only_in(names[0])))
        elif a.line(number) != b.line(other):
            sides = (
                (tensor, a.checksums[number], names[0]),
                (b.tensors[other], b.checksums[other], names[1]),
            )
            mismatched.append(Mismatch(tensor.label, ", ".join(_in_words(*side) for side in sides)))
    for tensor in b.tensors:
        if a.tensors.find(tensor.key, tensor.state) is None:
            mismatched.append(Mismatch(tensor.label, only_in(names[1])))
    return sorted(mismatched, key=lambda entry: entry.tensor)


def _in_words(tensor: Tensor, checksum: int, where: str) -> str:
    return f"{tensor.dtype.name} {tensor.global_shape} with crc64nvme {int(checksum):016x} in {where}"
