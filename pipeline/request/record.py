"""What was asked of a conversion, as plain JSON: in its manifest, in its report, and in its session for ``--resume``.

A record names options as Python does, so that the call or the command can be made of it. It holds the options that
decide the outcome or the plan, and the text of small files, but no options of stores and no credentials, and does not
say where the target is: a conversion has the same manifest wherever it writes. Locations in it are shown and compared,
but never opened.

Some options are consent rather than a choice: to follow links out of the source, and to read a further file or URL. A
record next to a target cannot give consent: a session only notes that the option was given, and the user must give it
again.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paddle_reshard.pipeline.checkpoint.format import Entries
from paddle_reshard.pipeline.core.errors import StaleSessionError, UsageError
from paddle_reshard.pipeline.core.ranks import ranks_in_words
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY
from paddle_reshard.pipeline.request.given_file import GivenFile
from paddle_reshard.pipeline.request.options import (
    CONVERSION_OPTIONS,
    TARGET_OPTIONS,
    Decides,
    Kind,
    declarations,
    flag_of,
)
from paddle_reshard.pipeline.request.parse import ConversionRequest, Values, value_of
from paddle_reshard.storage.documents.typed_json import EntryError, typed
from paddle_reshard.storage.locate import shown_location

OPTIONS = {name: declarations()[name] for name in CONVERSION_OPTIONS}
KEPT = tuple(name for name, option in OPTIONS.items() if option.in_session)
NOT_KEPT = tuple(name for name in OPTIONS if name not in KEPT)
"""Access to stores, and options that concern the state of a disk."""
LOCATIONS = tuple(name for name in KEPT if OPTIONS[name].decides is Decides.LOCATION)
OF_ALL_TARGETS = tuple(name for name in KEPT if name not in TARGET_OPTIONS)
SOURCES = "sources"
"""Entry of the request of an average; ``decay``, ``weights`` or ``uniform`` is beside it."""


def averaging(asked: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """The checkpoints of which a request makes an average, and how, in words; of another request nothing.

    >>> averaging({"sources": ["a", "b"], "decay": 0.9})
    (('a', 'b'), 'with decay 0.9')
    """
    if SOURCES not in asked:
        return (), ""
    how = "with equal weights"
    if "decay" in asked:
        how = f"with decay {asked['decay']}"
    elif "weights" in asked:
        how = f"with weights {', '.join(map(str, asked['weights']))}"
    return tuple(asked[SOURCES]), how


NOT_STATED = ("overwrite",)
"""It says what may be at the target's location, not what is made; a session keeps it all the same."""
LARGEST_KEPT_BYTES = 1 << 20
"""Maximum size of a file whose text is kept: the session is rewritten several times a minute."""


@dataclass(frozen=True, slots=True)
class _File:
    """A small file in a record; without its text if that is too large."""

    name: str
    sha256: str
    text: str | None = None


TYPES: Mapping[Kind, Any] = {
    Kind.TEXT: str,
    Kind.COUNT: int,
    Kind.FLAG: bool,
    Kind.LIST: tuple[str, ...],
    Kind.FILE: _File,
    Kind.ENTRIES: _File | Mapping[str, Any],
}
"""Type of an option's value in a record; an option that is ``consent`` is a ``bool`` in a session."""


# ------------------------------------------------------------------------------------------------- to a record


def record_of(request: ConversionRequest) -> dict[str, Any]:
    """What a manifest states of the options of a conversion; defaults are omitted, except ``memory``."""
    targets = [_recorded(target, TARGET_OPTIONS) for target in request.target_options]
    memory = str(request.options.get("memory") or DEFAULT_MEMORY)
    return {"targets": targets, **_recorded(request.options, OF_ALL_TARGETS), "memory": memory}


def record_of_average(
    sources: Sequence[str], request: ConversionRequest, how: Mapping[str, Any]
) -> dict[str, Any]:
    """The same for an average; ``how`` has ``decay``, ``weights`` or ``uniform``."""
    weighed = {name: list(value) if isinstance(value, Sequence) else value for name, value in how.items()}
    given = {name: value for name, value in weighed.items() if value}
    return {SOURCES: list(map(shown_location, sources)), **given, **record_of(request)}


