"""Our frozen dataclasses behave as those of the standard library, which is the oracle here."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import sys
from collections.abc import Callable
from dataclasses import field, fields, replace
from types import FunctionType
from typing import Any, ClassVar

import pytest

import paddle_reshard.pipeline.convert.conversion  # noqa: F401
from paddle_reshard.pipeline.core import frozen

NAN = float("nan")


def defined(dataclass: Any, **options: bool) -> dict[str, type]:
    """The same classes, by either decorator."""

    @dataclass(frozen=True, **options)
    class Plain:
        a: int
        b: str = "b"
        c: list[int] = field(default_factory=list, compare=False)
        d: float = field(default=2.5, repr=False)
        counted: ClassVar[int] = 7

        def twice(self) -> int:
            return 2 * self.a

    @dataclass(frozen=True, **options)
    class Derived(Plain):
        e: int = field(default=5, kw_only=True)
        f: int = field(init=False)
        g: int = field(default=8, init=False)
        h: tuple[int, ...] = field(default_factory=tuple, init=False)

        def __post_init__(self) -> None:
            if self.a < 0:
                raise ValueError("negative")
            object.__setattr__(self, "f", self.a + self.e)

    @dataclass(frozen=True, **options)
    class Own:
        a: int

        def __repr__(self) -> str:
            return "mine"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own)

    @dataclass(frozen=True, eq=False, repr=False, **options)
    class Bare:
        a: int

    @dataclass(frozen=True, kw_only=True, **options)
    class Named:
        a: int
        b: int = 1

    @dataclass(frozen=True, **options)
    class Empty:
        """Nothing."""

    class Loose(Plain):
        pass

    return {cls.__name__: cls for cls in (Plain, Derived, Own, Bare, Named, Empty, Loose)}


def outcome(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except (TypeError, ValueError, AttributeError) as error:
        return type(error), str(error)


def set_(instance: Any, name: str) -> Any:
    setattr(instance, name, 1)
    return getattr(instance, name)


@pytest.mark.parametrize("options", [{}, {"slots": True}], ids=str)
def test_values_behave_as_those_of_the_standard_library(options: dict[str, bool]) -> None:
    def seen(dataclass: Any) -> list[Any]:
        of = defined(dataclass, **options)
        plain, derived = of["Plain"], of["Derived"]
        made = [plain(1), plain(1, "b", [3]), plain(NAN, d=NAN), plain(b="x", a=2), derived(4, e=6)]
        made += [of["Own"](1), of["Own"](2), of["Bare"](1), of["Named"](a=3), of["Empty"](), of["Loose"](1)]
        wrong = [
            lambda: plain(),
            lambda: plain(1, 2, 3, 4, 5),
            lambda: plain(1, z=2),
            lambda: derived(-1),
            lambda: derived(1, "b", [], 2.5, 5),
            lambda: of["Named"](1),
            lambda: replace(made[4], g=1),
        ]
        found: list[Any] = [outcome(act) for act in wrong]
        # With slots, Python 3.11 raises a TypeError about its own code for names that are not fields.
        further = [] if options else ["new"]
        for one in made:
            names = [*(f.name for f in fields(one)), *further]
            bare = "Bare" in type(one).__name__
            found += ["" if bare else repr(one), [] if bare else [one == two for two in made], one == one]
            found.append(bare or outcome(lambda one=one: hash(one)))
            for act in (set_, lambda i, n: delattr(i, n)):
                found += [outcome(lambda one=one, n=n, act=act: act(one, n)) for n in names]
            for again in (copy.copy(one), copy.deepcopy(one)):
                found += [[getattr(again, f.name) for f in fields(again)], type(again) is type(one)]
        found += [repr(replace(plain(1), a=9)), repr(replace(derived(1), a=9)), plain(1) == (1, "b", 2.5)]
        for cls in of.values():
            found += [str(inspect.signature(cls)), cls.__match_args__, [f.name for f in fields(cls)]]
            found += [hasattr(cls, "__slots__"), cls.__hash__ is object.__hash__, cls.__init__.__qualname__]
        return found

    assert seen(frozen.dataclass) == seen(dataclasses.dataclass)


@frozen.dataclass(frozen=True, slots=True)
class Sent:
    a: int
    b: tuple[int, ...] = ()


def test_values_are_pickled_before_and_after_their_class_is_used() -> None:
    message = pickle.dumps(Sent(1, (2,)))
    assert pickle.loads(message) == Sent(1, (2,))
    Sent.__init__ = frozen._Init(Sent)  # type: ignore[method-assign]
    assert pickle.loads(message) == Sent(1, (2,))


def test_classes_that_are_not_frozen_are_those_of_the_standard_library() -> None:
    @frozen.dataclass
    class Loose:
        a: int = 1

    @frozen.dataclass(frozen=True, order=True)
    class Ordered:
        a: int

    loose = Loose()
    loose.a = 3
    assert loose == Loose(3) and Ordered(1) < Ordered(2)


def test_each_of_our_classes_takes_what_its_fields_say() -> None:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("paddle_reshard.")]
    found = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    classes = [cls for cls in found if isinstance(vars(cls).get("__setattr__"), FunctionType)]
    assert len(classes) > 100
    for cls in classes:
        spec = [(f.name, f.type, copy.copy(f)) for f in fields(cls)]
        twin = dataclasses.make_dataclass(cls.__name__, spec, frozen=True)
        assert str(inspect.signature(cls)) == str(inspect.signature(twin)), cls
