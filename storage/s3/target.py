"""A new checkpoint on S3: every file is a multipart upload, and none is completed before all parts are written."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from paddle_reshard.pipeline.core.errors import ReshardError, TargetError, UnsupportedError
from paddle_reshard.pipeline.core.part_limits import CopyLimits
from paddle_reshard.storage.checksum import checksum, source_checksum
from paddle_reshard.storage.remote import retry
from paddle_reshard.storage.remote.folder import Listing
from paddle_reshard.storage.remote.source import FsspecSource
from paddle_reshard.storage.remote.target import FsspecTarget, is_marker, probe_name, refuse_replacing
from paddle_reshard.storage.s3 import uploads
from paddle_reshard.storage.s3.folder import S3Folder, md5_of
from paddle_reshard.storage.s3.session import S3SessionStore
from paddle_reshard.storage.s3.trials import part_check
from paddle_reshard.storage.s3.uploads import CHECKSUM, PartCheck, Upload, UploadedPart, joined_etag
from paddle_reshard.storage.session.ledger import (
    SESSION,
    Phase,
    Session,
    SessionRecord,
    SessionStore,
    acquire_lock,
    find_session,
)
from paddle_reshard.storage.store import (
    OWN_PREFIX,
    CopyRange,
    Identity,
    NewFile,
    Permission,
    ReadRange,
    Receipt,
    Record,
    Source,
)

SMALLEST_PART_BYTES = 5 << 20
LARGEST_PART_BYTES = 5 << 30
MOST_PARTS = 10_000
LARGEST_OBJECT_BYTES = 5 << 40
COPIES = CopyLimits(smallest_bytes=SMALLEST_PART_BYTES, largest_bytes=128 << 20)
COPIES_IN_FLIGHT = 16
PROBE_COPY_BYTES = 1 << 10


logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class S3Writer:
    """Uploads parts. Can be sent to any worker: the credentials travel with it."""

    folder: S3Folder
    uploads: Mapping[str, Upload]
    check: PartCheck = PartCheck.MD5
    with_checksums: bool = False
    """Whether the uploads were created for parts with checksums."""
    copies_in_flight: ClassVar[int] = COPIES_IN_FLIGHT

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        """Upload one whole part."""
        upload = self.uploads[path]
        number, nbytes = upload.part(byte_offset)
        if len(buffer) != nbytes:
            raise TargetError(f"{path}: the part at {byte_offset} has {nbytes} bytes, not {len(buffer)}")
        crc = checksum(buffer)
        taken = self.folder.attempt(
            path,
            uploads.upload_part,
            self.folder,
            path,
            upload.upload_id,
            number,
            buffer.cast("B"),
            self.check,
            crc if self.with_checksums else "",
        )
        return Receipt(path, byte_offset, nbytes, taken.tag, crc, taken.md5)

    def copy_part(self, copy: CopyRange, source: ReadRange) -> Receipt:
        """Have the store copy one whole part."""
        path, upload = copy.path, self.uploads[copy.path]
        number, wanted = upload.part(copy.byte_offset)
        if copy.nbytes != wanted:
            raise TargetError(f"{path}: the part at {copy.byte_offset} has {wanted} bytes, not {copy.nbytes}")
        if not isinstance(source, FsspecSource) or not isinstance(source.folder, S3Folder):
            raise UnsupportedError(f"{path}: the store copies only from files of its own")
        taken = self.folder.attempt(
            path, uploads.copy_part, self.folder, upload.upload_id, number, copy, source, source.folder
        )
        return Receipt(path, copy.byte_offset, copy.nbytes, taken.tag, md5=taken.md5)


class S3Target(FsspecTarget):
    """A new checkpoint on S3. Its session lists the files before their uploads are created, then the uploads."""

    smallest_part_bytes = SMALLEST_PART_BYTES
    most_parts = MOST_PARTS

    def __init__(self, folder: S3Folder, permission: Permission = Permission()) -> None:
        self.s3 = folder
        self.uploads: dict[str, str] = {}
        self.completed: set[str] = set()
        super().__init__(folder, permission)

    def open_session_store(self) -> SessionStore:
        """The session, under keys next to those of the new files."""
        return S3SessionStore(self.s3)

    def find_session(self, listing: Listing) -> SessionRecord | None:
        """The session at this target, without a request if the listing names none; whoever takes it looks again."""
        return super().find_session(listing) if SESSION in listing.files else None

    def copies_from(self, source: Source) -> CopyLimits | None:
        """Try the copy request that real parts will use: a few bytes of the largest file, into an aborted upload."""
        if not isinstance(source, FsspecSource) or not isinstance(source.folder, S3Folder):
            return None
        if source.folder.endpoint() != self.s3.endpoint():
            return None
        largest = max(source.stamps, key=lambda name: source.stamps[name].size_bytes, default="")
        if not largest or source.stamps[largest].size_bytes <= SMALLEST_PART_BYTES:
            return None
        try:
            wanted = source.read(largest, 1, PROBE_COPY_BYTES)
            probe = CopyRange(probe_name(), 0, PROBE_COPY_BYTES, largest, 1)
            taken = self._probe_copy(probe, source, source.folder)
        except ReshardError as error:
            logger.info("%s does not copy from %s: %s", self.location, source.location, error)
            return None
        if taken.md5 and taken.md5 != md5_of(wanted).hex():
            logger.info("%s copies other bytes than requested", self.location)
            return None
        return COPIES

    def _probe_copy(self, probe: CopyRange, source: FsspecSource, source_folder: S3Folder) -> uploads.Taken:
        """Copy a range into an upload, then abort it."""
        attempt = partial(self.s3.attempt, policy=retry.HURRIED)
        upload_id = attempt("", self.s3.create_upload, probe.path)
        try:
            return attempt("", uploads.copy_part, self.s3, upload_id, 1, probe, source, source_folder)
        finally:
            attempt("", self.s3.abort_upload, probe.path, upload_id)

    def begin_files(self, files: Sequence[NewFile], identity: Identity) -> tuple[S3Writer, Sequence[Record]]:
        """Create the upload of every file that has bytes, or find the uploads of an earlier run."""
        for new in files:
            check_limits(new)
        writes = any(new.size_bytes for new in files)
        with ThreadPoolExecutor(1) as beside:  # the trial and the session do not know each other
            trial = beside.submit(self._part_check, True) if writes and not self.permission.resume else None
            session = Session.take(
                self.session_store, self.location, identity, self.permission, (new.path for new in files)
            )
            self.session = session
        self.uploads = dict(session.record.uploads)
        if session.resumed:  # some stores have no ListMultipartUploads, which nothing else needs
            self._abort_strays()
        elif self.permission.resume:  # of a run that was killed in its trial, before it had a session
            with suppress(ReshardError):
                self._abort_strays()
        begins = session.phase is Phase.MOVE and not any(self.uploads.values())
        check = PartCheck.MD5
        if trial is not None:
            check = trial.result()
        elif writes and session.phase is Phase.MOVE:
            check = self._part_check(begins or bool(session.record.checksum))
        checked = CHECKSUM if begins and check is PartCheck.CHECKSUM else session.record.checksum
        if checked and check is not PartCheck.CHECKSUM:  # over another connection than the run that began
            check = PartCheck.MD5
        listed = self._list_parts(files)
        # Some stores answer for a missing upload as for one without parts.
        gone = [new for new in files if not listed.get(new.path)]
        if session.phase is Phase.MOVE:
            empty = [new.path for new in gone if listed.get(new.path) is not None]
            self.folder.for_each(lambda name: self._abort(name, self.uploads[name]), empty)
            self.uploads |= dict(self.folder.for_each(partial(self._begin, checked), gone))
            session.update(uploads=self.uploads, checksum=checked)
        else:
            self._find_completed([new for new in gone if new.size_bytes], session.records)
        records = kept_records(session.records, self.completed, listed, self.files)
        if session.phase is not Phase.MOVE and len(records) < len(session.records):
            raise TargetError(
                f"{self.location}: parts of the unfinished conversion are gone from the store; paddle-reshard clean "
                f"{self.location} removes the rest"
            )
        begun = {
            new.path: Upload(self.uploads[new.path], new.part_starts, new.size_bytes)
            for new in files
            if new.size_bytes
        }
        return S3Writer(self.s3, begun, check, bool(checked)), records

    def _part_check(self, with_checksums: bool) -> PartCheck:
        return part_check(self.s3, probe_name(), with_checksums)

    def _begin(self, algorithm: str, new: NewFile) -> tuple[str, str]:
        if not new.size_bytes:
            return new.path, ""
        return new.path, self.folder.attempt(new.path, self.s3.create_upload, new.path, algorithm)

    def _list_parts(self, files: Sequence[NewFile]) -> dict[str, dict[int, UploadedPart] | None]:
        """The parts that the store has of every upload created by an earlier run; ``None`` where the upload is gone."""
        begun = [new.path for new in files if self.uploads.get(new.path)]

        def parts(name: str) -> tuple[str, dict[int, UploadedPart] | None]:
            return name, self.folder.attempt(name, uploads.list_parts, self.s3, name, self.uploads[name])

        return dict(self.folder.for_each(parts, begun))

    def _abort_strays(self) -> None:
        """Abort uploads of files that the session lists, created by a run that was killed before it noted their ids."""
        for name, upload_id in self.folder.attempt("", uploads.list_uploads, self.s3):
            if _is_upload_of(name, self.uploads) and upload_id != self.uploads.get(name):
                self._abort(name, upload_id)

    def _abort(self, name: str, upload_id: str) -> None:
        self.folder.attempt(name, self.s3.abort_upload, name, upload_id)

    def _find_completed(self, files: Sequence[NewFile], records: Sequence[Record]) -> None:
        """Require a complete file wherever an upload is gone; otherwise the conversion cannot be resumed."""
        receipts = {(r.path, r.byte_offset): r for record in records for r in record.receipts}
        source = FsspecSource(self.folder, [new.path for new in files])
        for new in files:
            parts = [receipts[new.path, start] for start in new.part_starts if (new.path, start) in receipts]
            if len(parts) < len(new.part_starts) or not _is_made_of(source, new, parts):
                raise TargetError(
                    f"{self.location}/{new.path}: its upload is gone, and the file is not there; paddle-reshard clean "
                    f"{self.location} removes the rest"
                )
            self.completed.add(new.path)

    def _parts(self, name: str) -> list[Receipt]:
        return [self.receipts[name, start] for start in self.files[name].part_starts]

    def etags(self) -> Mapping[str, str]:
        """The ETag of every file for which the MD5 of all parts is known."""
        tags = {name: joined_etag(self._parts(name)) for name, new in self.files.items() if new.size_bytes}
        return {name: tag for name, tag in tags.items() if tag}

    def make_visible(self, name: str) -> None:
        """Complete a file's upload; an empty file is simply written.

        A request whose answer was lost is repeated, and stores disagree about the answer to completing an upload twice.
        So the answer does not decide: a file that consists of exactly these parts is ours.
        """
        if not self.files[name].size_bytes:
            self.s3.put(name, b"")
        elif name not in self.completed:
            try:
                uploads.complete_upload(self.s3, name, self.uploads[name], self._parts(name))
            except OSError:
                if not _is_made_of(FsspecSource(self.folder, [name]), self.files[name], self._parts(name)):
                    raise
            self.completed.add(name)

    def take_back(self) -> int:
        """Abort every upload that has not been completed; how many could not be."""
        going = {name: of for name, of in self.uploads.items() if of and name not in self.completed}
        return self.try_each(lambda name: self.s3.abort_upload(name, going[name]), going)

    def clean(self) -> list[str]:
        """Remove what an unfinished conversion left behind: uploads, visible files, the session. Returns their names.

        A checkpoint that was to be overwritten stays whole: once its replacement has begun, nothing is removed.
        """
        listing, found = self._sweep()
        refuse_replacing(found, self.location)
        session = (
            find_session(self.session_store) if acquire_lock(self.session_store, self.location) else None
        )
        strays = self.folder.attempt("", uploads.list_uploads, self.s3)
        leftovers = find_leftovers(session, listing.files, strays)
        self.folder.for_each(lambda each: self._abort(*each), leftovers.uploads)
        self.folder.for_each(self._delete, sorted(leftovers.visible, key=lambda n: (not is_marker(n), n)))
        self.session_store.remove()
        self.folder.for_each(self._delete, [name for name in leftovers.own if name != SESSION])
        return [f"{self.location}/{name}" for name in leftovers.names()]


# -------------------------------------------------------------------------------------- leftovers of an earlier run


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What an unfinished conversion left at its target."""

    uploads: tuple[tuple[str, str], ...]
    """``(file, upload id)`` of every upload that has not been completed."""
    visible: tuple[str, ...]
    """Files that it made visible."""
    own: tuple[str, ...]
    """Its session and ledger."""

    def names(self) -> list[str]:
        """What is shown to users."""
        return [*(f"{name} (upload)" for name, _ in self.uploads), *self.visible, *self.own]


