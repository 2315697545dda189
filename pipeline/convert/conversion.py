"""A whole conversion: index → plan → move → verify → publish.

The command line, the Python API and ``watch`` all run these steps. With ``--resume``, options that the request omits
come from the session; the request becomes a plan, and :mod:`~paddle_reshard.pipeline.convert.run` runs it.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import sleep
from typing import Any

from paddle_reshard.clusters.choose import choose_engine
from paddle_reshard.clusters.engine import Engine
from paddle_reshard.pipeline.changes.change import Altered, Reading
from paddle_reshard.pipeline.changes.kinds import Rewrite, ToConvention
from paddle_reshard.pipeline.changes.read import OpenChanges
from paddle_reshard.pipeline.checkpoint.checkpoint import MissingPolicy
from paddle_reshard.pipeline.checkpoint.format import JobTarget
from paddle_reshard.pipeline.checkpoint.reading import IndexFiles
from paddle_reshard.pipeline.checkpoint.stages import about_head
from paddle_reshard.pipeline.convert.plan import ConversionPlan, plan_checkpoint
from paddle_reshard.pipeline.convert.run import MoveReport, check_finished, check_targets, run_conversion
from paddle_reshard.pipeline.core.errors import (
    BusyError,
    CheckpointError,
    DriftError,
    FinishedError,
    OccupiedError,
    TargetError,
    UsageError,
)
from paddle_reshard.pipeline.core.events import Observer, Planned, StepEnded, StepStarted, ignore_events
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.shown import (
    SHOWN_DIFFERENCES,
    SHOWN_WORKERS,
    Facts,
    Result,
    counted,
    readable_bytes,
    readable_seconds,
)
from paddle_reshard.pipeline.core.topology import sharding_in_words
from paddle_reshard.pipeline.indexing.occupant import checkpoint_in_words, states_held
from paddle_reshard.pipeline.indexing.opening import open_checkpoint
from paddle_reshard.pipeline.planning.metadata import spare_bytes
from paddle_reshard.pipeline.request.inputs import load_config, load_tables
from paddle_reshard.pipeline.request.options import flag_of
from paddle_reshard.pipeline.request.parse import ConversionRequest, Locations
from paddle_reshard.pipeline.request.record import completed, record_of
from paddle_reshard.storage.apart import check_apart, check_targets_apart
from paddle_reshard.storage.locate import Access, comparable_path, is_local, open_source, open_target
from paddle_reshard.storage.outputs import Outputs
from paddle_reshard.storage.remote.retry_counts import count_retries
from paddle_reshard.storage.store import Permission, TargetStore
from paddle_reshard.tasks.figures import add_retries
from paddle_reshard.tasks.index import index_here

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, repr=False)
class ConversionReport(Result):
    """The result of a conversion."""

    source: str
    target: str
    plan: ConversionPlan
    moved: MoveReport
    seconds: float
    """Duration, including planning and publishing."""

    @property
    def read_bytes(self) -> int:
        """Bytes that were read from the source."""
        return self.moved.read_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes that this run wrote; without those of an interrupted one, which are ``moved.resumed_bytes``."""
        return self.moved.written_bytes

    def _in_short(self) -> str:
        return f"{self.source} → {self.target}, {readable_bytes(self.written_bytes)} written"

    def facts(self) -> Facts:
        """What was planned, and what was done."""
        moved, drift = self.moved, self.moved.replica_drift
        outcome = f"{len(drift)} differ" if drift else "all equal"
        facts = self.plan.facts()
        facts.append(("compared", f"{moved.compared_elements:,} elements stored twice, {outcome}"))
        facts += [("drift", line) for line in drift[:SHOWN_DIFFERENCES]]
        if len(drift) > SHOWN_DIFFERENCES:
            facts.append(("drift", f"… and {len(drift) - SHOWN_DIFFERENCES} more, listed in {MANIFEST}"))
        facts += [(f"worker {worker.number}", worker.in_words()) for worker in moved.workers[:SHOWN_WORKERS]]
        if len(moved.workers) > SHOWN_WORKERS:
            facts.append(("workers", f"… and {len(moved.workers) - SHOWN_WORKERS} more, shown with --json"))
        if moved.retries:
            repeated = ", ".join(f"{times} × {failure}" for failure, times in moved.retries.items())
            facts.append(("repeated", repeated))
        if moved.resumed_bytes:
            groups = f"{moved.resumed_groups} of {counted(self.plan.plan.groups, 'group')}"
            facts.append(("reused", f"{groups}, {readable_bytes(moved.resumed_bytes)}, from an earlier run"))
        rate = (
            f", {readable_bytes(int(moved.written_bytes / self.seconds))}/s written" if self.seconds else ""
        )
        facts.append(("time", f"{readable_seconds(self.seconds)}{rate if moved.written_bytes else ''}"))
        facts.append(("done", self.target))
        return facts


