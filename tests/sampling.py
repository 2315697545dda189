"""Tests that `make test` leaves to other commands."""

import pytest
from _pytest.mark.structures import ParameterSet

FULL = (
    "cluster/test_own_ray.py",
    "documents/test_blocks.py",
    "hostile/test_fuzz_",
    "jobs/test_real_head.py",
    "live/test_jobs.py",
    "memory/",
    "mutations/",
    "resume/test_kills_",
    "storage/test_failures.py",
    "unit/test_notebooks.py",
)
"""How the paths of modules in `tests` begin that `make full` runs: those of what can only be seen on something whole,
a job, a Ray of its own, every request of a conversion that fails, every block of every document."""


def is_full(path: str) -> bool:
    """Whether `make full` runs a module. ``path``: of its file in `tests`."""
    return path.startswith(FULL)


def in_full(*values: object, id: str | None = None) -> ParameterSet:
    """One set of parameters for `make full` only."""
    return pytest.param(*values, marks=pytest.mark.full, id=id)


def exhaustive(*values: object) -> ParameterSet:
    """One set of parameters for `make exhaustive` only."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def on_cluster(*values: object) -> ParameterSet:
    """One set of parameters for `make cluster` only."""
    return pytest.param(*values, marks=pytest.mark.cluster)
