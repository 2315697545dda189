"""Plan, convert, clean: the functions that make or remove a target.

``src/paddle_reshard/__init__.py`` lists every public name with its module, and ``docs/api.md`` explains each.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import overload

from paddle_reshard.pipeline.convert.conversion import ConversionReport, convert_with, plan_with
from paddle_reshard.pipeline.convert.plan import ConversionPlan
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.examine.cards import CardsPlan, plan_cards, with_topology
from paddle_reshard.pipeline.request.arguments import checked
from paddle_reshard.pipeline.request.options import ConversionOptions, ConvertOptions, Targets, with_options
from paddle_reshard.pipeline.request.parse import locations_of, parse_request
from paddle_reshard.storage.locate import StorageOptions, open_target, target_access
from paddle_reshard.storage.store import Permission


@overload
def plan(
    source: PathLike,
    target: Targets | None = None,
    *,
    cards: None = None,
    resume: bool = False,
    observe: Observer = ignore_events,
    **options: Unpack[ConversionOptions],
) -> ConversionPlan: ...


@overload
def plan(
    source: PathLike,
    *,
    cards: int,
    observe: Observer = ignore_events,
    **options: Unpack[ConversionOptions],
) -> CardsPlan: ...


@with_options(ConversionOptions)
def plan(
    source: PathLike,
    target: Targets | None = None,
    *,
    cards: int | None = None,
    resume: bool = False,
    observe: Observer = ignore_events,
    **options: Unpack[ConversionOptions],
) -> ConversionPlan | CardsPlan:
    """Plan a conversion: the exact layout of the targets, the groups and their peak memory. Nothing is moved.

    With ``cards``, list instead every topology of so many cards to which the source can be converted, with the bytes
    on a card, the bytes to move, what is lost, and the arguments with which the trainer starts.

    Parameters
    ----------
    target
        Path or URL of the target. Several targets, written in one pass over the source, are a mapping from path to
        :class:`TargetOptions`. Without a target, the plan suits every store.
    cards
        Number of cards for which to list topologies; then without ``target`` and ``to``.
    resume
        Accept a target at which a conversion is unfinished.

    Raises
    ------
    ReshardError
        If the source is incomplete or inconsistent, or cannot be converted as requested.
    """
    if cards is not None:
        if target is not None:
            raise UsageError(
                "cards lists topologies, and a target is for one of them; use only one of the two"
            )
        return plan_cards(source, cards, options, observe)
    options = with_topology(source, target, options)
    request = replace(parse_request(options, target), resume=resume)
    return plan_with(locations_of((source,), target, request), request, observe)


@with_options(ConvertOptions)
def convert(
    source: PathLike,
    target: Targets,
    *,
    observe: Observer = ignore_events,
    progress: bool = False,
    **options: Unpack[ConvertOptions],
) -> ConversionReport:
    """Convert a checkpoint. Afterwards the targets are complete, or nothing looks like a finished checkpoint.

    Parameters
    ----------
    target
        As for :func:`plan`. Several targets appear one after the other, once all of them are complete.

    Raises
    ------
    ReshardError
        If the conversion is refused, or the source proves inconsistent while it is read.
    FinishedError
        If ``resume`` is given without a request, and the targets are finished already.
    """
    options = with_topology(source, target, options)
    request = parse_request(options, target)
    return convert_with(locations_of((source,), target, request), request, observe)


@checked
def clean(target: PathLike, *, storage_options: StorageOptions | None = None) -> tuple[str, ...]:
    """Remove an unfinished conversion, which then cannot be resumed. Returns what was removed.

    Parameters
    ----------

    Raises
    ------
    TargetError
        If the conversion is running, or ended on another machine less than two minutes ago.
    """
    access = target_access({"storage_options": storage_options})
    unfinished = open_target(os.fspath(target), access, Permission(resume=True))
    return tuple(unfinished.clean())
