"""What is known of a checkpoint, whatever its format?"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from paddle_reshard.pipeline.core.catalog import Catalog, File
from paddle_reshard.pipeline.core.errors import UnsupportedError
from paddle_reshard.pipeline.core.tensors import EMA_STATES
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.layouts.lora_config import Adapter
from paddle_reshard.pipeline.layouts.model import Model
from paddle_reshard.storage.formats.paddle_pickle import ArrayRef
from paddle_reshard.storage.formats.paddle_pickle_writer import encode_pickle


@dataclass(frozen=True)
class MissingPolicy:
    """What is to become of tensors that no file of a checkpoint holds.

    PaddleFormers' sharded saving loses buffers and parameters that are not trained
    (``trainer/utils/sharding_io.py:70-107``).
    """

    filled: Mapping[str, ArrayRef] = field(default_factory=dict)
    """Structured key → where its values are in ``file``."""
    file: File | None = None
    """A file that was given beside the checkpoint; the source serves it under this path."""
    allowed: tuple[str, ...] = ()
    """Patterns of structured keys (``*`` stands for anything) that may be missing in the target too."""
    drops_mtp: bool = False
    """Whether the layers of multi-token prediction go into no target, so that they may have a form of their own."""

    def allows(self, key: str) -> bool:
        """Whether a tensor may be missing."""
        return any(fnmatchcase(key, pattern) for pattern in self.allowed)


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
    has_optimizer: bool = True
    """Whether it has files of an optimizer, where the format tells: even if these hold nothing."""
    not_carried: tuple[tuple[str, str], ...] = ()
    """``(tensor, why it goes into no target)``."""
    expert_axis: str | None = None
    """The axis over which whole experts are spread: ``ep``, ``tp`` or ``dp``; ``None``: every rank has all of them."""
    unified_experts: bool | None = None
    """Whether they are in the unified layer; ``None`` where the order of tensors cannot tell."""
    adapter: Adapter | None = None
    """What ``lora_config.json`` says; ``None`` where there is none."""
    merged: str | None = None
    """What was merged into it while it is read, in words."""
    newer: str = ""
    """What its files say beyond the versions of the libraries that are proven, in words; it changes no value."""

    def without(self, states: Collection[str]) -> Checkpoint:
        """The same checkpoint without the tensors of some states."""
        tensors = self.catalog.tensors
        if tensors.states.isdisjoint(states):
            return self
        kept = [number for number, tensor in enumerate(tensors) if tensor.state not in states]
        has_ema = any(tensors[number].state in EMA_STATES for number in kept)
        return replace(self, catalog=self.catalog.only(kept), has_ema=has_ema)


def checked_schedule(state: Any, where: str) -> Any:
    """The state of a learning-rate schedule, which every target holds anew.

    Raises
    ------
    UnsupportedError
        If it holds an array or anything else that is not a plain value; ``where`` names its place.
    """
    try:
        encode_pickle({"LR_Scheduler": state})
    except (TypeError, ValueError) as error:
        raise UnsupportedError(
            f"{where}: the state of the learning-rate schedule cannot be written anew: {error}; only plain values are"
        ) from error
    return state
