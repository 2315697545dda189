"""New checkpoints in a store that has no rename of folders.

The order is what keeps an unfinished checkpoint from looking finished: nothing is visible until all parts are
written; then old completion markers go, the files appear, they are read back, what is left of an overwritten
checkpoint goes, the new markers appear, and the manifest is last.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType

from paddle_reshard.pipeline.errors import ReshardError, TargetError, UnsupportedError
from paddle_reshard.pipeline.layouts.hybrid.sidecars import MANIFEST
from paddle_reshard.pipeline.layouts.hybrid.target import SIGNAL_PREFIX
from paddle_reshard.storage import retry
from paddle_reshard.storage.fsspec_folder import FsspecFolder, Listing
from paddle_reshard.storage.fsspec_source import FsspecSource
from paddle_reshard.storage.local import LocalWriter
from paddle_reshard.storage.retry import RetryPolicy
from paddle_reshard.storage.store import NewFile, Receipt, WritePart

RANK_FILES = ("model_state.", "optimizer.")
PROBE_PREFIX = ".paddle_reshard_probe-"

logger = logging.getLogger(__name__)


def is_marker(name: str) -> bool:
    """Whether a trainer, or this package, takes a checkpoint with this file for a finished one."""
    return name == MANIFEST or name.startswith((SIGNAL_PREFIX, "save_signal_TMP_")) or name.endswith("_done")


class FsspecTarget(ABC):
    """What all targets without a rename have in common; how a file is written and appears is the store's."""

    smallest_part_bytes = 1

    def __init__(self, folder: FsspecFolder, overwrite: bool) -> None:
        self.folder, self.overwrite = folder, overwrite
        self.location = folder.location
        self.files: dict[str, NewFile] = {}
        self.replaced = self.check_free(retry.HURRIED)
        self.tags: Mapping[tuple[str, int], str] = {}
        self.made: set[str] = set()
        self.published = False
        folder.probe(PROBE_PREFIX + secrets.token_hex(8), deleting=overwrite)

    def check_free(self, policy: RetryPolicy | None = None) -> Listing:
        """Refuse a folder that holds something; with ``overwrite``, only what is no checkpoint.

        A probe that a killed process left behind is nothing.
        """
        listing = self.folder.listing(policy)
        names = [name for name in listing.files if not name.startswith(PROBE_PREFIX)]
        if not names and not listing.folders:
            return listing
        if not self.overwrite:
            raise TargetError(
                f"{self.location}: is not empty; give another target, or --overwrite to replace it"
            )
        if listing.folders:
            raise TargetError(
                f"{self.location}: --overwrite replaces the files of a checkpoint, and here is also the folder "
                f"{listing.folders[0]}; remove it first"
            )
        if not any(name.startswith(RANK_FILES) for name in names):
            raise TargetError(
                f"{self.location}: --overwrite replaces a checkpoint, and this folder does not hold one"
            )
        return listing

    def __enter__(self) -> FsspecTarget:
        return self

    @abstractmethod
    def begin(self, files: Sequence[NewFile]) -> WritePart:
        """Make room for all files but the manifest."""

    @abstractmethod
    def make_visible(self, name: str) -> None:
        """All parts of a file are written: let it appear, whole."""

    @abstractmethod
    def take_back(self) -> int:
        """Drop what is written and did not appear; says how many things could not be dropped."""

    def finish(self, receipts: Iterable[Receipt]) -> FsspecSource:
        """Let all files but the markers appear, and look at them as they are in the store.

        Files by which a folder is known for a checkpoint come first: if this is cut short, ``--overwrite`` can
        replace what is there.
        """
        self.check_receipts(receipts)
        self.replaced = self.check_free()
        names = [name for name in self.files if not is_marker(name)]
        self.folder.for_each(self._delete, [name for name in self.replaced.files if is_marker(name)])
        self._show([name for name in names if name.startswith(RANK_FILES)])
        self._show([name for name in names if not name.startswith(RANK_FILES)])
        source = FsspecSource(self.folder, names)
        sizes = source.sizes()
        for name in names:
            if sizes.get(name) != self.files[name].size_bytes:
                raise TargetError(
                    f"{self.location}/{name}: has {sizes.get(name, 'no')} bytes in the store, "
                    f"{self.files[name].size_bytes} were written"
                )
        return source

    def check_receipts(self, receipts: Iterable[Receipt]) -> None:
        """Refuse unless there is exactly one receipt for every part of every file."""
        wanted = {
            (new.path, start): stop - start
            for new in self.files.values()
            for start, stop in pairwise((*new.part_starts, new.size_bytes))
            if new.size_bytes
        }
        tags: dict[tuple[str, int], str] = {}
        for receipt in receipts:
            part = receipt.path, receipt.byte_offset
            if wanted.get(part) != receipt.nbytes or tags.setdefault(part, receipt.tag) != receipt.tag:
                raise TargetError(
                    f"{receipt.path}: {receipt.nbytes} bytes written at {receipt.byte_offset} are no part of it"
                )
        if missing := wanted.keys() - tags.keys():
            path, start = min(missing)
            raise TargetError(
                f"{path}: the part at byte {start} was never written ({len(missing)} are missing)"
            )
        self.tags = tags

    def publish(self, manifest_path: str, manifest: bytes) -> None:
        """Remove what is left of an overwritten checkpoint, show the markers, write the manifest last."""
        self.folder.for_each(self._delete, self.replaced.files.keys() - self.files.keys() - {manifest_path})
        self._show([name for name in self.files if is_marker(name)])
        if self.overwrite:
            self.folder.attempt(manifest_path, self.folder.put, manifest_path, manifest)
        elif not self.folder.attempt(manifest_path, self.folder.put_new, manifest_path, manifest):
            self.made.clear()
            raise TargetError(
                f"{self.location}: another conversion was written here at the same time; what is there now may be "
                "of both, remove it"
            )
        self.published = True

    def _show(self, names: Sequence[str]) -> None:
        def show(name: str) -> None:
            if name not in self.replaced.files:
                self.made.add(name)
            self.folder.attempt(name, self.make_visible, name)
            self.made.add(name)

        self.folder.for_each(show, names)

    def _delete(self, name: str) -> None:
        self.folder.attempt(name, self.folder.delete, name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self.take_back()
        if not self.published:
            left += self.try_each(self.folder.delete, sorted(self.made, key=lambda n: (not is_marker(n), n)))
        if left:
            logger.warning(
                "%s: %d things of an unfinished conversion could not be removed", self.location, left
            )

    def try_each(self, function: Callable[[str], None], names: Iterable[str]) -> int:
        """Apply a function to all names; says how many times it failed."""

        def attempt(name: str) -> bool:
            try:
                self.folder.attempt(name, function, name, policy=retry.HURRIED)
            except ReshardError:
                return False
            return True

        return self.folder.for_each(attempt, names).count(False)


@dataclass(frozen=True, slots=True)
class StagedWriter:
    """Writes into the staging folder, which only this machine sees."""

    staging: Path

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        """Write one whole part."""
        if not self.staging.is_dir():
            raise UnsupportedError(
                "this kind of store is written through a folder on the machine that began the conversion, and "
                "this worker runs on another; use one machine, or an S3 target"
            )
        return LocalWriter(self.staging).write_part(path, byte_offset, buffer)


class StagedTarget(FsspecTarget):
    """A target of any fsspec store: files are staged whole in a temporary folder, then uploaded.

    The temporary folder (``TMPDIR`` says where) needs room for the whole checkpoint.
    """

    staging: Path | None = None

    def begin(self, files: Sequence[NewFile]) -> StagedWriter:
        """Make every file in its final size in the staging folder."""
        self.files = {new.path: new for new in files}
        self.staging = Path(tempfile.mkdtemp(prefix="paddle_reshard-"))
        for new in files:
            with open(self.staging / new.path, "xb") as file:
                file.truncate(new.size_bytes)
        return StagedWriter(self.staging)

    def make_visible(self, name: str) -> None:
        """Upload a staged file."""
        if self.staging is not None:
            self.folder.put_file(self.staging / name, name)

    def take_back(self) -> int:
        """Remove the staging folder."""
        if self.staging is not None:
            shutil.rmtree(self.staging, ignore_errors=True)
        return 0
