"""botocore's own client, made of the options and credentials that s3fs understands.

s3fs makes its requests through aiobotocore, in an event loop that copies every body several times. The client beneath
takes a tenth of that: bodies are read into buffers of the caller, and sent from them. Only public names of both
packages are used (docs/decisions/031-botocore-makes-the-requests.md).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from urllib.parse import quote

import botocore
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import BotoCoreError, ClientError, UnseekableStreamError
from botocore.parsers import ResponseParserError
from botocore.session import Session
from fsspec.utils import tokenize
from s3fs.errors import translate_boto_error
from urllib3.exceptions import HTTPError

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.version import __version__
from paddle_reshard.storage.remote.retry import DamagedBody, code_of
from paddle_reshard.storage.s3.connections import Connections, authorities
from paddle_reshard.storage.s3.reads import Reads, fill

logger = logging.getLogger(__name__)

_CHECKSUM = "ChecksumCRC64NVME"
_HEADERS = {"Range": "Range", "IfMatch": "If-Match"}
"""Parameter of a read → its header."""
_ALTERED = ("BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch")
"""Error codes for a body that is not the one that was signed, or whose checksum differs."""


class Client:
    """Makes all requests of this process to a store with the same options. Can be used by several threads.

    What a file system of s3fs was given says how they are made; it makes none itself. If botocore does not understand
    the options, it raises a ``TypeError``, a ``ValueError`` or one of its own errors.
    """

    def __init__(self, file_system: Any) -> None:
        self.file_system = file_system
        self.botocore, credentials, verify = self._make({})
        self._connections = Connections(self.botocore, verify)
        self._reads = Reads(self.botocore, credentials, self._connections)
        self._reads.is_usable &= not self._of_every_request("get_object")
        self.trial_results: dict[str, dict[Any, Any]] = {}
        """Bucket → what trials have found about it."""
        self._altering: dict[str, bytes] = {}

    def _make(self, s3: Mapping[str, Any]) -> tuple[Any, Any, bool | str]:
        """A client of botocore with these options for S3, its credentials, and whom it trusts."""
        given = self.file_system
        if given.session is not None:
            raise UsageError("storage options: session: give a profile, or key, secret and token instead")
        config = {
            "connect_timeout": given.connect_timeout,
            "read_timeout": given.read_timeout,
            **given.config_kwargs,
        }
        config.setdefault("user_agent", f"paddle-reshard/{__version__}")
        config["s3"] = {**(config.get("s3") or {}), **s3}
        own = {
            "endpoint_url": given.endpoint_url,
            "aws_access_key_id": given.key,
            "aws_secret_access_key": given.secret,
            "aws_session_token": given.token,
        }
        options = {"use_ssl": given.use_ssl, **given.client_kwargs}
        options |= {name: value for name, value in own.items() if value is not None}
        if given.anon:
            options = {name: value for name, value in options.items() if not name.startswith("aws_")}
            config["signature_version"] = botocore.UNSIGNED
        session = Session(**given.kwargs)
        # Nobody asks when a file was changed, and to parse it takes most of the time of a listing.
        session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=str)
        made = session.create_client("s3", config=Config(**config), **options)
        made.meta.events.register("before-send.s3", self._send)
        credentials = None
        if not given.anon:
            keys = (options.get(name) for name in own if name != "endpoint_url")
            credentials = (
                Credentials(*keys) if options.get("aws_access_key_id") else session.get_credentials()
            )
        return made, credentials, authorities(session, options.get("verify"))

    def close(self) -> None:
        """Close the connections that are not in use. A request after this opens new ones."""
        self._connections.close()
        for client in (self.botocore, self.__dict__.get("_leaving_out_bytes")):
            if client is not None:
                client.close()

    @property
    def endpoint(self) -> str:
        """The URL that receives requests."""
        return str(self.botocore.meta.endpoint_url)

    @property
    def leaves_bytes_to_checksums(self) -> bool:
        """Whether the signature of a part with a checksum leaves out its bytes: over TLS, that is enough."""
        signed = (self.botocore.meta.config.s3 or {}).get("payload_signing_enabled")
        return self.endpoint.startswith("https:") if signed is None else not signed

    @cached_property
    def _leaving_out_bytes(self) -> Any:
        """The client for parts with checksums; botocore knows only checksums that it computes itself."""
        return self._make({"payload_signing_enabled": False})[0]

    # -------------------------------------------------------------------------------------------- requests

    def request(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Make a request by a method of botocore's client, such as ``put_object``; the answer as botocore gives it.

        ``Body`` is a buffer. What the user wants of every request is added to the parameters.

        Raises
        ------
        OSError
            If the store refuses it; its cause is botocore's exception.
        DamagedBody
            If the answer cannot be understood.
        BotoCoreError
            If there is no answer.
        """
        client = self.botocore
        if _CHECKSUM in parameters and self.leaves_bytes_to_checksums:
            client = self._leaving_out_bytes
        if "Body" in parameters:
            parameters["Body"] = self._sendable(parameters["Body"])
        chosen = {**self._of_every_request(method), **parameters}
        try:
            answer: dict[str, Any] = _repeated_elsewhere(getattr(client, method), chosen)
        except ClientError as error:
            raise translate_boto_error(error) from error
        except (ResponseParserError, ValueError) as error:
            raise DamagedBody(f"the answer to {method} is not well-formed: {error}") from error
        return answer

    def _of_every_request(self, method: str) -> dict[str, Any]:
        """What the user wants of every request, as far as this kind has it."""
        wanted = {**self.file_system.s3_additional_kwargs, **self.file_system.req_kw}
        if not wanted:
            return wanted
        model = self.botocore.meta.service_model.operation_model(
            self.botocore.meta.method_to_api_mapping[method]
        )
        return {name: value for name, value in wanted.items() if name in model.input_shape.members}

    def _sendable(self, body: Any) -> Any:
        """A body that is sent as it lies in memory, unless the user has botocore compute checksums of it."""
        view = memoryview(body).cast("B")
        checksums = getattr(self.botocore.meta.config, "request_checksum_calculation", None)
        return bytes(view) if checksums == "when_supported" else view

    def read(self, buffer: memoryview, bucket: str, key: str, asked: Mapping[str, str]) -> dict[str, Any]:
        """Fill ``buffer`` with a range of a file; what the answer says of it, as botocore would.

        ``asked`` has ``Range`` and optionally ``IfMatch``. Fails as :meth:`request` does, and with a
        :class:`DamagedBody` if the body is shorter or longer than ``buffer``.
        """
        tried = self._reads.is_usable
        if tried:
            headers = {_HEADERS[name]: value for name, value in asked.items()}
            try:
                answer = self._reads.read(buffer, bucket, key, headers)
            except ClientError as error:
                raise translate_boto_error(error) from error
            if answer is not None:
                return answer
        with self._answered({"Bucket": bucket, "Key": key, **asked}) as told:
            fill(buffer, told.pop("Body"), told.get("ContentLength"))
        if tried:
            self._reads.is_usable = False
            logger.info("reads of %s are left to botocore, which is permitted what was refused", bucket)
        return told

    def read_object(
        self, check_size: Callable[[int | None], None], **parameters: Any
    ) -> tuple[bytes, dict[str, Any]]:
        """The whole body of the answer to ``get_object``, and the rest of the answer.

        ``check_size`` is given the length before the body is read, and raises if it is too large.
        """
        with self._answered(parameters) as answer:
            check_size(answer.get("ContentLength"))
            content: bytes = answer.pop("Body").read()
        return content, answer

    @contextmanager
    def _answered(self, parameters: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """An answer whose body is closed in the end; a connection whose body was not read to its end goes with it."""
        answer = self.request("get_object", **parameters)
        body = answer["Body"]
        try:
            yield answer
        except HTTPError as error:
            raise DamagedBody(f"the response ended with {type(error).__name__}: {error}") from error
        finally:
            body.close()

    # ---------------------------------------------------------------------------------------------- trials

    def refuses_altered_part(self, **parameters: Any) -> bool:
        """Whether the store refuses a part whose bytes change on their way; if not, it is stored with other bytes.

        ``parameters`` are those of ``upload_part``.
        """
        upload = f"uploadId={quote(parameters['UploadId'], safe='-._~')}"
        self._altering[upload] = bytes(byte ^ 1 for byte in parameters["Body"])
        try:
            self.request("upload_part", **parameters)
        except OSError as error:
            return code_of(error) in _ALTERED
        except BotoCoreError:
            return False
        finally:
            del self._altering[upload]
        return False

    def _send(self, request: Any, **_: Any) -> Any:
        """Send a signed request, with another body if it belongs to a trial; ``None`` to leave it to botocore."""
        for upload, body in tuple(self._altering.items()):
            if upload in request.url and request.body is not None:
                request.body = body
        return self._connections.send(request)


def _repeated_elsewhere(method: Any, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Make a request, and once more if botocore has learnt meanwhile that the bucket is in another region.

    It repeats such requests itself, but rewinds only files.
    """
    try:
        answer: dict[str, Any] = method(**parameters)
    except UnseekableStreamError:
        answer = method(**parameters)
    return answer


MOST_CLIENTS = 4
"""A process that needs more options in turn, as a service may, makes clients again: each keeps connections open."""
_clients: dict[tuple[int, str], Client] = {}
"""Process and options → the client for them, the latest last."""
_making = threading.Lock()


def client_of(file_system: Any, options: Mapping[str, Any]) -> Client:
    """The client of this process for a store, made of a file system of s3fs with these options if there is none."""
    which = os.getpid(), tokenize(dict(options))
    with _making:
        _clients[which] = client = _clients.pop(which, None) or Client(file_system)
        while len(_clients) > MOST_CLIENTS:
            _clients.pop(next(iter(_clients))).close()
    return client
