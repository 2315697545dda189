"""The staging folder of a new checkpoint on a disk, with the session of its conversion.

::

    .NAME.reshard/session.json   which conversion, who runs it, its phase
    .NAME.reshard/ledger         a line for every finished unit
    .NAME.reshard/lock           held briefly, while the session is read and replaced
    .NAME.reshard/files/         the new checkpoint, every file in its final size
    .NAME.reshard/replaced/      the checkpoint being overwritten, while the two are exchanged

A killed process leaves all its writes intact; a machine that crashed may not. So if the machine has rebooted, or a file
does not have the size that it was given, every finished part is read and compared with its checksum first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paddle_reshard.pipeline.core.errors import TargetError
from paddle_reshard.pipeline.core.limits import MAX_LEDGER_BYTES, MAX_MANIFEST_BYTES
from paddle_reshard.storage.checksum import source_checksum
from paddle_reshard.storage.os_errors import NO_SPACE
from paddle_reshard.storage.plain import UNWAITING, plain_opener, read_small
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
from paddle_reshard.storage.store import Identity, NewFile, Openness, Permission, Receipt, Record

MOST_TRIES = 1000
MOST_REFUSALS = 10
"""Attempts to lock a folder that another run may remove and make again in between, though hardly this often."""
_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class DiskSessionStore:
    """A session in a folder.

    The folder is used only if it is ours: if it holds the record of a conversion, or nothing except what is created
    before that record.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.location = str(folder / "session.json")
        self.session, self.lines = folder / "session.json", folder / "ledger"
        self.files, self.lock = folder / "files", folder / "lock"
        self.openness = Openness()

    def read(self) -> tuple[bytes, str] | None:
        """The record, and a hash of it; refused if the folder is not ours."""
        try:
            mode = self.folder.lstat().st_mode
            if stat.S_ISLNK(mode):
                raise self._foreign(f"a link to {os.readlink(self.folder)}")
            if not stat.S_ISDIR(mode):
                raise self._foreign("a file")
            data = read_small(self.session, MAX_MANIFEST_BYTES, TargetError)
        except FileNotFoundError:
            self._check_half_made()
            return None
        return data, _version(data)

    def _check_half_made(self) -> None:
        """Refuse a folder without a record that holds more than a run killed before its first record leaves."""
        try:
            names = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return
        if self.session.name in names:
            return  # created a moment ago; the next write detects it
        new = _new(self.session)
        for name in names:
            path = self.folder / name
            with contextlib.suppress(FileNotFoundError):  # another run is resuming it at this moment
                empty = path == self.lock and _is_file(path) and path.stat().st_size == 0
                if not empty and not (
                    path == new
                    and _is_file(path)
                    and begins_record(read_small(path, MAX_MANIFEST_BYTES, TargetError))
                ):
                    raise self._foreign(
                        f"a folder with {name!r} and without a {self.session.name} of this tool"
                    )

    def _foreign(self, what: str) -> TargetError:
        return TargetError(
            f"{self.folder}: is {what}, but new checkpoints are staged under this name; move it away, or choose "
            "another target"
        )

    def write(self, data: bytes, version: str | None) -> str | None:
        """Replace the record in one step."""
        with self.locked():
            now = self.read()
            if (None if now is None else now[1]) != version:
                return None
            _replace_file(self.session, data, self.openness.files)
        return _version(data)

    def append(self, lines: bytes) -> None:
        """Add lines in one write."""
        append_to_file(self.lines, lines, self.openness.files)

    def flush(self) -> None:
        """Nothing to wait for: lines are written immediately."""

    def shorten_timeouts(self) -> None:
        """Nothing to change: a disk is never retried."""

    def ledger(self) -> list[Record]:
        """All whole lines; a torn last line is cut off, so that the next line starts on its own."""
        try:
            data = read_small(self.lines, MAX_LEDGER_BYTES, TargetError)
        except FileNotFoundError:
            return []
        records, good_bytes = parse_ledger(data)
        if good_bytes < len(data):
            os.truncate(self.lines, good_bytes)
        return records

    def clear(self) -> None:
        """Nothing to do: the record is created first and removed last."""

    def restart(self, records: Sequence[Record]) -> None:
        """Replace the ledger by these records."""
        lines = b"".join(ledger_line(record) for record in records)
        _replace_file(self.lines, lines, self.openness.files)

    def remove(self) -> None:
        """Remove our own files from the folder, the record last, and then the folder."""
        if self.folder.is_dir():
            with self.locked():
                self.remove_alone()

    def remove_alone(self) -> None:
        """Remove our own files and the folder, for a caller that holds the lock."""
        if self.files.is_dir():
            from shutil import rmtree

            rmtree(self.files)
        for path in (self.lines, _new(self.lines), self.session):
            path.unlink(missing_ok=True)
        self._remove_folder()

    def tidy(self) -> None:
        """Remove a folder without a record: a run was killed while it removed the folder."""
        if self.folder.is_dir():
            with self.locked():
                if self.read() is None:
                    self._remove_folder()

    def _remove_folder(self) -> None:
        _new(self.session).unlink(missing_ok=True)
        self.lock.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another run waits for the lock, or a user has put something here
            self.folder.rmdir()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from replacing the record during the block.

        On a file system without locks, two runs that begin at the same moment may both proceed until the session's lock
        is renewed; then one of them finds that the other took over.
        """
        refused = 0
        for _ in range(MOST_TRIES):
            self.folder.mkdir(self.openness.folders, parents=True, exist_ok=True)
            try:
                descriptor, locked = self._open_lock()
            except (
                FileNotFoundError
            ):  # unless the folder still exists, the previous holder of the lock has removed it
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
        """The file to lock; on a disk too full to create it, the folder itself."""
        try:
            flags = os.O_RDWR | os.O_CREAT | UNWAITING
            return os.open(self.lock, flags, self.openness.files), self.lock
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            return os.open(self.folder, os.O_RDONLY | UNWAITING), self.folder


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
    """Write a file that never has more permissions than ``mode``."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | UNWAITING
    with open(os.open(path, flags, mode), "wb") as file:
        file.write(data)


