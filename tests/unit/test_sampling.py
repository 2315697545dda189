"""Where tests are run is told by paths that exist."""

import pytest

from tests.conftest import REPO
from tests.sampling import FULL, SAMPLED

MODULES = [path.relative_to(REPO / "tests").as_posix() for path in (REPO / "tests").rglob("test_*.py")]


@pytest.mark.parametrize("start", [*FULL, *SAMPLED])
def test_a_path_is_that_of_a_module(start: str) -> None:
    assert any(module.startswith(start) for module in MODULES)
