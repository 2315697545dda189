"""The public functions with groups of another size: a checkpoint of a test fits one group of the usual size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paddle_reshard.pipeline.convert import conversion
from paddle_reshard.pipeline.convert.conversion import (
    ConversionReport,
    convert_with,
    plan_request,
    plan_with,
    run_request,
)
from paddle_reshard.pipeline.convert.plan import ConversionPlan
from paddle_reshard.pipeline.convert.series import of_average, read_series, weigh
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.examine.reading import Reader
from paddle_reshard.pipeline.examine.verify import Scope, VerifyReport, verify_with
from paddle_reshard.pipeline.planning.settings import PlanSizes
from paddle_reshard.pipeline.request.parse import ConversionRequest, Locations, locations_of, parse_request
from paddle_reshard.tasks.index import index_here

Place = str | Path


@dataclass(frozen=True)
class Sized:
    """Each method takes what the function of its name takes, and calls what that calls."""

    sizes: PlanSizes

    def request(self, options: Any, target: Any = None) -> ConversionRequest:
        """Options of ``convert`` as a value."""
        return replace(parse_request(options, target), sizes=self.sizes)

    def plan(self, source: Place, target: Any = None, **options: Any) -> ConversionPlan:
        request = self.request(options, target)
        return plan_with(locations_of((source,), target, request), request)

    def convert(
        self, source: Place, target: Any, *, observe: Observer = ignore_events, **options: Any
    ) -> ConversionReport:
        request = self.request(options, target)
        return convert_with(locations_of((source,), target, request), request, observe)

    def average(self, sources: Sequence[Place], target: Any, **options: Any) -> ConversionReport:
        how, rest = _weighting(options)
        request = of_average(self.request(rest, target))
        return run_request(
            locations_of(sources, target, request),
            request,
            read=partial(read_series, weigh(len(sources), **how)),
        )

    def plan_average(self, sources: Sequence[Place], target: Any, **options: Any) -> ConversionPlan:
        how, rest = _weighting(options)
        request = of_average(self.request(rest, target))
        read = partial(read_series, weigh(len(sources), **how))
        return plan_request(locations_of(sources, target, request), request, index_here, read=read)

    def verify(
        self,
        a: Place,
        b: Place | None = None,
        *,
        resume: Place | None = None,
        observe: Observer = ignore_events,
        **options: Any,
    ) -> VerifyReport:
        scope = Scope(resume=None if resume is None else Path(resume))
        return verify_with(
            str(a), None if b is None else str(b), scope, Reader.of(options, observe, self.sizes)
        )


def _weighting(options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    how = {name: value for name, value in options.items() if name in ("decay", "weights", "uniform")}
    return how, {name: value for name, value in options.items() if name not in how}


def in_groups(group_bytes: int, **sizes: int) -> Sized:
    """Groups of about so many bytes."""
    return Sized(PlanSizes(group_bytes=group_bytes, **sizes))


def size_commands(group_bytes: int) -> None:
    """Let the commands of this process convert in groups of ``group_bytes``."""
    sizes = in_groups(group_bytes).sizes

    def sized(locations: Locations, request: ConversionRequest, *further: Any) -> ConversionReport:
        return convert_with(locations, replace(request, sizes=sizes), *further)

    conversion.convert_with = sized