def session_record(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a session keeps: of locations, only that they were given. ``None`` for averages."""
    if record is None or SOURCES in record:
        return None
    return {name: True if name in LOCATIONS else value for name, value in record.items()}


def _recorded(values: Values, names: Sequence[str]) -> dict[str, Any]:
    given = {name: plain(name, values[name]) for name in names if values.get(name)}
    return {name: value for name, value in given.items() if value != OPTIONS[name].default}


def plain(name: str, value: Any) -> Any:
    """The value of an option as JSON."""
    if name in LOCATIONS:
        return shown_location(value)
    if OPTIONS[name].consent:
        return True
    if name == "ranks":
        return ranks_in_words(value)
    if isinstance(value, Entries):
        return {entry: _listed(value.values[entry]) for entry in sorted(value.values)}
    if isinstance(value, GivenFile):
        facts = {"name": value.name, "sha256": value.sha256}
        kept = value.text is not None and len(value.text.encode()) <= LARGEST_KEPT_BYTES
        return {**facts, "text": value.text} if kept else facts
    return _listed(value) if isinstance(value, Sequence | bool | int) else str(value)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


# ----------------------------------------------------------------------------------------------- from a record


def completed(request: ConversionRequest, record: Mapping[str, Any], location: str) -> ConversionRequest:
    """The request, completed with the options that the session of the conversion at ``location`` has on ``record``.

    A request with a topology or a format is complete: options of the outcome that it omits have their defaults. A
    request with neither takes everything from the session.

    Raises
    ------
    StaleSessionError
        If an option contradicts the original, with both values.
    UsageError
        If a file must be given again.
    """
    original, shared = _read_record(record, location)
    if len(original) != len(request.target_options):
        raise StaleSessionError(
            f"{location}: the unfinished conversion here was started with {len(original)} targets, not "
            f"{len(request.target_options)}; give the same targets in the same order, or run {_clean(location)}"
        )
    complete = request.is_complete
    targets = tuple(
        _merged(location, before, given, TARGET_OPTIONS, complete)
        for before, given in zip(original, request.target_options, strict=True)
    )
    unrecorded = {name: request.options[name] for name in NOT_KEPT if name in request.options}
    merged = _merged(location, shared, request.options, OF_ALL_TARGETS, complete)
    whole = replace(request, target_options=targets, options={**merged, **unrecorded})
    whole.check_targets()
    return whole


def _read_record(record: Mapping[str, Any], location: str) -> tuple[tuple[Values, ...], Values]:
    """The options on record: of each target, and of all. Whoever can write to the target's folder could change them.

    Raises
    ------
    StaleSessionError
        If it is malformed.
    """
    targets: Any = record.get("targets")
    shared = {name: value for name, value in record.items() if name != "targets"}
    try:
        if not isinstance(targets, list) or type(record.get("memory")) is not str:
            raise EntryError("", "no targets, or no budget")
        of_targets = tuple(_read_values(target, TARGET_OPTIONS) for target in targets)
        return of_targets, _read_values(shared, OF_ALL_TARGETS)
    except (EntryError, UsageError) as error:
        raise StaleSessionError(
            f"{location}: the record of the unfinished conversion here holds no valid options; remove it with "
            f"{_clean(location)}"
        ) from error


def _read_values(record: Any, names: Sequence[str]) -> Values:
    """The values of options of these names, each of its type."""
    if not isinstance(record, dict) or not record.keys() <= set(names):
        raise EntryError("", "not a record of options")
    return {name: _read_value(name, value) for name, value in record.items()}


def _read_value(name: str, value: Any) -> Any:
    option = OPTIONS[name]
    if option.consent:
        return typed(value, bool)
    recorded = typed(value, TYPES[option.kind])
    if isinstance(recorded, _File):
        return GivenFile(recorded.name, recorded.sha256, recorded.text)
    return value_of(name, recorded)


def _merged(location: str, original: Values, given: Values, names: Sequence[str], complete: bool) -> Values:
    merged: dict[str, Any] = {}
    for name in names:
        option, before, now = OPTIONS[name], original.get(name), given.get(name)
        is_given = name in given and (complete or bool(now))
        if not is_given and not option.consent and not (complete and option.changes_bytes):
            if before is not None:
                merged[name] = _usable(location, name, before)
            continue
        if option.changes_bytes and _compared(name, now) != _compared(name, before):
            raise _contradiction(location, name, _compared(name, before), _compared(name, now))
        if name in given:
            merged[name] = now
    return merged


def _compared(name: str, value: Any) -> Any:
    """The value by which options are compared; ``None`` if it is the default. Of consent, that it was given."""
    if not value or value == OPTIONS[name].default:
        return None
    if isinstance(value, Entries):
        return plain(name, value)
    return True if OPTIONS[name].consent else value


def _usable(location: str, name: str, kept: Any) -> Any:
    if isinstance(kept, GivenFile) and kept.text is None:
        raise UsageError(
            f"{location}: the unfinished conversion here was started with {_in_words(name, kept)}, which is too large "
            f"to be kept; give it again: {flag_of(name)} FILE"
        )
    return kept


def _clean(location: str) -> str:
    return shlex.join(["paddle-reshard", "clean", location])


def _contradiction(location: str, name: str, before: Any, now: Any) -> StaleSessionError:
    here = f"{location}: the unfinished conversion here was started"
    clean = f"run {_clean(location)}"
    if now is None and OPTIONS[name].consent:
        again = f"{flag_of(name)} {OPTIONS[name].metavar}" if OPTIONS[name].metavar else flag_of(name)
        return StaleSessionError(
            f"{here} with {flag_of(name)}, which must be given again: {again}; or {clean}"
        )
    if now is None:
        return StaleSessionError(
            f"{here} with {_in_words(name, before)}, which is not given; give it, or omit --to and --format to use "
            f"all of its original options, or {clean}"
        )
    then = f"with {_in_words(name, before)}" if before is not None else f"without {flag_of(name)}"
    return StaleSessionError(
        f"{_in_words(name, now)}: the unfinished conversion at {location} was started {then}; omit the option to "
        f"continue it, or {clean}"
    )


def _in_words(name: str, value: Any) -> str:
    """An option as on the command line."""
    if value is True:
        return flag_of(name)
    if isinstance(value, GivenFile):
        return f"{flag_of(name)} {value.name} (SHA-256 {value.sha256[:12]}…)"
    if isinstance(value, Mapping):
        return f"{flag_of(name)} ({', '.join(f'{entry}: {value[entry]}' for entry in value)})"
    return " ".join(_words(name, plain(name, value)))


def _words(name: str, value: Any) -> Iterator[str]:
    for item in value if isinstance(value, list) else [value]:
        yield f"{flag_of(name)} {item}"
