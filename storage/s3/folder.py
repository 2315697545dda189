"""A prefix in a bucket: one request each, S3's own words for what went wrong, and the uploads of large files."""

from __future__ import annotations

import hashlib
import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from botocore.exceptions import BotoCoreError
from fsspec.asyn import sync

from paddle_reshard.pipeline.core.errors import UnsupportedError, UsageError
from paddle_reshard.pipeline.core.file_names import TENSOR_FOLDERS
from paddle_reshard.storage.remote import retry
from paddle_reshard.storage.remote.folder import FsspecFolder, Listing, ObjectStamp
from paddle_reshard.storage.remote.retry import DamagedBody, RetryPolicy
from paddle_reshard.storage.remote.source import FsspecSource
from paddle_reshard.storage.s3.reads import read_body
from paddle_reshard.storage.store import (
    CopyRange,
    Receipt,
)

SCHEMES = ("s3", "s3a")
_CONFIG = {
    # Retries are ours. Checksums: parts carry Content-MD5, which also those stores know that choke on newer ones.
    "retries": {"total_max_attempts": 1},
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "max_pool_connections": 64,
}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an upload as the store lists it."""

    size_bytes: int
    tag: str


class Taken(NamedTuple):
    """What the store says of a part that it has taken."""

    tag: str
    """Its ETag."""
    md5: str
    """Of its bytes, ``""`` where the ETag is something else: with most kinds of encryption, and in some stores."""

    @classmethod
    def of(cls, tag: str, answer: Mapping[str, Any]) -> Taken:
        """What an answer says."""
        return cls(tag, tag.strip('"') if _is_md5(tag) and not _encrypted(answer) else "")


class S3Folder(FsspecFolder):
    """A prefix in a bucket, through the client that s3fs sets up."""

    ranges_in_flight = 16

    def _open(self, options: dict[str, Any]) -> tuple[Any, str]:
        options["config_kwargs"] = {**_CONFIG, **options.get("config_kwargs", {})}
        options["use_listings_cache"] = False
        file_system, root = super()._open(options)
        file_system.retries = 1
        return file_system, root

    def _connect(self) -> None:
        file_system, root = self.open()
        if not root:
            raise UsageError(f"{self.location}: an S3 location is s3://bucket/prefix")
        try:
            file_system.connect()
        except BotoCoreError as error:  # nothing was asked yet: what is wrong is what was given
            raise UsageError(f"{self.location}: storage options: {self.redacted(error)}") from None

    def key(self, name: str) -> tuple[str, str]:
        """Bucket and key of a file."""
        file_system, root = self.open()
        bucket, prefix, _ = file_system.split_path(root)
        return bucket, f"{prefix}/{name}" if prefix else name

    def request(self, method: str, name: str, **parameters: Any) -> dict[str, Any]:
        """One request about one file, without a retry."""
        bucket, key = self.key(name)
        return self.open()[0].call_s3(method, Bucket=bucket, Key=key, **parameters)

    def level(self, policy: RetryPolicy | None) -> Listing:
        """All files and folders below the prefix, one level deep, page by page."""
        bucket, prefix = self.key("")
        files: dict[str, ObjectStamp] = {}
        folders: list[str] = []
        more: dict[str, str] = {}
        while True:
            page = self.attempt("", self._list_page, bucket, prefix, more, policy=policy)
            for entry in page.get("Contents", []):
                if name := entry["Key"][len(prefix) :]:
                    files[name] = ObjectStamp(entry["Size"], entry.get("ETag", ""))
            folders += [entry["Prefix"][len(prefix) : -1] for entry in page.get("CommonPrefixes", [])]
            if not page.get("IsTruncated"):
                return Listing(files, tuple(folders))
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _list_page(self, bucket: str, prefix: str, more: Mapping[str, str]) -> dict[str, Any]:
        return self.open()[0].call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/", **more)

    def read_range(self, name: str, stamp: ObjectStamp, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` straight from the connection, if the file is still the version that was listed."""
        file_system, root = self.open()
        bucket, prefix, _ = file_system.split_path(root)
        request = {
            "Bucket": bucket,
            "Key": f"{prefix}/{name}" if prefix else name,
            "Range": f"bytes={byte_offset}-{byte_offset + len(buffer) - 1}",
        }
        if stamp.version and not getattr(file_system, "local_expiry_check", False):
            request["IfMatch"] = stamp.version
        version: str = sync(file_system.loop, read_body, file_system, request, buffer)
        # Not every store looks at the condition.
        if stamp.version and version.strip('"') != stamp.version.strip('"'):
            raise self.failure(f"{self.location}/{name}: it changed while it was read")

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, in place of another if need be."""
        self.request("put_object", name, Body=content, ContentMD5=_base64_md5(content))

    def put_new(self, name: str, content: bytes) -> bool:
        """Write a small file where none is, by one conditional request; False if one is.

        A request whose answer got lost is repeated and then refused: so a file with these very bytes is ours. A
        store without conditional writes gets a plain one.
        """
        try:
            self.request("put_object", name, Body=content, ContentMD5=_base64_md5(content), IfNoneMatch="*")
        except OSError as error:
            code = retry.code_of(error)
            if code == "PreconditionFailed":
                return self._etag(name) == f'"{_md5(content).hex()}"'
            if code != "NotImplemented":
                raise
            self.put(name, content)
        return True

    def read_object(self, name: str) -> tuple[bytes, str] | None:
        """A small file and its ETag, ``None`` where there is none."""
        file_system, _ = self.open()
        bucket, key = self.key(name)
        try:
            content, tag = sync(file_system.loop, _read_object, file_system, {"Bucket": bucket, "Key": key})
        except OSError as error:
            if retry.code_of(error) in ("NoSuchKey", "404", "FileNotFoundError"):
                return None
            raise
        return content, tag

    def put_if(self, name: str, content: bytes, version: str | None) -> str | None:
        """Write a small file if it still has this ETag (``None``: if there is none); its new ETag, else ``None``.

        A request whose answer got lost is repeated and then refused: so a file with these very bytes is ours. A
        store without conditional writes is looked at first.
        """
        # Ceph 16 takes an ETag in quotes for another one: where nothing has changed, ask again without.
        matches = () if version is None else dict.fromkeys((version, version.strip('"')))
        conditions = [{"IfMatch": match} for match in matches] or [{"IfNoneMatch": "*"}]
        body = {"Body": content, "ContentMD5": _base64_md5(content)}
        code = ""
        for condition in conditions:
            try:
                return str(self.request("put_object", name, **body, **condition)["ETag"])
            except OSError as error:
                code = retry.code_of(error)
                if code not in ("PreconditionFailed", "NoSuchKey", "NotImplemented"):
                    raise
            found = self.read_object(name)
            if found is not None and found[0] == content:
                return found[1]
            if (None if found is None else found[1]) != version:
                return None
        if code != "NotImplemented":
            return None
        return str(self.request("put_object", name, **body)["ETag"])

    def _etag(self, name: str) -> str:
        return str(self.request("head_object", name)["ETag"])

    def put_file(self, local: Path, name: str) -> None:
        """Write a small file from this machine."""
        self.put(name, local.read_bytes())

    def delete(self, name: str) -> None:
        """Delete a file; one that is not there is no failure."""
        self.request("delete_object", name)

    def probe(self, name: str, deleting: bool) -> None:
        """Find out now whether this folder can be written, and leave no trace, whatever happens.

        An upload that is begun and aborted asks for the same permissions as the real ones and is never visible.
        """
        upload_id = self.attempt("", self.create_upload, name, policy=retry.HURRIED)
        self.attempt("", self.abort_upload, name, upload_id, policy=retry.HURRIED)
        if deleting:
            self.attempt("", self.delete, name, policy=retry.HURRIED)

    def endpoint(self) -> str:
        """Where requests go to; the same for two folders of one store."""
        return str(self.open()[0].s3.meta.endpoint_url)

    def probe_copy(self, copy: CopyRange, source: FsspecSource) -> Taken:
        """Copy a range into an upload that is dropped."""
        upload_id = self.attempt("", self.create_upload, copy.path, policy=retry.HURRIED)
        try:
            return self.attempt("", self.copy_part, upload_id, 1, copy, source, policy=retry.HURRIED)
        finally:
            self.attempt("", self.abort_upload, copy.path, upload_id, policy=retry.HURRIED)

    # -------------------------------------------------------------------------------------- multipart uploads

    def create_upload(self, name: str) -> str:
        """Begin an upload."""
        return str(self.request("create_multipart_upload", name)["UploadId"])

    def abort_upload(self, name: str, upload_id: str) -> None:
        """Drop an upload with all its parts; one that is gone is no failure."""
        try:
            self.request("abort_multipart_upload", name, UploadId=upload_id)
        except OSError as error:
            if retry.code_of(error) not in UPLOAD_GONE:
                raise

    def list_parts(self, name: str, upload_id: str) -> dict[int, Part] | None:
        """Number of every part that an upload has; ``None`` if the upload is gone."""
        parts: dict[int, Part] = {}
        more: dict[str, Any] = {}
        try:
            while True:
                page = self.request("list_parts", name, UploadId=upload_id, **more)
                for part in page.get("Parts", []):
                    parts[part["PartNumber"]] = Part(part["Size"], part["ETag"].strip('"'))
                if not page.get("IsTruncated"):
                    return parts
                more = {"PartNumberMarker": page["NextPartNumberMarker"]}
        except OSError as error:
            if retry.code_of(error) not in UPLOAD_GONE:
                raise
            return None

    def list_uploads(self) -> list[tuple[str, str]]:
        """File and upload id of every upload of the folder and of those of a checkpoint in it, neither completed nor
        aborted.
        """
        bucket, prefix = self.key("")
        found: list[tuple[str, str]] = []
        more: dict[str, Any] = {}
        while True:
            page = self.open()[0].call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **more)
            for upload in page.get("Uploads", []):
                name = upload["Key"].removeprefix(prefix)
                folder, _, _ = name.rpartition("/")
                if upload["Key"].startswith(prefix) and folder in ("", *TENSOR_FOLDERS):
                    found.append((name, upload["UploadId"]))
            if not page.get("IsTruncated"):
                return found
            more = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def upload_part(self, name: str, upload_id: str, number: int, buffer: memoryview) -> Taken:
        """Upload one part."""
        md5 = _md5(buffer)
        answer = self.request(
            "upload_part",
            name,
            UploadId=upload_id,
            PartNumber=number,
            Body=_Sent(buffer),
            ContentMD5=b64encode(md5).decode(),
        )
        taken = Taken.of(str(answer["ETag"]), answer)
        if taken.md5 and taken.md5 != md5.hex():
            raise DamagedBody(f"part {number}: the store has {taken.md5}, sent was {md5.hex()}")
        return taken

    def copy_part(self, upload_id: str, number: int, copy: CopyRange, source: FsspecSource) -> Taken:
        """Have the store make a part of a range of a file that is still the version that was seen."""
        if not isinstance(source.folder, S3Folder):
            raise UnsupportedError(f"{copy.path}: only files of the same store can be copied there")
        bucket, key = source.folder.key(copy.source_path)
        condition = {"CopySourceIfMatch": v} if (v := source.stamps[copy.source_path].version) else {}
        try:
            answer = self.request(
                "upload_part_copy",
                copy.path,
                UploadId=upload_id,
                PartNumber=number,
                CopySource={"Bucket": bucket, "Key": key},
                CopySourceRange=f"bytes={copy.source_offset}-{copy.source_offset + copy.nbytes - 1}",
                **condition,
            )
        except OSError as error:
            if retry.code_of(error) in _SOURCE_GONE:
                raise source.folder.explain(error, copy.source_path) from None
            raise
        tag = answer.get("CopyPartResult", {}).get("ETag")
        if not tag:
            raise DamagedBody(f"part {number}: the store does not say what it has copied")
        return Taken.of(str(tag), answer)

    def complete_upload(self, name: str, upload_id: str, receipts: Sequence[Receipt]) -> None:
        """Let an upload appear as a file."""
        parts = [{"PartNumber": number, "ETag": receipt.tag} for number, receipt in enumerate(receipts, 1)]
        self.request("complete_multipart_upload", name, UploadId=upload_id, MultipartUpload={"Parts": parts})


async def _read_object(file_system: Any, request: Mapping[str, Any]) -> tuple[bytes, str]:
    """A whole small file and its ETag."""
    answer = await file_system._call_s3("get_object", **request)
    body = answer["Body"]
    try:
        return await body.read(), str(answer["ETag"])
    finally:
        body.close()


class _Sent(io.RawIOBase):
    """A buffer as a file, so that it is sent without a copy."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer, self.at = buffer.cast("B"), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + (0, self.at, len(self.buffer))[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, into: Any) -> int:
        piece = self.buffer[self.at : self.at + len(into)]
        into[: len(piece)] = piece
        self.at += len(piece)
        return len(piece)


