"""A folder of a store that fsspec reaches: list, read ranges, write, delete. Every failure becomes one sentence.

A folder can be pickled and sent to a worker. The pickle contains its options, which hold credentials; ``repr``,
``location`` and messages do not.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeVar
from urllib.parse import parse_qsl, urlsplit

import fsspec
from fsspec.core import url_to_fs
from fsspec.registry import known_implementations

from paddle_reshard.pipeline.core.errors import ReshardError, UnsupportedError, UsageError
from paddle_reshard.pipeline.core.file_names import TENSOR_FOLDERS
from paddle_reshard.pipeline.core.limits import most_bytes, too_large
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.storage.remote import retry
from paddle_reshard.storage.remote.retry import DamagedBody, GaveUp, RetryPolicy
from paddle_reshard.storage.replaceable import Entry, EntryKind
from paddle_reshard.storage.schemes import S3_SCHEMES
from paddle_reshard.storage.store import OWN_PREFIX

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")

REQUESTS_IN_FLIGHT = 16
"""Number of concurrent small requests (create, complete, delete)."""
_UNKNOWN_OPTION = re.compile(r"unexpected keyword argument '(\w+)'")
_OURS = ("asynchronous", "skip_instance_cache", "use_listings_cache")
"""Options of fsspec that would break how folders use it."""
_VERSION_FIELDS = ("ETag", "etag", "e_tag", "md5Hash", "generation", "mtime", "LastModified", "last_modified")
_SECRET_NAME = re.compile(r"key|secret|token|pass|cred|sas|sign|connection_string|auth|user", re.IGNORECASE)
_SHORTEST_SECRET = 4
_LONGEST_MESSAGE = 300
_RUN_CODE = frozenset(f"fsspec.implementations.{name}" for name in ("reference", "cached", "dirfs"))
"""Drivers that can run code of a file before fsspec 2026.6, or open one that can: a reference file has templates,
rendered outside of a sandbox, and the metadata of a cache may be a pickle."""
_BUGS = (TypeError, AttributeError, NameError, AssertionError, MemoryError)
"""Failures that are not the store's; for them a traceback is more useful than a sentence."""

_SENTENCES = {
    "403": "access denied",
    "404": "not found",
    "412": "changed while it was read",
    "AccessDenied": "access denied; the key may not do this",
    "AllAccessDisabled": "access denied; the key may not do this",
    "AuthorizationHeaderMalformed": "the store requires a different region; set it in client_kwargs",
    "EndpointConnectionError": "the store cannot be reached; is the endpoint right?",
    "ConnectTimeoutError": "the store cannot be reached; is the endpoint right?",
    "ExpiredToken": "the session token has expired",
    "FileNotFoundError": "not found",
    "InvalidAccessKeyId": "access denied; the store does not know this access key",
    "InvalidBucketName": "the bucket has no valid name",
    "InvalidRange": "has become shorter since it was indexed",
    "InvalidToken": "the session token is not valid",
    "405": "the store has no such request",
    "501": "the store has no such request",
    "MethodNotAllowed": "the store has no such request",
    "NoCredentialsError": "no credentials were found",
    "NoSuchBucket": "no such bucket",
    "NoSuchKey": "not found",
    "NoSuchUpload": "the upload no longer exists; did another program abort it?",
    "NotImplemented": "the store has no such request",
    "PermanentRedirect": "the bucket is in a different region; set it in client_kwargs",
    "PermissionError": "access denied",
    "PreconditionFailed": "changed while it was read",
    "ReadTimeoutError": "the store did not respond in time",
    "RequestTimeTooSkewed": "access denied; the clock of this machine is wrong",
    "SSLError": "TLS handshake failed; does the endpoint use https, with a trusted certificate?",
    "SignatureDoesNotMatch": "access denied; the secret does not belong to the access key",
    "SlowDown": "the store is throttling requests",
}
_DENIED = ("AccessDenied", "AllAccessDisabled")
_UNKNOWN = ("NotImplemented", "MethodNotAllowed", "501", "405")
"""Codes for a request that the store does not have."""
_CHANGED = ("404", "412", "FileNotFoundError", "InvalidRange", "NoSuchKey", "PreconditionFailed")
"""Codes for a listed file that has changed or no longer exists. The store has not failed, so there is no retry."""