def find_leftovers(
    session: SessionRecord | None, files: Collection[str], strays: Sequence[tuple[str, str]]
) -> Leftovers:
    """Which of the visible files and uncompleted uploads (``strays``) at a target belong to an unfinished conversion.

    Those of files that its session lists do, and those with our own names. All others are another program's.
    """
    own = tuple(name for name in files if name.startswith(OWN_PREFIX))
    listed = {} if session is None else session.uploads
    pending = tuple(each for each in strays if _is_upload_of(each[0], listed))
    if session is None:
        return Leftovers(pending, (), own)
    visible: list[str] = []
    if session.phase is not Phase.MOVE:
        open_uploads = {of for _, of in strays}
        visible = [name for name, of in session.uploads.items() if of not in open_uploads and name in files]
    return Leftovers(pending, tuple(visible), own)


def _is_upload_of(name: str, listed: Collection[str]) -> bool:
    """Whether an upload of this name is of the session that lists these, or a trial of ours."""
    return name in listed or name.startswith(OWN_PREFIX)


def kept_records(
    records: Sequence[Record],
    completed: Collection[str],
    listed: Mapping[str, dict[int, UploadedPart] | None],
    files: Mapping[str, NewFile],
) -> list[Record]:
    """Units of work of an earlier run whose parts all exist: in a completed file, or in the store's list of parts."""
    return [
        record
        for record in records
        if all(receipt.path in completed or _is_listed(receipt, listed, files) for receipt in record.receipts)
    ]


