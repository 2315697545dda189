"""New checkpoints in folders of a local file system.

A new checkpoint is staged in a hidden folder next to its target and renamed when it is complete, so an unfinished
checkpoint is never mistaken for a finished one.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import ClassVar

import numpy as np

from paddle_reshard.pipeline.core.errors import TargetError, UnsupportedError
from paddle_reshard.pipeline.core.limits import MAX_MANIFEST_BYTES
from paddle_reshard.pipeline.core.part_limits import CopyLimits
from paddle_reshard.pipeline.core.trainer_files import is_marker
from paddle_reshard.storage.checksum import Checksum
from paddle_reshard.storage.local.direct import (
    Blocks,
    Direct,
    PartFile,
    direct_writes,
    pieces,
    start_writeback,
)
from paddle_reshard.storage.local.folders import check_free, object_to, remove_files, set_aside
from paddle_reshard.storage.local.source import LocalSource, list_folder
from paddle_reshard.storage.os_errors import translated, translated_while_moving
from paddle_reshard.storage.plain import plain_opener, read_small
from paddle_reshard.storage.replaceable import EntryKind
from paddle_reshard.storage.session.ledger import Phase, Session, check_receipts, refuse_unfinished
from paddle_reshard.storage.session.staging import Staging, sync, write_file
from paddle_reshard.storage.space import Room, room_for
from paddle_reshard.storage.store import (
    CopyRange,
    Identity,
    NewFile,
    Openness,
    Permission,
    Read,
    ReadRange,
    Receipt,
    Record,
    Source,
    TargetStore,
)

COPIES = CopyLimits(smallest_bytes=1 << 20, largest_bytes=16 << 20)
FSYNCS_IN_FLIGHT = 8
_CANNOT_COPY = {errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
"""Errors of the kernel for files between which it cannot copy."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalWriter:
    """Positioned writes into the staging folder."""

    staging: Path
    location: str
    """Location of the target as the user gave it."""
    direct: Direct | None = None
    """Where files are written without the kernel's cache."""
    blocks: Blocks = field(default_factory=Blocks, compare=False, repr=False)
    copies_in_flight: ClassVar[int] = 1

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        """Write all of ``buffer`` into a staged file."""
        whole = Checksum()
        with (
            self._translated(path),
            open(self.staging / path, "r+b", buffering=0, opener=plain_opener) as file,
        ):
            target = PartFile(file.fileno(), self.direct)
            if target.bypasses(len(buffer)):
                self._write_through_block(target, byte_offset, buffer, whole)
            else:
                target.write(byte_offset, buffer)
                whole.update(buffer)
        return Receipt(path, byte_offset, len(buffer), checksum=whole.text())

    def _write_through_block(
        self, target: PartFile, byte_offset: int, buffer: memoryview, whole: Checksum
    ) -> None:
        """Copy the part to a block and write it from there. A block is in huge pages, which a disk takes in one piece;
        that saves more time than copying costs."""
        content = np.frombuffer(buffer, dtype=np.uint8)
        with self.blocks.block() as block:
            for done, piece in pieces(block, byte_offset, len(buffer), byte_offset):
                np.copyto(np.frombuffer(piece, dtype=np.uint8), content[done : done + len(piece)])
                whole.update(piece)  # while it is in the processor's cache
                target.write(byte_offset + done, piece)

    def copy_part(self, copy: CopyRange, source: ReadRange) -> Receipt:
        """Copy inside the kernel where it copies nothing, or to its cache; otherwise through a small buffer."""
        if not isinstance(source, LocalSource):
            raise UnsupportedError(f"{copy.path}: only files of this machine can be copied here")
        with (
            source.opened(copy.source_path) as from_file,
            self._translated(copy.path, f", while {source.location}/{copy.source_path} was copied there"),
            open(self.staging / copy.path, "r+b", buffering=0, opener=plain_opener) as file,
        ):
            target = PartFile(file.fileno(), self.direct)
            done = 0
            if target.direct is None or target.direct.may_share(copy.byte_offset, copy.source_offset):
                done = _copy_in_kernel(
                    from_file, file.fileno(), copy.nbytes, copy.source_offset, copy.byte_offset
                )
                start_writeback(file.fileno(), copy.byte_offset, done)
            if done < copy.nbytes:
                self._copy_through_memory(_after(copy, done), source, from_file, target)
        return Receipt(copy.path, copy.byte_offset, copy.nbytes)

    def _copy_through_memory(
        self, copy: CopyRange, source: LocalSource, from_file: int, target: PartFile
    ) -> None:
        with self.blocks.block() as block:
            for done, piece in pieces(block, copy.byte_offset, copy.nbytes, copy.source_offset):
                source.read_opened(from_file, Read(copy.source_path, copy.source_offset + done, piece))
                target.write(copy.byte_offset + done, piece)

    def _translated(self, path: str, doing: str = "") -> AbstractContextManager[None]:
        """Convert errors of the operating system to sentences about the target."""
        return translated_while_moving(self.staging / path, self.location, TargetError, doing)


