"""What a user asks for, parsed once: options become values, and the values a request.

The command line imports this module, so anything that needs NumPy is imported where it is used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paddle_reshard.pipeline.checkpoint.format import Entries
from paddle_reshard.pipeline.core.choices import (
    CHECKS,
    DEVICES,
    FINGERPRINTS,
    REPLICAS,
)
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.limits import MAX_VOCABULARY
from paddle_reshard.pipeline.core.ranks import parse_ranks, ranks_in_words
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.units import (
    DEFAULT_MEMORY,
    PathLike,
    parse_count,
    parse_memory,
    parse_size,
    texts_of,
)
from paddle_reshard.pipeline.formats.registry import DEFAULT, FORMATS, names_of
from paddle_reshard.pipeline.planning.settings import PlanSettings, PlanSizes
from paddle_reshard.pipeline.request.arguments import check_given
from paddle_reshard.pipeline.request.given_file import GivenFile, read_object
from paddle_reshard.pipeline.request.options import (
    CONVERSION_OPTIONS,
    TARGET_OPTIONS,
    AverageOptions,
    ConversionOptions,
    ConvertOptions,
    Decides,
    Kind,
    TargetOptions,
    Targets,
    declarations,
    flag_of,
)

if TYPE_CHECKING:
    from paddle_reshard.pipeline.changes.change import Change
    from paddle_reshard.pipeline.checkpoint.format import Request
    from paddle_reshard.storage.locate import Access

Values = Mapping[str, Any]
"""Option → its value; options that were not given are not in it."""
SHARED_OPTIONS = tuple(name for name in CONVERSION_OPTIONS if name not in TARGET_OPTIONS)
"""Options of a conversion that all of its targets share."""


# ---------------------------------------------------------------------------------------------------- values


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, and how it was written."""

    nbytes: int
    text: str = field(compare=False)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a conversion as values: files are read, topologies and sizes parsed, choices known."""

    targets: tuple[Values, ...]
    """The options of each target."""
    shared: Values
    """The options of all targets."""

    @property
    def is_complete(self) -> bool:
        """Whether a topology or a format is among them; options that are not given then have their defaults."""
        return any(target.get("to") or target.get("format") for target in self.targets)

    @property
    def of_outcome(self) -> list[str]:
        """The given options that decide what is made."""
        given = {
            name for values in (*self.targets, self.shared) for name in values if values[name] is not None
        }
        deciding = (Decides.OUTCOME, Decides.LOCATION)
        return [
            name for name, option in declarations().items() if name in given and option.decides in deciding
        ]

    @property
    def budget_bytes(self) -> int:
        """Memory budget of each worker."""
        memory: Size | None = self.shared.get("memory")
        return parse_memory(DEFAULT_MEMORY) if memory is None else memory.nbytes

    def with_shared(self, **values: Any) -> Asked:
        """The same with other values of options of all targets."""
        return replace(self, shared={**self.shared, **values})

    def check_targets(self) -> None:
        """Refuse options that do not apply to the format of their target.

        Raises
        ------
        UsageError
        """
        for target in self.targets:
            check_options(target.get("format") or DEFAULT, target)


def read_options(options: ConversionOptions, target: Targets | None = None, resume: bool = False) -> Asked:
    """Parse the options of a conversion. Nothing else looks at what a user wrote.

    With ``resume``, options that describe no target may be completed by a session.

    Raises
    ------
    UsageError
        If an option is invalid, or does not apply to its target.
    """
    of_targets: Collection[Mapping[str, Any]] = [options]
    if isinstance(target, Mapping):
        for own in target.values():
            if not isinstance(own, Mapping):
                raise UsageError(f"target: the options of a location are a mapping, not {type(own).__name__}")
            check_given(own, TargetOptions)
        if misplaced := [name for name in TARGET_OPTIONS if options.get(name)]:
            raise UsageError(
                f"{flag_of(misplaced[0])}: with several targets, give it inside each --target DST:FORMAT:NAME=VALUE,…"
            )
        if not target:
            raise UsageError("no target given")
        of_targets = target.values()
    asked = Asked(
        tuple(_values(of_target, TARGET_OPTIONS) for of_target in of_targets),
        _values(options, SHARED_OPTIONS),
    )
    if asked.is_complete or not resume:
        asked.check_targets()
    return asked


def locations_of(target: Targets | None) -> tuple[str, ...]:
    """The locations of all targets."""
    targets = () if target is None else tuple(target) if isinstance(target, Mapping) else (target,)
    return tuple(os.fspath(location) for location in targets)


def _values(options: Mapping[str, Any], names: Sequence[str]) -> Values:
    return {name: value_of(name, options[name]) for name in names if name in options}


def value_of(name: str, given: Any) -> Any:
    """The value of an option. ``None``: it is as if it were not given.

    Raises
    ------
    UsageError
        If it is invalid.
    """
    option = declarations()[name]
    empty = name in (*TARGET_OPTIONS, "ranks") and not isinstance(given, int) and not given
    if given is None or given is False or empty:
        return None
    if (parse := _PARSERS.get(name)) is not None:
        return parse(given)
    if option.kind is Kind.FILE:
        return given if isinstance(given, GivenFile) else GivenFile.read(given)
    if option.kind is Kind.LIST:
        return texts_of(given)
    if option.kind is Kind.COUNT:
        if given < 1:
            raise UsageError(f"{flag_of(name)} {given}: at least 1 is expected")
        return int(given)
    if option.decides is Decides.LOCATION:
        return os.fspath(given)
    if option.choices and given not in option.choices:
        words = name.replace("_", " ")
        known = f"{', '.join(option.choices)}{did_you_mean(str(given), option.choices)}"
        raise UsageError(f"unknown {words} {given!r}; known: {known}")
    return given


def read_layout(layout: PathLike | Mapping[str, Any]) -> Entries:
    """The entries of a layout, from a JSON file or a mapping, not yet validated."""
    if isinstance(layout, Mapping):
        return Entries(layout, "layout")
    return Entries(read_object(layout), str(layout))


def parse_drop(names: Sequence[str] | str) -> tuple[str, ...]:
    """The names to drop, each once, in the order of :data:`~paddle_reshard.pipeline.core.tensors.DROPPABLE`.

    >>> parse_drop(["mtp", "ema", "mtp"])
    ('ema', 'mtp')

    Raises
    ------
    UsageError
    """
    from paddle_reshard.pipeline.core.tensors import DROPPABLE

    chosen = texts_of(names)
    for name in chosen:
        if name not in DROPPABLE:
            known = f"{', '.join(DROPPABLE)}{did_you_mean(name, DROPPABLE)}"
            raise UsageError(f"--drop {name}: cannot be dropped; known: {known}")
    return tuple(name for name in DROPPABLE if name in chosen)


_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    "to": Topology.of,
    "layout": read_layout,
    "files": parse_count,
    "max_shard_size": lambda text: Size(parse_size(text, "--max-shard-size"), str(text)),
    "memory": lambda text: Size(parse_memory(text), str(text)),
    "drop": parse_drop,
    "ranks": parse_ranks,
}
"""Option → what makes a value of it, where its kind does not say that."""


# --------------------------------------------------------------------------------------------------- request


@dataclass(frozen=True)
class Locations:
    """The paths and URLs of a conversion, and how to access them."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    """Empty if the conversion is only planned."""
    brought: tuple[str, ...]
    """What changes read besides the sources."""
    reading: Access
    """Access to everything that is read."""
    writing: Access
    """Access to the targets."""
    overwrite: bool


@dataclass(frozen=True)
class ConversionRequest:
    """A requested conversion, with every value parsed and in range."""

    target_requests: tuple[Request, ...]
    """The request for each target."""
    locations: Locations
    changes: tuple[Change, ...]
    """What alters the checkpoint, in order."""
    rules: GivenFile | None
    config: GivenFile | None
    allow_missing: tuple[str, ...]
    """Patterns of keys."""
    planning: PlanSettings
    fingerprint: str
    check_in_full: bool
    ranks: tuple[int, ...] = ()
    """Global ranks of the target's job whose files are made, in order; empty: all files."""

    def __post_init__(self) -> None:
        if self.ranks:
            self._check_ranks()

    def _check_ranks(self) -> None:
        asked = f"--ranks {ranks_in_words(self.ranks)}"
        if len(self.target_requests) > 1:
            raise UsageError(
                f"{asked} with several targets: the ranks are those of one job; convert one by one"
            )
        if self.fingerprint != FINGERPRINTS[0]:
            raise UsageError(
                f"{asked} with --fingerprint {self.fingerprint}: a portion holds pieces of tensors"
            )
        if self.check_in_full:
            raise UsageError(
                f"{asked} with --check full: a portion compares what it loads anyway, and samples; paddle-reshard "
                "verify of the source compares everything"
            )


