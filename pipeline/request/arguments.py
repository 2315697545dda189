"""Arguments of the public functions are of the types with which they are annotated; nothing else says what they may be.

Otherwise ``allow_links="no"`` would allow links, and a path where a list of paths belongs would be taken apart.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.suggest import did_you_mean

Function = TypeVar("Function", bound=Callable[..., Any])
_NUMBERS: Mapping[Any, type] = {int: Integral, float: Real}
"""NumPy's numbers are numbers too."""
_NOUNS: Mapping[Any, str] = {
    str: "text",
    Literal: "text",
    int: "whole number",
    float: "number",
    os.PathLike: "path",
    Mapping: "mapping",
    Callable: "function",
}


def checked(function: Function, options: Any = None) -> Function:
    """The function, which refuses arguments of wrong types; ``options`` is the TypedDict of its ``**options``.

    An unknown option is a ``TypeError``, as Python would make it, and a wrong value a ``UsageError``.
    """
    parameters = inspect.signature(function).parameters.values()
    own = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if options is not None:
            check_given({name: value for name, value in kwargs.items() if name not in own}, options)
        check_types({**dict(zip(own, args, strict=False)), **kwargs}, function)
        return function(*args, **kwargs)

    return cast(Function, call)


def check_given(given: Mapping[str, Any], options: Any) -> None:
    """Refuse what is not among the ``options``, a TypedDict, or not of their types. ``None`` stands for no value.

    Raises
    ------
    TypeError
        If a name is unknown.
    UsageError
        If a value is of another type.
    """
    for name in given:
        if name not in options.__annotations__:
            raise TypeError(f"unknown option {name!r}{did_you_mean(name, options.__annotations__)}")
    check_types({name: value for name, value in given.items() if value is not None}, options)


def check_types(given: Mapping[str, Any], annotated: Any) -> None:
    """Refuse values that are not of the types with which a function or TypedDict annotates their names."""
    kinds = _kinds(annotated)
    for name, value in given.items():
        if name in kinds and not _fits(value, kinds[name]):
            raise UsageError(f"{name}: {_in_words(kinds[name])} is expected, not {_type_of(value)}")


@cache
def _kinds(annotated: Any) -> Mapping[str, Any]:
    return get_type_hints(annotated)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value has a type; only of lists also what they hold. Which texts are known, their parsers say."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return isinstance(value, str)
    if origin in _NUMBERS:
        return isinstance(value, _NUMBERS[origin]) and not isinstance(value, bool)
    if origin is Sequence:
        if isinstance(value, str):  # a single text stands for a list of it (`texts_of`), a path for no list
            return inner[0] is str or get_origin(inner[0]) is Literal
        listed = isinstance(value, Collection) and not isinstance(value, bytes | Mapping)
        return listed and all(_fits(item, inner[0]) for item in value)
    return not isinstance(origin, type) or isinstance(value, origin)


def _type_of(value: Any) -> str:
    """The type of a value. Never the value itself, which may hold secrets.

    >>> _type_of("ema"), _type_of(["ema", 1])
    ('str', 'list of int and str')
    """
    kind = type(value).__name__
    items = {type(item).__name__ for item in value} if isinstance(value, list | tuple | set) else ()
    return f"{kind} of {' and '.join(sorted(items))}" if items else kind


def _in_words(kind: Any) -> str:
    """What is expected.

    >>> _in_words(int | str | None), _in_words(Sequence[str | os.PathLike[str]])
    ('a whole number or a text', 'a list of paths')
    """
    if get_origin(kind) is Sequence:
        return f"a list of {_noun(get_args(kind)[0])}s"
    if get_origin(kind) in (Union, UnionType):
        kinds = [one for one in get_args(kind) if one is not NoneType]
        if any(get_origin(one) is os.PathLike for one in kinds):
            kinds.remove(str)
        return " or ".join(map(_in_words, kinds))
    return "True or False" if kind is bool else f"a {_noun(kind)}"


def _noun(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return _NOUNS[os.PathLike]  # of the items of lists, only paths are a union
    kind = get_origin(kind) or kind
    return _NOUNS.get(kind) or str(kind.__name__)