def _is_listed(
    receipt: Receipt, listed: Mapping[str, dict[int, UploadedPart] | None], files: Mapping[str, NewFile]
) -> bool:
    """Whether the store lists exactly the part that a receipt describes."""
    parts = listed.get(receipt.path)
    if parts is None:
        return False
    number = files[receipt.path].part_starts.index(receipt.byte_offset) + 1
    return parts.get(number) == UploadedPart(receipt.nbytes, receipt.tag.strip('"'))


def _is_made_of(source: FsspecSource, new: NewFile, parts: Sequence[Receipt]) -> bool:
    """Whether a file exists and consists of these parts: judged by its ETag, or else by the checksums of its bytes."""
    if source.sizes().get(new.path) != new.size_bytes:
        return False
    if wanted := joined_etag(parts):
        return source.versions()[new.path].strip('"') == wanted.strip('"')
    return all(
        part.checksum and source_checksum(source, new.path, part.byte_offset, part.nbytes) == part.checksum
        for part in parts
    )


def check_limits(new: NewFile) -> None:
    """Refuse a file beyond the limits of S3: it or a part too large, a part too small, or the parts too many."""
    if new.size_bytes > LARGEST_OBJECT_BYTES:
        raise TargetError(
            f"{new.path}: has {new.size_bytes} bytes, an S3 object may have {LARGEST_OBJECT_BYTES}; "
            "choose a topology with smaller files"
        )
    if len(new.part_starts) > MOST_PARTS:
        raise TargetError(
            f"{new.path}: has {len(new.part_starts)} parts, an S3 upload may have {MOST_PARTS}; "
            "choose a topology with smaller files"
        )
    sizes = [b - a for a, b in zip(new.part_starts, (*new.part_starts[1:], new.size_bytes), strict=False)]
    if any(size < SMALLEST_PART_BYTES for size in sizes[:-1]) or any(s > LARGEST_PART_BYTES for s in sizes):
        raise TargetError(
            f"{new.path}: has parts of {min(sizes)} to {max(sizes)} bytes, an S3 upload may have parts of "
            f"{SMALLEST_PART_BYTES} to {LARGEST_PART_BYTES}"
        )
