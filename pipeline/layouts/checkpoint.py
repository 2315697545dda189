"""What is known of a checkpoint, whatever its format?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddle_reshard.pipeline.catalog import Catalog
from paddle_reshard.pipeline.layouts.model import Model
from paddle_reshard.pipeline.topology import Topology


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, understood: its tensors and where they lie, its model, and what is known of its job.

    ``catalog`` holds the logical tensors of ``model``: the same whatever topology and format they came from.
    """

    format: str
    """One of ``FORMATS``."""
    catalog: Catalog
    own_files: frozenset[str]
    """Paths of the files that hold its tensors or say where they lie; the others only lie beside them."""
    model: Model
    topology: Topology | None
    """``None`` where the format does not tell."""
    strategy: str | None
    """Sharding strategy; ``None`` where the format does not tell."""
    comm_overlap: bool
    sequence_parallel: bool | None
    """``None`` where the files cannot tell (tp = 1, or a family whose names do not depend on it)."""
    names_predicted: str | None
    """``None`` if the parameter names follow the naming rules; else what differs, in words."""
    lr_scheduler: Any
    """What the optimizer files hold of the learning-rate schedule; ``None`` where they hold nothing."""
    has_ema: bool
