"""What a conversion was begun with, kept in its session, so that ``--resume`` alone goes on with it.

Kept is what decides the outcome or the plan, as plain JSON, and nothing else: no option by which a store is reached, so
no secret. Small files that were given are kept as they were. Two things are consent rather than a choice, and a record
that lies beside a target cannot give it: to follow links out of the source, and to read a further file or URL. They
have to be given again, and are only kept as "was given".
"""

from __future__ import annotations

import hashlib
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
"""How stores are reached, and what is said of a disk as it is today."""
FILES = tuple(name for name, option in OPTIONS.items() if option.kind is Kind.FILE)
OF_ALL_TARGETS = tuple(name for name in KEPT if name not in TARGET_OPTIONS)
LARGEST_KEPT_BYTES = 1 << 20
"""Of a file: the record of a session is written anew several times a minute."""


@dataclass(frozen=True, slots=True)
class _File:
    """A small file as a record has it, without its text where that is large."""

    name: str
    sha256: str
    text: str | None = None


_TYPES: Mapping[Kind, Any] = {
    Kind.TEXT: str,
    Kind.COUNT: int,
    Kind.FLAG: bool,
    Kind.LIST: tuple[str, ...],
    Kind.FILE: _File,
    Kind.ENTRIES: Mapping[str, Any],
}
"""What a record has for an option that is not ``consent``; of that only whether it was given."""


# ------------------------------------------------------------------------------------------------- to a record


def request_record(target: Targets, options: ConversionOptions) -> dict[str, Any]:
    """What a conversion is begun with, for its session: what is as by default is left out, but for ``memory``.

    Raises
    ------
    UsageError
        If a file that is given cannot be read.
    """
    if isinstance(target, Mapping):
        targets = [_kept(of_target, TARGET_OPTIONS) for of_target in target.values()]
    else:
        targets = [_kept(options, TARGET_OPTIONS)]
    memory = options.get("memory", DEFAULT_MEMORY)
    return {"targets": targets, **_kept(options, OF_ALL_TARGETS), "memory": memory}


def _kept(options: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    kept = {name: _plain(name, options.get(name)) for name in names}
    return {name: value for name, value in kept.items() if value and value != OPTIONS[name].default}


def _plain(name: str, value: Any) -> Any:
    """An option as JSON has it; the same text for the same meaning."""
    if not value:
        return None
    if name == "to":
        return str(value if isinstance(value, Topology) else Topology.parse(value))
    if name == "layout":
        entries = value if isinstance(value, Mapping) else read_layout_file(Path(value))
        return {entry: _listed(entries[entry]) for entry in sorted(entries)}
    if name in FILES:
        return _plain_file(value)
    if OPTIONS[name].consent:
        return True
    if name == "files":
        return parse_count(value)
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
    location: str, begun: Mapping[str, Any], target: Targets, options: ConversionOptions
) -> tuple[Targets, ConversionOptions]:
    """What to go on with: what is asked, and for the rest what the conversion at ``location`` was ``begun`` with.

    A request that names a topology or a format is a whole one: whatever else of the outcome it leaves out is meant to
    be as by default. One that names neither leaves all to the session.

    Raises
    ------
    StaleSessionError
        If what is asked contradicts it; names both values.
    UsageError
        If a file has to be given again.
    """
    check_record(begun, location)
    places = list(target) if isinstance(target, Mapping) else [target]
    of_begun = begun["targets"]
    if len(of_begun) != len(places):
        raise StaleSessionError(
            f"{location}: the unfinished conversion here was begun with {len(of_begun)} targets, and {len(places)} are "
            f"given; give the same, in the same order, or paddle-reshard clean {location}"
        )
    asked = list(target.values()) if isinstance(target, Mapping) else [cast(TargetOptions, options)]
    whole = is_complete(target, options)
    merged = [
        _merge(location, begun_of, of_target, TARGET_OPTIONS, whole)
        for begun_of, of_target in zip(of_begun, asked, strict=True)
    ]
    shared = _merge(location, begun, options, OF_ALL_TARGETS, whole)
    reach = {name: options[name] for name in NOT_KEPT if name in options}  # type: ignore[literal-required]
    if isinstance(target, Mapping):
        several = dict(zip(places, (cast(TargetOptions, of_target) for of_target in merged), strict=True))
        return several, cast(ConversionOptions, {**shared, **reach})
    return target, cast(ConversionOptions, {**merged[0], **shared, **reach})


