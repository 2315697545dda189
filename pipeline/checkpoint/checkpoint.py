"""An interpreted checkpoint, independent of its format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from paddle_reshard.pipeline.checkpoint.parameter_names import CellNames
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.errors import UnsupportedError
from paddle_reshard.pipeline.core.numbers import Ints
from paddle_reshard.pipeline.core.tensors import (
    ACCUMULATORS,
    DTYPES,
    EMA_MASTER_WEIGHT,
    EMA_PARAM,
    EMA_STATES,
    MASTER_WEIGHT,
    dtype_number,
    is_per_parameter,
)
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.model.lora_config import Adapter
from paddle_reshard.pipeline.model.model import Model, ModelTensor
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


class KindsOfPlace(NamedTuple):
    """The tensors of a pipeline item, in the order of the model, as columns."""

    kinds: Ints
    experts: Ints
    """Number of the expert, -1 for other tensors."""


@dataclass(frozen=True)
class Kinds:
    """The tensors of a model by what they take; those that differ only in layer and expert are of one kind.

    All arrays but those of ``of_places`` have an entry for each kind; bytes are of one element.
    """

    first: tuple[ModelTensor, ...]
    """A tensor of each kind, the first."""
    of_places: Mapping[tuple[str, int | None], KindsOfPlace]
    itemsize: Ints
    dtypes: Ints
    trained: Ints
    missing: Ints
    as_masters: Ints
    """Whether a file with its master weight defines it."""
    shares_name: Ints
    """Whether its parameter name may be that of another tensor."""
    leads: Ints
    of_expert: Ints
    of_expert_rank: Ints
    colors: Ints
    """The number of the color of its rule."""
    numbers: Ints
    """Bytes of states that are single numbers."""
    rates: Ints
    """``[kind, 3]``: moments, master weight and average of the master weight."""
    ema_param: Ints
    """Of the average of the parameter."""
    shares: dict[object, tuple[Ints, Ints]] = field(default_factory=dict)
    """What ranks of sharding hold of cells that were asked for: hundreds of topologies have few that differ."""


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
    fused_over: tuple[int, int] = (0, 0)
    """FlexCheckpoints: over how many ranks of tp the tensors with fused parts are stored, each rank's parts together;
    first those of all ranks of ``ep``, then those that these share out. 0: there are none."""
    keys_read: str = ""
    """How the keys in its files become those of the model, in words; empty: they are the same."""

    @property
    def source_config(self) -> Mapping[str, Any]:
        """The config with which the source was read."""
        former = self.history.former_config
        return self.model.config if former is None else former

    @cached_property
    def kinds(self) -> Kinds:
        """The tensors of the model by what they take."""
        tensors, places = self.catalog.tensors, self.model.of_places
        item_bytes = [DTYPES[number].itemsize for number in tensors.dtypes.tolist()]

        def finder(state: str) -> Callable[[str], int]:
            find = tensors.finder(state)
            return lambda key: 0 if (number := find(key)) is None else item_bytes[number]

        size_of = {state: finder(state) for state in (*ACCUMULATORS, MASTER_WEIGHT, *EMA_STATES)}
        states_of = (MASTER_WEIGHT, EMA_MASTER_WEIGHT, EMA_PARAM)
        found: dict[tuple[object, ...], int] = {}
        first: list[ModelTensor] = []
        bytes_of: list[dict[str, int]] = []
        of_places: dict[tuple[str, int | None], KindsOfPlace] = {}
        experts = self.model.experts
        for place, owned in places.items():
            numbers = []
            for t in owned:
                key = t.tied_to or t.key
                states = tuple([size_of[state](key) for state in (*t.accumulators, *states_of)])
                named = t.tied_to is not None or t.automatic_name is not None
                kind = (
                    id(t.rule),
                    t.global_shape,
                    t.dtype,
                    t.accumulators,
                    t.master,
                    t.missing,
                    named,
                    states,
                )
                number = found.setdefault(kind, len(first))
                if number == len(first):
                    first.append(t)
                    bytes_of.append(dict(zip((*t.accumulators, *states_of), states, strict=True)))
                numbers.append(number)
            of_expert = [-1 if (e := experts.get(t.key)) is None else e for t in owned]
            of_places[place] = KindsOfPlace(np.array(numbers), np.array(of_expert))
        colors = [t.rule.color for t in first]
        rates = [
            (
                sum(of[state] for state in t.accumulators if not is_per_parameter(state)),
                of[MASTER_WEIGHT] if t.master else 0,
                of[EMA_MASTER_WEIGHT] if t.master else 0,
            )
            for t, of in zip(first, bytes_of, strict=True)
        ]
        per_parameter = [
            sum(of[state] for state in t.accumulators if is_per_parameter(state))
            for t, of in zip(first, bytes_of, strict=True)
        ]
        return Kinds(
            first=tuple(first),
            of_places=of_places,
            itemsize=np.array([t.dtype.itemsize for t in first]),
            dtypes=np.array([dtype_number(t.dtype) for t in first]),
            trained=np.array([t.trained for t in first]),
            missing=np.array([t.missing for t in first]),
            as_masters=np.array([t.master and t.dtype.name == "bfloat16" for t in first]),
            shares_name=np.array(
                [bool(t.tied_to or t.automatic_name or t.rule.parameter_name) for t in first]
            ),
            leads=np.array([t.rule.leads_if_unified for t in first]),
            of_expert=np.array([t.rule.of_expert for t in first]),
            of_expert_rank=np.array([t.rule.of_expert_rank for t in first]),
            colors=np.array([colors.index(color) for color in colors]),
            numbers=np.array(per_parameter),
            rates=np.array(rates, dtype=np.int64).reshape(-1, 3),
            ema_param=np.array([of[EMA_PARAM] for of in bytes_of]),
        )

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
