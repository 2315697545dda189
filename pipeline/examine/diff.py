"""Measure the differences between two checkpoints of any topologies and formats, tensor by tensor."""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from paddle_reshard.clusters.inline import InlineEngine
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.events import Observer, Progress, StepStarted, ignore_events
from paddle_reshard.pipeline.core.heap import trim_heap
from paddle_reshard.pipeline.core.shown import SHOWN_DIFFERENCES, Facts, Result, readable_bytes
from paddle_reshard.pipeline.core.units import PathLike, texts_of
from paddle_reshard.pipeline.examine.reading import Reader, check_states, joined, spare_of
from paddle_reshard.pipeline.indexing.pair import Contents
from paddle_reshard.pipeline.planning.compare import Comparison, Difference, plan_differences
from paddle_reshard.pipeline.planning.plan import Plan
from paddle_reshard.pipeline.planning.settings import PlanSettings
from paddle_reshard.pipeline.planning.work import RemainingGroups
from paddle_reshard.pipeline.request.options import with_options
from paddle_reshard.pipeline.request.read_options import DiffOptions
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks.group import groups_ended
from paddle_reshard.tasks.statistics import Statistics, Tolerance, combined

_LAYER = re.compile(r"layers\.(\d+)\.")
NO_LAYER = "outside of layers"
SHOWN_OUTSIDE = 3
"""Number of tensors outside the tolerance that the verdict names."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The differences between the values of a tensor in two checkpoints."""

    key: str
    state: str
    dtypes: tuple[str, str]
    """In A and in B."""
    elements: int
    changed: int
    """Elements that differ."""
    outside: int
    """Elements that differ by more than the tolerance."""
    nans: int
    """Elements that are NaN on one side only; the figures that follow leave them out."""
    largest: float
    """Largest difference."""
    mean: float
    """Mean difference of all elements."""
    ulps: int
    """Largest difference in units in the last place of the coarser dtype, after rounding to it."""
    relative: float
    """Largest difference, divided by the larger of the two absolute values."""
    first: tuple[int, ...]
    """Index of the first element that differs."""
    values: tuple[float, float]
    """The two values there."""

    @property
    def changed_share(self) -> float:
        """Share of elements that differ."""
        return self.changed / max(self.elements, 1)

    @property
    def layer(self) -> str:
        """Number of its layer."""
        match = _LAYER.search(self.key)
        return match[1] if match else NO_LAYER


@dataclass(frozen=True, slots=True)
class DifferenceSummary:
    """The differences of several tensors: those of a layer, or of a state."""

    name: str
    tensors: int
    """Tensors that differ."""
    changed: int
    largest: float
    mean: float
    """Mean difference of all elements of these tensors."""
    ulps: int


@dataclass(frozen=True, slots=True, repr=False)
class DiffReport(Result):
    """The result of :func:`diff`."""

    tensors: int
    """Tensors that both checkpoints have."""
    elements: int
    read_bytes: int
    differing: tuple[TensorDifference, ...]
    """The tensors that differ: those outside the tolerance first, and the largest relative difference first."""
    unmatched: tuple[Difference, ...] = field(default=())
    """Tensors that only one side has, or that have different shapes."""
    atol: float = 0.0
    rtol: float = 0.0
    """The tolerance: how far values may be apart, and the share of the value in B that is allowed in addition."""

    @property
    def agree(self) -> bool:
        """Whether all tensors are on both sides and agree within the tolerance."""
        return not self.unmatched and not any(tensor.outside for tensor in self.differing)

    def __bool__(self) -> bool:
        """Whether the two agree, so that ``assert diff(a, b)`` works as expected."""
        return self.agree

    def by_layer(self) -> tuple[DifferenceSummary, ...]:
        """One summary for each layer with differences, and one for tensors outside of layers."""
        layers = _summaries(self.differing, lambda tensor: tensor.layer)
        return tuple(sorted(layers, key=lambda layer: (layer.name == NO_LAYER, len(layer.name), layer.name)))

    def by_state(self) -> tuple[DifferenceSummary, ...]:
        """One summary for each state with differences."""
        states = _summaries(self.differing, lambda tensor: tensor.state)
        return tuple(sorted(states, key=lambda state: state.name))

    @property
    def verdict(self) -> str:
        """The result in one line."""
        extent = f"{self.tensors} tensors compared ({readable_bytes(self.read_bytes)} read)"
        if not self.differing and not self.unmatched:
            return f"no difference; {extent}"
        alone = f"{len(self.unmatched)} tensors have no counterpart"
        if not self.differing:
            return f"{alone}, no others differ; {extent}"
        return "; ".join([*self._differing(), *([alone] if self.unmatched else []), extent])

    def _differing(self) -> Iterator[str]:
        """How many tensors and elements differ, and of these how many by more than the tolerance."""
        changed = sum(tensor.changed for tensor in self.differing)
        if not (tolerance := self.tolerance):
            yield f"{len(self.differing)} of {self.tensors} tensors differ in {changed:,} elements"
            return
        outside = [tensor for tensor in self.differing if tensor.outside]
        if not outside:
            yield f"{len(self.differing)} of {self.tensors} tensors differ in {changed:,} elements, within {tolerance}"
            return
        beyond = sum(tensor.outside for tensor in outside)
        named = ", ".join(f"{tensor.key} ({tensor.state})" for tensor in outside[:SHOWN_OUTSIDE])
        more = " …" if len(outside) > SHOWN_OUTSIDE else ""
        yield (
            f"{len(outside)} of {self.tensors} tensors outside {tolerance} ({beyond:,} of {self.elements:,} elements): "
            f"{named}{more}"
        )
        if within := len(self.differing) - len(outside):
            yield f"{within} more differ within it"

    @property
    def tolerance(self) -> str:
        """The tolerance that was given; empty if every difference counts."""
        given = (("atol", self.atol), ("rtol", self.rtol))
        return ", ".join(f"{name}={value:g}" for name, value in given if value)

    def _in_short(self) -> str:
        return self.verdict

    def facts(self) -> Facts:
        """The result and the tensors that differ most."""
        shown = [
            (f"{tensor.key} ({tensor.state})", f"largest {tensor.largest:g}, {tensor.ulps} ulps")
            for tensor in self.differing[:SHOWN_DIFFERENCES]
        ]
        return [("result", self.verdict), *shown]


