"""Record the options of a conversion in its session, so that ``--resume`` alone can continue it.

The record holds, as plain JSON, the options that decide the outcome or the plan, and the text of small files. It holds
no access options, and therefore no secrets. Some options are consent rather than a choice: to follow links out of the
source, and to read a further file or URL. A record next to a target cannot give consent: it only notes that the option
was given, and the user must give it again.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from paddle_reshard.pipeline.convert.given import KeptFile
from paddle_reshard.pipeline.convert.inputs import read_layout_file, read_text
from paddle_reshard.pipeline.convert.options import (
    CONVERSION_OPTIONS,
    TARGET_OPTIONS,
    ConversionOptions,
    Kind,
    TargetOptions,
    Targets,
    declarations,
    flag_of,
    is_complete,
)
from paddle_reshard.pipeline.core.errors import StaleSessionError, UsageError
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike, parse_count, texts_of
from paddle_reshard.storage.formats.typed_json import EntryError, typed

OPTIONS = {name: declarations()[name] for name in CONVERSION_OPTIONS}
KEPT = tuple(name for name, option in OPTIONS.items() if option.in_session)
NOT_KEPT = tuple(name for name in OPTIONS if name not in KEPT)
"""Access to stores, and options that concern the state of a disk."""
FILES = tuple(name for name, option in OPTIONS.items() if option.kind is Kind.FILE)
OF_ALL_TARGETS = tuple(name for name in KEPT if name not in TARGET_OPTIONS)
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
    Kind.ENTRIES: Mapping[str, Any],
}
"""Type of an option's value in a record; an option that is ``consent`` is a ``bool``."""


# ------------------------------------------------------------------------------------------------- to a record


def request_record(target: Targets, options: ConversionOptions) -> dict[str, Any]:
    """The options of a conversion as its session records them; defaults are omitted, except ``memory``.

    Raises
    ------
    UsageError
        If a given file cannot be read.
    """
    if isinstance(target, Mapping):
        targets = [_kept(of_target, TARGET_OPTIONS) for of_target in target.values()]
    else:
        targets = [_kept(options, TARGET_OPTIONS)]
    memory = options.get("memory", DEFAULT_MEMORY)
    return {"targets": targets, **_kept(options, OF_ALL_TARGETS), "memory": memory}