def read_source(locations: Locations, request: ConversionRequest, index_files: IndexFiles) -> Altered:
    """Index the source of a conversion, and apply what alters it.

    Raises
    ------
    ReshardError
        If it is incomplete or inconsistent, or the options do not fit it.
    """
    access = locations.reading
    changes = OpenChanges.open(request.changes, access)
    library = next(
        (asked.library for asked in request.changes if isinstance(asked, Rewrite | ToConvention)), None
    )
    reading = Reading(
        load_tables(request.rules, library),
        load_config(request.config),
        MissingPolicy(
            allowed=request.allow_missing,
            parameters_only=all(asked.of_stored_parameters for asked in request.target_requests),
        ),
        index_files,
    )
    return changes.index(open_checkpoint(locations.sources[0], access), reading)


ReadSource = Callable[[Locations, ConversionRequest, IndexFiles], Altered]
"""Reads the sources of a conversion as one checkpoint, and applies what alters it."""


def plan_request(
    locations: Locations,
    request: ConversionRequest,
    index_files: IndexFiles,
    in_process: bool = False,
    outputs: Outputs | None = None,
    read: ReadSource = read_source,
) -> ConversionPlan:
    """Read the source, lay out the targets and plan the conversion; nothing is moved.

    ``outputs`` are the targets, if they are open already.
    """
    request.check()
    if outputs is None and locations.targets:
        outputs = open_targets(locations, request)
    altered = read(locations, request, index_files)
    if outputs is None:
        return plan_checkpoint(altered, request)
    everywhere = (*locations.sources, *locations.targets, *locations.brought)
    spare = spare_bytes(all(map(is_local, everywhere)))
    limits = outputs.limits(altered.store)
    planned = plan_checkpoint(altered, request, limits, spare if in_process else None)
    check_targets(planned, outputs, space=not request.resume)
    same_values = len(locations.sources) == 1 and all(change.keeps_values for change in request.changes)
    return replace(
        planned,
        target_locations=outputs.locations,
        spare_bytes=spare,
        same_values=same_values,
        losing=tuple(_losing(planned, locations, request)),
    )


def _losing(
    planned: ConversionPlan, locations: Locations, request: ConversionRequest
) -> Iterator[tuple[str, ...]]:
    """The states of what each target replaces that the new one will not hold."""
    for location, target in zip(locations.targets, planned.targets, strict=True):
        held = states_held(location, locations.writing) if request.overwrite else frozenset()
        yield tuple(sorted(held - target.states)) if held else ()


def open_targets(locations: Locations, request: ConversionRequest) -> Outputs:
    """Open all targets; a location that is already in use is refused before anything is read."""
    for number, location in enumerate(locations.targets):
        for read in (*locations.sources, *locations.brought):
            check_apart(read, location)
        for earlier in locations.targets[:number]:
            check_targets_apart(earlier, location)
    permission = Permission(request.overwrite, request.resume)
    try:
        with _naming_occupants(locations):
            return Outputs([_open_target(at, locations.writing, permission) for at in locations.targets])
    except TargetError:
        for source in locations.sources:  # a mistake there comes first, as it does in the command
            open_source(source, *locations.reading)
        raise


def _open_target(location: str, access: Access, permission: Permission) -> TargetStore:
    """A target; one that is to be resumed, once the lock of a run that has ended on another machine has expired."""
    try:
        return open_target(location, access, permission)
    except BusyError as busy:
        if not permission.resume or busy.expires_seconds is None:
            raise
        log.warning("%s", busy)
        sleep(busy.expires_seconds + 1)  # seconds of another machine's clock are compared
    return open_target(location, access, permission)


@contextmanager
def _naming_occupants(locations: Locations) -> Iterator[None]:
    """Have the refusal of a target say which checkpoint lies there, if one does."""
    try:
        yield
    except OccupiedError as error:
        there = comparable_path(error.location)
        at = next((at for at in locations.targets if comparable_path(at) == there), None)
        occupant = "" if at is None else checkpoint_in_words(at, locations.writing)
        raise OccupiedError(error.location, error.held, error.overwrite, occupant) from None


