"""Every mutant can be planted: the code that it changes is there, and so are its nearest tests."""

import ast

import pytest

from tests.conftest import REPO
from tests.mutants.run import mutated
from tests.mutants.table import MUTANTS, Mutant
from tests.sampling import FULL


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.wrong)
def test_a_mutant_can_be_planted_and_its_tests_are_of_make_test(mutant: Mutant) -> None:
    ast.parse(mutated(mutant))
    for test in mutant.tests:
        path, *names = test.split("::")
        assert not path.removeprefix("tests/").startswith(FULL)
        module = (REPO / path).read_text()
        assert all(f"def {name.partition('[')[0]}(" in module for name in names), test


def test_no_two_mutants_are_the_same() -> None:
    assert len({(m.file, m.old, m.new) for m in MUTANTS}) == len(MUTANTS) == len({m.wrong for m in MUTANTS})
