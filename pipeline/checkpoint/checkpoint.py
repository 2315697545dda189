"""An interpreted checkpoint, independent of its format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol

from paddle_reshard.pipeline.checkpoint.parameter_names import CellNames
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.errors import UnsupportedError
from paddle_reshard.pipeline.core.tensors import (
    DTYPES,
    EMA_MASTER_WEIGHT,
    EMA_PARAM,
    EMA_STATES,
    MASTER_WEIGHT,
    is_per_parameter,
)
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.model.lora_config import Adapter
from paddle_reshard.pipeline.model.model import Model
from paddle_reshard.storage.files.paddle_pickle_writer import encode_pickle

DROPPED_MTP: Final = "it is of multi-token prediction, which was asked to be dropped"
"""Why a tensor of an MTP layer goes into no target."""


@dataclass(frozen=True)
class MissingPolicy:
    """How to treat tensors that no file of a checkpoint holds."""

    fills: bool = False
    """Whether they are taken from elsewhere, after the checkpoint is indexed."""
    allowed: tuple[str, ...] = ()
    """Patterns of structured keys (``*`` stands for anything) that may be missing in the target too."""
    reports: bool = False
    """Whether what the files list without holding it is reported, and not refused."""
    untrained: frozenset[str] = frozenset()
    """Keys that are known to have no optimizer states."""
    drops_mtp: bool = False
    """Whether MTP layers are omitted from every target, so that their tensors need no rules."""
    parameters_only: bool = False
    """Whether nothing but stored parameters is wanted, so that an optimizer that cannot be read is no obstacle."""
    lacks_layers: bool = False
    """Whether the files may be of a part of the model, without whole layers."""

    def lets_lack(self, key: str) -> bool:
        """Whether the checkpoint may lack a tensor that its model has."""
        return self.fills or self.allows(key)

    def lets_lack_states(self, key: str) -> bool:
        """Whether a parameter may have no optimizer states although its layer should have some."""
        return key in self.untrained or self.allows(key)

    def allows(self, key: str) -> bool:
        """Whether a tensor may be missing in the target too."""
        return any(fnmatchcase(key, pattern) for pattern in self.allowed)


@dataclass(frozen=True, slots=True)
class Filled:
    """What a checkpoint lacked and ``--fill`` gave."""

    location: str
    tensors: tuple[str, ...]
    """Structured keys of the parameters."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a checkpoint lacked and another model gave (``--like``)."""

    location: str
    tensors: tuple[str, ...]
    """Keys in a Hugging Face checkpoint."""
    files: Mapping[str, str]
    """Name of every small file of the other model → its path in the source."""
    config: Mapping[str, Any]
    """Entries of ``config.json``."""
    license: Mapping[str, str] = field(default_factory=dict)


DONOR: Final = "LIKE/"
"""Prefix of the paths of a donor's files among those of the source."""


