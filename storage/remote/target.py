"""New checkpoints in a store that has no rename of folders.

The order is what keeps an unfinished checkpoint from looking finished: nothing is visible until all parts are
written; then old completion markers go, the files appear, they are read back, what is left of an overwritten
checkpoint goes, the new markers appear, and the manifest is last.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from paddle_reshard.pipeline.core import trainer_files
from paddle_reshard.pipeline.core.errors import ReshardError, TargetError, UnsupportedError
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.part_limits import CopyLimits
from paddle_reshard.pipeline.core.trainer_files import is_tensor_file
from paddle_reshard.storage.formats.strict_json import parse_json
from paddle_reshard.storage.local.target import LocalWriter
from paddle_reshard.storage.os_errors import told
from paddle_reshard.storage.remote import retry
from paddle_reshard.storage.remote.folder import FsspecFolder, Listing
from paddle_reshard.storage.remote.source import FsspecSource
from paddle_reshard.storage.replaceable import objection
from paddle_reshard.storage.session.ledger import (
    Phase,
    Place,
    Session,
    SessionRecord,
    acquire_lock,
    check_receipts,
    find_session,
    refuse_busy,
    refuse_unfinished,
)
from paddle_reshard.storage.session.staging import Staging
from paddle_reshard.storage.space import Room, room_for
from paddle_reshard.storage.store import (
    OWN_PREFIX,
    CopyRange,
    Identity,
    NewFile,
    Openness,
    ReadRange,
    Receipt,
    Record,
    Source,
    WritePart,
)

PROBE_PREFIX = f"{OWN_PREFIX}probe-"

logger = logging.getLogger(__name__)


def is_marker(name: str) -> bool:
    """Whether a trainer, or this package, takes a checkpoint with this file for a finished one."""
    return name == MANIFEST or trainer_files.is_marker(name)


class FsspecTarget(ABC):
    """What all targets without a rename have in common; how a file is written and appears is the store's."""

    smallest_part_bytes = 1
    most_parts: int | None = None

    def __init__(self, folder: FsspecFolder, overwrite: bool, resume: bool, take_over: bool) -> None:
        self.folder, self.overwrite = folder, overwrite
        self.resume, self.take_over = resume, take_over
        self.location = folder.location
        self.files: dict[str, NewFile] = {}
        self.receipts: Mapping[tuple[str, int], Receipt] = {}
        self.session: Session | None = None
        self.made: set[str] = set()
        self.place = self.find_place()
        listing = folder.listing(retry.HURRIED)
        left = find_session(self.place)
        self.unfinished: Identity | None = None
        if left is not None and not self.is_over(left, listing):
            self.unfinished = left.identity
            if not resume:
                refuse_busy(left, self.location, False, time.time())
                refuse_unfinished(left, self.location)
        elif not resume:
            self.check_free(listing)
        folder.probe(PROBE_PREFIX + secrets.token_hex(8), deleting=overwrite)

    @abstractmethod
    def find_place(self) -> Place:
        """Where the session is kept."""

    @abstractmethod
    def begin_files(self, files: Sequence[NewFile], identity: Identity) -> tuple[WritePart, Sequence[Record]]:
        """Take the session and make room for all files; sets ``session``."""

    @abstractmethod
    def make_visible(self, name: str) -> None:
        """All parts of a file are written: let it appear, whole. Can be repeated."""

    @abstractmethod
    def take_back(self) -> int:
        """Drop what is written and did not appear; says how many things could not be dropped."""

    def check_free(self, listing: Listing) -> list[str]:
        """Refuse a folder that holds something; with ``overwrite``, what is more than a checkpoint.

        What a killed process left behind is nothing. The files that may go.
        """
        names = [name for name in listing.files if not name.startswith(OWN_PREFIX)]
        if not names and not listing.folders:
            return []
        if not self.overwrite:
            raise TargetError(
                f"{self.location}: is not empty; choose another target, or --overwrite to replace it"
            )
        manifest = self._read(MANIFEST, listing) if MANIFEST in listing.files else None
        if (reason := objection(listing.entries(OWN_PREFIX), manifest)) is not None:
            raise TargetError(
                f"{self.location}: --overwrite replaces a checkpoint and nothing else, and {reason}; move that away, "
                "or choose another target"
            )
        return names

    def is_over(self, left: SessionRecord, listing: Listing) -> bool:
        """Whether a session is only what a run left that was killed when its manifest was there already."""
        if left.phase is not Phase.PUBLISH or MANIFEST not in listing.files:
            return False
        try:
            manifest = parse_json(self._read(MANIFEST, listing))
        except ValueError:
            return False
        return isinstance(manifest, dict) and manifest.get("plan_id") == left.identity.plan_id

    def _read(self, name: str, listing: Listing) -> bytes:
        stamp = listing.files[name]
        buffer = bytearray(stamp.size_bytes)
        self.folder.attempt(name, self.folder.read_range, name, stamp, 0, memoryview(buffer))
        return bytes(buffer)

    def room(self) -> Room | None:
        """An object store has no end."""
        return None

    def copies_from(self, source: Source) -> CopyLimits | None:
        """Nothing, as far as is known of any store."""
        return None

    def __enter__(self) -> FsspecTarget:
        return self

    def published(self, manifest_path: str) -> bytes | None:
        """The manifest, if a whole checkpoint is here and no conversion is under way."""
        listing = self._sweep()
        if manifest_path not in listing.files or find_session(self.place) is not None:
            return None
        return self._read(manifest_path, listing)

    def _sweep(self) -> Listing:
        """Remove what a run left that was killed when its manifest was there already."""
        listing = self.folder.listing()
        left = find_session(self.place)
        if left is not None and self.is_over(left, listing):
            acquire_lock(self.place, self.location, self.take_over)
            self.place.remove()
            return self.folder.listing()
        return listing

    def begin(
        self,
        files: Sequence[NewFile],
        identity: Identity,
        openness: Openness = Openness(),
    ) -> tuple[WritePart, Sequence[Record]]:
        """Make room for all files but the manifest, or find what an earlier run has made."""
        listing = self._sweep()
        if find_session(self.place) is None:
            self.check_free(listing)
        self.files = {new.path: new for new in files}
        return self.begin_files(files, identity)

    def held(self) -> Session:
        """The session, which has begun."""
        if self.session is None:
            raise TargetError(f"{self.location}: the conversion has not begun")
        return self.session

    def note(self, record: Record) -> None:
        """Add a line to the ledger."""
        self.held().note(record)

    def finish(self, receipts: Iterable[Receipt]) -> FsspecSource:
        """Let all files but the markers appear, and look at them as they are in the store.

        Files by which a folder is known for a checkpoint come first: if this is cut short, ``--overwrite`` can
        replace what is there.
        """
        self.receipts = check_receipts(self.location, self.files.values(), receipts)
        session, listing = self.held(), self.folder.listing()
        session.flush()
        if session.phase is Phase.MOVE:
            session.update(phase=Phase.FINISH, replaces=self.check_free(listing))
        if session.phase is Phase.FINISH:  # later, the markers are ours
            old = {MANIFEST, *session.record.replaces}
            self.folder.for_each(self._delete, [n for n in listing.files if n in old and is_marker(n)])
        names = [name for name in self.files if not is_marker(name)]
        self._show([name for name in names if is_tensor_file(name)], listing)
        self._show([name for name in names if not is_tensor_file(name)], listing)
        source = FsspecSource(self.folder, names)
        sizes = source.sizes()
        for name in names:
            if sizes.get(name) != self.files[name].size_bytes:
                raise TargetError(
                    f"{self.location}/{name}: has {sizes.get(name, 'no')} bytes in the store, "
                    f"{self.files[name].size_bytes} were written"
                )
        return source

    def reopen(self) -> FsspecSource:
        """What is published here."""
        return FsspecSource(self.folder)

    def etags(self) -> Mapping[str, str]:
        """Not every store names files by what they hold."""
        return {}

    def publish(self, manifest_path: str, manifest: bytes) -> None:
        """Remove what is left of an overwritten checkpoint, show the markers, write the manifest last."""
        session, listing = self.held(), self.folder.listing()
        if session.phase is Phase.FINISH:
            old = {*session.record.replaces, *(n for n in listing.files if n.startswith(PROBE_PREFIX))}
            self.folder.for_each(
                self._delete, (old & listing.files.keys()) - self.files.keys() - {manifest_path}
            )
            session.update(phase=Phase.PUBLISH)
        self._show([name for name in self.files if is_marker(name)], listing)
        session.check()
        if self.overwrite:
            self.folder.attempt(manifest_path, self.folder.put, manifest_path, manifest)
        elif not self.folder.attempt(manifest_path, self.folder.put_new, manifest_path, manifest):
            raise TargetError(
                f"{self.location}: another conversion was written here at the same time; what is there now may be "
                "of both, remove it"
            )
        session.remove()
        self.session = None

    def _show(self, names: Sequence[str], before: Listing) -> None:
        def show(name: str) -> None:
            if name not in before.files:
                self.made.add(name)
            self.folder.attempt(name, self.make_visible, name)

        self.folder.for_each(show, names)

    def _delete(self, name: str) -> None:
        self.folder.attempt(name, self.folder.delete, name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.session is None or self.session.keep(error):
            return
        if self.session.record.replaces:  # half of the old checkpoint is gone: there is no way but on
            self.session.release()
            logger.warning("%s", _only_forward(self.location))
            return
        self.session.stop()
        self.place.shorten_timeouts()
        left = self.take_back()
        visible = self.made if self.overwrite or self.session.phase is Phase.MOVE else self.files.keys()
        left += self.try_each(self.folder.delete, sorted(visible, key=lambda n: (not is_marker(n), n)))
        try:
            self.place.remove()
        except ReshardError:
            self.session.release()
            left += 1
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


def refuse_replacing(left: SessionRecord | None, location: str) -> None:
    """Refuse to remove what has begun to take the place of another checkpoint: neither would be left.

    Raises
    ------
    TargetError
        If the session has come so far.
    """
    if left is not None and left.replaces:
        raise TargetError(_only_forward(location))


def _only_forward(location: str) -> str:
    return (
        f"{location}: some files of the checkpoint that was here are replaced already, and all of the new one is in "
        "the store: the same command with --resume completes it; to keep neither, delete the objects yourself"
    )


@dataclass(frozen=True, slots=True)
class StagedWriter:
    """Writes into the staging folder, which only this machine sees."""

    staging: Path
    location: str
    """Of the target, as the user has given it."""
    copies_in_flight: ClassVar[int] = 1

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        """Write one whole part."""
        if not self.staging.is_dir():
            raise UnsupportedError(
                "this kind of store is written through a folder on the machine that began the conversion, and "
                "this worker runs on another; use one machine, or an S3 target"
            )
        return LocalWriter(self.staging, self.location).write_part(path, byte_offset, buffer)

    def copy_part(self, copy: CopyRange, source: ReadRange) -> Receipt:
        """Never asked for."""
        raise UnsupportedError(f"{copy.path}: this kind of store copies nothing by itself")


class StagedTarget(FsspecTarget):
    """A target of any fsspec store: files are staged whole in a temporary folder, then uploaded.

    The temporary folder (``TMPDIR`` says where) needs room for the whole checkpoint. The session is there too, so
    only this machine knows of it.
    """

    def find_place(self) -> Place:
        """A folder that only this user can write, of a name that only this target has."""
        digest = hashlib.sha256(self.location.encode()).hexdigest()[:16]
        folder = Path(tempfile.gettempdir()) / f"paddle_reshard-{os.getuid()}-{digest}"
        self.staging = Staging(folder, self.location)
        return self.staging.place

    def room(self) -> Room:
        """What the disk on which it is staged can take."""
        with told(self.staging.place.folder, self.location, TargetError):
            return room_for(self.staging.files)

    def check_free(self, listing: Listing) -> list[str]:
        """Refuse a folder that holds anything: uploading takes long, and meanwhile neither checkpoint is whole."""
        if names := super().check_free(listing):
            raise TargetError(
                f"{self.location}: holds {names[0]}, and this kind of store cannot replace a checkpoint without a "
                "long time in which none can be read; choose another target, or remove this one first"
            )
        return names

    def begin_files(
        self, files: Sequence[NewFile], identity: Identity
    ) -> tuple[StagedWriter, Sequence[Record]]:
        """Make every file in its final size in the staging folder, or find what an earlier run has made."""
        folder = self.staging.place.folder
        with told(folder, self.location, TargetError):
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                raise TargetError(f"{folder}: belongs to somebody else; set TMPDIR to another folder")
            self.session, records = self.staging.begin(files, identity, self.resume, self.take_over)
        return StagedWriter(self.staging.files, self.location), records

    def make_visible(self, name: str) -> None:
        """Upload a staged file."""
        self.folder.put_file(self.staging.files / name, name)

    def take_back(self) -> int:
        """What is staged goes with the session."""
        return 0

    def clean(self) -> list[str]:
        """Remove what an unfinished conversion has left here; what has appeared in the store stays. Says what."""
        folder = self.staging.place.folder
        with told(folder, self.location, TargetError):
            if not folder.is_dir():
                return []
            with self.staging.taken(self.take_over):
                self.staging.place.remove_alone()
        return [str(folder)]
