"""Frozen dataclasses that are cheap to define.

The decorator of the standard library compiles six methods for every class, which takes a millisecond on Python 3.11. A
conversion imports more than 150 such classes and instantiates half of them. Here all classes share one function for
each of these methods, and ``__init__`` is compiled when it is first used. Values behave as those of ``dataclasses`` do;
``dataclasses.fields`` and ``replace`` work on them. Classes derived from them are made by the same decorator.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

_set = object.__setattr__


class _Factory:
    """What a parameter is whose default a factory makes."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


def _frozen(
    cls: type | None = None,
    *,
    frozen: bool = False,
    slots: bool = False,
    eq: bool = True,
    repr: bool = True,
    order: bool = False,
    kw_only: bool = False,
) -> Any:
    """As ``dataclasses.dataclass``, which makes the classes that are not frozen, or ordered."""
    if cls is None:
        return lambda cls: _frozen(
            cls, frozen=frozen, slots=slots, eq=eq, repr=repr, order=order, kw_only=kw_only
        )
    if order or not frozen:
        return dataclasses.dataclass(
            cls, frozen=frozen, slots=slots, eq=eq, repr=repr, order=order, kw_only=kw_only
        )
    own = frozenset(name for name, value in vars(cls).items() if value is not None)
    cls = dataclasses.dataclass(cls, init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)
    methods: dict[str, Any] = {"__init__": _Init(cls), **_refusals(cls)}
    if repr:
        methods["__repr__"] = _repr
    if eq:
        methods |= _comparisons(cls)
    if slots:
        methods |= {"__getstate__": _getstate, "__setstate__": _setstate}
    for name, method in methods.items():
        if name not in own:
            setattr(cls, name, method)
    return cls


def _refusals(cls: type[Any]) -> dict[str, Callable[..., None]]:
    """A class derived from a frozen one may have further attributes, which can be changed."""
    names = frozenset(field.name for field in fields(cls))

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


@recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr)
    return f"{type(self).__qualname__}({shown})"


def _comparisons(cls: type) -> dict[str, Callable[..., Any]]:
    names = [field.name for field in fields(cls) if field.compare]
    values: Callable[[Any], tuple[Any, ...]]
    if len(names) > 1:
        values = attrgetter(*names)
    else:

        def values(self: Any) -> tuple[Any, ...]:
            return tuple(getattr(self, name) for name in names)

    def __eq__(self: Any, other: object) -> Any:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:
        return hash(values(self))

    return {"__eq__": __eq__, "__hash__": __hash__}


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in fields(self)]


def _setstate(self: Any, state: list[Any]) -> None:
    for field, value in zip(fields(self), state, strict=True):
        _set(self, field.name, value)


class _Init:
    """``__init__`` of a class until somebody asks for it."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        function = _compiled(self.cls)
        self.cls.__init__ = function  # type: ignore[misc]
        return function.__get__(instance, owner)


def _compiled(cls: type) -> Any:
    given = {"_set": _set, "_factory": _FACTORY}
    positional: list[str] = []
    named: list[str] = []
    body: list[str] = []
    for field in fields(cls):
        name, value = field.name, field.name
        parameter = f"{name}=_default_{name}"
        if field.default is not MISSING:
            given[f"_default_{name}"] = field.default
            value = name if field.init else f"_default_{name}"
        elif field.default_factory is not MISSING:
            given |= {f"_default_{name}": _FACTORY, f"_make_{name}": field.default_factory}
            value = f"_make_{name}()" + (f" if {name} is _factory else {name}" if field.init else "")
        else:
            parameter = name
        if field.init:
            (named if field.kw_only else positional).append(parameter)
        elif parameter == name:
            continue
        body.append(f"_set(self, {name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    parameters = ", ".join(["self", *positional, *(["*", *named] if named else [])])
    text = "\n  ".join([f" def __init__({parameters}):", *(body or ["pass"])])
    made: dict[str, Any] = {}
    exec(f"def make({', '.join(given)}):\n{text}\n return __init__", vars(sys.modules[cls.__module__]), made)
    function = made["make"](**given)
    function.__qualname__ = f"{cls.__qualname__}.__init__"
    function.__annotations__ = {field.name: field.type for field in fields(cls) if field.init}
    function.__annotations__["return"] = None
    return function


if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    dataclass = _frozen