def read_request(
    sources: Sequence[PathLike], targets: Sequence[str], asked: Asked, sizes: PlanSizes = PlanSizes()
) -> ConversionRequest:
    """The request that options describe, for targets at these locations; none, if it is only to be planned.

    Raises
    ------
    UsageError
        If an option is invalid, or options contradict each other.
    """
    given = {name: value for name, value in asked.shared.items() if value is not None}
    fingerprint = given.get("fingerprint", FINGERPRINTS[0])
    target_requests = tuple(map(read_target, asked.targets))
    return ConversionRequest(
        target_requests=target_requests,
        locations=read_locations(sources, targets, asked),
        changes=read_changes(given, target_requests),
        rules=given.get("rules"),
        config=given.get("config"),
        allow_missing=given.get("allow_missing", ()),
        planning=PlanSettings(
            budget_bytes=asked.budget_bytes,
            compare_replicas=given.get("replicas", REPLICAS[0]) == REPLICAS[0],
            allow_replica_drift=bool(given.get("allow_replica_drift")),
            allow_master_drift=bool(given.get("allow_master_drift")),
            allow_reread=bool(given.get("allow_reread")),
            sums=fingerprint != FINGERPRINTS[0],
            sizes=sizes,
        ),
        fingerprint=fingerprint,
        check_in_full=given.get("check", CHECKS[0]) != CHECKS[0],
        ranks=given.get("ranks", ()),
    )


