"""A prefix in a bucket: listings, small files, and the configuration of s3fs."""

from __future__ import annotations

import hashlib
import os
from base64 import b64encode
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from botocore.exceptions import BotoCoreError

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.storage.remote import retry
from paddle_reshard.storage.remote.folder import FsspecFolder, Listing, ObjectStamp
from paddle_reshard.storage.remote.retry import DamagedBody, RetryPolicy
from paddle_reshard.storage.remote.retry_counts import note_retry
from paddle_reshard.storage.s3.answers import check_range, is_version, number_of, pages, text_of
from paddle_reshard.storage.s3.client import Client, client_of

_CONFIG = {
    # Retries are ours. Some stores reject the newer checksums; what is sent instead is in uploads.py.
    "retries": {"total_max_attempts": 1},
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
    "max_pool_connections": 128,
    # Without it, botocore would sign URLs as S3 did at first, for no region.
    "signature_version": "s3v4",
    # It does not know that buffers can be sent.
    "parameter_validation": False,
}

UPLOAD_GONE = ("NoSuchUpload", "NoSuchKey", "NotFound", "404")
"""Error codes for an upload that was completed or aborted, or never existed.

AWS, MinIO, OSS and COS answer ``NoSuchUpload`` to every request. Ceph answers ``NoSuchKey`` to ListParts (seen on
16.2.15; newer versions do the same: ceph/s3-tests#728), and 500 ``InternalError`` to completing an upload whose file
does not exist. Completing an upload twice succeeds on AWS and Ceph, and fails on MinIO (minio#13318). SeaweedFS
answers with an empty list of parts (seaweedfs#11081).
"""


