"""Check that a staged target of any format holds the planned tensors."""

from __future__ import annotations

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.format import Staged
from paddle_reshard.pipeline.core.errors import CheckpointError


def check_tensors(staged: Staged, reread: Checkpoint) -> None:
    """Refuse a staged target whose tensors, as ``reread``, are not the planned ones; names the first of them."""
    catalog, read = staged.wanted.catalog, reread.catalog.tensors
    wanted, content = catalog.tensors, len(catalog.tensors) - catalog.borrowed

    def kept(number: int) -> bool:
        return number < content and wanted.identity(number)[1] not in staged.states_not_carried

    def same(number: int, other: int) -> bool:
        return wanted.dtype(number) == read.dtype(other) and wanted.shape(number) == read.shape(other)

    lacking, added = [], []
    for number in filter(kept, range(content)):
        reread_number = read.find(*wanted.identity(number))
        if reread_number is None or not same(number, reread_number):
            lacking.append(wanted.identity(number))
    for identity in reread.catalog.index():
        origin = wanted.find(*identity)
        if origin is None or not kept(origin):
            added.append(identity)
    if lacking or added:
        key, state = min(lacking + added)
        raise CheckpointError(f"{key} ({state}): not the same in the source and the staged target")
