"""A value of JSON as a frozen dataclass: the annotations of its fields say what a file may hold, and nothing else does.

:mod:`~paddle_reshard.storage.documents.strict_json` has read the text within its limits; this gives the result its
types.
Unknown and missing entries are refused, and nothing is converted but what JSON cannot write: lists become tuples, texts
members of an ``Enum``, whole numbers ``float`` where that is declared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.storage.documents.strict_json import JsonError

T = TypeVar("T")
_SHOWN_CHARACTERS = 120
_WORDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}


class EntryError(JsonError):
    """Sound JSON that does not hold what is expected."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a number: ``Annotated[int, Bounds(1, 10)]``."""

    least: int
    most: int | None = None


def typed(value: object, kind: type[T]) -> T:
    """Read a value as a dataclass or any type that is made of such, of mappings, lists, unions and plain values.

    A dataclass whose ``OPEN`` is true stands for an object that may have further entries.

    >>> from dataclasses import make_dataclass
    >>> Point = make_dataclass("Point", [("x", int), ("label", str, "")], frozen=True)
    >>> typed({"x": 3}, Point)
    Point(x=3, label='')
    >>> typed({"x": "3"}, Point)
    Traceback (most recent call last):
    paddle_reshard.storage.documents.typed_json.EntryError: x cannot be "3": a whole number is expected
    >>> typed({"lable": ""}, Point)
    Traceback (most recent call last):
    paddle_reshard.storage.documents.typed_json.EntryError: unknown entry 'lable' in {"lable": ""}; did you mean label?

    Raises
    ------
    EntryError
        Says which entry is unknown or missing, or which value is not what is expected.
    """
    return cast(T, _read(value, kind, ""))


def shown(value: object) -> str:
    """A value as JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


def _read(value: Any, kind: Any, path: str) -> Any:
    if kind is Any or type(value) is kind:
        return value
    if is_dataclass(kind):
        return _read_object(value, cast(type, kind), path)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _read_number(value, inner, path)
    if origin in (Union, UnionType):
        return _read_union(value, inner, path)
    if origin is Literal and value in inner:
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return _read_sequence(value, inner, kind, path)
    if origin is Mapping and isinstance(value, dict):
        return {name: _read(item, inner[1], f"{path}[{name!r}]") for name, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum) and value in [member.value for member in kind]:
        return kind(value)
    if kind is float and type(value) is int:
        return float(value)
    raise _unexpected(value, kind, path)


def _read_object(value: object, kind: type, path: str) -> Any:
    if not isinstance(value, dict):
        raise _unexpected(value, kind, path)
    types, needed = _entries(kind)
    for name in () if getattr(kind, "OPEN", False) else value:
        if name not in types:
            likely = did_you_mean(name, types) or f"; known: {', '.join(types)}"
            raise EntryError("unknown_entry", f"unknown entry {name!r} in {shown(value)}{likely}")
    for name in needed:
        if name not in value:
            raise EntryError("missing_entry", f"{name!r} is missing in {shown(value)}")
    above = f"{path}." if path else ""
    return kind(
        **{name: _read(item, types[name], above + name) for name, item in value.items() if name in types}
    )


def _read_number(value: Any, inner: tuple[Any, ...], path: str) -> Any:
    number, bounds = _read(value, inner[0], path), inner[1]
    if number < bounds.least:
        raise EntryError("out_of_bounds", f"{path} cannot be {number}: it must be at least {bounds.least}")
    if bounds.most is not None and number > bounds.most:
        raise EntryError("out_of_bounds", f"{path} cannot be {number}: it must be at most {bounds.most}")
    return number


def _read_union(value: Any, kinds: tuple[Any, ...], path: str) -> Any:
    """Read as the first kind that fits; if none does, raise the error of the only kind that is not ``null``."""
    if value is None and NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not NoneType]
    for kind in others[:-1]:
        try:
            return _read(value, kind, path)
        except EntryError:
            continue
    return _read(value, others[-1], path)


def _read_sequence(
    value: list[Any] | tuple[Any, ...], inner: tuple[Any, ...], kind: Any, path: str
) -> tuple[Any, ...]:
    kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
    if len(value) != len(kinds):
        raise _unexpected(value, kind, path)
    return tuple(
        _read(item, of, f"{path}[{number}]")
        for number, (item, of) in enumerate(zip(value, kinds, strict=True))
    )


@cache
def _entries(kind: type) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """The types of a dataclass's fields by their names, and the names of those without a default."""
    types = get_type_hints(kind, include_extras=True)
    own = [field for field in fields(kind) if field.init]
    needed = [f.name for f in own if f.default is MISSING and f.default_factory is MISSING]
    return {field.name: types[field.name] for field in own}, tuple(needed)


def _unexpected(value: object, kind: Any, path: str) -> EntryError:
    expected = f"{_in_words(kind)} is expected"
    if not path:
        return EntryError("wrong_type", f"{expected}, not {shown(value)}")
    return EntryError("wrong_type", f"{path} cannot be {shown(value)}: {expected}")


def _in_words(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(member.value for member in kind)}"
    if origin is tuple:
        return "a list"
    return _WORDS.get(kind, "an object")
