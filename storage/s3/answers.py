"""What a store's answer must say before it is believed: exactly what was asked, and everything that is needed.

An answer that does not is a :class:`DamagedBody`: it is asked for again, and nothing of it is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from paddle_reshard.storage.remote.retry import DamagedBody

T = TypeVar("T")

_CONTENT_RANGE = re.compile(r"bytes ([0-9]+)-([0-9]+)/([0-9]+)", re.ASCII | re.IGNORECASE)


def text_of(answer: Mapping[str, Any], name: str) -> str:
    """A text that an answer must have, and not empty.

    >>> text_of({"UploadId": "2~x"}, "UploadId")
    '2~x'
    """
    found = answer.get(name)
    if not isinstance(found, str) or not found.strip('"'):
        raise DamagedBody(f"the answer has no {name}")
    return found


def number_of(answer: Mapping[str, Any], name: str) -> int:
    """A number that an answer must have, and not negative."""
    found = answer.get(name)
    if not isinstance(found, int) or found < 0:
        raise DamagedBody(f"the answer has no {name}")
    return found


def check_range(answer: Mapping[str, Any], byte_offset: int, nbytes: int, size_bytes: int) -> None:
    """Refuse the answer to a ranged read, as botocore gives it, whose body is not this range of a file of this size.

    Only a file that was asked for as a whole may come with status 200 and without ``Content-Range``.
    """
    status, told = status_of(answer), answer.get("ContentRange")
    wanted = f"bytes {byte_offset}-{byte_offset + nbytes - 1}/{size_bytes}"
    whole = nbytes == size_bytes
    if status != 206 and not (status == 200 and whole):
        raise DamagedBody(f"the answer to a read of {wanted} has status {status}")
    if told is None and not (status == 200 and whole):
        raise DamagedBody(f"the answer to a read of {wanted} does not say which bytes it has")
    if told is not None and _range_of(str(told)) != (byte_offset, byte_offset + nbytes - 1, size_bytes):
        raise DamagedBody(f"the answer has {told[:80]!r}, {wanted} were asked for")
    if (length := answer.get("ContentLength", nbytes)) != nbytes:
        raise DamagedBody(f"the response has {length} of the requested {nbytes} bytes")


def _range_of(text: str) -> tuple[int, ...] | None:
    found = _CONTENT_RANGE.fullmatch(text.strip())
    return found and tuple(map(int, found.groups()))


def status_of(answer: Mapping[str, Any]) -> int:
    """The HTTP status of an answer."""
    found: int = answer["ResponseMetadata"]["HTTPStatusCode"]
    return found


def is_version(wanted: str, found: str) -> bool:
    """Whether an ETag is the one that was listed (``""``: unknown). Some stores leave out the quotes."""
    return not wanted or found.strip('"') == wanted.strip('"')


def _at_once(function: Callable[[], T]) -> T:
    return function()


def pages(
    ask: Callable[..., dict[str, Any]],
    attempt: Callable[[Callable[[], dict[str, Any]]], dict[str, Any]] = _at_once,
    **markers: str,
) -> Iterator[dict[str, Any]]:
    """All pages of a listing: ``ask`` requests one, and ``attempt`` repeats that after a :class:`DamagedBody`.

    ``markers``: parameter of the next request → the entry of this page to pass in it. A page that says that there are
    more and not where, or that leads back to an earlier one, is refused: such a listing has no end.

    >>> answers = iter([{"IsTruncated": True, "Next": "b"}, {"IsTruncated": False}])
    >>> list(pages(lambda **more: {**next(answers), "asked": more}, After="Next"))[1]["asked"]
    {'After': 'b'}
    """
    more: dict[str, Any] = {}
    seen: list[dict[str, Any]] = []

    def ask_once() -> dict[str, Any]:
        page = ask(**more)
        if page.get("IsTruncated") and _following(page, markers) in seen:
            raise DamagedBody("a page of the listing leads back to an earlier one")
        return page

    while True:
        page = attempt(ask_once)
        yield page
        if not page.get("IsTruncated"):
            return
        more = _following(page, markers)
        seen.append(more)


def _following(page: Mapping[str, Any], markers: Mapping[str, str]) -> dict[str, Any]:
    """What the request for the page after this one says."""
    found = {parameter: page.get(entry) for parameter, entry in markers.items()}
    if not any(found.values()):
        raise DamagedBody("the listing goes on, but does not say where")
    return {parameter: value for parameter, value in found.items() if value}
