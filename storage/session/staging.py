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
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from paddle_reshard.pipeline.core.errors import TargetError
from paddle_reshard.storage.checksum import source_checksum
from paddle_reshard.storage.os_errors import NO_SPACE
from paddle_reshard.storage.session.holder import this_process
from paddle_reshard.storage.session.ledger import (
    Phase,
    Session,
    SessionRecord,
    begins_record,
    find_session,
    ledger_line,
    parse_ledger,
    refuse_busy,
)
from paddle_reshard.storage.store import Identity, NewFile, Openness, Receipt, Record

MOST_TRIES = 1000
MOST_REFUSALS = 10
"""Of a folder that is there: another run may have made it anew in between, but hardly as often as that."""
_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class DiskPlace:
    """A session in a folder.

    The folder is used only if it is ours: if the record of a conversion lies in it, or nothing but what is made before
    there is one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.location = str(folder / "session.json")
        self.session, self.lines = folder / "session.json", folder / "ledger"
        self.files, self.lock = folder / "files", folder / "lock"
        self.openness = Openness()

    def read(self) -> tuple[bytes, str] | None:
        """The record, and a hash of it.

        Raises
        ------
        TargetError
            If the folder is somebody else's.
        """
        try:
            mode = self.folder.lstat().st_mode
            if stat.S_ISLNK(mode):
                raise self._foreign(f"a link to {os.readlink(self.folder)}")
            if not stat.S_ISDIR(mode):
                raise self._foreign("a file")
            data = _read_file(self.session)
        except FileNotFoundError:
            self._check_half_made()
            return None
        return data, _version(data)

    def _check_half_made(self) -> None:
        """Refuse a folder without a record that holds more than a run which was killed before it had one leaves."""
        try:
            names = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return
        if self.session.name in names:
            return  # made just now; whoever writes next finds out
        new = _new(self.session)
        for name in names:
            path = self.folder / name
            with contextlib.suppress(FileNotFoundError):  # another run goes on with it right now
                empty = path == self.lock and _is_file(path) and path.stat().st_size == 0
                if not empty and not (path == new and _is_file(path) and begins_record(_read_file(path))):
                    raise self._foreign(
                        f"a folder with {name!r} and without a {self.session.name} of this tool"
                    )

    def _foreign(self, what: str) -> TargetError:
        return TargetError(
            f"{self.folder}: new checkpoints are staged under this name, and here is {what}; move it away, or give "
            "another target"
        )

    def write(self, data: bytes, version: str | None) -> str | None:
        """Replace the record in one step."""
        with self.alone():
            now = self.read()
            if (None if now is None else now[1]) != version:
                return None
            _replace_file(self.session, data, self.openness.files)
        return _version(data)

    def append(self, lines: bytes) -> None:
        """Add lines in one write."""
        descriptor = os.open(
            self.lines, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, self.openness.files
        )
        try:
            written = os.write(descriptor, lines)
        finally:
            os.close(descriptor)
        if written != len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.lines))

    def flush(self) -> None:
        """Lines are written at once."""

    def shorten_timeouts(self) -> None:
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
        """Nothing is there that no record belongs to: the record is made first and removed last."""

    def restart(self, records: Sequence[Record]) -> None:
        """Have a ledger of these records only."""
        lines = b"".join(ledger_line(record) for record in records)
        _replace_file(self.lines, lines, self.openness.files)

    def remove(self) -> None:
        """Remove what this package has put into the folder, the record last, and the folder."""
        if self.folder.is_dir():
            with self.alone():
                self.remove_alone()

    def remove_alone(self) -> None:
        """The same for who keeps the others out."""
        if self.files.is_dir():
            shutil.rmtree(self.files)
        for path in (self.lines, _new(self.lines), self.session):
            path.unlink(missing_ok=True)
        self._remove_folder()

    def tidy(self) -> None:
        """Remove a folder that has no record any more: a run was killed while it removed all this."""
        if self.folder.is_dir():
            with self.alone():
                if self.read() is None:
                    self._remove_folder()

    def _remove_folder(self) -> None:
        _new(self.session).unlink(missing_ok=True)
        self.lock.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody waits for the lock, or has put something here
            self.folder.rmdir()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from replacing the record, for a short time.

        On a file system that knows no locks two runs that begin in the same instant may both go on until the lock is
        renewed: then one of them finds that it was taken over.
        """
        refused = 0
        for _ in range(MOST_TRIES):
            self.folder.mkdir(self.openness.folders, parents=True, exist_ok=True)
            try:
                descriptor, locked = self._open_lock()
            except FileNotFoundError:  # the one before us has removed the folder, unless it is still there
                refused += self.folder.is_dir()
                if refused == MOST_REFUSALS:
                    raise
                continue
            try:
                _lock(descriptor)
                if _is_there(locked, descriptor):
                    yield
                    return
            finally:
                os.close(descriptor)
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(self.lock))

    def _open_lock(self) -> tuple[int, Path]:
        """What is locked: a file, or on a full disk that has no room for one the folder itself."""
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            return os.open(self.lock, flags, self.openness.files), self.lock
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            return os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC), self.folder


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


def write_file(path: Path, data: bytes, mode: int) -> None:
    """Write a file whose permissions are at most ``mode`` from its first moment on."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, mode), "wb") as file:
        file.write(data)


def _replace_file(path: Path, data: bytes, mode: int) -> None:
    """Give a file another content in one step that lasts."""
    new = _new(path)
    write_file(new, data, mode)
    sync(new)
    os.replace(new, path)


def _new(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def _read_file(path: Path) -> bytes:
    """The content of a small file; a link is not followed, so that nothing else is taken for it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        return file.read()


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

    @contextlib.contextmanager
    def taken(self, take_over: bool) -> Iterator[SessionRecord | None]:
        """Keep everybody else out, in order to remove what is here; this writes nothing, so a full disk allows it.

        Raises
        ------
        TargetError
            If another run holds the session.
        """
        with self.place.alone():
            left = self.find()
            if left is not None:
                refuse_busy(left, self.location, take_over, time.time())
            yield left

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
        openness = self.place.openness
        self.files.mkdir(openness.folders, exist_ok=True)
        as_left = all([_make(self.files / new.path, new.size_bytes, openness) for new in files])
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


def _make(path: Path, size_bytes: int, openness: Openness) -> bool:
    """Give a file its final size; whether it was there and had it."""
    path.parent.mkdir(openness.folders, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, openness.files)
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
