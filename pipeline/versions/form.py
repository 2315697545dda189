"""The form of published weights: names of versions, and what the index of a delta says.

The form is that of the receiver of SGLang's ``/pull_weights`` (sgl-project/sglang pull request 30366) and of the
publishers of slime, miles, vime and ModelExpress. Versions lie side by side in one folder::

    weight_v000001/    full: a Hugging Face checkpoint
    weight_v000002/    a delta: index, and one file with a Zstandard frame for each tensor that changed
    latest             the text "weight_v000002"

A delta leads from the version before it to its own. The index of a delta states in its ``metadata`` what it is, and
its file states in ``__metadata__`` a checksum of the new bytes of each tensor that it holds.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from paddle_reshard.pipeline.core.errors import CheckpointError, UsageError
from paddle_reshard.pipeline.core.extras import require
from paddle_reshard.storage.files.safetensors import Index, format_index

LATEST = "latest"
"""The file beside the versions that names the newest one."""
DELTA_FILE = "model-00000-of-00001.safetensors"
"""The file of a delta, which holds the frames of all changed tensors."""
COMPRESSION = "zstd"
MAX_VERSION = 999_999
_NAME = re.compile(r"weight_v([0-9]{6})")


class Encoding(str, Enum):
    """How the new bytes of a tensor follow from the old ones."""

    XOR = "xor"
    """The frame holds as many bytes as the tensor: the exclusive or of old and new."""
    OVERWRITE = "overwrite"
    """The frame holds the number of bytes that changed, their positions and their new values."""


class Hasher(Protocol):
    """A checksum of bytes that arrive piece by piece."""

    def update(self, data: memoryview, /) -> object:
        """Add bytes."""

    def hexdigest(self) -> str:
        """The checksum of all bytes so far, in lower case."""


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: memoryview) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def _xxh3_128() -> Hasher:
    require("xxhash", "publish", "the checksum xxh3-128")
    import xxhash

    return xxhash.xxh3_128()


def _blake3() -> Hasher:
    require("blake3", "publish", "the checksum blake3")
    import blake3

    return blake3.blake3()


CHECKSUMS: Mapping[str, Callable[[], Hasher]] = {
    "adler32": _Adler32,
    "xxh3-128": _xxh3_128,
    "blake3": _blake3,
}
"""Name of a checksum, as in the index of a delta → a new one; an ``UnsupportedError`` if its library is missing."""


def version_name(number: int) -> str:
    """The folder of a version.

    >>> version_name(7)
    'weight_v000007'
    """
    return f"weight_v{number:06}"


def version_number(name: str) -> int | None:
    """The number of a version from the name of its folder; ``None`` if it is the folder of something else.

    >>> version_number("weight_v000007"), version_number("weight_v7")
    (7, None)
    """
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


@dataclass(frozen=True, slots=True)
class DeltaForm:
    """How a delta states what has changed."""

    encoding: Encoding
    checksum: str
    """A key of :data:`CHECKSUMS`."""

    @classmethod
    def named(cls, encoding: str, checksum: str) -> DeltaForm:
        """From the names that a user gives."""
        if encoding not in (known.value for known in Encoding):
            raise UsageError(f"encoding {encoding!r}: neither xor nor overwrite")
        if checksum not in CHECKSUMS:
            raise UsageError(f"checksum {checksum!r}: none of {', '.join(CHECKSUMS)}")
        CHECKSUMS[checksum]()  # which fails if its library is missing
        return cls(Encoding(encoding), checksum)


def format_delta_index(form: DeltaForm, number: int, keys: list[str]) -> bytes:
    """The index of a delta that leads to version ``number`` and holds these tensors."""
    metadata = {
        "version": f"{number:06}",
        "base_version": f"{number - 1:06}",
        "delta_encoding": form.encoding.value,
        "compression_format": COMPRESSION,
        "checksum_format": form.checksum,
    }
    return format_index(Index(dict.fromkeys(keys, DELTA_FILE), metadata, {}))


def delta_form(metadata: Mapping[str, object], number: int, where: str) -> DeltaForm | None:
    """The form of a delta from the ``metadata`` of its index at ``where``; ``None`` if the version is full.

    ``number`` is that of its folder; a delta that cannot be read, or does not lead there from the version before, is
    refused.
    """
    if "delta_encoding" not in metadata:
        return None
    known = {
        "delta_encoding": tuple(encoding.value for encoding in Encoding),
        "compression_format": (COMPRESSION,),
        "checksum_format": tuple(CHECKSUMS),
        "version": (f"{number:06}",),
        "base_version": (f"{number - 1:06}",),
    }
    for name, values in known.items():
        if metadata.get(name) not in values:
            raise CheckpointError(
                f"{where}: {name} is {metadata.get(name)!r}; for {version_name(number)} it can be "
                f"{' or '.join(map(repr, values))}"
            )
    return DeltaForm(Encoding(str(metadata["delta_encoding"])), str(metadata["checksum_format"]))


def pointed_version(text: bytes, where: str) -> int:
    """The number of the version that :data:`LATEST` names: ``weight_v000007`` or ``<run>/weight_v000007``."""
    name = text.decode("utf-8", "replace").strip().rpartition("/")[2]
    number = version_number(name)
    if number is None:
        raise CheckpointError(f"{where}: names {name[:80]!r}, which is no version like {version_name(7)}")
    return number
