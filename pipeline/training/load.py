"""Fill the tensors of a running job from a checkpoint of any topology and format.

The live tensors of a process are laid out as files, and the planner and the tasks of a conversion read and move their
values. Processes do not communicate; each reads only the bytes that its own tensors need.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from paddle_reshard.clusters.inline import InlineEngine, Reports
from paddle_reshard.pipeline.changes.change import Reading
from paddle_reshard.pipeline.changes.kinds import Fill
from paddle_reshard.pipeline.changes.read import OpenChanges
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.checkpoint.files import TargetFiles
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.choices import READ_MASTER_WEIGHTS, parse_choice
from paddle_reshard.pipeline.core.errors import CheckpointError, PlanError
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike, parse_memory, texts_of
from paddle_reshard.pipeline.indexing.opening import open_checkpoint
from paddle_reshard.pipeline.planning.checks import master_checks_of_loaded
from paddle_reshard.pipeline.planning.plan import JOIN_GAP_BYTES, Plan, plan_conversion
from paddle_reshard.pipeline.planning.settings import PlanSettings
from paddle_reshard.pipeline.planning.work import GroupWork, RemainingGroups
from paddle_reshard.pipeline.request.inputs import load_config, load_tables
from paddle_reshard.pipeline.request.options import with_options
from paddle_reshard.pipeline.request.read_options import LoadOptions
from paddle_reshard.pipeline.training.layout import (
    Names,
    check_complete,
    find_tensors,
    lay_out_live,
    needed_of,
)
from paddle_reshard.pipeline.training.tensors import (
    LR_SCHEDULER,
    LiveTensor,
    MemoryWriter,
    empty_sections,
    leaves_of,
    parameter_names_of,
    read_entry,
    tensor_parallel,
)
from paddle_reshard.storage.locate import is_local, source_access
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks.device import Mover
from paddle_reshard.tasks.group import GroupReport
from paddle_reshard.tasks.index import index_here
from paddle_reshard.tasks.needed import NeededBytes
from paddle_reshard.tasks.run_group import run_group
from paddle_reshard.tasks.workspace import Workspace

REMOTE_GAP_BYTES = 1 << 20
"""On a remote store, ranges with a smaller gap between them are read together."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of loading in this process."""

    source: str
    tensors: int
    """Number of live tensors that were filled."""
    filled_bytes: int
    read_bytes: int
    """Bytes of tensors read, without metadata."""
    kept: tuple[str, ...]
    """Entries without a value in the checkpoint that were left unchanged, as ``allow_missing`` permits."""
    master_drift: tuple[str, ...] = ()
    """Parameters that differ from the cast of their master weights, as ``master_weights="report"`` permits."""


@with_options(LoadOptions)
def load_into(
    state_dict: Mapping[str, Any],
    source: PathLike,
    *,
    parameter_to_structured_name: Mapping[str, str] | None = None,
    config: PathLike | Mapping[str, Any] | None = None,
    strict: bool = True,
    **options: Unpack[LoadOptions],
) -> LoadReport:
    """Fill the tensors of a ``state_dict`` in place from a checkpoint of any topology and format.

    Parameters
    ----------
    state_dict
        Nested dicts of tensors. Parameters have their structured names as keys. Optimizer states have the names that
        the optimizer gives them (``linear_0.w_0_fp32_master_0_moment1_0``), parameter names in a dict
        ``"master_weights"``, or structured names with a suffix (``.moment1_0``, ``.w_0``). Entries below ``"ema"`` are
        averages. A tensor is a plain tensor (the whole logical tensor, or under ``fleet`` the piece of this tp rank), a
        DistTensor, a ``ShardedWeight``, or a NumPy array (bfloat16 as ``uint16``). A learning-rate schedule
        (``"LR_Scheduler"``) is updated if the checkpoint's tensor files hold one.
    parameter_to_structured_name
        Parameter name → structured name, in this process. Default: from the parameters in ``state_dict``.
    config
        ``config.json`` of the model, for a checkpoint without one.
    strict
        Refuse empty dicts, and a ``state_dict`` with some optimizer states of a parameter but not all that the
        checkpoint has.

    Raises
    ------
    MasterDriftError
        If a parameter is not its stored master weight, rounded. All elements of which this process loads both are
        compared; where it loads only one of the two, samples of every array.
    ReshardError
        Before any tensor is changed, if the checkpoint has no value for an entry, or one of a different shape or dtype.
        Errors while bytes are moved (a master drift, a store that is down, a checkpoint that changes) may leave some
        tensors filled.
    """
    settings, location = _settings(options), os.fspath(source)
    missing = MissingPolicy(allowed=texts_of(options.get("allow_missing", ())))
    store, checkpoint = _open(location, config, missing, options)
    leaves = dict(leaves_of(state_dict))
    schedules = [value for path, value in leaves.items() if path[-1] == LR_SCHEDULER]
    for schedule in schedules:
        _check_schedule(schedule, checkpoint)
    if strict:
        _check_sections(state_dict)
    entries = {path: value for path, value in leaves.items() if path[-1] != LR_SCHEDULER}
    names = Names(checkpoint.catalog, {**parameter_names_of(entries), **(parameter_to_structured_name or {})})
    numbers = find_tensors(names, entries, missing)
    live = [tensor for path in numbers if (tensor := read_entry(path, entries[path])) is not None]
    pieces = {tensor.piece: numbers[tensor.piece.path] for tensor in live}
    files = lay_out_live(checkpoint, pieces, tensor_parallel())
    if strict:
        check_complete(checkpoint.catalog.tensors, numbers)
    plan = _planned(checkpoint, files, settings)
    reports = _fill(plan, store, live, JOIN_GAP_BYTES if is_local(location) else REMOTE_GAP_BYTES)
    store.check_unchanged()
    for schedule in schedules:
        schedule.update(checkpoint.job.lr_scheduler)
    return LoadReport(
        source=store.location,
        tensors=len(live),
        filled_bytes=sum(tensor.piece.nbytes for tensor in live),
        read_bytes=sum(report.read_bytes for report in reports),
        kept=tuple(".".join(path) for path in entries if path not in numbers),
        master_drift=tuple(sorted(str(found) for report in reports for found in report.differences)),
    )


