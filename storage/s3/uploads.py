"""Multipart uploads: one function per request, and the meaning of the answers.

Every file of a new checkpoint is a multipart upload, even if it has a single part, because an upload stays invisible
until it is completed. Nothing appears before everything is written, a marker can be uploaded long before it may be
seen, and after a failure aborting the uploads removes everything. The store checks every part (:class:`PartCheck`).
"""

from __future__ import annotations

from base64 import b64encode
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from paddle_reshard.pipeline.core.errors import TargetError
from paddle_reshard.pipeline.core.file_names import TENSOR_FOLDERS
from paddle_reshard.storage.remote.retry import DamagedBody, code_of
from paddle_reshard.storage.remote.source import FsspecSource
from paddle_reshard.storage.s3.answers import number_of, pages, text_of
from paddle_reshard.storage.s3.folder import UPLOAD_GONE, S3Folder, md5_of
from paddle_reshard.storage.store import CopyRange, Receipt

_SOURCE_GONE = ("PreconditionFailed", "NoSuchKey", "InvalidRange")
"""Error codes for a source object that is not the version that was listed."""

CHECKSUM = "CRC64NVME"
"""The checksum that uploads are made for, where the store checks it."""


class PartCheck(str, Enum):
    """How a store notices that a part arrived altered."""

    CHECKSUM = "checksum"
    """By its CRC-64/NVME, which every part has anyway; TLS protects the request, and its signature leaves out the
    bytes."""
    SIGNATURE = "signature"
    """By its SHA-256, which the signature covers: 0.7 s of processor time per GB."""
    MD5 = "md5"
    """By its MD5, where the store takes other bytes than were signed: twice as long."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that is being uploaded."""

    upload_id: str
    part_starts: tuple[int, ...]
    size_bytes: int

    def part(self, byte_offset: int) -> tuple[int, int]:
        """Number and size of the part that starts at an offset.

        >>> Upload("u", (0, 100), 130).part(100)
        (2, 30)
        """
        index = bisect_left(self.part_starts, byte_offset)
        if self.part_starts[index : index + 1] != (byte_offset,):
            raise TargetError(f"no part starts at byte {byte_offset}")
        stop = (*self.part_starts[index + 1 : index + 2], self.size_bytes)[0]
        return index + 1, stop - byte_offset


@dataclass(frozen=True, slots=True)
class UploadedPart:
    """A part of an upload as the store lists it."""

    size_bytes: int
    tag: str


class Taken(NamedTuple):
    """The store's answer to a part that it accepted."""

    tag: str
    """Its ETag."""
    md5: str
    """MD5 of the part's bytes; ``""`` where the ETag is no MD5, as with most kinds of encryption and in some stores."""

    @classmethod
    def of(cls, tag: str, answer: Mapping[str, Any]) -> Taken:
        """Read an answer."""
        return cls(tag, tag.strip('"') if _is_md5(tag) and not _encrypted(answer) else "")


# --------------------------------------------------------------------------------------------- requests


def complete_upload(folder: S3Folder, name: str, upload_id: str, receipts: Sequence[Receipt]) -> None:
    """Complete an upload: it becomes a visible file."""
    parts = [{"PartNumber": number, "ETag": receipt.tag} for number, receipt in enumerate(receipts, 1)]
    folder.request("complete_multipart_upload", name, UploadId=upload_id, MultipartUpload={"Parts": parts})


def list_parts(folder: S3Folder, name: str, upload_id: str) -> dict[int, UploadedPart] | None:
    """The parts of an upload by number; ``None`` if the upload does not exist."""

    def ask(**more: Any) -> dict[str, Any]:
        return folder.request("list_parts", name, UploadId=upload_id, **more)

    try:
        return {
            number_of(part, "PartNumber"): UploadedPart(
                number_of(part, "Size"), text_of(part, "ETag").strip('"')
            )
            for page in pages(ask, PartNumberMarker="NextPartNumberMarker")
            for part in page.get("Parts", [])
        }
    except OSError as error:
        if code_of(error) not in UPLOAD_GONE:
            raise
        return None


