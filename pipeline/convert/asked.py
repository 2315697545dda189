"""What was asked of a conversion, as its manifest and a saved plan state it.

A statement names options as Python does, so that the call or the command can be made of it. It holds no options of
stores and no credentials, and does not say where the target is, so that a conversion has the same manifest wherever it
writes. Locations in it are shown and compared, but never opened: who plans the conversion again gives them again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from paddle_reshard.pipeline.convert.options import (
    TARGET_OPTIONS,
    ConversionOptions,
    Decides,
    TargetOptions,
    Targets,
    flag_of,
)
from paddle_reshard.pipeline.convert.resuming import (
    FILES,
    KEPT,
    NOT_KEPT,
    OF_ALL_TARGETS,
    OPTIONS,
    fits,
    plain,
    request_record,
    restored,
)
from paddle_reshard.pipeline.core import version
from paddle_reshard.pipeline.core.errors import FormatError, UsageError
from paddle_reshard.pipeline.core.part_limits import CopyLimits, PartLimits
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.storage.formats.typed_json import Bounds, EntryError, typed
from paddle_reshard.storage.locate import absolute, is_local

if TYPE_CHECKING:
    from paddle_reshard.pipeline.convert.plan import ConversionPlan

LOCATIONS = tuple(name for name in KEPT if OPTIONS[name].decides is Decides.LOCATION)
CONSENTED = tuple(name for name in KEPT if OPTIONS[name].consent)
SOURCES = "sources"
"""Entry of the request of an average; ``decay``, ``weights`` or ``uniform`` is beside it."""
NOT_STATED = ("overwrite",)
"""It says what may be at the target's location, not what is made; a session keeps it all the same."""
_SMALLEST_COPY_BYTES = 1 << 16


# ------------------------------------------------------------------------------------------------- stating


def stated_request(target: Targets, options: ConversionOptions) -> dict[str, Any]:
    """The options of a conversion, as its manifest states them; defaults are omitted, except ``memory``.

    Raises
    ------
    UsageError
        If a given file cannot be read.
    """
    record = request_record(target, options)
    given = {name: shown_location(cast(PathLike, options.get(name))) for name in LOCATIONS if name in record}
    return {**record, **given}


def stated_average(
    sources: Sequence[PathLike], target: Targets, options: ConversionOptions, how: Mapping[str, Any]
) -> dict[str, Any]:
    """The same for an average; ``how`` has ``decay``, ``weights`` or ``uniform``."""
    weighed = {name: list(value) if isinstance(value, Sequence) else value for name, value in how.items()}
    given = {name: value for name, value in weighed.items() if value}
    return {
        SOURCES: [shown_location(source) for source in sources],
        **given,
        **stated_request(target, options),
    }


