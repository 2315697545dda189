"""The one reader of JSON that comes from outside: what is not exactly one reading of one JSON text is refused.

Python's own reader takes the last of two equal keys, makes numbers of ``NaN``, ``Infinity`` and ``1e999``, and ends in
a ``RecursionError`` when it is nested deeply. None of this has a meaning here (RFC 8259, sections 4 and 6), so two
readers could see two different files in one.
"""

from __future__ import annotations

import json
import sys
from math import isfinite
from typing import Any

from paddle_reshard.pipeline.core.limits import FREE_VALUES, JSON_VALUE_BYTES

_SHOWN_CHARACTERS = 80
_DIGITS = 4300
"""At most in a whole number, as by Python since 3.10.7: the time to read them grows with their square."""


class JsonError(ValueError):
    """A text is not JSON with one meaning. ``reason`` is a short machine-readable code.

    ``byte_offset`` is the position in the text, if known.
    """

    def __init__(self, reason: str, detail: str, byte_offset: int | None = None) -> None:
        super().__init__(reason, detail, byte_offset)
        self.reason, self.detail, self.byte_offset = reason, detail, byte_offset

    def __str__(self) -> str:
        return self.detail


def parse_json(text: bytes | str) -> Any:
    """The value of a JSON text in UTF-8.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    paddle_reshard.storage.documents.strict_json.JsonError: the key 'a' stands twice in one object
    >>> parse_json("[NaN]")
    Traceback (most recent call last):
    paddle_reshard.storage.documents.strict_json.JsonError: NaN is not JSON

    Raises
    ------
    JsonError
        If it is not JSON, not UTF-8, holds a key twice in one object, a number that is none or that no float can
        hold, is nested without end, or has more values than its size allows for
        (:mod:`~paddle_reshard.pipeline.core.limits`). It is a ``ValueError``.
    """
    return _parse(text, _refuse_constant)


def parse_json_with_constants(text: bytes | str) -> Any:
    """The value of a JSON text with ``NaN`` and ``Infinity``, as Python's own writer makes it of a trainer's figures.

    A trainer that met a loss of NaN once has it in the history of every later ``trainer_state.json``.
    """
    return _parse(text, float)


def _parse(text: bytes | str, constant: Any) -> Any:
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JsonError("bad_text", "text that is not UTF-8", error.start) from None
    _check_size(decoded)
    try:
        return json.loads(  # noqa: TID251 (the only call)
            decoded,
            object_pairs_hook=_object,
            parse_constant=constant,
            parse_float=_number,
            parse_int=None if _python_limits_digits() else _whole,  # a call for each number takes time
        )
    except RecursionError:
        raise JsonError("nesting_too_deep", "JSON nested without end") from None
    except JsonError:
        raise
    except ValueError as error:  # also a number of more digits than Python converts
        raise JsonError("bad_json", str(error)) from None


def _check_size(text: str) -> None:
    """Refuse what would take many times its size of memory, before anything of it is built.

    Commas and brackets in strings are counted too, so this is the most that there can be.
    """
    values = text.count(",") + text.count("[") + text.count("{")
    most = FREE_VALUES + len(text) // JSON_VALUE_BYTES
    if values > most:
        raise JsonError(
            "too_many_values", f"{values} values in {len(text)} characters; at most {most} are read"
        )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        shown = twice if len(twice) <= _SHOWN_CHARACTERS else f"{twice[:_SHOWN_CHARACTERS]}…"
        raise JsonError("duplicate_key", f"the key {shown!r} stands twice in one object")
    return entries


def _refuse_constant(name: str) -> Any:
    raise JsonError("bad_json", f"{name} is not JSON")


def _python_limits_digits() -> bool:
    limit = getattr(sys, "get_int_max_str_digits", None)  # not before Python 3.10.7
    return limit is not None and limit() > 0


def _whole(text: str) -> int:
    if len(text) > _DIGITS:
        raise JsonError("bad_json", f"a whole number of {len(text)} characters; at most {_DIGITS} are read")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not isfinite(value):
        raise JsonError("bad_json", f"the number {text[:_SHOWN_CHARACTERS]} is too large for a float")
    return value
