"""``paddle.save`` as Paddle 3.4 has it: the functions of 3.3.1 with 5 for the highest protocol (Paddle#79660)."""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


@contextlib.contextmanager
def numpy_by_its_old_name() -> Iterator[None]:
    """Let pickle write ``numpy.core.numeric`` under NumPy 2 too: both versions load that, NumPy 1 nothing else."""
    module = importlib.import_module("numpy._core.numeric" if np.__version__ >= "2" else "numpy.core.numeric")
    original = module._frombuffer.__module__
    module._frombuffer.__module__ = "numpy.core.numeric"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="numpy.core")
            yield
    finally:
        module._frombuffer.__module__ = original


def dumps(obj: object) -> bytes:
    """What pickle writes of an object with protocol 5."""
    with numpy_by_its_old_name():
        return pickle.dumps(obj, 5)


def save(obj: object, path: Path | io.BytesIO) -> None:
    """Write a file with protocol 5."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="No ccache found")
        module = importlib.import_module("paddle.framework.io")
    originals = {name: getattr(module, name) for name in ("_pickle_save", "_legacy_save")}
    try:
        for name, original in originals.items():
            setattr(module, name, _with_limit_5(original))
        with numpy_by_its_old_name():
            module.save(obj, path if isinstance(path, io.BytesIO) else str(path), protocol=5)
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


def _with_limit_5(function: Any) -> types.FunctionType:
    """The function with the number 5 instead of 4, the highest protocol that it takes."""
    code = function.__code__
    assert 4 in code.co_consts
    constants = tuple(5 if type(value) is int and value == 4 else value for value in code.co_consts)
    copy = types.FunctionType(code.replace(co_consts=constants), function.__globals__, None, (2,))
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
