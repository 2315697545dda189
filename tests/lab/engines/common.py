"""What the loaders have in common: which key fills which parameter, stand-ins for kernels, and how a list is written.

Runs in the environments of the engines, without this package.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest.mock import MagicMock


class _Absent(ModuleType):
    """A module in which everything is found, and nothing does anything."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds packages that an engine imports but does not need to load weights: kernels, servers."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self.packages):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Recorder:
    """Notes which keys fill each parameter, which are known by where their tensors lie in memory."""

    def __init__(self, address: Callable[[Any], int], copy: Callable[[Any], Any]) -> None:
        self.filled: dict[str, set[str]] = {}
        self.keys: dict[int, str] = {}
        self.alive: list[Any] = []
        """No other tensor takes the memory of one that was handed over."""
        self.address, self.copy = address, copy

    def noting(self, name: str, load: Callable[..., Any]) -> Callable[..., Any]:
        """The loader of a parameter, noted."""

        @functools.wraps(load)
        def noted(*arguments: Any, **named: Any) -> Any:
            tensor = named["loaded_weight"] if "loaded_weight" in named else arguments[1]
            if key := self.keys.get(self.address(tensor)):
                self.filled.setdefault(name, set()).add(key)
            return load(*arguments, **named)

        return noted

    def handed(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The weights as they are handed to the model."""
        for key, tensor in weights:
            own = self.copy(tensor)
            self.keys[self.address(own)] = key
            self.alive.append(own)
            yield key, own

    def entry(self, model: Any, unfilled: Iterable[str] = ()) -> dict[str, Any]:
        """What is written of a case.

        ``class`` is what the engine chose, and ``parameters`` has the keys from which each parameter is filled.
        ``copied`` are parameters that the model fills without their loader, or from several keys joined, and
        ``further`` are all other keys. ``unfilled`` are parameters of which an element kept its first value, NaN.
        """
        used = set().union(*self.filled.values())
        copied = {name for name, _ in model.named_parameters()} - self.filled.keys()
        return {
            "class": type(model).__name__,
            "parameters": {name: sorted(keys) for name, keys in sorted(self.filled.items())},
            "copied": sorted(copied.difference(unfilled)),
            "unfilled": sorted(unfilled),
            "further": sorted(set(self.keys.values()) - used),
        }


def write_list(
    head: dict[str, str], load: Callable[[Path], dict[str, Any]], folder: Path, target: Path
) -> None:
    """Load every export below a folder, and write what the engine made of it."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*/hf")):
        name = path.parent.name.replace("--", "/")
        try:
            found[name] = load(path)
        except Exception as error:  # noqa: BLE001 (whatever the engine raises is its answer)
            traceback.print_exc()
            found[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(name, found[name].get("error", "loaded"), file=sys.stderr, flush=True)  # noqa: T201
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in found.items()]
    text = json.dumps({**head, "cases": None}, indent=1)
    target.write_text(text.replace("null\n}", "{\n" + ",\n".join(lines) + "\n }\n}\n"))
