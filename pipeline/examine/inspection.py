"""Describe a checkpoint from its metadata alone, importing only what that needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, Job, MissingPolicy
from paddle_reshard.pipeline.checkpoint.format import LOADED, NotLoaded
from paddle_reshard.pipeline.checkpoint.parameter_names import in_words, misnamed
from paddle_reshard.pipeline.checkpoint.reading import IndexFiles, SourceFiles, check_given_config
from paddle_reshard.pipeline.checkpoint.sidecars import STRAY, lacking_files
from paddle_reshard.pipeline.checkpoint.training_job import naming_arguments
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.errors import (
    CheckpointError,
    FormatError,
    PlanError,
    RuleError,
    UnsafePickleError,
)
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.file_names import CONFIG
from paddle_reshard.pipeline.core.shown import Facts, Result, by_reason, readable_bytes
from paddle_reshard.pipeline.core.stored import StoredTensor
from paddle_reshard.pipeline.core.tensors import (
    ACCUMULATORS,
    EMA_MASTER_WEIGHT,
    EMA_PARAM,
    EMA_STATES,
    MASTER_WEIGHT,
    PARAM,
)
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.trainer_files import is_of_average, is_stray
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.formats.registry import FORMATS, format_of
from paddle_reshard.pipeline.indexing.detect import index_source
from paddle_reshard.pipeline.indexing.opening import open_checkpoint
from paddle_reshard.pipeline.model.lora_config import Adapter
from paddle_reshard.pipeline.model.model import Model, ModelTensor
from paddle_reshard.pipeline.model.optimizers import muon_parameters, without_states_in_words
from paddle_reshard.pipeline.model.rules.choose import candidate_tables, choose_table, is_beyond, is_known
from paddle_reshard.pipeline.model.rules.libraries import library_of
from paddle_reshard.pipeline.model.rules.tables import RuleTables
from paddle_reshard.pipeline.request.inputs import check_convention, given_inputs, load_tables
from paddle_reshard.pipeline.request.options import with_options
from paddle_reshard.pipeline.request.read_options import InspectOptions
from paddle_reshard.storage.locate import source_access
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks.index import index_here


@dataclass(frozen=True, slots=True)
class StateSummary:
    """Totals over all tensors of one state."""

    state: str
    tensors: int
    elements: int
    dtypes: tuple[str, ...]
    implied: int
    """How many are not stored because they are the cast of their master weight."""


@dataclass(frozen=True, slots=True, repr=False)
class Inspection(Result):
    """The description of a checkpoint."""

    path: str
    format: str
    convention: str
    family: str
    topology: Topology | None
    """``None`` if the format does not record it."""
    sharding_strategy: str | None
    comm_overlap: bool
    sequence_parallel: bool | None
    has_ema: bool
    states: tuple[StateSummary, ...]
    tensors: tuple[ModelTensor, ...]
    tensor_files: int
    tensor_bytes: int
    other_files: tuple[str, ...]
    adapter: Adapter | None = None
    """The contents of ``lora_config.json``, if there is one."""
    newer: str = ""
    """Entries of its files that are newer than the tested library versions; they change no value."""
    unproven: str = ""
    """What nothing in its files proves and may be wrong."""
    alike: str = ""
    """The number of files that only their names tell from those of other ranks, in words; usual in a healthy one."""
    misnamed: str = ""
    """The first parameter whose name breaks the naming rules, and what that means."""
    library: str = ""
    """The library with its version, if its files tell an earlier one by their keys."""
    rules: str | None = None
    """Why no rule table is used, and what follows; ``None`` if a table describes the model."""
    recipe: str = ""
    """The pre-training recipe whose own model it is, as the library's argument ``stage`` calls it; empty: none."""
    recipe_switches: tuple[str, ...] = ()
    """Switches that are on in the model's config, and that a job of the recipe has to be told."""
    stored: tuple[StoredTensor, ...] = ()
    """The arrays in the files, if no table describes them all; ``tensors`` then holds what several tables agree on."""
    keys_read: str = ""
    """How the keys in its files become those of the model; empty: they are the same."""
    left_out: tuple[tuple[str, str], ...] = ()
    """``(tensor or file, why it is not read)``."""
    described: str = ""
    """Behind the family: in which jobs its model was described, where no table of the package is used."""
    not_loaded: NotLoaded = LOADED
    """Which jobs do not start from it, and why."""
    lacking: tuple[str, ...] = ()
    """Small files that an inference engine reads beside a model and that are not there, in words."""

    def _in_short(self) -> str:
        topology = self.topology or "topology not recorded"
        size = readable_bytes(self.tensor_bytes)
        return f"{self.path}: {self.format}, {self.family}, {topology}; {self.tensor_files} files, {size}"

    def facts(self) -> Facts:
        """The description, line by line."""
        written_by = f"{self.library or self.convention}{f' ({self.recipe})' if self.recipe else ''}"
        facts = [
            ("checkpoint", self.path),
            ("format", f"{self.format}, written by {written_by}, model family {self.family}{self.described}"),
            *self._job_facts(),
            ("tensor files", f"{self.tensor_files}, {readable_bytes(self.tensor_bytes)}"),
            ("other files", f"{len(self.other_files)}"),
            *self._model_facts(),
            *(("left out", f"{names}: {reason}") for reason, names in by_reason(self.left_out)),
        ]
        if self.keys_read:
            facts.append(("keys", self.keys_read))
        if self.newer:
            facts.append(("newer", self.newer))
        if self.unproven:
            facts.append(("not proven", self.unproven))
        if self.misnamed:
            facts.append(("misnamed", self.misnamed))
        if self.lacking:
            words = f"{' and '.join(self.lacking)}: an inference engine may need it; see --like of convert"
            facts.append(("lacks", words))
        if missing := [tensor.key for tensor in self.tensors if tensor.missing]:
            facts.append(("in no file", f"{', '.join(missing)}: see --fill and --allow-missing of convert"))
        return facts

    def _job_facts(self) -> Facts:
        """The facts about the job that wrote the checkpoint."""
        facts = [("topology", str(self.topology or "not recorded by this format"))]
        if self.rules is not None:
            facts.append(("rules", self.rules))
        if self.sharding_strategy is not None:
            overlap = ", comm overlap" if self.comm_overlap else ""
            several = self.topology is not None and self.topology.sharding > 1
            with_cp = several and self.convention != "paddlenlp"
            cp = "; ranks of context parallelism are sharding ranks" if with_cp else ""
            facts.append(("sharding", f"{self.sharding_strategy}{overlap}{cp}"))
        if self.sequence_parallel is not None:
            facts.append(("sequence parallel", "yes" if self.sequence_parallel else "no"))
        if self.topology and (arguments := naming_arguments(self.topology, bool(self.sequence_parallel))):
            facts.append(("names", f"of a job with {arguments}"))
        if by_muon := muon_parameters(self.tensors):
            facts.append(("optimizer", f"Muon, with moment1 only for {len(by_muon)} parameters"))
        if without := without_states_in_words(self.tensors):
            facts.append(("no states", without))
        return facts

    def _model_facts(self) -> Facts:
        """The facts about tied tensors and LoRA."""
        facts = []
        if tied := [f"{t.key} = {t.tied_to}" for t in self.tensors if t.tied_to]:
            more = [f"and {len(tied) - _SHOWN_TIED} more"] if len(tied) > _SHOWN_TIED else []
            facts.append(("tied", ", ".join([*tied[:_SHOWN_TIED], *more])))
        if self.adapter is not None:
            base = self.adapter.base or "not recorded"
            lora = f"rank {self.adapter.rank}, scaling {self.adapter.scaling:g}, base model {base}"
            facts.append(("LoRA", lora))
        return facts


