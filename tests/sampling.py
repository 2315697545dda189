"""Parameters of tests that `make test` leaves to other commands."""

import pytest
from _pytest.mark.structures import ParameterSet


def exhaustive(*values: object) -> ParameterSet:
    """One set of parameters for `make exhaustive` only."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def on_cluster(*values: object) -> ParameterSet:
    """One set of parameters for `make cluster` only."""
    return pytest.param(*values, marks=pytest.mark.cluster)
