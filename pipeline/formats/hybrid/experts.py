"""Join cells with the same tp rank and stage, and check the routed experts of each.

Under expert parallelism the ranks of a (tp, pp) coordinate form several cells with the same tensors, except that each
has its own experts. The same parameter name refers to a different expert in each cell, so cells are joined by
structured keys, after all names are resolved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError
from paddle_reshard.pipeline.core.tensors import EMA_PARAM, PARAM
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.hybrid.arrays import StoredArray
from paddle_reshard.pipeline.formats.hybrid.ranks import FACTS, Ranks, StoredCell
from paddle_reshard.pipeline.formats.jobs.keys import experts_of, shift_expert
from paddle_reshard.pipeline.model.model import ModelTensor, expert_of, spelled_experts


def join_cells(ranks: Ranks, shared_out: Callable[[str], bool] = lambda key: False) -> list[StoredCell]:
    """Join all cells of each (tp, pp) into one, in the order of ranks, tp fastest.

    ``shared_out``: whether each expert rank has a piece of its own under a key.
    """
    groups: dict[tuple[int, int], list[StoredCell]] = {}
    for cell in ranks.cells:
        groups.setdefault((cell.pp, cell.tp), []).append(cell)
    return [_join(groups[coordinates], ranks.topology, shared_out) for coordinates in sorted(groups)]


def _join(cells: Sequence[StoredCell], topology: Topology, shared_out: Callable[[str], bool]) -> StoredCell:
    if len(cells) == 1:
        return cells[0]
    joined = StoredCell(cells[0].tp, cells[0].pp, optimizer=max(cell.optimizer for cell in cells))
    joined.names = merged_names([cell.names for cell in cells])
    in_all = set.intersection(*(set(cell.names) for cell in cells))
    pieces = {key for key in in_all if topology.ep > 1 and shared_out(key)}
    for cell in cells:
        for field_name, what in FACTS.items():
            known = getattr(joined, field_name)
            for key, value in getattr(cell, field_name).items():
                if known.setdefault(key, value) != value:
                    raise CoverageError(
                        key, f"{what} is {known[key]} in one cell and {value} in {cell.label()}"
                    )
        joined.sliced |= cell.sliced
        joined.master_spellings |= cell.master_spellings
        for (key, state), arrays in cell.arrays.entries():
            for stored in arrays:
                alike = key in in_all and key not in pieces
                joined.arrays.add(key, state, _joined_array(stored, cell, state, alike, topology))
    return joined


def _joined_array(
    stored: StoredArray, cell: StoredCell, state: str, shared: bool, topology: Topology
) -> StoredArray:
    """Renumber an array's shard and copy: expert ranks shard the states of common tensors; parameters are copies.

    What is an expert rank's own has its number for a copy.
    """
    if topology.ep == 1 or state in (PARAM, EMA_PARAM):
        return StoredArray(stored.shard, stored.path, stored.array, copy=cell.ep)
    if shared:
        return stored
    return StoredArray(stored.shard // topology.dense_sharding, stored.path, stored.array, copy=cell.ep)


def merged_names(tables: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """All keys in model order; a key that only a later table has precedes the key that follows it there.

    Keys ``a c`` and ``a b c`` are merged to ``a b c``.
    """
    order = list(tables[0])
    for table in tables[1:]:
        known = set(order)
        before: dict[str | None, list[str]] = {}
        run: list[str] = []
        for key in table:
            if key in known:
                before[key], run = run, []
            else:
                run.append(key)
        order = [key for old in order for key in (*before.get(old, ()), old)] + run
    names: dict[str, str] = {}
    for table in tables:
        names |= table
    return {key: names[key] for key in order}


def expert_axis_of(ranks: Ranks) -> str | None:
    """The axis over which routed experts are distributed; ``None``: every rank has all of them."""
    if ranks.topology.ep > 1:
        return "ep"
    for first, *others in ranks.stages:
        for other in others:
            if experts_of(first.names) != experts_of(other.names):
                return "dp" if other.ep else "tp"
    return None


def number_experts(ranks: Ranks, count: int | None) -> None:
    """Give experts that each rank numbers from 0 on their numbers in the model: rank 1 of ``ep=2`` has 2 and 3 of 4.

    A rank must hold exactly its share of the ``count`` experts.
    """
    ep = ranks.topology.ep
    for cell in ranks.cells if ep > 1 else ():
        held = experts_of(cell.names)
        if held and (count is None or len(held) * ep != count or held != set(range(len(held)))):
            raise CheckpointError(
                f"{cell.label()} holds the experts {sorted(held)}; each rank of ep={ep} numbers its share of the "
                f"{count} experts of config.json from 0 on"
            )
        first = cell.ep * len(held)
        cell.rename(
            {key: shift_expert(key, first) for key in cell.names if first and expert_of(key) is not None}
        )


def check_experts(ranks: Ranks, over: str | None, tensors: Sequence[ModelTensor], count: int | None) -> None:
    """Check that every layer has all ``count`` experts, and every cell exactly its own; ``over`` is their axis."""
    layers: dict[int | str, set[int]] = {}
    of_experts = spelled_experts(tensors)
    for tensor in tensors:
        if tensor.key in of_experts:
            layer = tensor.key.partition(".experts.")[0] if tensor.layer is None else tensor.layer
            layers.setdefault(layer, set()).add(int(of_experts[tensor.key]))
    total = count if count is not None else max((len(held) for held in layers.values()), default=0)
    for layer, held in layers.items():
        if total != len(held) or max(held, default=-1) >= total:
            # Iterates over what the files hold: the config may say any number.
            unmatched = next(n for n in (*range(len(held) + 1), *sorted(held)) if (n < total) != (n in held))
            raise CheckpointError(
                f"layer {layer} has {len(held)} experts, the model has {total}; expert {unmatched} is in only one of "
                "them"
            )
    if over is None or any(tensor.rule.shared_out for tensor in tensors):
        return
    if not layers:
        raise CheckpointError(
            f"{ranks.topology}: no tensor belongs to one expert, so nothing can be distributed over ep"
        )
    parts = getattr(ranks.topology, over)
    for cell in ranks.cells:
        rank = cell.tp if over == "tp" else cell.ep
        first, stop = rank * total // parts, (rank + 1) * total // parts
        held = experts_of(cell.names)
        if total % parts or (held and held != set(range(first, stop))):
            raise CheckpointError(
                f"{cell.label()} holds the experts {sorted(held)}; with {total} experts distributed over "
                f"{over}={parts}, it should hold {first} to {stop - 1}"
            )
