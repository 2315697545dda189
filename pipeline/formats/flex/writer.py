"""Collect the files of a dist checkpoint, byte for byte: data files, and the metadata of each folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paddle_reshard.pipeline.core.tensors import Tensor
from paddle_reshard.pipeline.core.upstream import PaddleRelease
from paddle_reshard.pipeline.formats.flex.boxes import Box, describe_boxes
from paddle_reshard.pipeline.formats.flex.names import METADATA
from paddle_reshard.pipeline.formats.writing import NewArray, NewFiles
from paddle_reshard.storage.files.dist_metadata import encode_dist_metadata
from paddle_reshard.storage.files.paddle_pickle import STRUCTURED_NAMES
from paddle_reshard.storage.files.paddle_pickle_writer import ArraySlot, encode_pickle


class DataArray(NamedTuple):
    """An array of a data file."""

    box: Box
    """What the metadata say of it."""
    path: tuple[str, ...]
    """Path in the nested dict."""
    stored_name: str
    """Name of the tensor in ``StructuredToParameterName@@``."""
    array: NewArray

    @classmethod
    def whole(cls, number: int, tensor: Tensor, path: tuple[str, ...], stored_name: str) -> DataArray:
        """All of a tensor with this number in the catalog."""
        shape = tensor.global_shape
        box = Box(".".join(path), shape, (0,) * len(shape), shape, dtype=tensor.dtype.name)
        return cls(box, path, stored_name, NewArray.whole(number, tensor))

    @property
    def nbytes(self) -> int:
        """Size of the stored array."""
        return self.box.elements * self.array.dtype.itemsize


def file_name(number: int) -> str:
    """Name of a data file; the rank that reads it looks for this number."""
    return f"{number}_0.distcp"


class FlexFiles(NewFiles):
    """Collects the files of all folders."""

    def __init__(self, form: PaddleRelease) -> None:
        super().__init__()
        self.form = form

    def add_folder(
        self,
        folder: str,
        shares: Sequence[Sequence[DataArray]],
        holders: Mapping[Box, Sequence[int]] | None = None,
    ) -> None:
        """Add the data files of a folder, and its metadata.

        ``shares`` are the pieces of each data file, ``holders`` the files that hold a box, in the order in which its
        copies are numbered; ``None``: there are no copies, and nothing is numbered.
        """
        for number, pieces in enumerate(shares):
            self._add_data_file(f"{folder}/{file_name(number)}", pieces)
        copies = holders or {piece.box: [n] for n, pieces in enumerate(shares) for piece in pieces}
        files_of = {box: [file_name(number) for number in numbers] for box, numbers in copies.items()}
        paths = {piece.box.key: piece.path for pieces in shares for piece in pieces}
        described = describe_boxes(files_of, paths, numbered=holders is not None)
        content = encode_dist_metadata(described, self.form.metadata, self.form.pickle_protocol)
        self.add_literal(f"{folder}/0{METADATA}", content)

    def _add_data_file(self, path: str, pieces: Sequence[DataArray]) -> None:
        root: dict[str, object] = {
            piece.box.key: ArraySlot(slot, piece.array.dtype.code, piece.box.shape, None)
            for slot, piece in enumerate(pieces)
        }
        # Paddle's loader turns only the arrays listed here into tensors.
        root[STRUCTURED_NAMES] = {piece.box.key: piece.stored_name for piece in pieces}
        encoded = encode_pickle(root, self.form.pickle_protocol)
        self.add_encoded(path, encoded, [piece.array for piece in pieces])
