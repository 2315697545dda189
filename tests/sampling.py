"""Parameters of tests that `make exhaustive` runs and `make test` leaves to its neighbours."""

import pytest
from _pytest.mark.structures import ParameterSet


def exhaustive(*values: object) -> ParameterSet:
    """One set of parameters for `make exhaustive` only."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)