@with_options(InspectOptions)
def inspect(
    source: PathLike, *, observe: Observer = ignore_events, **options: Unpack[InspectOptions]
) -> Inspection:
    """Describe a checkpoint from its metadata alone. Missing tensors and damaged files are reported, not refused.

    Parameters
    ----------
    source
        Path or URL of the checkpoint.

    Raises
    ------
    CheckpointError, PlanError
        If it is not a single, complete, consistent checkpoint, or the rules for its family contradict it. For a family
        without a rule table, only files that cannot be parsed are an error.
    """
    store = open_checkpoint(os.fspath(source), source_access(options))
    return inspect_store(store, observe, options, in_part=True)


def inspect_store(
    store: Source, observe: Observer, options: InspectOptions, in_part: bool = False
) -> Inspection:
    """:func:`inspect` of a checkpoint that is open; a damaged file is an error, unless the rest is to be described."""
    index_files = partial(index_here, observe=observe)
    tables, config = given_inputs(options.get("rules"), options.get("config"), options.get("convention"))
    check_given_config(store, config)
    files = SourceFiles(store, config, index_here, index_files)
    try:
        checkpoint = index_source(files, tables, _REPORTED)
    except (CheckpointError, PlanError) as error:
        if isinstance(error, FormatError):
            if not in_part or isinstance(error, UnsafePickleError):
                raise
            return _in_part(files, index_files, tables, error)
        if isinstance(error, RuleError) and error.fitting:
            return _agreed(files, index_files, error)
        if _is_unknown(files, tables):
            return _as_stored(files, index_files, str(error))
        if isinstance(error, RuleError) and (
            beyond := _beyond_the_rules(files, index_files, tables, str(error))
        ):
            return beyond
        raise
    check_convention(options.get("convention"), store.location, checkpoint.model.table)
    return _described(checkpoint, store)


