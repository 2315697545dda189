"""S3 and what speaks its protocol.

Every file of a new checkpoint is one multipart upload, also where it has a single part: an upload is invisible until
it is completed, so nothing appears before everything is written, a marker can be uploaded long before it may be
seen, and a failed conversion leaves nothing behind but what aborting removes. Parts carry their MD5, which the store
checks, and which is the ETag that it answers.
"""

from __future__ import annotations

import hashlib
import io
import logging
import secrets
from base64 import b64encode
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from botocore.exceptions import BotoCoreError
from fsspec.asyn import sync

from paddle_reshard.pipeline.core.errors import ReshardError, TargetError, UnsupportedError, UsageError
from paddle_reshard.pipeline.core.file_names import TENSOR_FOLDERS
from paddle_reshard.pipeline.core.part_limits import CopyLimits
from paddle_reshard.storage.checksum import checksum, source_checksum
from paddle_reshard.storage.remote import retry
from paddle_reshard.storage.remote.folder import FsspecFolder, Listing, ObjectStamp
from paddle_reshard.storage.remote.retry import DamagedBody, RetryPolicy
from paddle_reshard.storage.remote.source import FsspecSource
from paddle_reshard.storage.remote.target import PROBE_PREFIX, FsspecTarget, is_marker, refuse_replacing
from paddle_reshard.storage.s3.reads import read_body
from paddle_reshard.storage.s3.session import S3Place
from paddle_reshard.storage.session.ledger import SESSION, Phase, Place, Session, find_session, seize
from paddle_reshard.storage.store import (
    OWN_PREFIX,
    CopyRange,
    Identity,
    NewFile,
    ReadRange,
    Receipt,
    Record,
    Source,
)

SCHEMES = ("s3", "s3a")
SMALLEST_PART_BYTES = 5 << 20
LARGEST_PART_BYTES = 5 << 30
MOST_PARTS = 10_000
LARGEST_OBJECT_BYTES = 5 << 40
COPIES = CopyLimits(smallest_bytes=SMALLEST_PART_BYTES, largest_bytes=128 << 20)
COPIES_IN_FLIGHT = 16
PROBE_COPY_BYTES = 1 << 10
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


logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that is being uploaded."""

    upload_id: str
    part_starts: tuple[int, ...]
    size_bytes: int

    def part(self, byte_offset: int) -> tuple[int, int]:
        """Number and size of the part that starts at an offset."""
        index = bisect_left(self.part_starts, byte_offset)
        if self.part_starts[index : index + 1] != (byte_offset,):
            raise TargetError(f"no part starts at byte {byte_offset}")
        stop = (*self.part_starts[index + 1 : index + 2], self.size_bytes)[0]
        return index + 1, stop - byte_offset


@dataclass(frozen=True, eq=False)
class S3Writer:
    """Uploads parts; can be sent to any worker, credentials inside."""

    folder: S3Folder
    uploads: Mapping[str, Upload]
    copies_in_flight: ClassVar[int] = COPIES_IN_FLIGHT

    def write_part(self, path: str, byte_offset: int, buffer: memoryview) -> Receipt:
        """Upload one whole part."""
        upload = self.uploads[path]
        number, nbytes = upload.part(byte_offset)
        if len(buffer) != nbytes:
            raise TargetError(f"{path}: the part at {byte_offset} has {nbytes} bytes, not {len(buffer)}")
        taken = self.folder.attempt(
            path, self.folder.upload_part, path, upload.upload_id, number, buffer.cast("B")
        )
        return Receipt(path, byte_offset, nbytes, taken.tag, checksum(buffer), taken.md5)

    def copy_part(self, copy: CopyRange, source: ReadRange) -> Receipt:
        """Have the store copy one whole part."""
        path, upload = copy.path, self.uploads[copy.path]
        number, wanted = upload.part(copy.byte_offset)
        if copy.nbytes != wanted:
            raise TargetError(f"{path}: the part at {copy.byte_offset} has {wanted} bytes, not {copy.nbytes}")
        if not isinstance(source, FsspecSource):
            raise UnsupportedError(f"{path}: only files of the same store can be copied there")
        taken = self.folder.attempt(path, self.folder.copy_part, upload.upload_id, number, copy, source)
        return Receipt(path, copy.byte_offset, copy.nbytes, taken.tag, md5=taken.md5)


class S3Target(FsspecTarget):
    """A new checkpoint on S3. Its session lists the uploads; a file that is empty has none (``""``)."""

    smallest_part_bytes = SMALLEST_PART_BYTES
    most_parts = MOST_PARTS

    def __init__(self, folder: S3Folder, overwrite: bool, resume: bool, take_over: bool) -> None:
        self.s3 = folder
        self.uploads: dict[str, str] = {}
        self.completed: set[str] = set()
        super().__init__(folder, overwrite, resume, take_over)

    def find_place(self) -> Place:
        """Beside the files that are to appear."""
        return S3Place(self.s3)

    def copies_from(self, source: Source) -> CopyLimits | None:
        """Try to copy a few bytes of the largest file, as real parts will be, into an upload that is dropped."""
        if not isinstance(source, FsspecSource) or not isinstance(source.folder, S3Folder):
            return None
        if source.folder.endpoint() != self.s3.endpoint():
            return None
        largest = max(source.stamps, key=lambda name: source.stamps[name].size_bytes, default="")
        if not largest or source.stamps[largest].size_bytes <= SMALLEST_PART_BYTES:
            return None
        try:
            wanted = source.read(largest, 1, PROBE_COPY_BYTES)
            probe = CopyRange(PROBE_PREFIX + secrets.token_hex(8), 0, PROBE_COPY_BYTES, largest, 1)
            taken = self.s3.probe_copy(probe, source)
        except ReshardError as error:
            logger.info("%s copies nothing from %s: %s", self.location, source.location, error)
            return None
        if taken.md5 and taken.md5 != _md5(wanted).hex():
            logger.info("%s copies other bytes than it is asked for", self.location)
            return None
        return COPIES

    def begin_files(self, files: Sequence[NewFile], identity: Identity) -> tuple[S3Writer, Sequence[Record]]:
        """Begin the upload of every file that has bytes, or find what an earlier run has uploaded."""
        for new in files:
            check_limits(new)
        session = Session.take(self.place, self.location, identity, self.resume, self.take_over)
        self.session = session
        self.uploads = dict(session.record.uploads)
        if self.resume:
            self._abort_strays()
        listed = self._list_parts(files)
        # Not every store tells an upload that is gone from one without parts.
        gone = [new for new in files if not listed.get(new.path)]
        if session.phase is Phase.MOVE:
            empty = [new.path for new in gone if listed.get(new.path) is not None]
            self.folder.for_each(lambda name: self._abort(name, self.uploads[name]), empty)
            self.uploads |= dict(self.folder.for_each(self._begin, gone))
            session.update(uploads=self.uploads)
        else:
            self._find_completed([new for new in gone if new.size_bytes], session.records)
        records = [
            record
            for record in session.records
            if all(
                receipt.path in self.completed or _is_listed(receipt, listed, self.files)
                for receipt in record.receipts
            )
        ]
        if session.phase is not Phase.MOVE and len(records) < len(session.records):
            raise TargetError(
                f"{self.location}: parts of the unfinished conversion are gone from the store; paddle-reshard clean "
                f"{self.location} removes the rest"
            )
        uploads = {
            new.path: Upload(self.uploads[new.path], new.part_starts, new.size_bytes)
            for new in files
            if new.size_bytes
        }
        return S3Writer(self.s3, uploads), records

    def _begin(self, new: NewFile) -> tuple[str, str]:
        if not new.size_bytes:
            return new.path, ""
        return new.path, self.folder.attempt(new.path, self.s3.create_upload, new.path)

    def _list_parts(self, files: Sequence[NewFile]) -> dict[str, dict[int, Part] | None]:
        """What is there of the files whose upload an earlier run has begun."""
        begun = [new.path for new in files if self.uploads.get(new.path)]

        def parts(name: str) -> tuple[str, dict[int, Part] | None]:
            return name, self.folder.attempt(name, self.s3.list_parts, name, self.uploads[name])

        return dict(self.folder.for_each(parts, begun))

    def _abort_strays(self) -> None:
        """Abort uploads of our files that a killed run has begun and no session knows."""
        for name, upload_id in self.folder.attempt("", self.s3.list_uploads):
            ours = name in self.files or name.startswith(OWN_PREFIX)
            if ours and upload_id != self.uploads.get(name):
                self._abort(name, upload_id)

    def _abort(self, name: str, upload_id: str) -> None:
        self.folder.attempt(name, self.s3.abort_upload, name, upload_id)

    def _find_completed(self, files: Sequence[NewFile], records: Sequence[Record]) -> None:
        """Files whose upload is gone are there, whole, or the conversion cannot go on."""
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
        """The ETag of every file where the MD5 of all parts are known."""
        tags = {name: joined_etag(self._parts(name)) for name, new in self.files.items() if new.size_bytes}
        return {name: tag for name, tag in tags.items() if tag}

    def make_visible(self, name: str) -> None:
        """Complete a file's upload; an empty file has none.

        A request whose answer got lost is repeated, and stores say different things of an upload that was completed
        before. So whatever is said: if a file made of these very parts is there, it is ours.
        """
        if not self.files[name].size_bytes:
            self.s3.put(name, b"")
        elif name not in self.completed:
            try:
                self.s3.complete_upload(name, self.uploads[name], self._parts(name))
            except OSError:
                if not self._has_appeared(self.files[name], self._parts(name)):
                    raise
            self.completed.add(name)

    def _has_appeared(self, new: NewFile, parts: Sequence[Receipt]) -> bool:
        """Whether a file is there and made of these parts."""
        return _is_made_of(FsspecSource(self.folder, [new.path]), new, parts)

    def take_back(self) -> int:
        """Abort all uploads that are not completed."""
        uploads = {name: of for name, of in self.uploads.items() if of and name not in self.completed}
        return self.try_each(lambda name: self.s3.abort_upload(name, uploads[name]), uploads)

    def clean(self) -> list[str]:
        """Remove what an unfinished conversion has left: its uploads, files that it let appear, its session.

        A checkpoint that it was to replace stays, whole: once it has begun to be replaced, nothing is removed.
        Says what was removed.
        """
        listing = self._sweep()
        refuse_replacing(find_session(self.place), self.location)
        left = find_session(self.place) if seize(self.place, self.location, self.take_over) else None
        strays = self.folder.attempt("", self.s3.list_uploads)
        known = {} if left is None else dict(left.uploads)
        going = [(name, of) for name, of in strays if left is not None or name.startswith(OWN_PREFIX)]
        visible: list[str] = []
        if left is not None and left.phase is not Phase.MOVE:
            open_uploads = {of for _, of in strays}
            visible = [name for name, of in known.items() if of not in open_uploads and name in listing.files]
        own = [name for name in listing.files if name.startswith(OWN_PREFIX)]
        self.folder.for_each(lambda each: self.folder.attempt(each[0], self.s3.abort_upload, *each), going)
        self.folder.for_each(self._delete, sorted(visible, key=lambda n: (not is_marker(n), n)))
        self.place.remove()
        self.folder.for_each(self._delete, [name for name in own if name != SESSION])
        return [
            f"{self.location}/{name}" for name in (*(f"{name} (upload)" for name, _ in going), *visible, *own)
        ]


def _is_listed(
    receipt: Receipt, listed: Mapping[str, dict[int, Part] | None], files: Mapping[str, NewFile]
) -> bool:
    """Whether the store has the very part that a receipt is of."""
    parts = listed.get(receipt.path)
    if parts is None:
        return False
    number = files[receipt.path].part_starts.index(receipt.byte_offset) + 1
    return parts.get(number) == Part(receipt.nbytes, receipt.tag.strip('"'))


def _is_made_of(source: FsspecSource, new: NewFile, parts: Sequence[Receipt]) -> bool:
    """Whether a file is there and made of these parts: by its ETag, else by the checksums of its bytes."""
    if source.sizes().get(new.path) != new.size_bytes:
        return False
    if wanted := joined_etag(parts):
        return source.versions()[new.path].strip('"') == wanted.strip('"')
    return all(
        part.checksum and source_checksum(source, new.path, part.byte_offset, part.nbytes) == part.checksum
        for part in parts
    )


def check_limits(new: NewFile) -> None:
    """Refuse a file that S3 cannot hold."""
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
