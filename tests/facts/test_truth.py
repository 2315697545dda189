"""The facts are true: what was built equals what real jobs of the same config and topology saved."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests import facts
from tests.conftest import case_directory
from tests.oracle import NAME_TABLE, load_with_paddle

CASES = Path(__file__).with_name("cases.txt").read_text().split()
Table = frozenset[tuple[str, tuple[int, ...], str | None]]


@pytest.mark.parametrize("case", CASES)
def test_keys_shapes_and_names_equal_those_in_the_files_of_a_real_job(case: str) -> None:
    built = [build for build in facts.builds() if build.topology == f"case {case}"]

    assert built and all(build.entries is not None for build in built), built
    assert {_of_build(build.entries or []) for build in built} == set(_of_files(case, built))


def _of_build(entries: list[facts.Entry]) -> Table:
    return frozenset((entry.key, tuple(entry.shape), entry.name) for entry in entries)


def _of_files(case: str, built: list[facts.Build]) -> Iterable[Table]:
    buffers = {e.key for build in built for e in build.entries or [] if not e.is_parameter}
    [checkpoint] = case_directory(case).glob("checkpoint-*")
    for file in checkpoint.glob("model_state*.pdparams"):
        state = load_with_paddle(file)
        names = state.pop(NAME_TABLE)
        yield frozenset(
            (key, tuple(value.shape), None if key in buffers else names[key]) for key, value in state.items()
        )