def read_changes(given: Values, targets: Sequence[Request]) -> tuple[Change, ...]:
    """What alters the checkpoint, in order.

    Raises
    ------
    UsageError
        If two changes contradict each other, or one does not apply to the targets.
    """
    from paddle_reshard.pipeline.changes.kinds import changes_of
    from paddle_reshard.pipeline.request.inputs import load_adapter, load_program

    _check_together(given, targets)
    asked = {**given, "lora_config": load_adapter(given.get("lora_config"))}
    program = load_program(given.get("aoa"))
    if program is not None:  # the statements rename; a library only says which rule table is meant
        asked |= {"aoa": (program, given.get("convention")), "convention": None}
    return changes_of(asked, targets)


def _check_together(given: Values, targets: Sequence[Request]) -> None:
    """Refuse options of changes that contradict each other."""
    from paddle_reshard.pipeline.core.tensors import EMA, MTP

    pad, dropped, aoa = given.get("vocab_pad"), given.get("drop", ()), given.get("aoa")
    if pad is not None and given.get("vocab_trim") is not None:
        raise UsageError("the vocabulary can be padded or trimmed, not both")
    if pad is not None and pad > MAX_VOCABULARY:
        raise UsageError(f"--vocab-pad {pad}: at most {MAX_VOCABULARY} rows are supported")
    if EMA in dropped and any(asked.of_average for asked in targets):
        raise UsageError("--drop ema cannot be combined with --state ema")
    if MTP in dropped and aoa is not None:
        raise UsageError(
            "--drop mtp finds tensors by name, which --aoa may change; drop them with statements, NAME -> _, or in "
            "an earlier conversion"
        )
    if MTP in dropped and given.get("like") is not None:
        raise UsageError(f"--like would take what --drop {MTP} drops from the donor; use only one of the two")


def read_locations(sources: Sequence[PathLike], targets: Sequence[str], asked: Asked) -> Locations:
    """The locations of a conversion, which must be given even if a session supplies the rest."""
    from paddle_reshard.storage.locate import source_access, target_access

    given = asked.shared
    return Locations(
        sources=tuple(os.fspath(source) for source in sources),
        targets=tuple(targets),
        brought=tuple(
            given[name]
            for name, option in declarations().items()
            if option.decides is Decides.LOCATION and given.get(name) is not None
        ),
        reading=source_access(given),
        writing=target_access(given),
        overwrite=bool(given.get("overwrite")),
    )


def read_target(values: Values) -> Request:
    """The request for one target."""
    from paddle_reshard.pipeline.request.inputs import load_target_names

    names = load_target_names(values.get("target_meta"))
    return FORMATS[values.get("format") or DEFAULT].request({**values, "target_meta": names})