def check_record(begun: Mapping[str, Any], location: str) -> None:
    """Refuse what no conversion was begun with: records lie where others may write.

    Raises
    ------
    StaleSessionError
    """
    targets: Any = begun.get("targets")
    sound = isinstance(targets, list) and type(begun.get("memory")) is str
    shared = {name: value for name, value in begun.items() if name != "targets"}
    groups = [
        (shared, OF_ALL_TARGETS),
        *((of_target, TARGET_OPTIONS) for of_target in (targets if sound else ())),
    ]
    if not sound or not all(_is_kept(given, names) for given, names in groups):
        raise StaleSessionError(
            f"{location}: the record of the unfinished conversion here does not say what it was begun with; give the "
            f"same options, or paddle-reshard clean {location}"
        )


def _is_kept(given: Any, names: Sequence[str]) -> bool:
    if not isinstance(given, dict) or not given.keys() <= set(names):
        return False
    try:
        for name, value in given.items():
            typed(value, bool if OPTIONS[name].consent else _TYPES[OPTIONS[name].kind])
    except EntryError:
        return False
    return True


def _merge(
    location: str, begun: Mapping[str, Any], asked: Mapping[str, Any], names: Sequence[str], whole: bool
) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in names:
        before = begun.get(name)
        option = OPTIONS[name]
        given = name in asked and (whole or bool(asked[name]))
        if not given and not option.consent and not (whole and option.changes_bytes):
            if before is not None:
                merged[name] = _restored(location, name, before)
            continue
        now = _plain(name, asked.get(name))
        if now == option.default:
            now = None
        if option.changes_bytes and _essence(now) != _essence(before):
            raise _contradiction(location, name, before, now)
        if name in asked:
            merged[name] = asked[name]
    return merged


def _essence(value: Any) -> Any:
    """What makes a file another one; anything else as it is."""
    return value["sha256"] if isinstance(value, Mapping) and "sha256" in value else value


def _restored(location: str, name: str, kept: Any) -> Any:
    if name not in FILES:
        return kept
    if "text" not in kept:
        raise UsageError(
            f"{location}: the unfinished conversion here was begun with {_in_words(name, kept)}, which is too large to "
            f"be kept; give it again: {flag_of(name)} FILE"
        )
    return KeptFile(kept["name"], kept["text"])


def _contradiction(location: str, name: str, before: Any, now: Any) -> StaleSessionError:
    here = f"{location}: the unfinished conversion here was begun"
    clean = f"paddle-reshard clean {location}"
    if now is None and OPTIONS[name].consent:
        again = f"{flag_of(name)} {OPTIONS[name].metavar}" if OPTIONS[name].metavar else flag_of(name)
        return StaleSessionError(
            f"{here} with {flag_of(name)}, which has to be given again: {again}; or {clean}"
        )
    if now is None:
        return StaleSessionError(
            f"{here} with {_in_words(name, before)}, which is not given; give it, or neither --to nor --format to go "
            f"on with all that it was begun with, or {clean}"
        )
    said = f"with {_in_words(name, before)}" if before is not None else f"without {flag_of(name)}"
    return StaleSessionError(
        f"{_in_words(name, now)}: the unfinished conversion at {location} was begun {said}; leave it out to go on with "
        f"that, or {clean}"
    )


def _in_words(name: str, value: Any) -> str:
    """An option as it would be typed."""
    if value is True:
        return flag_of(name)
    if isinstance(value, Mapping) and "sha256" in value:
        return f"{flag_of(name)} {value['name']} (SHA-256 {value['sha256'][:12]}…)"
    if isinstance(value, Mapping):
        return f"{flag_of(name)} ({', '.join(f'{entry}: {value[entry]}' for entry in value)})"
    return " ".join(_words(name, value))


def _words(name: str, value: Any) -> Iterator[str]:
    for one in value if isinstance(value, list) else [value]:
        yield f"{flag_of(name)} {one}"