def _summaries(
    differing: Iterable[TensorDifference], name_of: Callable[[TensorDifference], str]
) -> Iterable[DifferenceSummary]:
    named = defaultdict(list)
    for tensor in differing:
        named[name_of(tensor)].append(tensor)
    for name, alike in named.items():
        total = math.fsum(tensor.mean * tensor.elements for tensor in alike)
        yield DifferenceSummary(
            name,
            len(alike),
            sum(tensor.changed for tensor in alike),
            max(tensor.largest for tensor in alike),
            total / max(1, sum(tensor.elements for tensor in alike)),
            max(tensor.ulps for tensor in alike),
        )


@with_options(DiffOptions)
def diff(
    a: PathLike,
    b: PathLike,
    *,
    states: Sequence[str] | None = None,
    atol: float = 0.0,
    rtol: float = 0.0,
    observe: Observer = ignore_events,
    progress: bool = False,
    **options: Unpack[DiffOptions],
) -> DiffReport:
    """Measure how far two checkpoints of any topologies, formats and dtypes are apart.

    Tensors of different dtypes are compared as numbers; differences in units in the last place are those of the coarser
    dtype, after rounding to it: 0 if the finer side is rounded to the other. Of copies the first is read.

    Parameters
    ----------
    states
        States to compare. ``"master_weight:param"`` compares master weights of ``a`` with parameters of ``b``.
    atol, rtol
        Values agree if they differ by at most ``atol + rtol * abs(value in b)``.

    Raises
    ------
    ReshardError
        If either is not a complete, consistent checkpoint, or the comparison does not fit ``memory``.
    """
    if not (atol >= 0 and rtol >= 0 and math.isfinite(atol + rtol)):
        raise UsageError(f"atol {atol} and rtol {rtol}: tolerances cannot be negative or infinite")
    reader = Reader.of(options, observe)
    stores = reader.open_two(os.fspath(a), os.fspath(b))
    comparison = _planned(*reader.index_two(stores), states, reader.planning)
    plan = comparison.plan
    statistics = _measured(plan, stores, Tolerance(atol, rtol), observe)
    for store in stores:
        store.check_unchanged()
    differing = sorted(
        _differing(plan, statistics),
        key=lambda tensor: (not tensor.outside, -tensor.relative, -tensor.largest, tensor.key, tensor.state),
    )
    elements = sum(measured.elements for measured in statistics.values())
    return DiffReport(
        comparison.tensors, elements, plan.read_bytes, tuple(differing), comparison.differences, atol, rtol
    )


def _planned(a: Contents, b: Contents, states: Sequence[str] | None, settings: PlanSettings) -> Comparison:
    pairs = None
    if states is not None:
        pairs = dict(map(_pair, texts_of(states)))
        check_states({*pairs, *pairs.values()}, a.catalog.tensors.states | b.catalog.tensors.states)
    return plan_differences(a.catalog, b.catalog, settings, pairs)


def _pair(text: str) -> tuple[str, str]:
    """The states of A and of B that ``STATE`` or ``STATE:STATE`` compares."""
    state_a, _, state_b = text.strip().partition(":")
    return state_a, state_b or state_a


def _measured(
    plan: Plan, stores: Sequence[Source], tolerance: Tolerance, observe: Observer
) -> dict[int, Statistics]:
    """Number of a tensor in the plan → statistics of its differences."""
    trim_heap()
    engine = InlineEngine(plan.budget_bytes, observe=observe)
    engine = engine.reserving_metadata(len(plan.tensors), len(plan.ops), plan.peak_bytes, spare_of(stores))
    observe(StepStarted("comparing", plan.read_bytes, plan.groups, plan.budget_bytes))
    parts: dict[int, list[tuple[int, Statistics]]] = defaultdict(list)
    with closing(engine.measure(RemainingGroups(plan), joined(stores), tolerance)) as reports:
        for report in reports:
            for number, statistics in report.statistics:
                parts[number].append((report.group, statistics))
            for ended in groups_ended(plan, [report]):
                observe(ended)
            observe(Progress(report.read_bytes))
    return {number: combined(part for _, part in sorted(parts[number])) for number in sorted(parts)}


def _differing(plan: Plan, statistics: Mapping[int, Statistics]) -> Iterator[TensorDifference]:
    """The tensors with any element that differs."""
    for number, measured in statistics.items():
        if measured.first is None:
            continue
        tensor = plan.tensors[number]
        dtype_b = (plan.measured or {}).get(number, tensor.dtype)
        yield TensorDifference(
            key=tensor.key,
            state=tensor.state,
            dtypes=(tensor.dtype.name, dtype_b.name),
            elements=measured.elements,
            changed=measured.changed,
            outside=measured.outside,
            nans=measured.nans,
            largest=measured.largest,
            mean=measured.mean,
            ulps=measured.ulps,
            relative=measured.relative,
            first=measured.first,
            values=measured.values,
        )