def _in_part(
    files: SourceFiles, index_files: IndexFiles, tables: RuleTables, damaged: FormatError
) -> Inspection:
    """What can be read beside damaged files: all but the average if only that is, otherwise the arrays in each file."""
    left: dict[str, str] = {}
    error = damaged
    while error.path in files.sizes and error.path not in left and len(left) < _MOST_DAMAGED:
        left[error.path] = str(error).removeprefix(error.path).removeprefix(":").strip()
        averages = {path for path in files.sizes if is_of_average(path)}
        alone = left.keys() <= averages
        rest = files.without(averages if alone else left)
        try:
            if alone:
                described = _described(index_source(rest, tables, _REPORTED), rest.store)
            else:
                described = _as_stored(rest, index_files, str(damaged))
        except FormatError as further:
            error = further
            continue
        except (CheckpointError, PlanError):
            break
        if not described.tensors and not described.stored:
            break
        because = f"not read, because of {', '.join(left)}"
        lost = tuple((path, left.get(path, because)) for path in sorted(averages if alone else left))
        return replace(described, left_out=(*lost, *described.left_out))
    raise damaged


def _agreed(files: SourceFiles, index_files: IndexFiles, several: RuleError) -> Inspection:
    """The arrays in the files, and what the rule tables of several libraries all say of them."""
    read: list[Checkpoint] = []
    for library in several.fitting:
        with suppress(CheckpointError, PlanError):
            read.append(index_source(files, load_tables(None, library), _REPORTED))
    as_stored = replace(_as_stored(files, index_files, str(several)), convention=" or ".join(several.fitting))
    if not read:
        return as_stored
    described = _described(read[0], files.store)
    first, *others = (_by_array(checkpoint.model) for checkpoint in read)
    alike = (t for key, t in first.items() if all(_said(t) == _said(other.get(key)) for other in others))
    return replace(
        as_stored,
        tensors=tuple(alike),
        rules=f"{several}. Described is what they agree on",
        keys_read=described.keys_read,
        left_out=described.left_out,
        lacking=described.lacking,
    )


def _by_array(model: Model) -> dict[str, ModelTensor]:
    """Key in the files → the tensor that is stored as this array alone, under that key."""
    from paddle_reshard.pipeline.formats.huggingface.parts import model_parts

    single = ((tensor, parts[0]) for tensor, parts in model_parts(model) if len(parts) == 1)
    return {part.key: replace(tensor, key=part.key) for tensor, part in single}


def _said(tensor: ModelTensor | None) -> tuple[object, ...] | None:
    """What :class:`Inspection` tells of a tensor."""
    if tensor is None:
        return None
    rule = tensor.rule
    return (tensor.global_shape, tensor.dtype, tensor.missing, rule.split, rule.fused_parts)


def _described(checkpoint: Checkpoint, store: Source) -> Inspection:
    """The description of a checkpoint whose model is known, read from a store."""
    sizes = store.sizes()
    own = {file.path: file.size_bytes for file in checkpoint.catalog.files}
    served = FORMATS[checkpoint.format].model_only
    return Inspection(
        path=store.location,
        format=checkpoint.format,
        convention=checkpoint.model.table.convention,
        family=checkpoint.model.table.family,
        topology=checkpoint.job.topology,
        sharding_strategy=checkpoint.job.strategy,
        comm_overlap=checkpoint.job.comm_overlap,
        sequence_parallel=checkpoint.job.sequence_parallel,
        has_ema=checkpoint.has_ema,
        states=tuple(_summaries(checkpoint)),
        tensors=tuple(t for t in checkpoint.model.tensors if not (t.of_base and t.missing)),
        tensor_files=len(own),
        tensor_bytes=sum(own.values()),
        other_files=tuple(sorted(sizes.keys() - own.keys())),
        adapter=checkpoint.adapter,
        newer=checkpoint.newer,
        unproven=checkpoint.unproven,
        alike=checkpoint.alike,
        misnamed=_misnamed(checkpoint.job),
        library=checkpoint.model.table.library,
        rules=_without_rules(checkpoint.model),
        recipe=checkpoint.model.table.recipe,
        recipe_switches=checkpoint.model.recipe_switches,
        keys_read=checkpoint.keys_read,
        described=checkpoint.model.table.described_in,
        left_out=(*checkpoint.not_carried, *((name, STRAY) for name in store.folders if is_stray(name))),
        not_loaded=FORMATS[checkpoint.format].not_loaded(checkpoint),
        lacking=tuple(lacking_files(checkpoint.model.config, sizes)) if served else (),
    )


def _misnamed(job: Job) -> str:
    if exchanged := misnamed(job.names):
        return f"{in_words(exchanged)}; every other command refuses it"
    if job.names_predicted is not None:
        return f"{job.names_predicted}; a target with such names needs --layout model_meta.json"
    return ""


