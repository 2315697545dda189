"""A document with the fingerprints of a checkpoint, as ``fingerprint --output`` writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np

from paddle_reshard.pipeline.core.crc import ALGORITHM
from paddle_reshard.pipeline.core.errors import CheckpointError, FormatError
from paddle_reshard.pipeline.core.fingerprints import Fingerprints
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import Tensor, dtype_named
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json
from paddle_reshard.storage.documents.typed_json import EntryError, typed

FORMAT = "paddle-reshard fingerprints"
GENERATION = 1
Line = tuple[str, str, str, tuple[int, ...], str]
"""Key, state, dtype, global shape, checksum."""


@dataclass(frozen=True, slots=True)
class _Entries:
    """The entries of a document that are read; further ones are for people."""

    OPEN: ClassVar[bool] = True
    algorithm: Literal["crc64nvme"]
    root: str
    tensors: tuple[Line, ...]


def format_fingerprints(fingerprints: Fingerprints, facts: Mapping[str, Any]) -> bytes:
    """A document with one line for each tensor, exactly as the root is computed from it; ``facts`` come first."""
    head = {
        "format": FORMAT,
        "generation": GENERATION,
        **facts,
        "algorithm": ALGORITHM,
        "root": fingerprints.root,
        "states": dict(fingerprints.states),
        "tensors": None,
    }
    return with_lines(json.dumps(head, indent=1), "tensors", fingerprints.lines()).encode()


def with_lines(text: str, entry: str, lines: Iterable[bytes]) -> str:
    """JSON whose ``entry``, ``null`` so far, becomes a list with one item in each line."""
    items = [f"  {line.decode('ascii')}" for line in lines]
    listed = "[\n" + ",\n".join(items) + "\n ]" if items else "[]"
    return text.replace(f'"{entry}": null', f'"{entry}": {listed}', 1)


def parse_fingerprints(data: bytes, path: str) -> Fingerprints:
    """Parse a document.

    Raises
    ------
    FormatError
        If it is not such a document, or contradicts itself.
    """
    try:
        values = parse_json(data)
    except JsonError as error:
        raise FormatError("not_json", path, None, f"not valid JSON: {error}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise FormatError("not_fingerprints", path, None, f"not a document with {FORMAT}")
    if values.get("generation") != GENERATION:
        raise FormatError(
            "unknown_generation",
            path,
            None,
            f"has generation {values.get('generation')!r}; this version reads {GENERATION}",
        )
    try:
        entries = typed(values, _Entries)
        tensors = Tensors(
            Tensor(key, state, dtype_named(dtype), shape) for key, state, dtype, shape, _ in entries.tensors
        )
        checksums = [_checksum(line[-1]) for line in entries.tensors]
    except (EntryError, CheckpointError, ValueError) as error:
        raise FormatError("damaged", path, None, f"not valid fingerprints: {error}") from error
    identities = [line[:2] for line in entries.tensors]
    if any(following <= identity for identity, following in pairwise(identities)):
        raise FormatError("damaged", path, None, "its tensors are not sorted by key and state")
    fingerprints = Fingerprints(tensors, np.array(checksums, dtype=np.uint64))
    if fingerprints.root != entries.root:
        detail = f"the root of its tensors is {fingerprints.root}, the document says {entries.root}"
        raise FormatError("damaged", path, None, detail)
    return fingerprints


def _checksum(text: str) -> int:
    if len(text) != 16 or text.strip("0123456789abcdef"):
        raise ValueError(f"a checksum has 16 hexadecimal digits, not {text!r}")
    return int(text, 16)