def _kept(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    kept = {name: plain(name, options.get(name)) for name in names}
    return {name: value for name, value in kept.items() if value and value != OPTIONS[name].default}


def plain(name: str, value: Any) -> Any:
    """An option as JSON, in a canonical form."""
    if not value:
        return None
    if name == "to":
        return str(Topology.of(value))
    if name == "layout":
        entries = value if isinstance(value, Mapping) else read_layout_file(Path(value))
        return {entry: _listed(entries[entry]) for entry in sorted(entries)}
    if name in FILES:
        return _plain_file(value)
    if OPTIONS[name].consent:
        return True
    if name == "files":
        return parse_count(value)
    if name == "max_shard_size":
        return str(value)
    return list(texts_of(value)) if OPTIONS[name].kind is Kind.LIST else _listed(value)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _plain_file(given: PathLike | KeptFile) -> dict[str, Any]:
    file = given if isinstance(given, KeptFile) else Path(given)
    text = read_text(file)
    data = text.encode()
    facts = {"name": file.name, "sha256": hashlib.sha256(data).hexdigest()}
    return {**facts, "text": text} if len(data) <= LARGEST_KEPT_BYTES else facts


# ------------------------------------------------------------------------------------------------ from a record


def merge_with_session(
    location: str, original: Mapping[str, Any], target: Targets, options: ConversionOptions
) -> tuple[Targets, ConversionOptions]:
    """The given options, completed with the ``original`` ones of the conversion at ``location``.

    A request with a topology or a format is complete: options of the outcome that it omits have their defaults. A
    request with neither takes everything from the session.

    Raises
    ------
    StaleSessionError
        If an option contradicts the original, with both values.
    UsageError
        If a file must be given again.
    """
    check_record(original, location)
    locations = list(target) if isinstance(target, Mapping) else [target]
    original_targets = original["targets"]
    if len(original_targets) != len(locations):
        raise StaleSessionError(
            f"{location}: the unfinished conversion here was started with {len(original_targets)} targets, not "
            f"{len(locations)}; give the same targets in the same order, or run {_clean(location)}"
        )
    asked = list(target.values()) if isinstance(target, Mapping) else [cast(TargetOptions, options)]
    complete = is_complete(target, options)
    merged = [
        _merge(location, recorded, of_target, TARGET_OPTIONS, complete)
        for recorded, of_target in zip(original_targets, asked, strict=True)
    ]
    shared = _merge(location, original, options, OF_ALL_TARGETS, complete)
    unrecorded = {name: options[name] for name in NOT_KEPT if name in options}  # type: ignore[literal-required]
    if isinstance(target, Mapping):
        several = dict(zip(locations, (cast(TargetOptions, of_target) for of_target in merged), strict=True))
        return several, cast(ConversionOptions, {**shared, **unrecorded})
    return target, cast(ConversionOptions, {**merged[0], **shared, **unrecorded})


def check_record(original: Mapping[str, Any], location: str) -> None:
    """Refuse a malformed record: anyone who can write to the target's folder could have changed it.

    Raises
    ------
    StaleSessionError
    """
    targets: Any = original.get("targets")
    sound = isinstance(targets, list) and type(original.get("memory")) is str
    shared = {name: value for name, value in original.items() if name != "targets"}
    groups = [
        (shared, OF_ALL_TARGETS),
        *((of_target, TARGET_OPTIONS) for of_target in (targets if sound else ())),
    ]
    if not sound or not all(_fits(given, names) for given, names in groups):
        raise StaleSessionError(
            f"{location}: the record of the unfinished conversion here holds no valid options; remove it with "
            f"{_clean(location)}"
        )


def _fits(given: Any, names: Sequence[str]) -> bool:
    """Whether a record holds options of these names, each of its type."""
    if not isinstance(given, dict) or not given.keys() <= set(names):
        return False
    try:
        for name, value in given.items():
            typed(value, bool if OPTIONS[name].consent else TYPES[OPTIONS[name].kind])
    except EntryError:
        return False
    return True


def _merge(
    location: str, original: Mapping[str, Any], asked: Mapping[str, Any], names: Sequence[str], complete: bool
) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in names:
        before = original.get(name)
        option = OPTIONS[name]
        given = name in asked and (complete or bool(asked[name]))
        if not given and not option.consent and not (complete and option.changes_bytes):
            if before is not None:
                merged[name] = _restored(location, name, before)
            continue
        now = plain(name, asked.get(name))
        if now == option.default:
            now = None
        if option.changes_bytes and _essence(now) != _essence(before):
            raise _contradiction(location, name, before, now)
        if name in asked:
            merged[name] = asked[name]
    return merged


def _essence(value: Any) -> Any:
    """The value by which options are compared: the hash of a file, or the value itself."""
    return value["sha256"] if isinstance(value, Mapping) and "sha256" in value else value


def _restored(location: str, name: str, kept: Any) -> Any:
    if name in FILES and "text" not in kept:
        raise UsageError(
            f"{location}: the unfinished conversion here was started with {_in_words(name, kept)}, which is too large "
            f"to be kept; give it again: {flag_of(name)} FILE"
        )
    return KeptFile(kept["name"], kept["text"]) if name in FILES else kept


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
    if isinstance(value, Mapping) and "sha256" in value:
        return f"{flag_of(name)} {value['name']} (SHA-256 {value['sha256'][:12]}…)"
    if isinstance(value, Mapping):
        return f"{flag_of(name)} ({', '.join(f'{entry}: {value[entry]}' for entry in value)})"
    return " ".join(_words(name, value))


def _words(name: str, value: Any) -> Iterator[str]:
    for item in value if isinstance(value, list) else [value]:
        yield f"{flag_of(name)} {item}"
