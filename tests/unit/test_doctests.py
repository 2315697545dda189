"""The examples in the documentation of the pure modules are true."""

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import paddle_reshard

PURE = (
    "_import_path", "pipeline", "storage.files", "storage.documents", "clusters.ray.capacity",
    "clusters.ray.dealing", "clusters.ray.environment", "tasks.cast", "tasks.figures",
)  # fmt: skip


def _modules() -> list[ModuleType]:
    names = [
        found.name
        for found in pkgutil.walk_packages(paddle_reshard.__path__, "paddle_reshard.")
        if found.name.removeprefix("paddle_reshard.").startswith(PURE) and not found.name.endswith("__main__")
    ]
    return [importlib.import_module(name) for name in sorted(names)]


def _with_examples() -> list[ModuleType]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [module for module in _modules() if any(test.examples for test in finder.find(module))]


@pytest.mark.parametrize("module", _with_examples(), ids=lambda module: module.__name__)
def test_examples(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert not result.failed


def test_examples_are_found_in_the_modules_that_carry_the_rules() -> None:
    names = {module.__name__.removeprefix("paddle_reshard.") for module in _with_examples()}
    assert {
        "pipeline.core.geometry", "pipeline.core.topology", "pipeline.formats.hybrid.names", "tasks.cast",
    } <= names  # fmt: skip
