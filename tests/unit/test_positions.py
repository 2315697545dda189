"""What the slices of stage 1 v2 tell of the ranks that hold them, for random models."""

from __future__ import annotations

from hypothesis import event, given
from hypothesis import strategies as st

from paddle_reshard.pipeline.core.tensors import dtype_named
from paddle_reshard.pipeline.formats.sharding import (
    Parameter,
    cut_buffer,
    possible_buffer_bytes,
    read_buffers,
    stage1_v2_slices,
)

PARAMETERS = st.lists(
    st.tuples(st.integers(1, 3000), st.sampled_from(("float32", "bfloat16"))), min_size=1, max_size=25
).map(
    lambda found: [
        Parameter(f"p{i}", elements, dtype_named(dtype)) for i, (elements, dtype) in enumerate(found)
    ]
)
LIMITS = st.integers(1, 20_000)


def lengths(slices: dict) -> dict[str, dict[int, int]]:
    return {key: {rank: piece.elements for rank, piece in ranks.items()} for key, ranks in slices.items()}


def as_read(parameters: list[Parameter], held: dict[str, dict[int, int]], degree: int) -> dict:
    """The lengths that ranks must hold, if they hold these."""
    buffers = read_buffers(parameters, held)
    return lengths({key: cut for buffer in buffers for key, cut in cut_buffer(buffer, degree).items()})


def test_no_rank_holds_a_slice_of_parameters_without_elements() -> None:
    assert cut_buffer([Parameter("p", 0, dtype_named("float32"))], 2) == {"p": {}}


@given(PARAMETERS, st.integers(2, 6), LIMITS)
def test_slices_tell_the_buffers_and_the_size_at_which_they_were_closed(
    parameters: list[Parameter], degree: int, limit: int
) -> None:
    held = lengths(stage1_v2_slices(parameters, degree, limit, comm_overlap=False))
    assert as_read(parameters, held, degree) == held
    low, high = possible_buffer_bytes(read_buffers(parameters, held))
    assert low < limit
    assert high is None or limit <= high


@given(PARAMETERS, st.integers(2, 6), LIMITS, st.data())
def test_exchanged_ranks_are_told_unless_they_hold_slices_of_the_same_lengths(
    parameters: list[Parameter], degree: int, limit: int, data: st.DataObject
) -> None:
    moved = data.draw(st.permutations(range(degree)))
    held = lengths(stage1_v2_slices(parameters, degree, limit, comm_overlap=False))
    exchanged = {key: {moved[rank]: n for rank, n in ranks.items()} for key, ranks in held.items()}
    event("told" if exchanged != held else "nothing changes")
    assert (as_read(parameters, exchanged, degree) == exchanged) == (exchanged == held)