def list_uploads(folder: S3Folder) -> list[tuple[str, str]]:
    """``(file, upload id)`` of every pending upload in the folder and in its tensor folders."""
    _, prefix = folder.key("")

    def ask(**more: str) -> dict[str, Any]:
        return folder.request_below("list_multipart_uploads", **more)

    found: list[tuple[str, str]] = []
    for page in pages(ask, KeyMarker="NextKeyMarker", UploadIdMarker="NextUploadIdMarker"):
        for upload in page.get("Uploads", []):
            key = text_of(upload, "Key")
            name = key.removeprefix(prefix)
            inside, _, _ = name.rpartition("/")
            if key.startswith(prefix) and inside in ("", *TENSOR_FOLDERS):
                found.append((name, text_of(upload, "UploadId")))
    return found


def upload_part(
    folder: S3Folder,
    name: str,
    upload_id: str,
    number: int,
    buffer: memoryview,
    check: PartCheck = PartCheck.MD5,
    crc: str = "",
) -> Taken:
    """Upload one part. ``crc`` is its checksum in hexadecimal digits, if its upload was created for checksums."""
    part: dict[str, Any] = {"UploadId": upload_id, "PartNumber": number, "Body": buffer}
    if crc:
        part["ChecksumCRC64NVME"] = header_of(crc)
    if check is not PartCheck.MD5:
        answer = folder.request("upload_part", name, **part)
        return Taken.of(text_of(answer, "ETag"), answer)
    md5 = md5_of(buffer)
    answer = folder.request("upload_part", name, **part, ContentMD5=b64encode(md5).decode())
    taken = Taken.of(text_of(answer, "ETag"), answer)
    if taken.md5 and taken.md5 != md5.hex():
        raise DamagedBody(f"part {number}: the store has MD5 {taken.md5}, {md5.hex()} was sent")
    return taken


def copy_part(
    folder: S3Folder,
    upload_id: str,
    number: int,
    copy: CopyRange,
    source: FsspecSource,
    source_folder: S3Folder,
) -> Taken:
    """Have the store copy a range of a file, still in the version that was listed, into a part."""
    bucket, key = source_folder.key(copy.source_path)
    condition = {"CopySourceIfMatch": v} if (v := source.stamps[copy.source_path].version) else {}
    last_byte = copy.source_offset + copy.nbytes - 1
    try:
        answer = folder.request(
            "upload_part_copy",
            copy.path,
            UploadId=upload_id,
            PartNumber=number,
            CopySource={"Bucket": bucket, "Key": key},
            CopySourceRange=f"bytes={copy.source_offset}-{last_byte}",
            **condition,
        )
    except OSError as error:
        if code_of(error) in _SOURCE_GONE:
            raise source_folder.explain(error, copy.source_path) from None
        raise
    return Taken.of(text_of(answer.get("CopyPartResult", {}), "ETag"), answer)


# ------------------------------------------------------------------------------------------ ETags and MD5


def header_of(crc: str) -> str:
    """A checksum in hexadecimal digits as requests carry it.

    >>> header_of("ae8b14860a799888")
    'rosUhgp5mIg='
    """
    return b64encode(bytes.fromhex(crc)).decode()


def _is_md5(tag: str) -> bool:
    digits = tag.strip('"')
    return len(digits) == 32 and all(c in "0123456789abcdef" for c in digits)


def _encrypted(answer: Mapping[str, Any]) -> bool:
    """Whether the store encrypted a part with a key: then its ETag is no MD5."""
    return "SSECustomerAlgorithm" in answer or str(answer.get("ServerSideEncryption", "")).startswith("aws:")


def joined_etag(receipts: Sequence[Receipt]) -> str | None:
    """The ETag of a file that consists of these parts; ``None`` if the MD5 of a part is unknown."""
    if not all(receipt.md5 for receipt in receipts):
        return None
    digests = b"".join(bytes.fromhex(receipt.md5) for receipt in receipts)
    return f'"{md5_of(digests).hex()}-{len(receipts)}"'