def _md5(content: bytes | memoryview) -> bytes:
    return hashlib.md5(content, usedforsecurity=False).digest()


def _base64_md5(content: bytes) -> str:
    return b64encode(_md5(content)).decode()


def _is_md5(tag: str) -> bool:
    digits = tag.strip('"')
    return len(digits) == 32 and all(c in "0123456789abcdef" for c in digits)


def _encrypted(answer: Mapping[str, Any]) -> bool:
    """Whether the store encrypted a part with a key, so that its ETag is no MD5."""
    return "SSECustomerAlgorithm" in answer or str(answer.get("ServerSideEncryption", "")).startswith("aws:")


def joined_etag(receipts: Sequence[Receipt]) -> str | None:
    """The ETag of a file that was made of these parts; ``None`` where an MD5 is missing, and stores do as they like."""
    if not all(receipt.md5 for receipt in receipts):
        return None
    digests = b"".join(bytes.fromhex(receipt.md5) for receipt in receipts)
    return f'"{_md5(digests).hex()}-{len(receipts)}"'


UPLOAD_GONE = ("NoSuchUpload", "NoSuchKey", "NotFound", "404")
"""What is said of an upload that was completed or aborted, or never was.

AWS, MinIO, OSS and COS say ``NoSuchUpload`` of every request. Ceph 16 says ``NoSuchKey`` of ListParts, as do its
newer versions (seen on 16.2.15; ceph/s3-tests#728), and 500 ``InternalError`` of completing an upload whose file is
not there. AWS and Ceph complete a completed upload once more and say 200; MinIO does not (minio#13318). SeaweedFS
lists no parts (seaweedfs#11081).
"""
_SOURCE_GONE = ("PreconditionFailed", "NoSuchKey", "InvalidRange")
"""What is said of a source that is not the one that was seen."""
