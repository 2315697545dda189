"""What a store does is found out by trials with a few bytes, in uploads that nobody sees."""

from __future__ import annotations

import logging
from functools import partial
from typing import NamedTuple

from paddle_reshard.pipeline.core.errors import ReshardError
from paddle_reshard.storage.checksum import checksum
from paddle_reshard.storage.remote import retry
from paddle_reshard.storage.remote.source import FsspecSource
from paddle_reshard.storage.s3 import direct, uploads
from paddle_reshard.storage.s3.folder import S3Folder
from paddle_reshard.storage.s3.uploads import CHECKSUM, PartCheck
from paddle_reshard.storage.store import CopyRange, Receipt

_BYTES = memoryview(b"paddle_reshard")

logger = logging.getLogger(__name__)


class CopyTrial(NamedTuple):
    """A part that the store is to copy, because later ones will be copied like it."""

    source: FsspecSource
    folder: S3Folder
    path: str
    nbytes: int


def part_check(folder: S3Folder, name: str, copied: CopyTrial | None, with_checksums: bool) -> PartCheck:
    """How a store is made to refuse parts that arrive altered.

    Checksums count only if the store refuses a part with a wrong one, and completes an upload of parts that have them;
    so a file of a few bytes exists for a moment.

    Parameters
    ----------
    folder
        Where parts will go.
    name
        A file that does not exist.
    copied
        A part to copy into the upload too; its size is that of the smallest part.
    with_checksums
        Whether checksums may be used.
    """
    file_system, _ = folder.open()
    bucket, _ = folder.key(name)
    known, which = direct.known_checks(file_system, bucket), (with_checksums, copied is not None)
    if which not in known:
        found = None
        if with_checksums and direct.leaves_bytes_to_checksums(file_system, bucket):
            try:
                found = _try(folder, name, CHECKSUM, copied)
            except ReshardError as error:
                logger.info("%s takes no uploads with checksums: %s", folder.location, error)
        known[which] = found or _try(folder, name, "", copied)
    found = known[which]
    return found


def _try(folder: S3Folder, name: str, algorithm: str, copied: CopyTrial | None) -> PartCheck:
    """The same for uploads with or without checksums."""
    attempt = partial(folder.attempt, "", policy=retry.HURRIED)
    number = 2 if algorithm and copied else 1
    crc = checksum(_BYTES) if algorithm else ""
    upload_id = attempt(uploads.create_upload, folder, name, algorithm)
    try:
        taken = attempt(uploads.upload_part, folder, name, upload_id, number, _BYTES, PartCheck.MD5, crc)
        if not crc or not _is_refused(folder, name, upload_id, number + 1, _other(crc)):
            signed = _is_refused(folder, name, upload_id, number + 1, "")
            return PartCheck.SIGNATURE if signed else PartCheck.MD5
        parts = [Receipt(name, 0, len(_BYTES), taken.tag)]
        if copied:
            wanted = CopyRange(name, 0, copied.nbytes, copied.path, 0)
            first = attempt(uploads.copy_part, folder, upload_id, 1, wanted, copied.source, copied.folder)
            parts.insert(0, Receipt(name, 0, copied.nbytes, first.tag))
        attempt(uploads.complete_upload, folder, name, upload_id, parts)
        upload_id = ""
        attempt(folder.delete, name)
        return PartCheck.CHECKSUM
    finally:
        if upload_id:
            attempt(uploads.abort_upload, folder, name, upload_id)


def _is_refused(folder: S3Folder, name: str, upload_id: str, number: int, crc: str) -> bool:
    """Whether a part is refused that has a wrong checksum, or without one, a wrong signature."""
    bucket, key = folder.key(name)
    part = {"Bucket": bucket, "Key": key, "UploadId": upload_id, "PartNumber": number, "Body": _BYTES}
    if crc:
        part["ChecksumCRC64NVME"] = uploads.header_of(crc)
    return direct.refuses_altered_part(folder.open()[0], part)


def _other(crc: str) -> str:
    """The checksum of other bytes."""
    return f"{int(crc, 16) ^ 1:016x}"
