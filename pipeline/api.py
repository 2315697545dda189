"""Plan, convert, clean: the functions that make a target, or take back what was begun.

The other functions live where their work is done. ``src/paddle_reshard/__init__.py`` lists every public name with its
home, and ``docs/api.md`` says what each is for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from paddle_reshard.clusters.choose import choose_engine
from paddle_reshard.clusters.inline import InlineEngine
from paddle_reshard.pipeline.convert.options import ConversionOptions, TargetOptions
from paddle_reshard.pipeline.convert.plan import ConversionPlan, read_request
from paddle_reshard.pipeline.convert.resuming import request_of
from paddle_reshard.pipeline.convert.run import (
    ConversionReport,
    open_targets,
    plan_and_run,
    plan_request,
    resumed_request,
)
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.layouts.reading import IndexFiles
from paddle_reshard.storage.locate import StorageOptions, open_target
from paddle_reshard.tasks.index import index_here


def plan(
    source: PathLike,
    target: PathLike | Mapping[PathLike, TargetOptions] | None = None,
    *,
    resume: bool = False,
    observe: Observer = ignore_events,
    **options: Unpack[ConversionOptions],
) -> ConversionPlan:
    """Plan a conversion: the exact layout of the targets, groups and their peaks. Nothing is moved.

    Parameters
    ----------
    target
        Where it goes. Several targets, which are made of one reading of the source, are a mapping from the place of
        each to its own :class:`TargetOptions`. Without one, parts are those that any store takes.
    resume
        Plan also where an unfinished conversion is, which may be gone on with.
    observe
        Is told how far it is as event values.
    options
        :class:`ConversionOptions`.

    Raises
    ------
    ReshardError
        If the source is not whole, or cannot become what is asked.
    """
    request = read_request((source,), target, options)
    planned = plan_request(request, resume, partial(index_here, observe=observe))
    return planned if target is None else replace(planned, asked=request_of(target, options))


def convert(
    source: PathLike,
    target: PathLike | Mapping[PathLike, TargetOptions],
    *,
    resume: bool = False,
    take_over: bool = False,
    cluster: str = "inline",
    workers: int | None = None,
    exchange: str = "auto",
    expected_plan: PathLike | None = None,
    device: str = "cpu",
    verify: bool = False,
    observe: Observer = ignore_events,
    **options: Unpack[ConversionOptions],
) -> ConversionReport:
    """Convert a checkpoint; afterwards the targets are there, whole, or nothing looks like a finished one.

    Parameters
    ----------
    target
        As for :func:`plan`. Several targets appear one after the other, when all of them are whole.
    resume
        Go on where an unfinished run of this very conversion stopped, if there is one; and if all was done, do
        nothing but look at the targets: one that is seen to be damaged is refused. Without ``to`` and ``format``, go on
        with what that run was begun with; ``memory``, ``check`` and ``allow_reread`` may be left out in any case.
        Where there are several targets, ``target`` maps their places to ``{}``, in the same order. What a record may
        not decide is given again: ``fill``, ``allow_links``, and how stores are reached.
    take_over
        Also if it ran on another machine and may still be alive; implies ``resume``.
    cluster
        ``"inline"``: in this process. ``"ray"``: on the Ray that ``RAY_ADDRESS`` names, else on one of our own;
        ``"ray:ADDRESS"``: on that one.
    workers
        On Ray how many, by default as many as there is room for; in this process how many groups at a time, by
        default two for every processor.
    exchange
        On Ray, whether several workers share a group through the object store: ``"auto"``, ``"always"``,
        ``"never"``.
    expected_plan
        A file that ``plan --save`` made: refuse unless this conversion is that plan.
    device
        ``"cpu"``: NumPy. ``"gpu"``, on Ray: one GPU for each worker, and Paddle.
    verify
        In the end, read every byte of all targets and compare it with its checksum, also of those that were there.
    observe
        Is told what happens as event values.
    options
        :class:`ConversionOptions`.

    Raises
    ------
    ReshardError
        If the conversion is refused, or the source turns out to contradict itself while it is read.
    FinishedError
        If ``resume`` is all that is asked for, and the targets are finished: there is nothing to do.
    """
    resume = resume or take_over
    if resume:
        target, options = resumed_request(source, target, options, take_over, verify)
    request, asked = read_request((source,), target, options), request_of(target, options)
    engine = choose_engine(cluster, workers, request.budget_bytes, exchange, device)

    def make_plan(index_files: IndexFiles) -> ConversionPlan:
        made = plan_request(request, resume, index_files, isinstance(engine, InlineEngine))
        if expected_plan is not None:
            from paddle_reshard.pipeline.convert.plan_file import check_is_saved

            check_is_saved(made.plan, Path(expected_plan))
        return replace(made, asked=asked)

    return plan_and_run(
        make_plan,
        lambda: open_targets(request.places, resume, take_over),
        engine,
        observe,
        resume,
        verify,
        request.no_space_check,
    )


def clean(
    target: PathLike,
    *,
    take_over: bool = False,
    storage_options: StorageOptions | None = None,
    allow_scheme: Sequence[str] = (),
) -> tuple[str, ...]:
    """Remove what an unfinished conversion has left at a target, and say what: nothing is left to resume.

    Raises
    ------
    TargetError
        If the conversion is running. One on another machine whose lock has not expired is overruled with
        ``take_over``.
    """
    sink = open_target(
        os.fspath(target), False, storage_options or {}, True, take_over=take_over, schemes=allow_scheme
    )
    return tuple(sink.clean())