@dataclass(frozen=True, slots=True)
class ObjectStamp:
    """Identifies a version of a file. ``version`` is the store's identifier, or empty."""

    size_bytes: int
    version: str


@dataclass(frozen=True, slots=True)
class Listing:
    """Contents of a folder. ``files`` includes those in a checkpoint's own subfolders."""

    files: Mapping[str, ObjectStamp]
    folders: tuple[str, ...]

    def entries(self) -> list[Entry]:
        """The contents without the records of this tool."""
        files = [
            Entry(name, EntryKind.FILE, stamp.size_bytes)
            for name, stamp in self.files.items()
            if not name.startswith(OWN_PREFIX)
        ]
        return [*files, *(Entry(name, EntryKind.FOLDER) for name in self.folders)]


@dataclass(frozen=True, eq=False, repr=False)
class FsspecFolder:
    """A folder, given by its URL. ``failure`` is the type of its errors."""

    url: str
    options: Mapping[str, Any]
    failure: Callable[[str], ReshardError]
    ranges_in_flight: ClassVar[int] = 4
    """Number of concurrent reads; the driver holds the data of each."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.location!r})"

    @property
    def location(self) -> str:
        """The URL without user, password and query."""
        shown = without_secrets(self.url)
        return shown if shown.endswith("://") else shown.rstrip("/")

    def open(self) -> tuple[Any, str]:
        """The file system and the folder's path in it. fsspec caches it per process and set of options."""
        return self._open(dict(self.options))

    def _open(self, options: dict[str, Any]) -> tuple[Any, str]:
        file_system, root = url_to_fs(self.url, **options)
        return file_system, root.rstrip("/")

    def check_options(self) -> None:
        """Refuse a scheme without a driver, and options that the driver does not accept."""
        for scheme in (link.partition("://")[0] for link in self.url.split("::")):
            try:
                _refuse_code_of_files(scheme, fsspec.get_filesystem_class(scheme))
            except ImportError as error:
                raise UnsupportedError(f"{scheme}://: {_missing_driver(scheme)}") from error
            except ValueError as error:
                raise UnsupportedError(f"{scheme}:// is not a scheme that fsspec knows") from error
        try:
            self._connect()
        except (TypeError, KeyError, ValueError) as error:
            if unknown := _UNKNOWN_OPTION.search(str(error)):
                driver = fsspec.get_filesystem_class(self.url.partition("://")[0])
                near = did_you_mean(unknown[1], inspect.signature(driver.__init__).parameters)
                raise UsageError(
                    f"{self.location}: storage options: unknown option {unknown[1]!r}{near}"
                ) from None
            raise UsageError(f"{self.location}: storage options: {self.redacted(error)}") from None

    def _connect(self) -> None:
        with self._translated(""):
            self.open()

    # ------------------------------------------------------------------------------------------- requests

    def listing(self, policy: RetryPolicy | None = None) -> Listing:
        """List the folder and a checkpoint's own subfolders, without a cache."""
        level = self.level(policy)
        files, folders = dict(level.files), []
        for name in level.folders:
            if name in TENSOR_FOLDERS:
                inner = replace(self, url=below(self.url, name)).level(policy)
                files |= {f"{name}/{path}": stamp for path, stamp in inner.files.items()}
                folders += [f"{name}/{path}" for path in inner.folders]
            else:
                folders.append(name)
        return Listing(files, tuple(folders))

    def level(self, policy: RetryPolicy | None) -> Listing:
        """List the folder itself, without a cache."""
        entries = self.attempt("", self._ls, policy=policy)
        files, folders = {}, []
        for entry in entries:
            name = str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
            if entry["type"] == "directory":
                folders.append(name)
            elif entry["size"] is None:
                raise self.failure(
                    f"{self.location}/{name}: the store lists no size of it; copy the folder first"
                )
            else:
                files[name] = ObjectStamp(int(entry["size"]), _version(entry))
        return Listing(dict(sorted(files.items())), tuple(sorted(folders)))

    def _ls(self) -> list[dict[str, Any]]:
        file_system, root = self.open()
        file_system.invalidate_cache()
        try:
            entries: list[dict[str, Any]] = file_system.ls(root, detail=True)
        except FileNotFoundError:
            return []
        return [e for e in entries if str(e["name"]).rstrip("/") != root]

    def read_range(self, name: str, stamp: ObjectStamp, byte_offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from a file that still has this stamp, with one request."""
        file_system, root = self.open()
        data = file_system.cat_file(f"{root}/{name}", start=byte_offset, end=byte_offset + len(buffer))
        if len(data) != len(buffer):
            raise DamagedBody(f"received {len(data)} of {len(buffer)} bytes")
        buffer[:] = data

    def read_object(self, name: str) -> tuple[bytes, str] | None:
        """A small file and the store's identifier of its version, if it tells; ``None`` if there is no such file."""
        file_system, root = self.open()
        file_system.invalidate_cache()  # or it may answer from a listing without a file that has been written since
        try:
            self.check_size(name, file_system.info(f"{root}/{name}").get("size"))
            return bytes(file_system.cat_file(f"{root}/{name}")), ""
        except FileNotFoundError:
            return None

    def check_size(self, name: str, size_bytes: int | None) -> None:
        """Refuse a file that is larger than small files of this name are."""
        if size_bytes is not None and size_bytes > (most := most_bytes(name)):
            raise self.failure(f"{self.location}/{name}: {too_large(size_bytes, most)}; remove it")

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, replacing an existing one."""
        file_system, root = self.open()
        file_system.pipe_file(f"{root}/{name}", content)

    def put_new(self, name: str, content: bytes) -> bool:
        """Write a small file if none exists; False if one does.

        The check and the write are atomic only if the store supports it.
        """
        if name in self.listing().files:
            return False
        self.put(name, content)
        return True

    def put_file(self, local: Path, name: str) -> None:
        """Upload a local file."""
        file_system, root = self.open()
        if "/" in name:
            file_system.makedirs(f"{root}/{name.rpartition('/')[0]}", exist_ok=True)
        file_system.put_file(str(local), f"{root}/{name}")

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        file_system, root = self.open()
        try:
            file_system.rm_file(f"{root}/{name}")
        except FileNotFoundError:
            return

    def probe(self, name: str, deleting: bool) -> None:
        """Check that this folder is writable."""
        self.attempt("", self.put, name, b"", policy=retry.HURRIED)
        self.attempt("", self.delete, name, policy=retry.HURRIED)

    # ----------------------------------------------------------------------------------- retries and failures

    def attempt(
        self, name: str, function: Callable[..., T], *args: Any, policy: RetryPolicy | None = None
    ) -> T:
        """Make a request, with retries after temporary failures. A final failure becomes one sentence about
        ``name``."""
        with self._translated(name):
            return retry.call(policy or retry.POLICY, function, *args)

    def for_each(
        self, function: Callable[[Item], T], items: Iterable[Item], at_a_time: int = REQUESTS_IN_FLIGHT
    ) -> list[T]:
        """Apply a function to all items, concurrently if the driver supports it.

        After the first failure no further calls are started.
        """
        items = list(items)
        if len(items) < 2 or not self.open()[0].async_impl:
            return [function(item) for item in items]
        with _threads(at_a_time) as pool:
            futures = [pool.submit(function, item) for item in items]
            try:
                return [future.result() for future in futures]
            finally:
                wait([future for future in futures if not future.cancel()])

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """Convert errors of clients. The originals are not chained, because their text comes from the store."""
        try:
            yield
        except Exception as error:
            if isinstance(error, (ReshardError, *_BUGS)):
                raise
            raise self.explain(error, name) from None

    def explain(self, error: BaseException, name: str) -> ReshardError:
        """Convert an error of a client to one of ours."""
        attempts = ""
        if isinstance(error, GaveUp):
            attempts = f"; gave up after {error.attempts} attempts"
            error = error.cause
        code = retry.code_of(error)
        told = "the response body was corrupted" if code == "DamagedBody" else code
        sentence = _SENTENCES.get(code) or f"{told}: {self.redacted(error)}"
        if code in (*_DENIED, *_UNKNOWN) and (operation := retry.operation_of(error)):
            sentence = f"{sentence} ({operation})"
        location = f"{self.location}/{name}" if name else self.location
        explained = self.failure(f"{location}: {sentence}{attempts}")
        explained.retryable = code not in (*_CHANGED, *_UNKNOWN)
        return explained

    def redacted(self, error: BaseException) -> str:
        """The text of an error of a client, without secrets."""
        text = " ".join(str(error).split())
        for secret in sorted(secrets_of(self.url, self.options), key=len, reverse=True):
            text = text.replace(secret, "***")
        return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}…"


_idle: dict[tuple[int, int], list[ThreadPoolExecutor]] = {}
"""Process and number of threads → pools without work."""


@contextmanager
def _threads(at_a_time: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that nobody else uses. They are kept: to start them takes longer than many a request."""
    pools = _idle.setdefault((os.getpid(), at_a_time), [])
    try:
        pool = pools.pop()
    except IndexError:
        pool = ThreadPoolExecutor(at_a_time, thread_name_prefix="requests")
    try:
        yield pool
    finally:
        pools.append(pool)


def _version(entry: Mapping[str, Any]) -> str:
    """The store's identifier for the version of a listed file."""
    for field in (*_VERSION_FIELDS, "created"):
        if entry.get(field) is not None:
            return str(entry[field])
    return ""


def _missing_driver(scheme: str) -> str:
    """The package that is missing for a scheme known to fsspec."""
    known = known_implementations.get(scheme, {})
    package = str(known.get("class", "")).split(".")[0]
    if package in ("", "fsspec"):
        return str(known.get("err", "a package is missing"))
    return f"the package {package} is missing; install it with: pip install {package}"


def _refuse_code_of_files(scheme: str, driver: type) -> None:
    """Refuse a driver that could run code of a file in the fsspec that is installed.

    The newest releases are not required of everybody, because the ``datasets`` of trainers hold fsspec back.
    """
    if _RUN_CODE.isdisjoint(each.__module__ for each in driver.__mro__):
        return
    if tuple(map(int, re.findall(r"\d+", fsspec.__version__)[:2])) < (2026, 6):
        raise UnsupportedError(
            f"{scheme}:// needs fsspec 2026.6 or later, and {fsspec.__version__} is installed: older ones can run code "
            "that a reference file or the metadata of a cache holds"
        )


def choose_options(scheme: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for a scheme.

    ``{"s3": {…}, "gs": {…}}`` gives options by scheme; all other options apply to every scheme.
    """
    chosen: dict[str, Any] = {}
    for name, value in options.items():
        of_scheme = (name == scheme or name in known_implementations) and isinstance(value, Mapping)
        if of_scheme and name == scheme:
            chosen.update(value)
        elif not of_scheme:
            chosen.setdefault(name, value)
    return {name: value for name, value in chosen.items() if name not in _OURS}


def below(url: str, path: str) -> str:
    """The URL of something in a folder. In a chain, the first link with a path is extended.

    >>> below("s3://bucket/a/", "b"), below("zip://a::s3://bucket/c.zip", "b")
    ('s3://bucket/a/b', 'zip://a/b::s3://bucket/c.zip')
    """
    links = url.split("::")
    number = next((i for i, link in enumerate(links) if "://" in link), 0)
    link = links[number]
    links[number] = f"{link}{'' if link.endswith('/') else '/'}{path}" if path else link
    return "::".join(links)


def without_secrets(url: str) -> str:
    """A URL that is safe to show: without user, password and, except on S3, query."""
    if "::" in url and "://" in url:
        return "::".join(without_secrets(link) for link in url.split("::"))
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    if scheme not in S3_SCHEMES:  # there, they are part of names
        rest = rest.split("?", 1)[0].split("#", 1)[0]
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rsplit('@', 1)[-1]}{slash}{path}"


def secrets_of(url: str, options: Mapping[str, Any]) -> set[str]:
    """All strings in a URL or its options that must not be shown."""
    found: set[str] = set()
    for parts in map(urlsplit, url.split("::")):
        query = "" if parts.scheme in S3_SCHEMES else parts.query
        found |= {parts.username or "", parts.password or "", *(value for _, value in parse_qsl(query))}
    found.update(_secret_values(options, False))
    return {secret for secret in found if len(secret) >= _SHORTEST_SECRET}


def _secret_values(value: Any, secret: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _secret_values(inner, secret or _SECRET_NAME.search(str(name)) is not None)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _secret_values(inner, secret)
    elif secret and isinstance(value, (str, bytes)):
        yield value if isinstance(value, str) else value.decode(errors="replace")
