"""New checkpoints in stores that cannot rename folders.

Their order of steps keeps an unfinished checkpoint from looking finished. Nothing is visible until all parts are
written. Then old completion markers are removed, the new files appear and are read back, the remaining files of an
overwritten checkpoint are removed, the new markers appear, and finally the manifest.
"""

from __future__ import annotations

import logging
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import ClassVar

from paddle_reshard.pipeline.core import trainer_files
from paddle_reshard.pipeline.core.errors import ReshardError, TargetError, UnsupportedError
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.storage.documents.strict_json import parse_json
from paddle_reshard.storage.local.folders import make_private, temporary_folder
from paddle_reshard.storage.local.target import LocalWriter
from paddle_reshard.storage.os_errors import translated
from paddle_reshard.storage.remote import retry
from paddle_reshard.storage.remote.folder import FsspecFolder, Listing
from paddle_reshard.storage.remote.source import FsspecSource
from paddle_reshard.storage.replaceable import refuse_occupied
from paddle_reshard.storage.session.ledger import (
    Phase,
    Session,
    SessionRecord,
    SessionStore,
    acquire_lock,
    check_receipts,
    find_session,
    refuse_unfinished,
)
from paddle_reshard.storage.session.staging import Staging
from paddle_reshard.storage.space import Room, room_for
from paddle_reshard.storage.store import (
    OWN_PREFIX,
    Identity,
    NewFile,
    Openness,
    Permission,
    Receipt,
    Record,
    TargetStore,
    WritePart,
)

PROBE_PREFIX = f"{OWN_PREFIX}probe-"

logger = logging.getLogger(__name__)


def probe_name() -> str:
    """A name that no file has, for a trial."""
    return PROBE_PREFIX + secrets.token_hex(8)


def is_marker(name: str) -> bool:
    """Whether a file marks a checkpoint as finished, for a trainer or for this package."""
    return name == MANIFEST or trainer_files.is_marker(name)


