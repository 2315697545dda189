"""Does a staged target hold what was planned, whatever the format?"""

from __future__ import annotations

from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint
from paddle_reshard.pipeline.layouts.format import Staged


def check_tensors(staged: Staged, found: Checkpoint) -> None:
    """Refuse unless the tensors that were ``found`` are those that were wanted.

    Raises
    ------
    CheckpointError
        Naming the first tensor.
    """
    catalog = staged.wanted.catalog
    content = catalog.tensors[: len(catalog.tensors) - catalog.borrowed]
    kept = [t for t in content if t.state not in staged.left_states]
    one = {(t.key, t.state, t.dtype, t.global_shape) for t in kept}
    two = {(t.key, t.state, t.dtype, t.global_shape) for t in found.catalog.tensors}
    if one != two:
        key, state = min((key, state) for key, state, *_ in one ^ two)
        raise CheckpointError(f"{key} ({state}): not the same in the source and the staged target")
