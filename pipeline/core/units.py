"""Sizes, counts and paths, read as a user writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from os import PathLike as _PathLike

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.limits import MAX_BYTES

DEFAULT_MEMORY = "1GiB"
SMALLEST_BUDGET_BYTES = 256 << 20
PathLike = str | _PathLike[str]
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)


def parse_size(size_in_words: str | int, option: str = "") -> int:
    """Bytes of ``1GiB``, ``512MiB``, ``2GB`` or a plain number. ``option`` is where it was given, for messages.

    >>> parse_size("1.5GiB"), parse_size(200000)
    (1610612736, 200000)
    """
    text = str(size_in_words)
    given = f"{option} {text[:40]!r}".lstrip()
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{given} is not a size; write 512MiB, 1GiB, …")
    unit = (match[2] or "").lower()
    factor = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}[unit[:1]]
    size = float(match[1]) * (1024 if unit.endswith("i") else 1000) ** factor
    if size > MAX_BYTES:
        raise UsageError(
            f"{given} is more than any file or memory has; at most {MAX_BYTES >> 40}TiB are supported"
        )
    return int(size)


def parse_memory(text: str | int) -> int:
    """A memory budget per worker in bytes, not below the smallest one."""
    size = parse_size(text, "--memory")
    if size < SMALLEST_BUDGET_BYTES:
        raise UsageError(f"--memory {text} is below the smallest budget of {SMALLEST_BUDGET_BYTES >> 20}MiB")
    return size


def parse_shard_size(text: str | int) -> int:
    """The maximum size of the tensors in a file, in bytes."""
    size = parse_size(text, "--max-shard-size")
    if size < 1:
        raise UsageError(f"--max-shard-size {text} holds nothing")
    return size


def texts_of(given: str | Iterable[str]) -> tuple[str, ...]:
    """One text or several. A text is iterable too: taken apart, the ``*`` of a pattern would match anything.

    >>> texts_of("lm_head.*"), texts_of(["a", "b"])
    (('lm_head.*',), ('a', 'b'))
    """
    return (given,) if isinstance(given, str) else tuple(given)