def _without_rules(model: Model) -> str | None:
    """Why no rule table describes a model, and what follows; ``None`` if one does."""
    if model.table.not_known is None:
        return None
    if any(rule.huggingface is not None for rule in model.table.rules):
        return _WITHOUT_NAMES
    return f"{model.table.not_known}: {_WITHOUT_RULES}" if model.config else _WITHOUT_CONFIG


_WITHOUT_CONFIG = (
    f"{CONFIG} is missing, which names the family: without --config FILE only the files of a FlexCheckpoint can be "
    "divided into files differently"
)
_WITHOUT_RULES = (
    "only its sharding degree and strategy, at the same tp, pp and ep, can be changed, and its format to "
    "FlexCheckpoint"
)
_WITHOUT_NAMES = (
    "the rule table of this family does not tell what a job calls its parameters: only its sharding degree and "
    "strategy can be changed (at the same tp, pp and ep) and its format to FlexCheckpoint and Hugging Face"
)


def _is_unknown(files: SourceFiles, tables: RuleTables) -> bool:
    """Whether there are tensor files of a family that no rule table knows."""
    config = files.config_if_any()
    if any(name.startswith("checkpoint-") for name in files.store.folders):
        return False  # the folder of a run
    return bool(files.pickles or files.safetensors) and not is_known(tables, config)


def _beyond_the_rules(
    files: SourceFiles, index_files: IndexFiles, tables: RuleTables, why: str
) -> Inspection | None:
    """The arrays in the files, if the rule tables of the family do not describe such a model, or not in this format."""
    from paddle_reshard.pipeline.indexing.as_stored import degrees_by_names

    try:
        as_stored = _as_stored(files, index_files, why)
        keys = {tensor.key for tensor in as_stored.stored if tensor.state == PARAM}
        if is_beyond(tables, keys, files.config_if_any(), bool(degrees_by_names(files))):
            return as_stored
        of_recipe = all(table.recipe for table in candidate_tables(tables, files.config_if_any()))
        if of_recipe and FORMATS[as_stored.format].model_only:  # its own export, which it may have spoiled
            return as_stored
        table = choose_table(tables, keys, files.config_if_any(), stages_known=True)
    except (CheckpointError, PlanError):
        return None
    if table.is_for(as_stored.format):
        return None
    return replace(as_stored, convention=table.convention)


def _as_stored(files: SourceFiles, index_files: IndexFiles, why: str) -> Inspection:
    """Describe the arrays in the files of a checkpoint that no rule table explains."""
    from paddle_reshard.pipeline.indexing.as_stored import degrees_by_names, stored_tensors

    stored = tuple(stored_tensors(files, index_files))
    config = files.config_if_any()
    degrees = degrees_by_names(files)
    held = {path: files.sizes[path] for path in (*files.pickles, *files.safetensors)}
    by_state = {state: [t for t in stored if t.state == state] for state in _STATES}
    return Inspection(
        path=files.store.location,
        format=format_of(files).name,
        convention=library_of(config) or "an unknown library",
        family=str(config.get("model_type", "not known")),
        topology=Topology(**degrees) if degrees else None,
        sharding_strategy=None,
        comm_overlap=False,
        sequence_parallel=None,
        has_ema=any(by_state[state] for state in EMA_STATES),
        states=tuple(
            StateSummary(state, len(of), sum(t.elements for t in of), tuple(sorted({t.dtype for t in of})), 0)
            for state, of in by_state.items()
            if of
        ),
        tensors=(),
        tensor_files=len(held),
        tensor_bytes=sum(held.values()),
        other_files=tuple(sorted(files.sizes.keys() - held.keys())),
        rules=f"{why}; listed are the arrays in each file",
        stored=stored,
    )


_REPORTED = MissingPolicy(reports=True, parameters_only=True)
_MOST_DAMAGED = 8
"""Of how many damaged files `inspect` describes what lies beside them; more are no accident of one file."""
_SHOWN_TIED = 4
"""Of how many tied tensors inspect says the keys."""
_STATES = (PARAM, MASTER_WEIGHT, *ACCUMULATORS, EMA_PARAM, EMA_MASTER_WEIGHT)


def _summaries(checkpoint: Checkpoint) -> Iterator[StateSummary]:
    catalog = checkpoint.catalog
    elements = catalog.tensors.elements
    for state in sorted(catalog.tensors.states, key=_STATES.index):
        members = catalog.tensors.numbers_of_state(state)
        yield StateSummary(
            state=state,
            tensors=len(members),
            elements=int(elements[members].sum()),
            dtypes=tuple(sorted(dtype.name for dtype in catalog.tensors.dtypes_of(state))),
            implied=sum(map(catalog.implied.__contains__, members.tolist())),
        )