class Donor(Protocol):
    """The model that training began from, by its metadata (``--like``)."""

    def complete(self, source: Checkpoint, wanted: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
        """The source, and the source with all requested changes, with what both lack.

        A ``CheckpointError`` names tensors if the two are not of one model, or the result would not be whole.
        """


@dataclass(frozen=True, slots=True)
class Job:
    """The job that saved a checkpoint, as far as its files tell; the defaults are what a format without them knows."""

    topology: Topology | None = None
    strategy: str | None = None
    comm_overlap: bool = False
    sequence_parallel: bool | None = None
    """``None`` if it cannot be determined (tp = 1, or a family whose parameter names do not depend on it)."""
    names_predicted: str | None = None
    """``None`` if the parameter names follow the naming rules; otherwise a description of the first difference."""
    names: tuple[CellNames, ...] = ()
    """What its files call the parameters whose optimizer states are found by name."""
    expert_axis: str | None = None
    """The axis over which whole experts are distributed: ``ep``, ``tp`` or ``dp``; ``None``: every rank has all."""
    unified_experts: bool | None = None
    """Whether experts are in the unified layer; ``None`` if the order of tensors does not show it."""
    lr_scheduler: Any = None


@dataclass(frozen=True, slots=True)
class History:
    """What became of a checkpoint since its files were read."""

    dequantised: str | None = None
    """Description of the weights that are dequantised while they are read."""
    merged: str | None = None
    """Description of what is merged into it while it is read."""
    filled: Filled | None = None
    """What it took with ``--fill``; ``None`` where nothing was given."""
    completion: Completion | None = None
    """What it took from another model; ``None`` where none was given."""
    masters_made: bool = False
    """Whether its master weights are made from its parameters on request, without other optimizer states."""
    former_config: Mapping[str, Any] | None = None
    """The config with which the source was read, also where the model has another one since."""
    rewritten: Mapping[str, tuple[str, bytes]] = field(default_factory=dict)
    """Small file of the source → the name and content that it has in targets."""
    statements: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Key → the statements of ``--aoa`` that made it, in order, with file and line."""


class StateBytes(NamedTuple):
    """Bytes of the states of a parameter: of single numbers, and of one element of the others."""

    numbers: int
    moments: int
    master: int
    ema: int
    """Of the average as a master weight, and as a parameter."""
    ema_param: int


@dataclass(frozen=True)
class Checkpoint:
    """An interpreted checkpoint: its tensors and their locations, its model, its job, and what became of it.

    ``catalog`` holds the logical tensors of ``model``, which do not depend on topology and format.
    """

    format: str
    """Name of its format, a key of ``FORMATS``."""
    catalog: Catalog
    own_files: frozenset[str]
    """Paths of the files that hold or locate its tensors; all others are small files of the trainer or the model."""
    model: Model
    job: Job = Job()
    history: History = History()
    has_ema: bool = False
    has_optimizer: bool = True
    """Whether it has optimizer files, even empty ones, if the format has such files."""
    adapter: Adapter | None = None
    """Contents of ``lora_config.json``, or ``None``."""
    not_carried: tuple[tuple[str, str], ...] = ()
    """``(tensor, why it goes into no target)``."""
    newer: str = ""
    """Description of attributes that are newer than the tested library versions; they do not affect values."""
    unproven: str = ""
    """What nothing in its files proves and may be wrong, in words."""
    alike: str = ""
    """The number of files that only their names tell from those of other ranks, in words; usual in a healthy one."""
    keys_read: str = ""
    """How the keys in its files become those of the model, in words; empty: they are the same."""

    @property
    def source_config(self) -> Mapping[str, Any]:
        """The config with which the source was read."""
        former = self.history.former_config
        return self.model.config if former is None else former

    @cached_property
    def bytes_of_states(self) -> dict[str, StateBytes]:
        """Key of a tensor of the model → what its states take; tensors with equal ones share them."""
        tensors = self.catalog.tensors
        item_bytes = [DTYPES[number].itemsize for number in tensors.dtypes.tolist()]
        found: dict[StateBytes, StateBytes] = {}

        def finder(state: str) -> Callable[[str], int]:
            find = tensors.finder(state)
            return lambda key: 0 if (number := find(key)) is None else item_bytes[number]

        states = {state for tensor in self.model.tensors for state in tensor.accumulators}
        size_of = {state: finder(state) for state in (*states, MASTER_WEIGHT, *EMA_STATES)}
        of_states = {}
        for tensor in self.model.tensors:
            key = tensor.tied_to or tensor.key
            numbers = moments = 0
            for state in tensor.accumulators:
                if is_per_parameter(state):
                    numbers += size_of[state](key)
                else:
                    moments += size_of[state](key)
            master = size_of[MASTER_WEIGHT](key) if tensor.master else 0
            ema = size_of[EMA_MASTER_WEIGHT](key) if tensor.master else 0
            of = StateBytes(numbers, moments, master, ema, size_of[EMA_PARAM](key))
            of_states[tensor.key] = found.setdefault(of, of)
        return of_states

    def without(self, states: Collection[str]) -> Checkpoint:
        """The same checkpoint without the tensors of some states."""
        tensors = self.catalog.tensors
        if tensors.states.isdisjoint(states):
            return self
        kept = [number for number, tensor in enumerate(tensors) if tensor.state not in states]
        has_ema = any(tensors[number].state in EMA_STATES for number in kept)
        return replace(self, catalog=self.catalog.only(kept), has_ema=has_ema)


def checked_schedule(state: Any, where: str) -> Any:
    """The state of a learning-rate schedule, which must be of plain values so that a target can hold it.

    An ``UnsupportedError`` names what else it holds, ``where``.
    """
    try:
        encode_pickle({"LR_Scheduler": state})
    except (TypeError, ValueError) as error:
        raise UnsupportedError(
            f"{where}: the state of the learning-rate schedule cannot be written anew: {error}; only plain values are"
        ) from error
    return state
