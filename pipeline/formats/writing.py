"""What the targets of several formats share: files that are laid out one after the other, and choices left to none."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, TypeVar

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.files import TargetFiles
from paddle_reshard.pipeline.checkpoint.format import Staged
from paddle_reshard.pipeline.core.catalog import File
from paddle_reshard.pipeline.core.errors import WITHOUT_OPTIMIZER, CheckpointError, PlanError, UsageError
from paddle_reshard.pipeline.core.file_names import SCHEDULER
from paddle_reshard.pipeline.core.limits import MAX_TARGET_FILES
from paddle_reshard.pipeline.core.literals import Literals
from paddle_reshard.pipeline.core.tensors import DType, Tensor
from paddle_reshard.pipeline.model.model import Model
from paddle_reshard.pipeline.model.placement import ArrayKind, Placements, TensorCut
from paddle_reshard.storage.files.paddle_pickle_writer import EncodedFile, encode_pickle

UNCUT = TensorCut(1, None)
"""The cut of a tensor that every rank has whole."""
_Target = TypeVar("_Target")


class SettledTarget:
    """A target that leaves nothing to the source: the request is the target. All of its tensors read back."""

    __slots__ = ()

    @property
    def of_average(self) -> bool:
        """Whether it exports the moving average as a model."""
        return False

    @property
    def of_stored_parameters(self) -> bool:
        """Whether it holds nothing but parameters as they are stored."""
        return False

    def target_for(self: _Target, source: Checkpoint) -> _Target:
        """The same."""
        return self

    def cannot_hold_lora(self, model: Model) -> str | None:
        """All that its format can hold."""
        return None

    def check_staged(self, staged: Staged) -> None:
        """Read it as a source: its tensors must be those that were planned."""
        check_tensors(staged, staged.index())


class NewArray(NamedTuple):
    """An array of a file that is laid out."""

    tensor: int
    """Index into the tensors of the catalog."""
    dtype: DType
    kind: ArrayKind
    """Which boxes of the logical tensor it holds, on tp rank 0."""
    tp: int = 0
    """The tp rank that holds it."""

    @classmethod
    def whole(cls, number: int, tensor: Tensor) -> NewArray:
        """All of a tensor, in its own shape."""
        return cls(number, tensor.dtype, ArrayKind(tensor.global_shape, UNCUT, tensor.dtype.itemsize))


class NewFiles:
    """Collects files with all their bytes but the values of tensors."""

    def __init__(self) -> None:
        self.files: list[File] = []
        self.literals = Literals()
        self.placements = Placements()

    def add_literal(self, path: str, content: bytes) -> None:
        """Add a file that contains no tensor values."""
        self.literals.add(len(self.files), 0, content)
        self.files.append(File(path, len(content)))

    def add_encoded(self, path: str, encoded: EncodedFile, arrays: Sequence[NewArray]) -> None:
        """Add a file whose slots are filled with these arrays, by number."""
        file = len(self.files)
        self.files.append(File(path, encoded.size_bytes))
        for offset, content in encoded.literals:
            self.literals.add(file, offset, content)
        for slot, byte_offset, _ in encoded.slots:
            tensor, dtype, kind, tp = arrays[slot]
            self.placements.add(self.placements.kind(kind), tp, tensor, file, byte_offset, dtype, 0)

    def target_files(self) -> TargetFiles:
        """All files that were added."""
        return TargetFiles(tuple(self.files), self.literals, (), self.placements.fragments())


def file_numbers(sizes_bytes: Iterable[int], max_bytes: int) -> list[int]:
    """The number of the file of each tensor: files are filled in order, each until the next tensor would exceed
    ``max_bytes``; a larger tensor has a file of its own.

    >>> file_numbers([4, 4, 1, 9, 2], 5)
    [0, 1, 1, 2, 3]
    """
    numbers: list[int] = []
    number = filled = 0
    for nbytes in sizes_bytes:
        if filled and filled + nbytes > max_bytes:
            number, filled = number + 1, 0
        numbers.append(number)
        filled += nbytes
    check_number(number + 1, max_bytes)
    return numbers


def check_number(files: int, max_bytes: int) -> None:
    """Refuse a size with which a target would have too many files."""
    if files > MAX_TARGET_FILES:
        raise UsageError(
            f"with --max-shard-size {max_bytes} the target has {files} files of a kind; at most {MAX_TARGET_FILES} are "
            "written, give a larger size"
        )


def lacking(key: str, state: str) -> PlanError:
    """The error for a tensor without which a target cannot be laid out."""
    return PlanError(f"{key} ({state}): the target needs it, the source does not have it")


def schedule_file(paths: Collection[str], wanted: Checkpoint, protocol: int = 4) -> list[tuple[str, bytes]]:
    """The file of the learning-rate schedule, if the source (with files ``paths``) has it in optimizer files only.

    For formats whose files do not tell an optimizer without states, such as SGD, from states that are lost.

    Raises
    ------
    PlanError
        If there is a schedule and no parameter has a state.
    """
    scheduled = SCHEDULER in paths or wanted.job.lr_scheduler is not None
    if scheduled and wanted.history.merged is None and not any(t.trained for t in wanted.model.tensors):
        raise PlanError(
            f"{SCHEDULER}: the optimizer of the source keeps no states, as SGD does, and has a schedule; files of this "
            "format do not tell this from states that are lost. Choose --format hybrid or hybrid-plain; "
            f"{WITHOUT_OPTIMIZER}"
        )
    if SCHEDULER in paths or wanted.job.lr_scheduler is None:
        return []
    ((_, content),) = encode_pickle(wanted.job.lr_scheduler, protocol).literals
    return [(SCHEDULER, content)]


def check_tensors(staged: Staged, reread: Checkpoint) -> None:
    """Refuse a staged target whose tensors, as ``reread``, are not the planned ones; names the first of them."""
    catalog, read = staged.wanted.catalog, reread.catalog.tensors
    wanted, content = catalog.tensors, len(catalog.tensors) - catalog.borrowed

    def kept(number: int) -> bool:
        return number < content and wanted.identity(number)[1] not in staged.states_not_carried

    def same(number: int, other: int) -> bool:
        return wanted.dtype(number) == read.dtype(other) and wanted.shape(number) == read.shape(other)

    lacking, added = [], []
    for number in filter(kept, range(content)):
        reread_number = read.find(*wanted.identity(number))
        if reread_number is None or not same(number, reread_number):
            lacking.append(wanted.identity(number))
    for identity in reread.catalog.index():
        origin = wanted.find(*identity)
        if origin is None or not kept(origin):
            added.append(identity)
    if lacking or added:
        key, state = min(lacking + added)
        raise CheckpointError(f"{key} ({state}): not the same in the source and the staged target")