def _after(copy: CopyRange, done: int) -> CopyRange:
    """What remains of a copy after its first bytes."""
    return replace(
        copy,
        byte_offset=copy.byte_offset + done,
        nbytes=copy.nbytes - done,
        source_offset=copy.source_offset + done,
    )


def _copy_in_kernel(from_file: int, to_file: int, nbytes: int, from_byte: int, to_byte: int) -> int:
    """Copy between two open files by ``copy_file_range``. Returns the number of bytes copied before it failed."""
    copy = getattr(os, "copy_file_range", None)
    done = 0
    while copy is not None and done < nbytes:
        try:
            count = copy(from_file, to_file, nbytes - done, from_byte + done, to_byte + done)
        except OSError as error:
            if error.errno not in _CANNOT_COPY:
                raise
            break
        if count == 0:
            break
        done += count
    return done


class LocalTarget(TargetStore):
    """A new checkpoint folder, staged next to its target and renamed when it is complete."""

    def __init__(self, root: Path, permission: Permission = Permission()) -> None:
        self.root = Path(os.path.abspath(root))
        self.location = str(root)
        self.permission = permission
        self.staging = Staging(staging_folder(self.root), self.location)
        self.files: Sequence[NewFile] = ()
        self.session: Session | None = None
        with self._translated():
            left = self.staging.find()
            self.unfinished = None
            if left is not None and not self.staging.is_moved(left):
                self.unfinished = left.identity
                # Before the source is read; whoever takes the session looks again.
                refuse_unfinished(left, self.location, permission)
            elif not permission.resume:
                check_free(self.root, permission.overwrite)

    def _translated(self) -> AbstractContextManager[None]:
        """Convert errors of the operating system to sentences about the target."""
        return translated(self.root, self.location, TargetError)

    def room(self) -> Room:
        """Free space of the disk in bytes, not counting the staged files."""
        with self._translated():
            return room_for(self.staging.files)

    def copies_from(self, source: Source) -> CopyLimits | None:
        """The kernel copies from files of this machine."""
        return COPIES if isinstance(source, LocalSource) else None

    def published(self, manifest_path: str) -> bytes | None:
        """The manifest, if the target is a complete checkpoint and no conversion is in progress."""
        with self._translated():
            self._sweep()
            if self.staging.find() is not None or not (self.root / manifest_path).is_file():
                return None
            return read_small(self.root / manifest_path, MAX_MANIFEST_BYTES, TargetError)

    def reopen(self) -> LocalSource:
        """Open the published checkpoint for reading."""
        return LocalSource(self.root)

    def _sweep(self) -> None:
        """Remove the remains of a run that was killed after it published the target."""
        left = self.staging.find()
        if left is None:
            self.staging.session_store.tidy()
        elif self.staging.is_moved(left):
            with self.staging.taken() as still:
                if still is not None and self.staging.is_moved(still):
                    self._remove_replaced()
                    self.staging.session_store.remove_alone()

    def begin(
        self,
        files: Sequence[NewFile],
        identity: Identity,
        openness: Openness = Openness(),
    ) -> tuple[LocalWriter, Sequence[Record]]:
        """Create every file in its final size, or find the files of an earlier run."""
        self.staging.session_store.openness = openness
        with self._translated():
            self._sweep()
            if self.staging.find() is None:
                check_free(self.root, self.permission.overwrite)
            self.files = files
            self.session, records = self.staging.begin(files, identity, self.permission)
        return LocalWriter(self.staging.files, self.location, direct_writes(self.staging.files)), records

    def note(self, records: Sequence[Record]) -> None:
        """Write lines of the ledger."""
        with self._translated():
            self._held().note(records)

    def _held(self) -> Session:
        if self.session is None:
            raise TargetError(f"{self.location}: the conversion has not started")
        return self.session

    def finish(self, receipts: Iterable[Receipt]) -> LocalSource:
        """Open the staged files: on a disk they are complete."""
        check_receipts(self.location, self.files, receipts)
        return LocalSource(self.staging.files)

    def publish(self, manifest_path: str, manifest: bytes) -> None:
        """Flush everything to the disk, then rename the folder."""
        session, staging = self._held(), self.staging
        with self._translated():
            write_file(staging.files / manifest_path, manifest, staging.session_store.openness.files)
            files, _ = list_folder(staging.files)
            for path in filter(is_marker, files):  # the parts of a target are written in any order
                os.utime(staging.files / path)
            inner = {str(Path(path).parent) for path in files}
            with ThreadPoolExecutor(FSYNCS_IN_FLIGHT) as pool:
                list(pool.map(sync, (staging.files / path for path in files)))  # raises the first error
            for path in sorted(inner, reverse=True):  # "." comes last
                sync(staging.files / path)
            occupied = check_free(self.root, self.permission.overwrite)
            session.update(phase=Phase.PUBLISH)
            if occupied:
                self._set_aside()
            os.rename(staging.files, self.root)
            sync(self.root.parent)
            self._remove_replaced()
            session.remove()
        self.session = None

    def _set_aside(self) -> None:
        """Set the old checkpoint aside. If files were added since it was checked, it is moved back."""
        replaced = self.staging.replaced
        if replaced.exists():
            raise TargetError(
                f"{self.root}: was created while the old checkpoint was set aside in {replaced}; remove one of the two"
            )
        os.rename(self.root, replaced)
        if (reason := object_to(replaced)[1]) is not None:
            os.rename(replaced, self.root)
            raise TargetError(f"{self.root}: is not replaced, because {reason}; move that away")

    def _remove_replaced(self) -> None:
        """Remove the checkpoint that was set aside, but only its own files. All others are kept where users find
        them."""
        replaced = self.staging.replaced
        if not replaced.is_dir():
            return
        entries, reason = object_to(replaced)
        if reason is None and remove_files(replaced, [e.path for e in entries if e.kind is EntryKind.FILE]):
            return
        kept = set_aside(replaced, self.root)
        logger.warning(
            "%s: the old contents are kept in %s: %s",
            self.location,
            kept,
            reason or "it is still being written to",
        )

    def clean(self) -> list[str]:
        """Remove what an unfinished conversion left behind. Returns the paths."""
        folder = self.staging.session_store.folder
        with self._translated():
            if not folder.is_dir():
                return []
            with self.staging.taken():
                self._take_back()
        return [str(folder)]

    def _take_back(self) -> None:
        """Remove everything that is staged. A checkpoint that was set aside is moved back."""
        replaced = self.staging.replaced
        if replaced.is_dir():
            if not self.root.is_dir() or not any(self.root.iterdir()):
                os.rename(replaced, self.root)
            elif self.staging.files.exists():
                raise TargetError(
                    f"{self.root}: was created while the old checkpoint was set aside in {replaced}; move one of the "
                    "two away"
                )
            else:
                self._remove_replaced()
        self.staging.session_store.remove_alone()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.session is not None and not self.session.keep(error):
            self.session.stop()
            with self._translated(), self.staging.session_store.locked():
                self._take_back()


def staging_folder(root: Path) -> Path:
    """The folder in which a target is staged: hidden, next to it."""
    return root.with_name(f".{root.name}.reshard")
