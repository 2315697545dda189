"""How much memory do the metadata take of a process that plans and moves, beside its groups?

A checkpoint may have hundreds of thousands of tensors with hardly a value in them. What is known of them is part of the
budget: it is worked out from how many there are, before anything is made in their proportion.
"""

from __future__ import annotations

from paddle_reshard.pipeline.core.errors import MemoryBudgetError
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES

DRIVER_BYTES = 72 << 20
"""What of the footprint only processes need that speak to an object store: drivers, requests in flight."""
FREE_BYTES = 16 << 20
"""What of the footprint is for metadata, wherever the files are."""
PLANNED_TENSOR_BYTES, PLANNED_PIECE_BYTES = 480, 310
"""The most while no group runs, for each tensor and for each piece: the source is read, the target is laid out and
planned, and read back in the end."""
HELD_TENSOR_BYTES, HELD_PIECE_BYTES = 350, 60
"""What is kept while groups run."""


def spare_bytes(local: bool) -> int:
    """What of the footprint is free for metadata, if all files are on disks of this machine and if not."""
    return FREE_BYTES + (DRIVER_BYTES if local else 0)


def held_bytes(tensors: int, pieces: int, spare_bytes: int) -> int:
    """What the metadata take beyond the footprint while groups run."""
    return max(0, HELD_TENSOR_BYTES * tensors + HELD_PIECE_BYTES * pieces - spare_bytes)


def needed_bytes(tensors: int, pieces: int, peak_bytes: int, spare_bytes: int) -> int:
    """The smallest budget for metadata, and for groups of at most ``peak_bytes``; 0 if only these need room."""
    planned = PLANNED_TENSOR_BYTES * tensors + PLANNED_PIECE_BYTES * pieces - spare_bytes
    held = held_bytes(tensors, pieces, spare_bytes)
    beyond = max(planned, held + peak_bytes if held else 0)
    return FOOTPRINT_BYTES + beyond if beyond > 0 else 0


def check_metadata(
    tensors: int, pieces: int | None, peak_bytes: int, budget_bytes: int, spare_bytes: int
) -> None:
    """Refuse if the metadata, and groups of at most ``peak_bytes``, do not fit the budget together.

    ``pieces`` are the boxes of the target, or what is compared; ``None``: not known yet, at least one for each tensor.
    ``benchmarks/many.py`` holds what a process really takes against this.

    Raises
    ------
    MemoryBudgetError
        Saying which budget would do.
    """
    needed = needed_bytes(tensors, tensors if pieces is None else pieces, peak_bytes, spare_bytes)
    if needed > budget_bytes:
        what = f"metadata of {tensors} tensors" + ("" if pieces is None else f" in {pieces} pieces")
        raise MemoryBudgetError(what, budget_bytes, needed, at_least=pieces is None)
