"""Tell by its first bytes what lies in place of a file, where a download or a copy went wrong.

>>> in_place_of(b"version https://git-lfs.github.com/spec/v1\\noid sha256:4d7a\\nsize 5368709120\\n", 130)
'is a Git LFS pointer to a file of 5368709120 bytes, not that file; fetch it with `git lfs pull`, or download it again'
>>> in_place_of(b"", 0)
'is empty; copy or download it again'
>>> in_place_of(b"{}", 2)
"""

from __future__ import annotations

import re
from typing import Final

BEGIN_BYTES: Final = 512
"""How much of a file :func:`in_place_of` looks at."""
_AGAIN: Final = "; copy or download it again"
_POINTER: Final = re.compile(
    rb"version https://(?:git-lfs\.github\.com|hawser\.github\.com)/spec/v1\n(?:.*\n)*?size (\d{1,19})\n"
)
_PAGE: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:!doctype html|html|head|body)\b", re.IGNORECASE)
_XML: Final = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(?:\?xml|Error>)")
_TEXT: Final = re.compile(rb"(?:Entry|Repository|Revision|Not|404)[ :][ -~]{1,80}\s*")
"""What a hub answers in place of a file that does not exist: ``Entry not found``."""


def in_place_of(begin: bytes, size_bytes: int) -> str | None:
    """What a file is instead of tensors or JSON, and what to do; ``None`` if its first bytes do not tell.

    ``begin`` are its first :data:`BEGIN_BYTES` or all of them.
    """
    if size_bytes == 0:
        return f"is empty{_AGAIN}"
    if pointer := pointer_in_place(begin):
        return pointer
    if _PAGE.match(begin):
        return (
            "is an HTML page, as a server answers when it refuses a download (a login, a wrong address)"
            + _AGAIN
        )
    if _XML.match(begin):
        return "is an XML document, as a store answers when it refuses a download" + _AGAIN
    if size_bytes <= BEGIN_BYTES and _TEXT.fullmatch(begin):
        return f"is the answer {begin.decode().strip()!r} of a server, not the file{_AGAIN}"
    if len(begin) == BEGIN_BYTES and not any(begin):
        return f"begins with zeros only: its contents were never written, or lost{_AGAIN}"
    return None


def pointer_in_place(begin: bytes) -> str | None:
    """The same of Git LFS alone, for files of any content."""
    pointer = _POINTER.match(begin)
    return pointer and (
        f"is a Git LFS pointer to a file of {int(pointer[1])} bytes, not that file; fetch it with `git lfs pull`, "
        "or download it again"
    )
