"""What a store does is found out by trials with a few bytes, in uploads that nobody sees."""

from __future__ import annotations

import logging
from functools import partial

from paddle_reshard.pipeline.core.errors import ReshardError
from paddle_reshard.storage.checksum import checksum
from paddle_reshard.storage.remote import retry
from paddle_reshard.storage.s3 import uploads
from paddle_reshard.storage.s3.answers import text_of
from paddle_reshard.storage.s3.folder import S3Folder
from paddle_reshard.storage.s3.uploads import CHECKSUM, PartCheck
from paddle_reshard.storage.store import Receipt

_BYTES = memoryview(b"paddle_reshard")

logger = logging.getLogger(__name__)


def part_check(folder: S3Folder, name: str, with_checksums: bool) -> PartCheck:
    """How a store is made to refuse parts that arrive altered.

    Checksums count only if the store refuses a part with a wrong one, and completes uploads of a part that has one and
    of a part that it copies; so a file of a few bytes exists for a moment, under a ``name`` that no other has.
    """
    known = folder.trial_results
    if with_checksums not in known:
        found = None
        if with_checksums and folder.client.leaves_bytes_to_checksums:
            try:
                found = _try(folder, name, CHECKSUM)
            except ReshardError as error:
                logger.info("%s takes no uploads with checksums: %s", folder.location, error)
        known[with_checksums] = found or _try(folder, name, "")
    result: PartCheck = known[with_checksums]
    return result


def _try(folder: S3Folder, name: str, algorithm: str) -> PartCheck:
    """How the store refuses altered parts of uploads with or without checksums."""
    attempt = partial(folder.attempt, "", policy=retry.HURRIED)
    crc = checksum(_BYTES) if algorithm else ""
    upload_id = attempt(folder.create_upload, name, algorithm)
    try:
        taken = attempt(uploads.upload_part, folder, name, upload_id, 1, _BYTES, PartCheck.MD5, crc)
        if not crc or not _is_refused(folder, name, upload_id, 2, crc):
            signed = _is_refused(folder, name, upload_id, 2, "")
            return PartCheck.SIGNATURE if signed else PartCheck.MD5
        _complete(folder, name, upload_id, taken.tag)
        upload_id = ""
    finally:
        if upload_id:
            attempt(folder.abort_upload, name, upload_id)
    try:
        _copy_onto_itself(folder, name, algorithm)
    finally:
        attempt(folder.delete, name)
    return PartCheck.CHECKSUM


def _complete(folder: S3Folder, name: str, upload_id: str, tag: str) -> None:
    """Complete an upload of one part."""
    parts = [Receipt(name, 0, len(_BYTES), tag)]
    folder.attempt("", uploads.complete_upload, folder, name, upload_id, parts, policy=retry.HURRIED)


def _copy_onto_itself(folder: S3Folder, name: str, algorithm: str) -> None:
    """Replace a file by an upload into which the store copies it: whole, since ranges have to be large."""
    attempt = partial(folder.attempt, "", policy=retry.HURRIED)
    bucket, key = folder.key(name)
    upload_id = attempt(folder.create_upload, name, algorithm)
    try:
        part = {"UploadId": upload_id, "PartNumber": 1, "CopySource": {"Bucket": bucket, "Key": key}}
        answer = attempt(partial(folder.request, "upload_part_copy", name, **part))
        _complete(folder, name, upload_id, text_of(answer.get("CopyPartResult", {}), "ETag"))
        upload_id = ""
    finally:
        if upload_id:
            attempt(folder.abort_upload, name, upload_id)


def _is_refused(folder: S3Folder, name: str, upload_id: str, number: int, crc: str) -> bool:
    """Whether a part is refused that changes on its way, by its checksum, or without one, by its signature."""
    bucket, key = folder.key(name)
    part = {"UploadId": upload_id, "PartNumber": number, "Body": _BYTES}
    if crc:
        part["ChecksumCRC64NVME"] = uploads.header_of(crc)
    return folder.client.refuses_altered_part(Bucket=bucket, Key=key, **part)
