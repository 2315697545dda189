"""Files of a new checkpoint that are staged in a folder of this machine, with the session of their conversion.

::

    .NAME.reshard/session.json   which conversion, who runs it, how far it is
    .NAME.reshard/ledger         what is done, a line for each unit
    .NAME.reshard/lock           locked for an instant, while the session is looked at and replaced
    .NAME.reshard/files/         the new checkpoint, every file in its final size
    .NAME.reshard/replaced/      the checkpoint that it takes the place of, for an instant

A killed process leaves its writes behind, whole; a machine that went down may not. So if the machine was started
since, or a file is not as it was left, every part that counts as done is read and compared with its checksum first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from paddle_reshard.storage.checksum import source_checksum
from paddle_reshard.storage.holder import this_process
from paddle_reshard.storage.ledger import (
    Phase,
    Session,
    SessionRecord,
    find_session,
    ledger_line,
    parse_ledger,
)
from paddle_reshard.storage.store import Identity, NewFile, Receipt, Record

_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class DiskPlace:
    """A session in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.location = str(folder / "session.json")
        self.session, self.lines = folder / "session.json", folder / "ledger"

    def read(self) -> tuple[bytes, str] | None:
        """The record, and a hash of it."""
        try:
            data = self.session.read_bytes()
        except FileNotFoundError:
            return None
        return data, _version(data)

    def write(self, data: bytes, version: str | None) -> str | None:
        """Replace the record in one step."""
        with self._alone():
            now = self.read()
            if (None if now is None else now[1]) != version:
                return None
            _replace_file(self.session, data)
        return _version(data)

    def append(self, lines: bytes) -> None:
        """Add lines in one write."""
        descriptor = os.open(self.lines, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            written = os.write(descriptor, lines)
        finally:
            os.close(descriptor)
        if written != len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.lines))

    def flush(self) -> None:
        """Lines are written at once."""

    def hurry(self) -> None:
        """A disk answers at once or not at all."""

    def ledger(self) -> list[Record]:
        """Every whole line; a torn end is cut off, so that the next line begins as one."""
        try:
            data = self.lines.read_bytes()
        except FileNotFoundError:
            return []
        records, good_bytes = parse_ledger(data)
        if good_bytes < len(data):
            os.truncate(self.lines, good_bytes)
        return records

    def clear(self) -> None:
        """Remove staged files and a ledger that no record belongs to."""
        shutil.rmtree(self.folder / "files", ignore_errors=True)
        self.lines.unlink(missing_ok=True)

    def restart(self, records: Sequence[Record]) -> None:
        """Have a ledger of these records only."""
        _replace_file(self.lines, b"".join(ledger_line(record) for record in records))

    def remove(self) -> None:
        """Remove everything in the folder, the record last, and the folder."""
        if not self.folder.is_dir():
            return
        for entry in sorted(self.folder.iterdir()):
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name not in (self.session.name, "lock"):
                entry.unlink(missing_ok=True)
        with self._alone():
            self.session.unlink(missing_ok=True)
            self._remove_folder()

    def tidy(self) -> None:
        """Remove a folder that has no record any more: a run was killed while it removed all this."""
        if self.folder.is_dir():
            with self._alone():
                if not self.session.exists():
                    self._remove_folder()

    def _remove_folder(self) -> None:
        (self.folder / "lock").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody waits for the lock
            self.folder.rmdir()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from replacing the record, for an instant.

        On a file system that knows no locks two runs that begin in the same instant may both go on until the lock is
        renewed: then one of them finds that it was taken over.
        """
        while True:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:  # removed by the one before us
                continue
            try:
                _lock(descriptor)
                if _is_there(self.folder / "lock", descriptor):
                    yield
                    return
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _replace_file(path: Path, data: bytes) -> None:
    """Give a file another content in one step that lasts."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(data)
    sync(new)
    os.replace(new, path)


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Staging:
    """A folder in which the files of a new checkpoint are staged."""

    def __init__(self, folder: Path, location: str) -> None:
        self.place, self.location = DiskPlace(folder), location
        self.files, self.replaced = folder / "files", folder / "replaced"

    def find(self) -> SessionRecord | None:
        """The session that is here, whoever holds it."""
        return find_session(self.place)

    def begin(
        self, files: Sequence[NewFile], identity: Identity, resume: bool, take_over: bool
    ) -> tuple[Session, list[Record]]:
        """Make every file in its final size, or find what an earlier run has made; says which units are done."""
        session = Session.take(self.place, self.location, identity, resume, take_over)
        try:
            return session, self._restore(files, session)
        except BaseException:
            session.release()
            raise

    def _restore(self, files: Sequence[NewFile], session: Session) -> list[Record]:
        boot = this_process().boot
        self.files.mkdir(exist_ok=True)
        as_left = all([_make(self.files / new.path, new.size_bytes) for new in files])
        if session.record.boot != boot or not as_left:
            sound = [record for record in session.records if all(self._holds(r) for r in record.receipts)]
            if len(sound) < len(session.records):
                self.place.restart(sound)
                session.recorded = len(sound)
                session.records = sound
            if session.record.boot != boot:
                session.update(boot=boot)
        return session.records

    def _holds(self, receipt: Receipt) -> bool:
        """Whether a part is there, by its checksum; one without is not known to be."""
        return receipt.checksum == source_checksum(self, receipt.path, receipt.byte_offset, receipt.nbytes)

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from a staged file, which has its final size."""
        with open(self.files / path, "rb", buffering=0) as file:
            done = 0
            while done < len(buffer):
                done += os.preadv(file.fileno(), [buffer[done:]], byte_offset + done)

    def is_moved(self, record: SessionRecord) -> bool:
        """Whether the staged files have left for their place, so that only a remainder is here."""
        return record.phase is Phase.PUBLISH and not self.files.exists()


def _make(path: Path, size_bytes: int) -> bool:
    """Give a file its final size; whether it was there and had it."""
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        as_left = os.fstat(descriptor).st_size == size_bytes
        if not as_left:
            os.truncate(descriptor, size_bytes)
        return as_left
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Have a file or the entries of a folder outlast a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