def session_record(asked: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The record of a session: of locations it only notes that they were given. ``None`` for averages."""
    if asked is None or SOURCES in asked:
        return None
    return {name: True if name in LOCATIONS else value for name, value in asked.items()}


def shown_location(location: PathLike) -> str:
    """A location as a manifest may show it: absolute, and without user, password and query."""
    text = os.fspath(location)
    if is_local(text):
        return absolute(text)
    from paddle_reshard.storage.remote.folder import without_secrets

    return without_secrets(text)


def statement_of(conversion: ConversionPlan) -> dict[str, Any]:
    """What is made of what, by which version."""
    source, store, asked = conversion.source, conversion.store, conversion.asked
    stated = {} if asked is None else {name: value for name, value in asked.items() if name not in NOT_STATED}
    return {
        "version": version.__version__,
        "plan_id": conversion.plan.plan_id,
        **({"request": stated} if stated else {}),
        "limits": asdict(conversion.limits),
        "source": {
            "location": absolute(store.location),
            "format": source.format,
            "topology": None if source.topology is None else str(source.topology),
            "sharding_strategy": source.strategy,
            "files": store.sizes(),
            "versions": store.versions(),
        },
    }


# ------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class _Copies:
    smallest_bytes: Annotated[int, Bounds(1)]
    largest_bytes: Annotated[int, Bounds(_SMALLEST_COPY_BYTES)]


@dataclass(frozen=True, slots=True)
class _Limits:
    smallest_bytes: Annotated[int, Bounds(1)]
    most: Annotated[int, Bounds(1)] | None
    copies: _Copies | None


@dataclass(frozen=True, slots=True)
class _Source:
    OPEN: ClassVar = True
    location: str
    files: Mapping[str, Annotated[int, Bounds(0)]]
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Entries:
    OPEN: ClassVar = True
    version: str
    plan_id: str
    source: _Source
    limits: _Limits
    request: Mapping[str, Any]
    target_number: Annotated[int, Bounds(0)] = 0


@dataclass(frozen=True, slots=True)
class Statement:
    """What was made of what, as a manifest or a saved plan says."""

    where: str
    """The file that says so."""
    version: str
    plan_id: str
    source: str
    """For display and comparison only."""
    source_files: Mapping[str, int]
    source_versions: Mapping[str, str]
    limits: PartLimits
    """Of the target's store: they are part of the plan."""
    request: Mapping[str, Any]
    target_number: int
    """Which of the targets of the request it is."""


def parse_statement(values: Mapping[str, Any], where: str) -> Statement:
    """The statement in a manifest or in the header of a saved plan.

    Raises
    ------
    UsageError
        If it states no request, as those of earlier versions.
    FormatError
        If an entry is not valid.
    """
    if "request" not in values:
        raise UsageError(
            f"{where}: does not say what was asked; it was written by version {values.get('version')}, or of a plan "
            "that has no request"
        )
    try:
        entries = typed(values, _Entries)
    except EntryError as error:
        raise FormatError("damaged", where, None, f"not a valid statement: {error}") from error
    _check_request(entries.request, where)
    source, limits = entries.source, entries.limits
    copies = None if limits.copies is None else CopyLimits(**asdict(limits.copies))
    return Statement(
        where,
        entries.version,
        entries.plan_id,
        source.location,
        source.files,
        source.versions,
        PartLimits(limits.smallest_bytes, limits.most, copies),
        entries.request,
        entries.target_number,
    )


def _check_request(request: Mapping[str, Any], where: str) -> None:
    if SOURCES in request:
        raise UsageError(f"{where}: states the request of an average, which cannot be planned again from it")
    targets: Any = request.get("targets")
    shared = {name: value for name, value in request.items() if name != "targets"}
    sound = isinstance(targets, list) and targets and fits(shared, OF_ALL_TARGETS, LOCATIONS)
    if not sound or not all(fits(of_target, TARGET_OPTIONS) for of_target in targets):
        raise FormatError("damaged", where, None, "its request holds no valid options")


def requested(statement: Statement, given: ConversionOptions) -> tuple[Targets, ConversionOptions]:
    """The targets, by number, and the options of a stated request.

    ``given`` has what a statement cannot: options of stores, consent, and files too large to be stated.

    Raises
    ------
    UsageError
        If consent or a file is missing, or if another option is given.
    """
    request, where = statement.request, statement.where
    shared = {name: value for name, value in request.items() if name != "targets"}
    options = dict(_again(shared, given, where))
    targets = {
        str(n): dict(_again(of_target, given, where)) for n, of_target in enumerate(request["targets"])
    }
    used = {*options, *(name for of_target in targets.values() for name in of_target)}
    for name in given:
        if name not in NOT_KEPT and not (name in used and (name in CONSENTED or name in FILES)):
            raise UsageError(f"{flag_of(name)}: {where} states all options of the conversion; omit it")
    options |= {name: given[name] for name in NOT_KEPT if name in given}  # type: ignore[literal-required]
    if len(targets) == 1:
        return "", cast(ConversionOptions, {**targets["0"], **options})
    return cast(Mapping[PathLike, TargetOptions], targets), cast(ConversionOptions, options)


def _again(stated: Mapping[str, Any], given: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    for name, value in stated.items():
        if name in CONSENTED:
            if not given.get(name):
                what = f" {value}" if name in LOCATIONS else ""
                raise UsageError(
                    f"{where}: the conversion had {flag_of(name)}{what}; recorded consent is not enough, give it again"
                )
            yield name, given[name]
        elif name in FILES and name in given:
            if plain(name, given[name])["sha256"] != value["sha256"]:
                raise UsageError(
                    f"{flag_of(name)} {given[name]}: not the file of which {where} states the SHA-256"
                )
            yield name, given[name]
        elif name in FILES and "text" not in value:
            raise UsageError(
                f"{where}: {flag_of(name)} {value['name']} is too large to be stated with its text; give it again"
            )
        else:
            yield name, restored(name, value)
