"""Determine which slices every rank of a sharding group must hold, with the rules by which targets are cut.

File names say which rank wrote a file. Under stage 1 v2 the lengths of slices say it too: the ranks of a group hold
equal parts of communication buffers, in which parameters follow each other in optimizer order. No file tells where one
buffer ends and the next begins, but a single number decides it for all cells of a job: the size at which a buffer is
closed. If no number explains what the ranks hold, files have changed places, or are not those of one job.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.core.numbers import Ints, hashed
from paddle_reshard.pipeline.core.tensors import (
    EMA_MASTER_WEIGHT,
    EMA_PARAM,
    MASTER_WEIGHT,
    PARAM,
    is_per_parameter,
)
from paddle_reshard.pipeline.formats.hybrid.ranks import Ranks, StoredCell
from paddle_reshard.pipeline.formats.sharding import (
    FlatSlice,
    Parameter,
    ShardingOptions,
    cut_buffer,
    partition_parameters,
    possible_buffer_bytes,
    read_buffers,
)
from paddle_reshard.pipeline.model.model import Model, ModelTensor

Slices = dict[str, dict[int, FlatSlice]]
"""Key → rank of its sharding group → slice of the flattened, padded tensor."""
_MOST_NUMBERS = 7 << 12
"""Facts of arrays that wait to be added up."""


def expected_slices(
    strategy: str, ranks: Ranks, cells: Sequence[StoredCell], model: Model, vpp: int
) -> list[Slices]:
    """The slices that the ranks of each of the joined ``cells`` must hold, of all tensors that sharding cuts.

    The buffers of all cells must have been closed at one size. With ``comm_overlap`` each of ``vpp`` virtual stages has
    its own, with its parameters in the order in which they are built. Without ``model_meta.json`` nothing tells of that
    but the lengths of the slices, and these give their places, whichever it was.
    """
    if strategy == "stage3":
        return [_of_stage3(cell, ranks.topology.sharding) for cell in cells]
    if strategy != "stage1v2":
        return [{} for _ in cells]
    if ranks.with_meta or vpp == 1:
        return _of_buffers(ranks, cells, model, ranks.comm_overlap, vpp)
    refusal = None
    try:
        expected = _of_buffers(ranks, cells, model, False, vpp)
        if _are_held(expected, cells, model):
            return expected
    except CheckpointError as error:
        refusal = error
    overlapped = _of_buffers(ranks, cells, model, True, vpp)
    if _are_held(overlapped, cells, model):
        return overlapped
    if refusal is not None:
        raise refusal
    return expected


def _of_buffers(
    ranks: Ranks, cells: Sequence[StoredCell], model: Model, comm_overlap: bool, vpp: int
) -> list[Slices]:
    """The slices of stage 1 v2."""
    tensors = {tensor.key: tensor for tensor in model.tensors}
    built: dict[str, int] = {}
    if comm_overlap and vpp > 1:
        built = {tensor.key: number for number, tensor in enumerate(model.as_built(ranks.topology.pp))}
    limits: list[tuple[int, int | None]] = []
    expected: list[Slices] = []
    for cell in cells:
        members = [member for member in ranks.cells if (member.tp, member.pp) == (cell.tp, cell.pp)]
        slices: Slices = {}
        for listed in _lists(ranks, cell, members, tensors, built):
            buffers = read_buffers(listed.parameters, listed.held)
            for buffer in buffers:
                slices |= cut_buffer(buffer, listed.degree)
            if listed.degree > 1 and not comm_overlap:  # which closes buffers of each virtual stage too
                limits.append(possible_buffer_bytes(buffers))
        expected.append(_for_all_members(slices, members))
    low = max((above for above, _ in limits), default=0)
    high = min((at_most for _, at_most in limits if at_most is not None), default=None)
    if high is not None and low >= high:
        raise CheckpointError(
            f"optimizer files: some ranks share communication buffers of more than {low} bytes, others closed them at "
            f"{high} bytes or fewer; a job has one limit, so the files are not those of one job"
        )
    return expected


def _are_held(expected: Sequence[Slices], cells: Sequence[StoredCell], model: Model) -> bool:
    """Whether every rank holds slices of these lengths."""
    states = {tensor.key: _sliced_state(tensor) for tensor in model.tensors}
    return all(
        {stored.shard: prod(stored.array.shape) for stored in cell.arrays[key, state]}
        == {rank: stop - start for rank, (start, stop) in of_ranks.items()}
        for slices, cell in zip(expected, cells, strict=True)
        for key, of_ranks in slices.items()
        if (state := states.get(key)) is not None and (key, state) in cell.arrays
    )


def shown_in_file(cell: StoredCell, tensor: ModelTensor, state: str) -> str:
    """What tells which tensor a state belongs to: its key, or only the name of a parameter, which each cell has anew.

    Master weights belong to the parameters that they are compared with. Other states are in the same file as these,
    but averages are not.
    """
    if state in (PARAM, EMA_PARAM):
        return tensor.key
    by_value = state != EMA_MASTER_WEIGHT and tensor.master and (tensor.key, PARAM) in cell.arrays
    return tensor.key if by_value else cell.names[tensor.key]


def shown_alike(state: str) -> str:
    """A state for which :func:`shown_in_file` says the same."""
    return state if state in (PARAM, EMA_PARAM, EMA_MASTER_WEIGHT) else MASTER_WEIGHT


class RankFiles:
    """What the files of ranks show and what it stands for, to find those that could be exchanged without a trace."""

    def __init__(self, count: int) -> None:
        self._shown, self._meant = np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.uint64)
        self._rows = array("q")  # seven numbers for each array that is yet to be added

    def add(self, file: int, state: str, shown: str, seen: int, key: str, start: int, rank: int) -> None:
        """Add an array of a file: what anyone can see of it there, and which part of which tensor it is said to be."""
        self._rows.extend((file, hash(state), hash(shown), seen, hash(key), start, rank))
        if len(self._rows) >= _MOST_NUMBERS:
            self._add_rows()

    def add_whole(self, file: Ints, state: Ints, shown: Ints, key: Ints, rank: Ints) -> None:
        """Add arrays that are whole tensors; state, what is shown, and key are given as hashes."""
        nothing = np.zeros(1, dtype=np.int64)
        np.add.at(self._shown, file, hashed((state, shown, nothing), len(file)))
        np.add.at(self._meant, file, hashed((state, key, nothing, rank), len(file)))

    def _add_rows(self) -> None:
        file, state, shown, seen, key, start, rank = np.array(self._rows).reshape(-1, 7).T
        np.add.at(self._shown, file, hashed((state, shown, seen), len(file)))
        np.add.at(self._meant, file, hashed((state, key, start, rank), len(file)))
        self._rows = array("q")

    def in_words(self) -> str:
        """The number of files that only their names tell apart from those of other ranks, in words; empty if none."""
        self._add_rows()
        alike: dict[int, list[int]] = {}
        for shown, meant in zip(self._shown.tolist(), self._meant.tolist(), strict=True):
            if shown:
                alike.setdefault(shown, []).append(meant)
        files = sum(len(meant) for meant in alike.values() if len(set(meant)) > 1)
        if not files:
            return ""
        return (
            f"which rank wrote {files} of {np.count_nonzero(self._shown)} files with tensors: each holds the same "
            "names and shapes as that of another rank, and only the names of the files tell"
        )


@dataclass(frozen=True, slots=True)
class _OptimizerList:
    """Parameters that share communication buffers, in the order of the optimizer."""

    parameters: list[Parameter]
    held: Mapping[str, Sequence[int]]
    """Key → ranks that hold slices of it."""
    degree: int


def _lists(
    ranks: Ranks,
    cell: StoredCell,
    members: Sequence[StoredCell],
    tensors: Mapping[str, ModelTensor],
    built: Mapping[str, int],
) -> Iterator[_OptimizerList]:
    """The lists of a joined cell: under expert parallelism, experts of each member have buffers of their own, and
    parameters of each color have them always."""
    topology = ranks.topology
    if topology.ep == 1:  # all data-parallel ranks have the buffers of the first
        yield from _optimizer_lists(members[0], members[0], tensors, built, topology.sharding, {False, True})
        return
    yield from _optimizer_lists(cell, cell, tensors, built, topology.sharding, {False})
    for member in members:
        yield from _optimizer_lists(member, cell, tensors, built, topology.moe_sharding, {True})


def _optimizer_lists(
    listing: StoredCell,
    holding: StoredCell,
    tensors: Mapping[str, ModelTensor],
    built: Mapping[str, int],
    degree: int,
    experts: set[bool],
) -> Iterator[_OptimizerList]:
    of_color: dict[str | None, list[Parameter]] = {None: []}
    held = {}
    for key, of_states in _entries(listing, tensors, built):
        tensor = tensors[of_states]
        state = _sliced_state(tensor)
        if (
            state is None
            or tensor.rule.of_expert_rank not in experts
            or (of_states, state) not in holding.arrays
        ):
            continue
        parameter = Parameter(key, prod(listing.shapes[key]), listing.dtypes[key])
        of_color.setdefault(tensor.rule.color, []).append(parameter)
        if key == of_states:
            held[key] = [
                stored.shard
                for stored in holding.arrays[key, state]
                if not tensor.rule.shared_out or stored.copy == listing.ep
            ]
    for parameters in of_color.values():
        yield _OptimizerList(parameters, held, degree)


def _entries(
    listing: StoredCell, tensors: Mapping[str, ModelTensor], built: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """The parameters of an optimizer: in what place of its list, and the key with the states of this parameter.

    They are in the order in which they are ``built`` if that is given, and otherwise in that of the cell.

    Two parameters of one name have places of their own; two keys of one parameter have one. The states are cut where
    the last of the parameters lies; the key that has them changes places with it.
    """
    named = (key for key in listing.names if tensors[key].rule.parameter_name is not None)
    twice = {listing.holders[key]: key for key in named if not tensors[key].is_alias}
    places = {a: b for key, last in twice.items() if key != last for a, b in ((key, last), (last, key))}
    for key in sorted(listing.names, key=lambda key: built.get(key, 0)):
        yield places.get(key, key), listing.holders[key] if key in places else key


def _sliced_state(tensor: ModelTensor) -> str | None:
    """A state with as many elements as the parameter; ``None`` if it has none."""
    states = (*((MASTER_WEIGHT,) if tensor.master else ()), *tensor.accumulators)
    return next((state for state in states if not is_per_parameter(state)), None)


def _for_all_members(slices: Slices, members: Sequence[StoredCell]) -> Slices:
    """The slices of all members: also of experts that other data-parallel ranks hold under the same parameter names."""
    first = members[0]
    by_name = {first.names[key]: slices[key] for key in first.names if key in slices}
    for member in members[1:]:
        for key, name in member.names.items():
            if key not in slices and name in by_name:
                slices[key] = by_name[name]
    return slices


def _of_stage3(cell: StoredCell, degree: int) -> Slices:
    cut = [Parameter(key, prod(cell.shapes[key]), cell.dtypes[key]) for key in cell.sliced]
    shares = partition_parameters("stage3", cut, degree, ShardingOptions(segment_elements=0))
    return {
        key: {rank: piece for rank, piece in ranks.items() if piece is not None}
        for key, ranks in shares.items()
    }
