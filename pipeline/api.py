"""Plan, convert, clean: the functions that make a target, or take back what was begun.

The other functions live where their work is done. ``src/paddle_reshard/__init__.py`` lists every public name with its
home, and ``docs/api.md`` says what each is for.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from paddle_reshard.pipeline.convert.conversion import ConversionReport, convert_with, plan_with
from paddle_reshard.pipeline.convert.options import ConversionOptions, ConvertOptions, Targets, takes
from paddle_reshard.pipeline.convert.plan import ConversionPlan
from paddle_reshard.pipeline.convert.request import ConversionSettings, RunSettings, read_settings
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.storage.locate import StorageOptions, open_target


@takes(ConversionOptions)
def plan(
    source: PathLike,
    target: Targets | None = None,
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
    run = RunSettings(resume=resume, no_space_check=options.get("no_space_check", False))
    return plan_with(source, target, ConversionSettings(options, run), observe)


@takes(ConvertOptions)
def convert(
    source: PathLike,
    target: Targets,
    *,
    observe: Observer = ignore_events,
    **options: Unpack[ConvertOptions],
) -> ConversionReport:
    """Convert a checkpoint; afterwards the targets are there, whole, or nothing looks like a finished one.

    Parameters
    ----------
    target
        As for :func:`plan`. Several targets appear one after the other, when all of them are whole.
    observe
        Is told what happens as event values.
    options
        :class:`ConvertOptions`: what is to come out, and where and how it runs.

    Raises
    ------
    ReshardError
        If the conversion is refused, or the source turns out to contradict itself while it is read.
    FinishedError
        If ``resume`` is all that is asked for, and the targets are finished: there is nothing to do.
    """
    return convert_with(source, target, read_settings(options), observe)


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