def append_to_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Add all of the data to the end of a file, in one write if the disk takes it, or raise."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | UNWAITING, mode)
    try:
        while data:  # on a disk that is almost full the first write is short, and the next one fails
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


def _replace_file(path: Path, data: bytes, mode: int) -> None:
    """Replace a file's content atomically and durably."""
    new = _new(path)
    write_file(new, data, mode)
    sync(new)
    os.replace(new, path)


def _new(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def _version(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Staging:
    """A folder in which the files of a new checkpoint are staged."""

    def __init__(self, folder: Path, location: str) -> None:
        self.session_store, self.location = DiskSessionStore(folder), location
        self.files, self.replaced = folder / "files", folder / "replaced"

    def find(self) -> SessionRecord | None:
        """The session in this folder, whoever holds it."""
        return find_session(self.session_store)

    @contextlib.contextmanager
    def taken(self) -> Iterator[SessionRecord | None]:
        """Take the lock, unless another run holds it, in order to remove everything.

        This writes nothing, so it works on a full disk.
        """
        with self.session_store.locked():
            left = self.find()
            if left is not None:
                refuse_busy(left, self.location)
            yield left

    def begin(
        self, files: Sequence[NewFile], identity: Identity, permission: Permission
    ) -> tuple[Session, list[Record]]:
        """Create every file in its final size, or find the files of an earlier run; the units that are done."""
        session = Session.take(self.session_store, self.location, identity, permission)
        try:
            return session, self._restore(files, session)
        except BaseException:
            session.release()
            raise

    def _restore(self, files: Sequence[NewFile], session: Session) -> list[Record]:
        boot = this_process().boot
        openness = self.session_store.openness
        self.files.mkdir(openness.folders, exist_ok=True)
        as_left = all([_make(self.files / new.path, new.size_bytes, openness) for new in files])
        sizes = {new.path: new.size_bytes for new in files}
        sound = [record for record in session.records if all(_is_within(r, sizes) for r in record.receipts)]
        if session.record.boot != boot or not as_left:
            sound = [record for record in sound if all(self._holds(r) for r in record.receipts)]
        if len(sound) < len(session.records):
            self.session_store.restart(sound)
            session.recorded = len(sound)
            session.records = sound
        if session.record.boot != boot:
            session.update(boot=boot)
        return session.records

    def _holds(self, receipt: Receipt) -> bool:
        """Whether a part is on the disk, by its checksum; a part without a checksum counts as missing."""
        return receipt.checksum == source_checksum(self, receipt.path, receipt.byte_offset, receipt.nbytes)

    def read_into(self, path: str, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from a staged file."""
        with open(self.files / path, "rb", buffering=0, opener=plain_opener) as file:
            done = 0
            while done < len(buffer):
                count = os.preadv(file.fileno(), [buffer[done:]], byte_offset + done)
                if count == 0:
                    raise TargetError(
                        f"{self.location}: the staged file {path} ends at byte {byte_offset + done}, but bytes up to "
                        f"{byte_offset + len(buffer)} were written to it: another program has cut it"
                    )
                done += count

    def is_moved(self, record: SessionRecord) -> bool:
        """Whether the staged files were moved to their target, so that only remains are here."""
        return record.phase is Phase.PUBLISH and not self.files.exists()


def _is_within(receipt: Receipt, sizes: Mapping[str, int]) -> bool:
    """Whether a part lies in a file of this checkpoint; a ledger can be damaged, and says nothing about other files."""
    return 0 <= receipt.byte_offset <= receipt.byte_offset + receipt.nbytes <= sizes.get(receipt.path, -1)


def _make(path: Path, size_bytes: int, openness: Openness) -> bool:
    """Give a file its final size; whether it already existed with that size."""
    path.parent.mkdir(openness.folders, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | UNWAITING, openness.files)
    try:
        as_left = os.fstat(descriptor).st_size == size_bytes
        if not as_left:
            os.truncate(descriptor, size_bytes)
        return as_left
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk, so that they survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | UNWAITING)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