def _settings(options: LoadOptions) -> PlanSettings:
    return PlanSettings(
        parse_memory(options.get("memory", DEFAULT_MEMORY)),
        compare_replicas=False,
        allow_master_drift=not parse_choice(
            options.get("master_weights", READ_MASTER_WEIGHTS[0]),
            READ_MASTER_WEIGHTS,
            "choice of master weights",
        ),
    )


def _open(
    location: str,
    config: PathLike | Mapping[str, Any] | None,
    missing: MissingPolicy,
    options: LoadOptions,
) -> tuple[Source, Checkpoint]:
    """The store, and the checkpoint in it with what ``fill`` brings."""
    access, fill = source_access(options), options.get("fill")
    changes = OpenChanges.open(() if fill is None else (Fill(os.fspath(fill)),), access)
    own = open_checkpoint(location, access)
    given = config if isinstance(config, Mapping) or config is None else load_config(config)
    reading = Reading(
        load_tables(options.get("rules"), options.get("convention")), given, missing, index_here, pieces=False
    )
    altered = changes.index(own, reading)
    return altered.store, altered.source


def _check_sections(state_dict: Mapping[str, Any]) -> None:
    """Refuse empty dicts: an empty optimizer may not have created its states yet."""
    for section in empty_sections(state_dict):
        raise PlanError(
            f"{'.'.join(section) or 'the state_dict'}: contains no tensor to fill; let the optimizer "
            f"create its states first, or pass strict=False"
        )


def _check_schedule(schedule: Any, checkpoint: Checkpoint) -> None:
    """Refuse a learning-rate schedule with other entries than the checkpoint's."""
    stored, expected = (
        sorted(value) if isinstance(value, MutableMapping) else []
        for value in (checkpoint.job.lr_scheduler, schedule)
    )
    if not stored or stored != expected:
        raise CheckpointError(
            f"{LR_SCHEDULER}: has the entries {expected}, but the checkpoint's tensor files have "
            f"{stored}; remove it from the state_dict and load it from scheduler.pdparams"
        )


def _planned(checkpoint: Checkpoint, files: TargetFiles, settings: PlanSettings) -> Plan:
    """The plan that fills live tensors as they are laid out."""
    source = needed_of(checkpoint.catalog, files.fragments)
    checks = master_checks_of_loaded(checkpoint.catalog, files.fragments)
    return plan_conversion(source, files, (), settings, checks=checks)


def _fill(plan: Plan, store: Source, live: Sequence[LiveTensor], gap_bytes: int) -> list[GroupReport]:
    """Read, compare and move everything."""
    writer = MemoryWriter({tensor.piece.name: tensor.memory for tensor in live})

    def do(work: GroupWork, mover: Mover) -> GroupReport:
        needed = NeededBytes(store, work, gap_bytes)
        return replace(run_group(work, needed, writer, mover), read_bytes=needed.read_bytes)

    if all(tensor.on_host for tensor in live):
        reports = InlineEngine(plan.budget_bytes).each(RemainingGroups(plan), do)
    else:
        reports = _run_in_this_thread(plan, do)
    with closing(reports):
        return list(reports)


def _run_in_this_thread(plan: Plan, do: Callable[[GroupWork, Mover], GroupReport]) -> Reports:
    """Run all groups in the calling thread, which has set the device of the tensors."""
    space = Workspace(plan.peak_bytes)
    for work in RemainingGroups(plan):
        space.clear(work.peak_bytes)
        yield do(work, space)
