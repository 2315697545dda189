"""Memory that metadata take in a process that plans and runs groups.

A checkpoint may have hundreds of thousands of small tensors. Their metadata count towards the budget; the estimate
needs only the number of tensors and pieces, so a budget is refused before any memory is used in proportion to them.
"""

from __future__ import annotations

from paddle_reshard.pipeline.core.errors import MemoryBudgetError
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES

DRIVER_BYTES = 72 << 20
"""Part of the footprint that only processes with an object store need: client libraries, requests in flight."""
FREE_BYTES = 16 << 20
"""Part of the footprint that is for metadata with any store."""
PLANNED_TENSOR_BYTES, PLANNED_PIECE_BYTES = 480, 310
"""Peak for each tensor and each piece while no group runs: indexing, planning, and reading back the target."""
HELD_TENSOR_BYTES, HELD_PIECE_BYTES = 350, 60
"""Memory for each tensor and each piece while groups run."""


def spare_bytes(local: bool) -> int:
    """Part of the footprint that is free for metadata; ``local`` if all files are on disks of this machine."""
    return FREE_BYTES + (DRIVER_BYTES if local else 0)


def held_bytes(tensors: int, pieces: int, spare_bytes: int) -> int:
    """Bytes of metadata beyond the footprint while groups run."""
    return max(0, HELD_TENSOR_BYTES * tensors + HELD_PIECE_BYTES * pieces - spare_bytes)


def needed_bytes(tensors: int, pieces: int, peak_bytes: int, spare_bytes: int) -> int:
    """The smallest budget for metadata and groups of at most ``peak_bytes``; 0 if the metadata fit the footprint.

    100,000 tensors in 200,000 pieces, groups of 64 MiB, all files local (88 MiB spare). Planning takes 480 · 100,000 +
    310 · 200,000 = 105 MiB, 17 more than are spare; while groups run 45 MiB are kept, which fit. The budget is then
    136 + 17 = 153 MiB.
    """
    planned = PLANNED_TENSOR_BYTES * tensors + PLANNED_PIECE_BYTES * pieces - spare_bytes
    held = held_bytes(tensors, pieces, spare_bytes)
    beyond = max(planned, held + peak_bytes if held else 0)
    return FOOTPRINT_BYTES + beyond if beyond > 0 else 0


def check_metadata(
    tensors: int, pieces: int | None, peak_bytes: int, budget_bytes: int, spare_bytes: int
) -> None:
    """Refuse if metadata and groups of at most ``peak_bytes`` do not fit the budget together.

    ``pieces`` is the number of boxes of the target, or of comparisons; ``None`` if not known yet, which counts as one
    for each tensor. The :class:`MemoryBudgetError` names a sufficient budget. ``benchmarks/many.py`` compares this
    estimate with measured memory.
    """
    needed = needed_bytes(tensors, tensors if pieces is None else pieces, peak_bytes, spare_bytes)
    if needed > budget_bytes:
        what = f"metadata of {tensors} tensors" + ("" if pieces is None else f" in {pieces} pieces")
        raise MemoryBudgetError(what, budget_bytes, needed, at_least=pieces is None)
