"""Collect the files of a dist checkpoint, byte for byte: data files, and the metadata of each folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paddle_reshard.pipeline.checkpoint.files import TargetFiles
from paddle_reshard.pipeline.core.catalog import File
from paddle_reshard.pipeline.core.literals import Literals
from paddle_reshard.pipeline.core.tensors import DType
from paddle_reshard.pipeline.core.upstream import PaddleRelease
from paddle_reshard.pipeline.formats.flex.boxes import Box, describe_boxes
from paddle_reshard.pipeline.formats.flex.names import METADATA
from paddle_reshard.pipeline.model.placement import ArrayKind, Placements
from paddle_reshard.storage.files.dist_metadata import encode_dist_metadata
from paddle_reshard.storage.files.paddle_pickle import STRUCTURED_NAMES
from paddle_reshard.storage.files.paddle_pickle_writer import ArraySlot, encode_pickle


@dataclass(frozen=True, slots=True)
class DataArray:
    """An array of a data file."""

    box: Box
    """What the metadata say of it."""
    path: tuple[str, ...]
    """Path in the nested dict."""
    stored_name: str
    """Name of the tensor in ``StructuredToParameterName@@``."""
    tensor: int
    """Index into the tensors of the catalog."""
    dtype: DType
    kind: ArrayKind
    """Which boxes of the logical tensor it holds, on tp rank 0."""
    tp: int = 0
    """The tp rank that holds it."""


def file_name(number: int) -> str:
    """Name of a data file; the rank that reads it looks for this number."""
    return f"{number}_0.distcp"


class FlexFiles:
    """Collects the files of all folders."""

    def __init__(self, form: PaddleRelease) -> None:
        self.form = form
        self.files: list[File] = []
        self.literals = Literals()
        self.placements = Placements()

    def laid_out(self) -> TargetFiles:
        """All files that were added."""
        return TargetFiles(tuple(self.files), self.literals, (), self.placements.fragments())

    def add_folder(
        self,
        folder: str,
        shares: Sequence[Sequence[DataArray]],
        holders: Mapping[Box, Sequence[int]] | None = None,
    ) -> None:
        """Add the data files of a folder, and its metadata.

        Parameters
        ----------
        shares
            The pieces of each data file.
        holders
            Box → the files that hold it, in the order in which its copies are numbered; ``None``: there are no copies,
            and nothing is numbered.
        """
        files_of: dict[Box, Sequence[str]] = {}
        paths: dict[str, tuple[str, ...]] = {}
        for number, pieces in enumerate(shares):
            self._data_file(f"{folder}/{file_name(number)}", pieces)
            for piece in pieces:
                paths[piece.box.key] = piece.path
                copies = (number,) if holders is None else holders[piece.box]
                files_of[piece.box] = tuple(map(file_name, copies))
        described = describe_boxes(files_of, paths, numbered=holders is not None)
        content = encode_dist_metadata(described, self.form.metadata, self.form.pickle_protocol)
        self.literals.add(len(self.files), 0, content)
        self.files.append(File(f"{folder}/0{METADATA}", len(content)))

    def _data_file(self, path: str, pieces: Sequence[DataArray]) -> None:
        root: dict[str, object] = {
            piece.box.key: ArraySlot(slot, piece.dtype.code, piece.box.shape, None)
            for slot, piece in enumerate(pieces)
        }
        # Paddle's loader turns only the arrays listed here into tensors.
        root[STRUCTURED_NAMES] = {piece.box.key: piece.stored_name for piece in pieces}
        encoded = encode_pickle(root, self.form.pickle_protocol)
        number = len(self.files)
        self.files.append(File(path, encoded.size_bytes))
        for offset, content in encoded.literals:
            self.literals.add(number, offset, content)
        for slot, byte_offset, _ in encoded.slots:
            piece = pieces[slot]
            kind = self.placements.kind(piece.kind)
            self.placements.add(kind, piece.tp, piece.tensor, number, byte_offset, piece.dtype, 0)
