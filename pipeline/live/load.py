"""Fill the tensors of a running job from a checkpoint of any topology and format.

This is the offline conversion with memory as the target: the live tensors of a process are laid out as files, and the
same planner and tasks read and move their values. Every process works independently, reads only the bytes that its
own tensors need, and communicates with no other process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from paddle_reshard.clusters.inline import InlineEngine, Reports
from paddle_reshard.pipeline.convert.inputs import load_config, load_tables
from paddle_reshard.pipeline.convert.options import check_names, takes
from paddle_reshard.pipeline.convert.read_options import LoadOptions
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.errors import CheckpointError, PlanError, UsageError
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike, parse_memory, texts_of
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.indexing.fill import read_filling
from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.live.layout import Names, check_complete, find_tensors, lay_out_live
from paddle_reshard.pipeline.live.tensors import (
    LR_SCHEDULER,
    LiveTensor,
    MemoryWriter,
    empty_sections,
    entries_of,
    parameter_names_of,
    read_entry,
    schedules_of,
    tensor_parallel,
)
from paddle_reshard.pipeline.planning.checks import master_checks_of_loaded
from paddle_reshard.pipeline.planning.plan import JOIN_GAP_BYTES, Plan, plan_conversion
from paddle_reshard.pipeline.planning.settings import PlanSettings
from paddle_reshard.pipeline.planning.work import GroupWork, plan_work
from paddle_reshard.storage.locate import Access, is_local, open_source, source_access
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks.device import Mover
from paddle_reshard.tasks.needed import NeededBytes
from paddle_reshard.tasks.run_group import GroupReport, run_group
from paddle_reshard.tasks.workspace import Workspace

REMOTE_GAP_BYTES = 1 << 20
"""On a remote store, gaps of fewer bytes between two ranges are read with them."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of loading in this process."""

    source: str
    tensors: int
    """Number of live tensors that were filled."""
    filled_bytes: int
    read_bytes: int
    """Bytes read of tensors, without metadata."""
    kept: tuple[str, ...]
    """Entries without a value in the checkpoint that were left unchanged, as ``allow_missing`` permits."""
    master_drift: tuple[str, ...] = ()
    """Parameters that differ from the cast of their master weights, as ``allow_master_drift`` permits."""


@dataclass(frozen=True)
class LoadRequest:
    """What a process asks to be loaded, every value read and in range."""

    location: str
    access: Access
    fill: str | None
    """A file with further tensors."""
    allow_missing: tuple[str, ...]
    """Patterns of names."""
    rules: Path | None
    config: Path | Mapping[str, Any] | None
    planning: PlanSettings
    strict: bool
    """Whether entries must not be empty, nor lack what the checkpoint has."""


