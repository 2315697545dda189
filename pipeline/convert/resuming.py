"""What a conversion was begun with, kept in its session, so that ``--resume`` alone goes on with it.

Kept is what decides the outcome or the plan, as plain JSON, and nothing else: no option by which a store is reached, so
no secret. Small files that were given are kept as they were. Two things are consent rather than a choice, and a record
that lies beside a target cannot give it: to follow links out of the source, and to read a further file or URL. They
have to be given again, and are only kept as "was given".
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from paddle_reshard.pipeline.convert.choices import CHECKS, REPLICAS
from paddle_reshard.pipeline.convert.given import KeptFile
from paddle_reshard.pipeline.convert.inputs import read_layout_file, read_text
from paddle_reshard.pipeline.convert.request import (
    CONVERSION_OPTIONS,
    TARGET_OPTIONS,
    ConversionOptions,
    TargetOptions,
)
from paddle_reshard.pipeline.core.errors import StaleSessionError, UsageError
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike
from paddle_reshard.pipeline.layouts.formats import DEFAULT

NOT_KEPT = (
    *("storage_options", "source_storage_options", "target_storage_options"),
    *("allow_scheme", "no_space_check"),
)
"""How stores are reached, and what is said of a disk as it is today."""
FILES = ("aoa", "rules", "config", "target_meta")
CONSENT = ("fill", "allow_links")
CHANGES_NO_BYTE = ("memory", "check", "allow_reread")
"""Kept, and free to be left out whatever else is given: only the plan, or how it is checked, follows from them."""
KEPT = tuple(name for name in CONVERSION_OPTIONS if name not in NOT_KEPT)
OF_ALL_TARGETS = tuple(name for name in KEPT if name not in TARGET_OPTIONS)
LARGEST_KEPT_BYTES = 1 << 20
"""Of a file: the record of a session is written anew several times a minute."""
_KINDS: Mapping[str, type] = {
    **dict.fromkeys((*FILES, "layout"), dict),
    **dict.fromkeys(("allow_missing", "drop"), list),
    **dict.fromkeys(("vocab_pad", "vocab_trim"), int),
    **dict.fromkeys((*CONSENT, "overwrite", "allow_reread"), bool),
    **dict.fromkeys(("allow_replica_drift", "allow_master_drift"), bool),
}
"""What JSON has for an option; for all others a text."""
_DEFAULTS: Mapping[str, Any] = {
    "format": DEFAULT,
    "memory": DEFAULT_MEMORY,
    "replicas": REPLICAS[0],
    "check": CHECKS[0],
}

Targets = PathLike | Mapping[PathLike, TargetOptions]


# ------------------------------------------------------------------------------------------------- to a record


def request_of(target: Targets, options: ConversionOptions) -> dict[str, Any]:
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
    return {name: value for name, value in kept.items() if value and value != _DEFAULTS.get(name)}


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
    if name in CONSENT:
        return True
    if name == "files":
        return str(value)
    return [value] if name == "drop" and isinstance(value, str) else _listed(value)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _plain_file(given: PathLike | KeptFile) -> dict[str, Any]:
    file = given if isinstance(given, KeptFile) else Path(given)
    text = read_text(file)
    data = text.encode()
    facts = {"name": file.name, "sha256": hashlib.sha256(data).hexdigest()}
    return {**facts, "text": text} if len(data) <= LARGEST_KEPT_BYTES else facts


# ------------------------------------------------------------------------------------------------ from a record


def go_on(
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
    check_request(begun, location)
    places = list(target) if isinstance(target, Mapping) else [target]
    of_begun = begun["targets"]
    if len(of_begun) != len(places):
        raise StaleSessionError(
            f"{location}: the unfinished conversion here was begun with {len(of_begun)} targets, and {len(places)} are "
            f"given; give the same, in the same order, or paddle-reshard clean {location}"
        )
    asked = list(target.values()) if isinstance(target, Mapping) else [cast(TargetOptions, options)]
    whole = is_whole(target, options)
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


def check_request(begun: Mapping[str, Any], location: str) -> None:
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
    if not all(type(value) is _KINDS.get(name, str) for name, value in given.items()):
        return False
    lists = (value for value in given.values() if isinstance(value, list))
    files = (given[name] for name in FILES if name in given)
    return all(isinstance(text, str) for value in lists for text in value) and all(
        file.keys() <= {"name", "sha256", "text"}
        and {"name", "sha256"} <= file.keys()
        and all(isinstance(text, str) for text in file.values())
        for file in files
    )


def is_whole(target: Targets, options: ConversionOptions) -> bool:
    """Whether a request says what is to come out."""
    asked = target.values() if isinstance(target, Mapping) else [options]
    return any(of_target.get("to") or of_target.get("format") for of_target in asked)


def _merge(
    location: str, begun: Mapping[str, Any], asked: Mapping[str, Any], names: Sequence[str], whole: bool
) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for name in names:
        before = begun.get(name)
        given = name in asked and (whole or bool(asked[name]))
        if not given and name not in CONSENT and (not whole or name in CHANGES_NO_BYTE):
            if before is not None:
                merged[name] = _restored(location, name, before)
            continue
        now = _plain(name, asked.get(name))
        if now == _DEFAULTS.get(name):
            now = None
        if name not in CHANGES_NO_BYTE and _essence(now) != _essence(before):
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
            f"be kept; give it again: {_flag(name)} FILE"
        )
    return KeptFile(kept["name"], kept["text"])


def _contradiction(location: str, name: str, before: Any, now: Any) -> StaleSessionError:
    here = f"{location}: the unfinished conversion here was begun"
    clean = f"paddle-reshard clean {location}"
    if now is None and name in CONSENT:
        again = f"{_flag(name)} FILE" if name == "fill" else _flag(name)
        return StaleSessionError(
            f"{here} with {_flag(name)}, which has to be given again: {again}; or {clean}"
        )
    if now is None:
        return StaleSessionError(
            f"{here} with {_in_words(name, before)}, which is not given; give it, or neither --to nor --format to go "
            f"on with all that it was begun with, or {clean}"
        )
    said = f"with {_in_words(name, before)}" if before is not None else f"without {_flag(name)}"
    return StaleSessionError(
        f"{_in_words(name, now)}: the unfinished conversion at {location} was begun {said}; leave it out to go on with "
        f"that, or {clean}"
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _in_words(name: str, value: Any) -> str:
    """An option as it would be typed."""
    if value is True:
        return _flag(name)
    if isinstance(value, Mapping) and "sha256" in value:
        return f"{_flag(name)} {value['name']} (SHA-256 {value['sha256'][:12]}…)"
    if isinstance(value, Mapping):
        return f"{_flag(name)} ({', '.join(f'{entry}: {value[entry]}' for entry in value)})"
    return " ".join(_words(name, value))


def _words(name: str, value: Any) -> Iterator[str]:
    for one in value if isinstance(value, list) else [value]:
        yield f"{_flag(name)} {one}"