# ------------------------------------------------------------------------------------------- where and how


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Where and how a conversion runs."""

    cluster: str = "inline"
    workers: int | None = None
    label_selector: tuple[str, ...] = ()
    device: str = DEVICES[0]
    resume: bool = False
    """Whether to continue an unfinished conversion, if there is one."""
    take_over: bool = False
    """Whether to continue it even if its process, on another machine, may still be running."""
    expected_plan: Path | None = None
    """File with the only plan that may be run."""
    verify: bool = False
    """Whether to finally read every byte of the targets."""
    no_space_check: bool = False


@dataclass(frozen=True, slots=True)
class ConversionSettings:
    """The options of a conversion without the locations of its source and targets, so that many can have them."""

    asked: Asked
    """As given, without defaults: an omitted option may be in a session."""
    run: RunSettings = RunSettings()
    sizes: PlanSizes = PlanSizes()


def read_settings(
    options: ConversionOptions | ConvertOptions | AverageOptions, target: Targets | None = None
) -> ConversionSettings:
    """The options of :func:`~paddle_reshard.convert` or :func:`~paddle_reshard.average` as a value.

    Raises
    ------
    UsageError
        If an option is invalid.
    """
    run = read_run(options)
    return ConversionSettings(read_options(options, target, run.resume), run)


def read_run(options: Mapping[str, Any]) -> RunSettings:
    """The run settings among ``options``.

    Raises
    ------
    UsageError
        If one is invalid.
    """
    plan = options.get("expected_plan")
    names = [name for name in RunSettings.__dataclass_fields__ if name != "expected_plan"]
    given = {name: value for name, value in _values(options, names).items() if value is not None}
    given["resume"] = bool(given.get("resume") or given.get("take_over"))
    return RunSettings(**given, expected_plan=Path(plan) if plan else None)


# ------------------------------------------------------------------------------------------------- targets


def check_options(format: str, given: Mapping[str, Any]) -> None:
    """Refuse options that do not apply to targets of this format; an empty value counts as not given.

    Raises
    ------
    UsageError
    """
    if format not in FORMATS:
        raise UsageError(
            f"unknown format {format!r}; known: {', '.join(FORMATS)}{did_you_mean(format, FORMATS)}"
        )
    for name, value in given.items():
        if name in TARGET_OPTIONS and name != "format" and name not in FORMATS[format].options and value:
            raise UsageError(_misplaced(name, value, format))
    if FORMATS[format].needs_topology and not given.get("to"):
        raise UsageError("--to is missing; give the topology of the target, such as tp=2,pp=2,sharding=2")


def _misplaced(name: str, value: Any, format: str) -> str:
    """The message for an option that does not apply to a format."""
    option = flag_of(name)
    if isinstance(value, Entries):
        option += f" ({', '.join(value.values)})"
    formats = names_of(known for known in FORMATS.values() if name in known.options)
    own = " and ".join(flag_of(option) for option in FORMATS[format].options)
    return f"{option} does not apply to --format {format}, only to {formats}; options for {format}: {own}"


_TARGET = re.compile(rf"(?P<location>.+?):(?P<format>{'|'.join(FORMATS)})(?::(?P<options>.*))?")

_FLAGS = {"true": True, "false": False}


def parse_target(text: str, resume: bool = False) -> tuple[str, TargetOptions]:
    """Location and options of ``DST:FORMAT:NAME=VALUE,…``; a NAME can also be an axis of the topology.

    With ``resume``, ``DST`` alone is enough: the session there has the options.

    >>> parse_target("s3://bucket/a:hybrid:sharding-strategy=stage2,tp=4,sharding=2")
    ('s3://bucket/a', {'format': 'hybrid', 'sharding_strategy': 'stage2', 'to': 'tp=4,sharding=2'})

    Raises
    ------
    UsageError
    """
    match = _TARGET.fullmatch(text)
    if match is None:
        for word in text.split(":")[1:]:
            if meant := did_you_mean(word, FORMATS):
                raise UsageError(f"--target {text!r}: unknown format {word!r}{meant}")
        if resume:
            return text, {}
        raise UsageError(
            f"--target {text!r}: write DST:FORMAT or DST:FORMAT:NAME=VALUE,…; known formats: {', '.join(FORMATS)}"
        )
    given: dict[str, Any] = {"format": match["format"]}
    options = FORMATS[match["format"]].options
    axes: list[str] = []
    for item in filter(None, (match["options"] or "").split(",")):
        name, mark, value = (part.strip() for part in item.partition("="))
        name = name.replace("-", "_")
        if name in Topology.__dataclass_fields__:
            axes.append(item.strip())
            continue
        if name not in TARGET_OPTIONS or name == "format":
            own = ", ".join(name.replace("_", "-") for name in options if name != "to")
            known = f"an axis or {own}" if "to" in options else own
            likely = did_you_mean(name, (*Topology.__dataclass_fields__, *TARGET_OPTIONS))
            raise UsageError(f"--target {text!r}: unknown name in {item!r}; known: {known}{likely}")
        if not mark or not value:
            raise UsageError(f"--target {text!r}: {item!r} has no value; write NAME=VALUE")
        if name in given:
            raise UsageError(f"--target {text!r}: {name.replace('_', '-')} is given twice")
        given[name] = _as_in_python(text, name, value)
    if axes:
        given["to"] = ",".join(axes)
    check_options(match["format"], given)
    return match["location"], cast(TargetOptions, given)


def _as_in_python(target: str, name: str, value: str) -> str | bool:
    """The value of an option of a ``--target``."""
    if declarations()[name].kind is not Kind.FLAG:
        return value
    if value not in _FLAGS:
        raise UsageError(f"--target {target!r}: {name} is {value!r}; known: {', '.join(_FLAGS)}")
    return _FLAGS[value]
