"""Plan a conversion again, from what a finished target or a saved plan says of it."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from paddle_reshard.pipeline.convert.asked import LOCATIONS, Statement, parse_statement, requested
from paddle_reshard.pipeline.convert.conversion import plan_request
from paddle_reshard.pipeline.convert.options import ConversionOptions, check_names, takes
from paddle_reshard.pipeline.convert.plan import ConversionPlan, read_request
from paddle_reshard.pipeline.convert.request import RunSettings
from paddle_reshard.pipeline.convert.signing import manifest_of
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.errors import CheckpointError, PlanError, UsageError
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.indexing.opening import open_checkpoint
from paddle_reshard.storage.formats.strict_json import parse_json
from paddle_reshard.storage.local.source import kept_by_copies
from paddle_reshard.storage.locate import is_local, local_path, open_source, source_access, target_access
from paddle_reshard.storage.store import Source
from paddle_reshard.tasks.index import index_here


@takes(ConversionOptions)
def plan_again(
    made: PathLike,
    source: PathLike | None = None,
    *,
    observe: Observer = ignore_events,
    **options: Unpack[ConversionOptions],
) -> ConversionPlan:
    """Plan a conversion as it was planned before, to explain or prove it. Nothing is moved.

    Parameters
    ----------
    made
        A finished target, or a file written by ``plan --save``.
    source
        The checkpoint that it was made from. A recorded location is never opened, only named if this is omitted.
    observe
        Called with progress events.
    options
        Those of :class:`ConversionOptions` that no record has: options of stores, consent (``fill``, ``merge_into``,
        ``like``, ``allow_links``), and files that were too large. All others are as recorded.

    Raises
    ------
    UsageError
        If the source is not given, or an option is missing or superfluous; or if the record states no request.
    CheckpointError
        If the source is gone, or was changed since.
    PlanError
        If this version plans the conversion differently.
    """
    check_names(options, ConversionOptions)
    statement = statement_in(made, options)
    if source is None:
        raise UsageError(
            f"{os.fspath(made)}: was made from {statement.source}, which is recorded, but not opened; give its "
            f"location: --source {statement.source}"
        )
    asked_targets, asked = requested(statement, options)
    request = read_request((os.fspath(source),), asked_targets, asked)
    request = replace(request, locations=replace(request.locations, targets=()))
    if not any(
        statement.request.get(name) for name in LOCATIONS
    ):  # files of other folders are known once planned
        _check_unchanged(open_checkpoint(os.fspath(source), request.locations.reading), statement)
    index_files = partial(index_here, observe=observe)
    planned = plan_request(request, RunSettings(), index_files, limits=statement.limits)
    _check_unchanged(planned.store, statement)
    if planned.plan.plan_id != statement.plan_id:
        raise PlanError(
            f"{statement.where} is of plan {statement.plan_id}, made by version {statement.version}, but version "
            f"{version.__version__} plans the same request as {planned.plan.plan_id}; use version {statement.version}"
        )
    return replace(planned, asked=statement.request, target_number=statement.target_number)


def statement_in(made: PathLike, options: ConversionOptions) -> Statement:
    """What the manifest of a target or the header of a saved plan says.

    Raises
    ------
    CheckpointError
        If it is neither, or was changed after it was written.
    UsageError, FormatError
        As :func:`~paddle_reshard.pipeline.convert.asked.parse_statement`.
    """
    location = os.fspath(made)
    if is_local(location) and local_path(location).is_file():
        from paddle_reshard.pipeline.convert.plan_file import read_header

        return parse_statement(read_header(local_path(location)), location)
    store = open_source(location, *target_access(options))
    data, manifest = manifest_of(store)
    where = f"{store.location}/{MANIFEST}"
    if manifest.changed:
        raise CheckpointError(f"{where}: {manifest.changed}")
    return parse_statement(parse_json(data), where)


def is_made(location: PathLike, options: ConversionOptions) -> bool:
    """Whether this is a file, or a folder with a manifest, rather than a checkpoint of a trainer."""
    text = os.fspath(location)
    if is_local(text) and local_path(text).is_file():
        return True
    return MANIFEST in open_source(text, *source_access(options)).sizes()


def _check_unchanged(store: Source, statement: Statement) -> None:
    """Refuse a source whose files are not those that were recorded.

    Raises
    ------
    CheckpointError
        With the first file that differs.
    """
    sizes, versions = store.sizes(), store.versions()
    for path in sorted(sizes.keys() | statement.source_files.keys()):
        now = sizes.get(path), kept_by_copies(versions.get(path, ""))
        then = statement.source_files.get(path), kept_by_copies(statement.source_versions.get(path, ""))
        if now != then:
            was, found = (
                "missing" if size is None else f"{size} bytes ({name})" for size, name in (then, now)
            )
            raise CheckpointError(
                f"{store.location}: is not what {statement.where} was made from: {path} was {was}, and is {found}"
            )