def resumed(locations: Locations, request: ConversionRequest) -> ConversionRequest:
    """The request, completed with the original options of an interrupted conversion.

    Raises
    ------
    FinishedError
        If all targets are finished already.
    OccupiedError
        If nothing tells what to do, and a checkpoint lies at a target that this package did not write.
    """
    outputs = open_targets(locations, request)
    for store in outputs.targets.values():
        if (session := store.unfinished) is None:
            continue
        if session.request is not None:
            return completed(request, session.request, store.location)
        if not request.is_complete:
            raise UsageError(
                f"{store.location}: the options of the unfinished conversion here are not on record; give them "
                f"again, or run {shlex.join(['paddle-reshard', 'clean', store.location])}"
            )
        return request
    if request.is_complete:
        return request
    for at in locations.targets:
        if occupant := checkpoint_in_words(at, locations.writing):
            raise OccupiedError(at, "", checkpoint=occupant)
    if of_outcome := request.of_outcome:
        raise UsageError(
            f"{outputs.location}: nothing to resume here that {', '.join(map(flag_of, of_outcome))} could belong to; "
            "for another conversion give --to or --format too"
        )
    source_store = open_checkpoint(locations.sources[0], locations.reading)
    for store in outputs.targets.values():
        if not check_finished(store, source_store):
            raise UsageError(f"{store.location}: nothing to resume here; give --to or --format")
    raise FinishedError(f"{outputs.location}: already finished, and matches its manifest; nothing to do")


def engine_of(request: ConversionRequest) -> Engine:
    """What runs the groups of a conversion; refused if options of it contradict, or Ray is not installed."""
    return choose_engine(request.cluster, request.workers, request.budget_bytes, request.device)


Approve = Callable[[ConversionPlan], None]
"""Is called with a plan before anything is moved; an error refuses it."""


def _as_planned(conversion: ConversionPlan) -> None:
    """Every plan is run."""


def run_request(
    locations: Locations,
    request: ConversionRequest,
    asked: Mapping[str, Any] | None = None,
    observe: Observer = ignore_events,
    read: ReadSource = read_source,
    approve: Approve = _as_planned,
) -> ConversionReport:
    """Plan a conversion and run it; ``asked`` is what its manifests state of the request."""
    request.check()
    engine = engine_of(request).observed(observe)
    if request.expected_plan is not None:
        from paddle_reshard.pipeline.convert.plan_file import (
            check_is_saved,
        )  # says at once if it cannot read any
    started = time.monotonic()
    earlier_retries, index_files = count_retries(), engine.indexing(observe)
    observe(StepStarted("plan"))
    outputs = open_targets(locations, request)
    conversion = plan_request(locations, request, index_files, engine.in_process, outputs, read)
    plan, conversion = conversion.plan, replace(conversion, asked=asked)
    if request.expected_plan is not None:
        check_is_saved(plan, request.expected_plan)
    observe(StepEnded("plan", _in_short(conversion)))
    approve(conversion)
    observe(Planned(conversion))
    engine = engine.reserving_metadata(
        len(plan.tensors), conversion.pieces, plan.peak_bytes, conversion.spare_bytes
    )
    try:
        with _naming_occupants(locations):
            moved = run_conversion(conversion, outputs, engine, observe, request, index_files)
    except DriftError as error:
        if (lost := about_head(conversion.source, error.tensor)) is not None:
            raise CheckpointError(f"{lost}. {error.path_a} and {error.path_b} differ") from error
        raise
    moved = replace(moved, retries=add_retries((moved.retries, count_retries() - earlier_retries)))
    return ConversionReport(
        conversion.store.location, outputs.location, conversion, moved, time.monotonic() - started
    )


def _in_short(conversion: ConversionPlan) -> str:
    """What was decided, and how much there is to do."""
    jobs = (target.spec for target in conversion.targets if isinstance(target.spec, JobTarget))
    decided = dict.fromkeys(f"{sharding_in_words(job.strategy)} ({job.strategy_reason})" for job in jobs)
    plan = conversion.plan
    return ", ".join(
        (*decided, counted(plan.groups, "group"), f"{readable_bytes(plan.written_bytes)} to write")
    )


def convert_with(
    locations: Locations,
    request: ConversionRequest,
    observe: Observer = ignore_events,
    approve: Approve = _as_planned,
) -> ConversionReport:
    """:func:`paddle_reshard.convert`, of a request."""
    if request.resume:
        request = resumed(locations, request)
    return run_request(locations, request, record_of(request), observe, approve=approve)


def plan_with(
    locations: Locations, request: ConversionRequest, observe: Observer = ignore_events
) -> ConversionPlan:
    """:func:`paddle_reshard.plan`, of a request."""
    planned = plan_request(locations, request, partial(index_here, observe=observe))
    return replace(planned, asked=record_of(request))
