"""The files of a target, independent of its format."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paddle_reshard.pipeline.core.catalog import Catalog, File, Fragments
from paddle_reshard.pipeline.core.literals import Literals
from paddle_reshard.pipeline.core.tensors import Cast


@dataclass(frozen=True)
class TargetFiles:
    """Exact layout of new files. ``fragments`` are boxes to fill; their ``file`` is an index into ``files``."""

    files: tuple[File, ...]
    literals: Literals
    fills: tuple[tuple[int, int, int], ...]
    """``(file, byte offset, number of zero bytes)``: padding."""
    fragments: Fragments
    parameter_names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Cell → structured key → parameter name, where the format has such names."""
    casts: frozenset[Cast] = frozenset()
    """Requested casts."""
    omitted: frozenset[int] = frozenset()
    """Tensors that some, but not all, of several targets omit."""
    first_files: tuple[int, ...] = (0,)
    """Index of the first file of each of several targets."""


class SourceListing(NamedTuple):
    """What the folder of a source holds, by name."""

    paths: Collection[str]
    folders: Sequence[str]
    """Subfolders, and files that are nobody's (``is_stray``)."""
    naming_code: Mapping[str, bytes | None] = {}
    """Small JSON file with an entry that names code → its contents without; ``None``: it cannot be read."""


@dataclass(frozen=True, slots=True)
class Sidecars:
    """Small files of a target."""

    carried: tuple[str, ...] = ()
    """Paths of files that go to the target byte for byte."""
    written: tuple[tuple[str, bytes], ...] = ()
    not_carried: tuple[tuple[str, str], ...] = ()
    """``(path or key, why it is not in the target)``; of tensors too."""
    donated: tuple[tuple[str, str], ...] = ()
    """``(path in the source, path in the target)`` of files of another model that go to the target byte for byte."""
    remarks: tuple[str, ...] = ()
    """What a user has to know about a file that is written anew."""

    def with_written(self, files: Iterable[tuple[str, bytes]]) -> Sidecars:
        """The same, and further files of known contents."""
        return replace(self, written=(*self.written, *files))


@dataclass(frozen=True)
class LaidOut:
    """The files of a target, and the tensors that they are made of."""

    catalog: Catalog
    """The tensors of the source that go into the target."""
    files: TargetFiles
    sidecars: Sidecars = Sidecars()
    states_not_carried: tuple[str, ...] = ()
    """States that the target omits, because its format cannot hold them or they were not requested."""
    remarks: tuple[str, ...] = ()
    """What a user has to know about the target."""


def add_literal_files(target: TargetFiles, files: Sequence[tuple[str, bytes]]) -> TargetFiles:
    """The target with additional files of known contents."""
    literals = target.literals.copy()
    for number, (_, content) in enumerate(files, len(target.files)):
        if content:
            literals.add(number, 0, content)
    added = (File(path, len(content)) for path, content in files)
    return replace(target, files=(*target.files, *added), literals=literals)