@takes(LoadOptions)
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
        Nested dicts of tensors. Keys are structured names of parameters; of optimizer states accumulator names as the
        optimizer gives them (``linear_0.w_0_fp32_master_0_moment1_0``), a dict ``"master_weights"`` by parameter name,
        or structured names with a suffix (``.moment1_0``, ``.w_0``). Below ``"ema"`` they are averages. A tensor is a
        plain one (the whole logical tensor, or under ``fleet`` the piece of this tp rank), a DistTensor, a
        ``ShardedWeight``, or a NumPy array (bfloat16 as ``uint16``). A learning-rate schedule (``"LR_Scheduler"``) is
        updated where the checkpoint holds one.
    parameter_to_structured_name
        Parameter name → structured name, in this process. Default: what the parameters in ``state_dict`` tell.
    config
        ``config.json`` of the model, for a checkpoint that has none.
    strict
        Refuse if the checkpoint holds optimizer states of a parameter that the ``state_dict``, which has others of it,
        has no place for; or if a nested dict is empty.
    options
        :class:`LoadOptions`.

    Raises
    ------
    MasterDriftError
        A parameter that the checkpoint stores beside its master weight is not that, rounded. Every element is compared
        of which this process loads both; where it loads one of the two only, a few runs of every array.
    ReshardError
        Naming the entry, before any tensor is touched: nothing in the checkpoint feeds it, or it is of another shape
        or dtype. An error while bytes are moved (a parameter that is not its master weight, a store that is down, a
        checkpoint that is changed under us) leaves some tensors filled and others not.
    """
    if not isinstance(state_dict, Mapping):
        raise UsageError(
            f"state_dict is a {type(state_dict).__name__}, not a dict; pass the result of its state_dict()"
        )
    request = _read_request(source, config, strict, options)
    store, checkpoint, missing = _open(request)
    schedules = list(schedules_of(state_dict))
    for schedule in schedules:
        _check_schedule(schedule, checkpoint)
    if request.strict:
        _check_sections(state_dict)
    entries = dict(entries_of(state_dict))
    names = Names(checkpoint.catalog, {**parameter_names_of(entries), **(parameter_to_structured_name or {})})
    numbers = find_tensors(names, entries, missing)
    live = [tensor for path in numbers if (tensor := read_entry(path, entries[path])) is not None]
    pieces = {tensor.piece: numbers[tensor.piece.path] for tensor in live}
    layout = lay_out_live(checkpoint, pieces, tensor_parallel())
    if request.strict:
        check_complete(checkpoint.catalog.tensors, numbers)
    checks = master_checks_of_loaded(checkpoint.catalog, layout.target.fragments)
    plan = plan_conversion(layout.source, layout.target, (), request.planning, checks=checks)
    filled = _fill(plan, store, live, JOIN_GAP_BYTES if is_local(request.location) else REMOTE_GAP_BYTES)
    store.check_unchanged()
    for schedule in schedules:
        schedule.update(checkpoint.lr_scheduler)
    return LoadReport(
        source=store.location,
        tensors=len(live),
        filled_bytes=sum(tensor.piece.nbytes for tensor in live),
        read_bytes=filled.read_bytes,
        kept=tuple(".".join(path) for path in entries if path not in numbers),
        master_drift=filled.master_drift,
    )


def _read_request(
    source: PathLike, config: PathLike | Mapping[str, Any] | None, strict: bool, options: LoadOptions
) -> LoadRequest:
    check_names(options, LoadOptions)
    rules, fill = options.get("rules"), options.get("fill")
    return LoadRequest(
        location=os.fspath(source),
        access=source_access(options),
        fill=None if fill is None else os.fspath(fill),
        allow_missing=texts_of(options.get("allow_missing", ())),
        rules=None if rules is None else Path(rules),
        config=config if isinstance(config, Mapping) or config is None else Path(config),
        planning=PlanSettings(
            parse_memory(options.get("memory", DEFAULT_MEMORY)),
            compare_replicas=False,
            allow_master_drift=options.get("allow_master_drift", False),
            allow_reread=True,
        ),
        strict=strict,
    )


def _open(request: LoadRequest) -> tuple[Source, Checkpoint, MissingPolicy]:
    """The checkpoint, the store that serves it, and how tensors that it lacks are treated."""
    filling = read_filling(request.fill, request.allow_missing, request.access)
    own = open_source(request.location, *request.access)
    config = request.config if not isinstance(request.config, Path) else load_config(request.config)
    checkpoint = index_checkpoint(own, load_tables(request.rules), config, filling.policy)
    return filling.serve(own), checkpoint, filling.policy


def _check_sections(state_dict: Mapping[str, Any]) -> None:
    """Refuse empty dicts: an optimizer without states may not have created them yet."""
    for section in empty_sections(state_dict):
        raise PlanError(
            f"{'.'.join(section) or 'the state_dict'}: contains no tensor to fill; let the optimizer "
            f"create its states first, or pass strict=False"
        )


def _check_schedule(schedule: Any, checkpoint: Checkpoint) -> None:
    found = checkpoint.lr_scheduler
    held, wanted = ([*value] if isinstance(value, MutableMapping) else [] for value in (found, schedule))
    if not held or sorted(held) != sorted(wanted):
        raise CheckpointError(
            f"{LR_SCHEDULER}: has the entries {sorted(wanted)}, but the checkpoint's tensor files have "
            f"{sorted(held)}; remove it from the state_dict and load it from scheduler.pdparams"
        )


class _Filled(NamedTuple):
    """The result of moving the data."""

    read_bytes: int
    master_drift: tuple[str, ...]


def _fill(plan: Plan, store: Source, live: Sequence[LiveTensor], gap_bytes: int) -> _Filled:
    """Read, compare and move everything."""
    writer = MemoryWriter({tensor.piece.name: tensor.memory for tensor in live})

    def do(work: GroupWork, mover: Mover) -> GroupReport:
        needed = NeededBytes(store, work, gap_bytes)
        return replace(run_group(work, needed, writer, mover), read_bytes=needed.read_bytes)

    if all(tensor.on_host for tensor in live):
        reports = InlineEngine(plan.budget_bytes).run(plan_work(plan), do)
    else:
        reports = _one_by_one(plan, do)
    with closing(reports):
        done = list(reports)
    drift = sorted(str(difference) for report in done for difference in report.differences)
    return _Filled(sum(report.read_bytes for report in done), tuple(drift))


def _one_by_one(plan: Plan, do: Callable[[GroupWork, Mover], GroupReport]) -> Reports:
    """Run all groups in the calling thread, whose device is that of the tensors."""
    space = Workspace(plan.peak_bytes)
    for work in plan_work(plan):
        space.clear()
        yield do(work, space)