class FsspecTarget(TargetStore):
    """Base of all targets in stores without a rename. Subclasses write files and make them visible."""

    can_replace: ClassVar[bool] = True
    """Whether a finished conversion may be replaced here, if the user says so."""

    def __init__(self, folder: FsspecFolder, permission: Permission = Permission()) -> None:
        self.folder, self.permission = folder, permission
        self.location = folder.location
        self.files: dict[str, NewFile] = {}
        self.receipts: Mapping[tuple[str, int], Receipt] = {}
        self.session: Session | None = None
        self.made: set[str] = set()
        self.session_store = self.open_session_store()
        listing = folder.listing(retry.HURRIED)
        found = self.find_session(listing)
        self.unfinished: Identity | None = None
        if found is not None and not self.is_published(found, listing):
            self.unfinished = found.identity
            refuse_unfinished(found, self.location, permission)
        elif not permission.resume:
            self.check_free(listing)
        folder.probe(probe_name(), deleting=permission.overwrite)

    @abstractmethod
    def open_session_store(self) -> SessionStore:
        """The store of this target's session."""

    def find_session(self, listing: Listing) -> SessionRecord | None:
        """The session at this target, if there is one. ``listing``: of the target, made just before."""
        return find_session(self.session_store)

    @abstractmethod
    def begin_files(self, files: Sequence[NewFile], identity: Identity) -> tuple[WritePart, Sequence[Record]]:
        """Take the session, which sets ``session``, and prepare all files."""

    @abstractmethod
    def make_visible(self, name: str) -> None:
        """Make a file visible after all its parts are written. Can be repeated."""

    @abstractmethod
    def take_back(self) -> int:
        """Remove everything written that is not visible. Returns the number of failures."""

    def check_free(self, listing: Listing) -> list[str]:
        """Refuse a folder that may not be written, as :func:`refuse_occupied` does.

        Remains of a killed process do not count. Returns the files that may be removed.
        """
        names = [name for name in listing.files if not name.startswith(OWN_PREFIX)]
        if not names and not listing.folders:
            return []
        manifest = self._read(MANIFEST, listing) if MANIFEST in listing.files else None
        overwrite = self.permission.overwrite or not self.can_replace
        refuse_occupied(self.location, listing.entries(), manifest, overwrite)
        return names

    def is_published(self, session: SessionRecord, listing: Listing) -> bool:
        """Whether a session belongs to a run that was killed after it wrote the manifest."""
        if session.phase is not Phase.PUBLISH or MANIFEST not in listing.files:
            return False
        try:
            manifest = parse_json(self._read(MANIFEST, listing))
        except ValueError:
            return False
        return isinstance(manifest, dict) and manifest.get("plan_id") == session.identity.plan_id

    def _read(self, name: str, listing: Listing) -> bytes:
        stamp = listing.files[name]
        self.folder.check_size(name, stamp.size_bytes)
        buffer = bytearray(stamp.size_bytes)
        self.folder.attempt(name, self.folder.read_range, name, stamp, 0, memoryview(buffer))
        return bytes(buffer)

    def published(self, manifest_path: str) -> bytes | None:
        """The manifest, if there is a complete checkpoint and no conversion in progress."""
        listing, found = self._sweep()
        if manifest_path not in listing.files or found is not None:
            return None
        return self._read(manifest_path, listing)

    def _sweep(self) -> tuple[Listing, SessionRecord | None]:
        """Remove the session of a run that was killed after it wrote the manifest. What is there, and whose session."""
        listing = self.folder.listing()
        found = self.find_session(listing)
        if found is not None and self.is_published(found, listing):
            acquire_lock(self.session_store, self.location)
            self.session_store.remove()
            return self.folder.listing(), None
        return listing, found

    def begin(
        self,
        files: Sequence[NewFile],
        identity: Identity,
        openness: Openness = Openness(),
    ) -> tuple[WritePart, Sequence[Record]]:
        """Prepare all files except the manifest, or resume an earlier run."""
        listing, found = self._sweep()
        if found is None:
            self.check_free(listing)
        self.files = {new.path: new for new in files}
        return self.begin_files(files, identity)

    def current_session(self) -> Session:
        """The session of this run."""
        if self.session is None:
            raise TargetError(f"{self.location}: the conversion has not started")
        return self.session

    def note(self, records: Sequence[Record]) -> None:
        """Add lines to the ledger."""
        self.current_session().note(records)

    def finish(self, receipts: Iterable[Receipt]) -> FsspecSource:
        """Make all files except the markers visible, and open them as they are in the store."""
        self.receipts = check_receipts(self.location, self.files.values(), receipts)
        session, listing = self.current_session(), self.folder.listing()
        session.flush()
        if session.phase is Phase.MOVE:
            session.update(phase=Phase.FINISH, replaces=self.check_free(listing))
        if session.phase is Phase.FINISH:  # from PUBLISH on, the markers are ours
            old = {MANIFEST, *session.record.replaces}
            self.folder.for_each(self._delete, [n for n in listing.files if n in old and is_marker(n)])
        names = [name for name in self.files if not is_marker(name)]
        self._show(names, listing)
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
        """Open the published checkpoint for reading."""
        return FsspecSource(self.folder)

    def publish(self, manifest_path: str, manifest: bytes) -> None:
        """Remove the remaining files of an overwritten checkpoint, make the markers visible, and write the manifest."""
        session, listing = self.current_session(), self.folder.listing()
        if session.phase is Phase.FINISH:
            old = {*session.record.replaces, *(n for n in listing.files if n.startswith(PROBE_PREFIX))}
            self.folder.for_each(
                self._delete, (old & listing.files.keys()) - self.files.keys() - {manifest_path}
            )
            session.update(phase=Phase.PUBLISH)
        self._show([name for name in self.files if is_marker(name)], listing)
        session.check()
        if self.permission.overwrite:
            self.folder.attempt(manifest_path, self.folder.put, manifest_path, manifest)
        elif not self.folder.attempt(manifest_path, self.folder.put_new, manifest_path, manifest):
            raise TargetError(
                f"{self.location}: a second conversion wrote here at the same time; remove the target, which may hold "
                "files of both"
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
        if self.session.record.replaces:  # part of the old checkpoint is gone, so rolling back is impossible
            self.session.release()
            logger.warning("%s", _only_forward(self.location))
            return
        self.session.stop()
        self.session_store.shorten_timeouts()
        failures = self.take_back()
        visible = (
            self.made if self.permission.overwrite or self.session.phase is Phase.MOVE else self.files.keys()
        )
        failures += self.try_each(self.folder.delete, sorted(visible, key=lambda n: (not is_marker(n), n)))
        try:
            self.session_store.remove()
        except ReshardError:
            self.session.release()
            failures += 1
        if failures:
            logger.warning(
                "%s: %d objects of an unfinished conversion could not be removed", self.location, failures
            )

    def try_each(self, function: Callable[[str], None], names: Iterable[str]) -> int:
        """Apply a function to all names. Returns the number of failures."""

        def attempt(name: str) -> bool:
            try:
                self.folder.attempt(name, function, name, policy=retry.HURRIED)
            except ReshardError:
                return False
            return True

        return self.folder.for_each(attempt, names).count(False)


def refuse_replacing(session: SessionRecord | None, location: str) -> None:
    """Refuse to remove a checkpoint that has begun to replace an old one: that would leave neither."""
    if session is not None and session.replaces:
        raise TargetError(_only_forward(location))


def _only_forward(location: str) -> str:
    return (
        f"{location}: some files of the old checkpoint have been replaced, and the new one is in the store completely: "
        "the same command with --resume publishes it; to keep neither, delete the objects yourself"
    )


class StagedWriter(LocalWriter):
    """Writes into the staging folder, which exists only on this machine."""

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        """Write a whole part."""
        if not self.staging.is_dir():
            raise UnsupportedError(
                "targets in this kind of store are staged on the machine that runs the conversion, and this worker "
                "runs on a different one; use one machine, or an S3 target"
            )
        return super().write_part(path, byte_offset, buffer)


class StagedTarget(FsspecTarget):
    """A target in any fsspec store: files are staged in a temporary folder, then uploaded.

    The temporary folder (``TMPDIR``) needs room for the whole checkpoint. It also holds the session, so only this
    machine can resume.
    """

    can_replace = False

    def open_session_store(self) -> SessionStore:
        """The session in the staging folder, whose name is derived from the target's location."""
        self.staging = Staging(temporary_folder(self.location), self.location)
        return self.staging.session_store

    def room(self) -> Room:
        """Free space of the disk on which the files are staged."""
        with translated(self.staging.session_store.folder, self.location, TargetError):
            return room_for(self.staging.files)

    def check_free(self, listing: Listing) -> list[str]:
        """Refuse a folder that is not empty: during the long upload neither checkpoint would be complete."""
        if super().check_free(listing):
            raise TargetError(
                f"{self.location}: holds a finished conversion, and in this kind of store a replacement would leave no "
                "complete checkpoint for a long time; choose another target, or remove this one first"
            )
        return []

    def begin_files(
        self, files: Sequence[NewFile], identity: Identity
    ) -> tuple[StagedWriter, Sequence[Record]]:
        """Create every file in its final size in the staging folder, or find the files of an earlier run."""
        folder = self.staging.session_store.folder
        with translated(folder, self.location, TargetError):
            make_private(folder)
            self.session, records = self.staging.begin(files, identity, self.permission)
        return StagedWriter(self.staging.files, self.location), records

    def make_visible(self, name: str) -> None:
        """Upload a staged file."""
        self.folder.put_file(self.staging.files / name, name)

    def take_back(self) -> int:
        """Nothing to do: the staged files are removed with the session."""
        return 0

    def clean(self) -> list[str]:
        """Remove the staged files of an unfinished conversion, not those visible in the store. Returns their folder."""
        folder = self.staging.session_store.folder
        with translated(folder, self.location, TargetError):
            if not folder.is_dir():
                return []
            with self.staging.taken():
                self.staging.session_store.remove_alone()
        return [str(folder)]