class S3Folder(FsspecFolder):
    """A prefix in a bucket, through botocore, with options and credentials as s3fs reads them."""

    ranges_in_flight = 16

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.options, self.failure)

    def open(self) -> tuple[Any, str]:
        """The file system and the folder's path in it, found once per process: fsspec takes as long as a small read."""
        process, found = self.__dict__.get("_opened", (0, None))
        if found is None or process != os.getpid():
            found = super().open()
            self.__dict__["_opened"] = os.getpid(), found
        return found

    def _open(self, options: dict[str, Any]) -> tuple[Any, str]:
        # A copy: the client changes what it is given, and fsspec would not recognise the same options the next time.
        config = {**_CONFIG, **options.get("config_kwargs", {})}
        options["config_kwargs"] = {
            name: dict(value) if isinstance(value, dict) else value for name, value in config.items()
        }
        options["use_listings_cache"] = False
        return super()._open(options)

    @property
    def client(self) -> Client:
        """What makes the requests of this process."""
        process, found = self.__dict__.get("_client", (0, None))
        if found is None or process != os.getpid():
            found = client_of(self.open()[0], self.options)
            self.__dict__["_client"] = os.getpid(), found
        return cast(Client, found)

    def _connect(self) -> None:
        if not self.open()[1]:
            raise UsageError(f"{self.location}: an S3 location is s3://bucket/prefix")
        try:
            _ = self.client
        except BotoCoreError as error:  # no request was made yet, so the options are wrong
            raise UsageError(f"{self.location}: storage options: {self.redacted(error)}") from None

    def key(self, name: str) -> tuple[str, str]:
        """Bucket and key of a file."""
        bucket, prefix = self._place
        return bucket, f"{prefix}/{name}" if prefix else name

    @cached_property
    def _place(self) -> tuple[str, str]:
        """Bucket and prefix: the client takes as long to find them as to read a few kilobytes."""
        file_system, root = self.open()
        bucket, prefix, _ = file_system.split_path(root)
        return bucket, prefix

    def request(self, method: str, name: str, **parameters: Any) -> dict[str, Any]:
        """One request about one file, without a retry."""
        bucket, key = self.key(name)
        return self.client.request(method, Bucket=bucket, Key=key, **parameters)

    def request_below(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One request about everything below the prefix, without a retry."""
        bucket, prefix = self.key("")
        return self.client.request(method, Bucket=bucket, Prefix=prefix, **parameters)

    def level(self, policy: RetryPolicy | None) -> Listing:
        """All files and folders below the prefix, one level deep, page by page."""
        _, prefix = self.key("")
        files: dict[str, ObjectStamp] = {}
        folders: list[str] = []
        listed = partial(self.request_below, "list_objects_v2", Delimiter="/")
        attempt = partial(self.attempt, "", policy=policy)

        def ask(**more: str) -> dict[str, Any]:
            return {**(page := listed(**more)), "Found": found_below(prefix, page)}

        for page in pages(ask, attempt, ContinuationToken="NextContinuationToken"):
            files |= page["Found"].files
            folders += page["Found"].folders
        return Listing(files, tuple(folders))

    def read_range(self, name: str, stamp: ObjectStamp, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` straight from the connection, if the file is still the version that was listed.

        An answer with another version, which the store should have refused, is asked for once more before the file is
        said to have changed.
        """
        if not len(buffer):
            return
        asked = {"Range": f"bytes={byte_offset}-{byte_offset + len(buffer) - 1}"}
        if stamp.version and not getattr(self.open()[0], "local_expiry_check", False):
            asked["IfMatch"] = stamp.version
        for again in (False, True):
            if again:
                note_retry("DamagedBody")
            answer = self.client.read(buffer, *self.key(name), asked)
            if is_version(stamp.version, str(answer.get("ETag", ""))):
                check_range(answer, byte_offset, len(buffer), stamp.size_bytes)
                return
        raise self.failure(f"{self.location}/{name}: changed while it was read")

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, replacing an existing one."""
        self.request("put_object", name, Body=content, ContentMD5=b64encode(md5_of(content)).decode())

    def put_new(self, name: str, content: bytes) -> bool:
        """Write a small file where none is; False if one is."""
        return self.put_if(name, content, None) is not None

    def read_object(self, name: str) -> tuple[bytes, str] | None:
        """A small file and its ETag; ``None`` if it does not exist."""
        bucket, key = self.key(name)
        try:
            content, answer = self.client.read_object(partial(self.check_size, name), Bucket=bucket, Key=key)
        except OSError as error:
            if retry.code_of(error) in ("NoSuchKey", "404"):
                return None
            raise
        return content, text_of(answer, "ETag")

    def put_if(self, name: str, content: bytes, version: str | None) -> str | None:
        """Write a small file if it still has this ETag (``None``: if it does not exist). Returns the new ETag or
        ``None``.

        If a response is lost, the retry fails its own condition; so a file with exactly these bytes is ours. In a store
        without conditional writes, the file is read first.
        """
        # Ceph 16 does not match an ETag in quotes: if nothing has changed, retry without them.
        matches = [] if version is None else list(dict.fromkeys((version, version.strip('"'))))
        if self.__dict__.get("_plain_tags"):
            matches.reverse()
        conditions = [{"IfMatch": match} for match in matches] or [{"IfNoneMatch": "*"}]
        body = {"Body": content, "ContentMD5": b64encode(md5_of(content)).decode()}
        code = ""
        for condition in conditions:
            try:
                made = text_of(self.request("put_object", name, **body, **condition), "ETag")
                self.__dict__["_plain_tags"] = condition.get("IfMatch", version) != version
                return made
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
        return text_of(self.request("put_object", name, **body), "ETag")

    def put_file(self, local: Path, name: str) -> None:
        """Upload a small local file."""
        self.put(name, local.read_bytes())

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        self.request("delete_object", name)

    def create_upload(self, name: str, algorithm: str = "") -> str:
        """Create an upload; its id. With ``algorithm``, its parts have such checksums."""
        checked = {"ChecksumAlgorithm": algorithm} if algorithm else {}
        return text_of(self.request("create_multipart_upload", name, **checked), "UploadId")

    def abort_upload(self, name: str, upload_id: str) -> None:
        """Abort an upload and drop its parts; a missing upload is no failure."""
        try:
            self.request("abort_multipart_upload", name, UploadId=upload_id)
        except OSError as error:
            if retry.code_of(error) not in UPLOAD_GONE:
                raise

    def probe(self, name: str, deleting: bool) -> None:
        """Check that this folder is writable, without leaving a trace.

        Creating and aborting an upload needs the same permissions as the real uploads, and it is never visible. Once is
        enough: a target is opened before its plan is made, and again when it is written.
        """
        known = self.trial_results
        if (which := ("writable", self._place[1], deleting)) in known:
            return
        upload_id = self.attempt("", self.create_upload, name, policy=retry.HURRIED)
        self.attempt("", self.abort_upload, name, upload_id, policy=retry.HURRIED)
        if deleting:
            self.attempt("", self.delete, name, policy=retry.HURRIED)
        known[which] = True

    def endpoint(self) -> str:
        """The URL that receives requests; the same for all folders of a store."""
        return self.client.endpoint

    @property
    def trial_results(self) -> dict[Any, Any]:
        """What trials of this process have found about the bucket."""
        return self.client.trial_results.setdefault(self._place[0], {})


def md5_of(content: bytes | memoryview) -> bytes:
    """The MD5 of some bytes, 16 bytes."""
    return hashlib.md5(content, usedforsecurity=False).digest()


def found_below(prefix: str, page: Mapping[str, Any]) -> Listing:
    """The files and folders that a page of a listing names; refused if one is not below the prefix, or has no size."""
    files: dict[str, ObjectStamp] = {}
    for entry in page.get("Contents", []):
        if name := _below(prefix, text_of(entry, "Key")):
            files[name] = ObjectStamp(number_of(entry, "Size"), entry.get("ETag", ""))
    folders = [_below(prefix, text_of(entry, "Prefix")) for entry in page.get("CommonPrefixes", [])]
    return Listing(files, tuple(name.removesuffix("/") for name in folders))


def _below(prefix: str, key: str) -> str:
    if not key.startswith(prefix):
        raise DamagedBody(f"a listing of {prefix!r} names {key[:200]!r}")
    return key[len(prefix) :]
