"""Ranged reads: botocore says where a file is and signs, and the standard library's HTTP client makes the request.

An index makes a small read for every array of a checkpoint. For each, botocore composes and parses everything anew, in
three times the processor time. What is unusual is left to botocore, and so is whatever the store refuses to permit: its
answer counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from http.client import HTTPResponse
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import botocore
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError, create_parser

from paddle_reshard.storage.remote.retry import DamagedBody
from paddle_reshard.storage.s3.connections import Connections, Place, closed_on_failure

REFUSAL_BYTES = 1 << 20
"""A longer error is not read."""
_REFUSED = (301, 307, 400, 401, 403)
"""What a store may answer that botocore knows how to deal with: another region, another way to sign."""
_REGION = "x-amz-bucket-region"
_TOLD = {"ETag": "ETag", "ContentRange": "Content-Range"}
"""What is said of a body → its header."""


class ReadAddress(NamedTuple):
    """Where a file is asked for."""

    place: Place
    url: str
    target: str
    """The path in the URL."""
    region: str
    """For which requests are signed."""


class Reads:
    """Reads ranges of files as botocore's ``client`` would; without ``credentials`` no request is signed.

    Can be used by several threads.
    """

    def __init__(self, client: Any, credentials: Any, connections: Connections) -> None:
        self.client, self.credentials, self.connections = client, credentials, connections
        self.is_usable = connections.are_direct and _is_usual(client)
        self._addresses: dict[tuple[str, str], ReadAddress] = {}
        self._regions: dict[str, str] = {}
        """Bucket → its region, where a store has said that it is another one."""

    def read(
        self, buffer: memoryview, bucket: str, key: str, asked: Mapping[str, str]
    ) -> dict[str, Any] | None:
        """Fill ``buffer`` with the body of an answer; what the answer says of it, or ``None`` to leave it to botocore.

        ``asked`` are headers: ``Range`` and the like.

        Raises
        ------
        DamagedBody
            If the body is shorter or longer than ``buffer``.
        ClientError
            If the store refuses the request, however it is signed.
        BotoCoreError
            If there is no answer.
        """
        try:
            at = self._address(bucket, key)
        except BotoCoreError:
            return None
        answer = self._exchange(at, asked, buffer)
        region = answer.headers.get(_REGION, at.region)
        if answer.status in _REFUSED and region != at.region:
            self._regions[bucket] = region
            answer = self._exchange(self._address(bucket, key), asked, buffer)
        if answer.status in _REFUSED:
            return None
        told: dict[str, Any] = {name: answer.headers.get(header) for name, header in _TOLD.items()}
        return {**told, "ResponseMetadata": {"HTTPStatusCode": answer.status}}

    def _exchange(self, at: ReadAddress, asked: Mapping[str, str], buffer: memoryview) -> HTTPResponse:
        """Make a request, and fill ``buffer`` unless botocore may know better."""
        with self.connections.translated():
            connection, answer = self.connections.ask(at.place, at.target, self._signed(at, asked))
            with closed_on_failure(connection):
                if answer.status >= 300 and answer.status not in _REFUSED:
                    raise self._refusal(answer)
                if answer.status < 300:
                    fill(buffer, answer, answer.headers.get("Content-Length"))
                self.connections.give_back(at.place, connection, answer)
        return answer

    def _address(self, bucket: str, key: str) -> ReadAddress:
        """Where a file is: found in a URL that botocore signs, and that is never used."""
        found = self._addresses.get((bucket, key))
        if found is None or found.region != self._regions.get(bucket, found.region):
            signed = self.client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key})
            url = urlsplit(signed)
            scope = dict(parse_qsl(url.query)).get("X-Amz-Credential", "///").split("/")
            place = url.scheme, str(url.hostname), url.port
            region = self._regions.get(bucket, scope[2])
            found = ReadAddress(place, signed.partition("?")[0], url.path, region)
            self._addresses[bucket, key] = found
        return found

    def _signed(self, at: ReadAddress, asked: Mapping[str, str]) -> dict[str, str]:
        """The headers of a request for a file."""
        if self.credentials is None:
            return dict(asked)
        request = AWSRequest("GET", at.url, headers=dict(asked))
        S3SigV4Auth(self.credentials.get_frozen_credentials(), "s3", at.region).add_auth(request)
        return dict(request.headers.items())

    def _refusal(self, answer: HTTPResponse) -> Exception:
        """The store's error, as botocore would raise it."""
        model = self.client.meta.service_model.operation_model("GetObject")
        body = answer.read(REFUSAL_BYTES)
        answered = {"status_code": answer.status, "headers": dict(answer.headers.items()), "body": body}
        try:
            return ClientError(create_parser("rest-xml").parse(answered, model.output_shape), model.name)
        except (ResponseParserError, ValueError, KeyError):
            return DamagedBody(f"the answer has status {answer.status} and is not well-formed")


def _is_usual(client: Any) -> bool:
    """Whether reads of a client are made, signed and checked in the usual way."""
    config = client.meta.config
    return (
        config.signature_version in ("s3v4", botocore.UNSIGNED)
        and getattr(config, "response_checksum_validation", "") == "when_required"
    )


def fill(buffer: memoryview, body: Any, length: Any) -> None:
    """Receive a body, which has ``readinto`` and ``read``, and refuse it unless it is as long as ``buffer``.

    ``length`` is what was announced, if anything was.
    """
    if length is not None and str(length) != str(len(buffer)):
        raise DamagedBody(f"the response has {str(length)[:20]} of the requested {len(buffer)} bytes")
    done = 0
    while done < len(buffer) and (count := body.readinto(buffer[done:])):
        done += count
    if done < len(buffer) or (length is None and body.read(1)):
        more = "more than" if done == len(buffer) else f"{done} of"
        raise DamagedBody(f"the response has {more} the requested {len(buffer)} bytes")
