"""What a user asks for, parsed once: options become values, and the values a request.

The command line imports this module, so anything that needs NumPy is imported where it is used.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paddle_reshard.pipeline.checkpoint.format import Entries
from paddle_reshard.pipeline.core.choices import DEVICES
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.limits import MAX_VOCABULARY
from paddle_reshard.pipeline.core.ranks import parse_ranks, ranks_in_words
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.units import (
    DEFAULT_MEMORY,
    PathLike,
    parse_memory,
    parse_shard_size,
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
    RunOptions,
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

_OF_MODEL_META = "sharding_metas"
"""Entry of a ``model_meta.json`` with parameter names."""


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, and how it was written."""

    nbytes: int
    text: str = field(compare=False)

    def __str__(self) -> str:
        return self.text


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


def read_layout(layout: PathLike | Mapping[str, Any] | GivenFile) -> Entries | GivenFile:
    """The entries of a layout, not yet validated; if a ``model_meta.json``, which is large, is in it, the file."""
    if isinstance(layout, Mapping):
        if _OF_MODEL_META in layout:
            return GivenFile.of("layout", json.dumps(layout))
        return Entries(layout, "layout")
    file = layout if isinstance(layout, GivenFile) else GivenFile.read(layout)
    values = read_object(file)
    return file if _OF_MODEL_META in values else Entries(values, file.path)


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
    "max_shard_size": lambda text: Size(parse_shard_size(text), str(text)),
    "memory": lambda text: Size(parse_memory(text), str(text)),
    "drop": parse_drop,
    "ranks": parse_ranks,
}
"""Option → what makes a value of it, where its kind does not say that."""


# --------------------------------------------------------------------------------------------------- request


@dataclass(frozen=True)
class ConversionRequest:
    """What is asked of a conversion, wherever it reads and writes: files are read, sizes and topologies parsed.

    An option that is not given has no value here, since the session of an interrupted conversion may have it.
    """

    target_options: tuple[Values, ...] = ()
    """The options of each target."""
    options: Values = field(default_factory=dict)
    """The options that all targets share."""

    cluster: str = "inline"
    workers: int | None = None
    device: str = DEVICES[0]
    resume: bool = False
    """Whether to continue an unfinished conversion, if there is one."""
    expected_plan: Path | None = None
    """File with the only plan that may be run."""
    sizes: PlanSizes = PlanSizes()

    def __post_init__(self) -> None:
        if self.is_complete or not self.resume:  # else a session may have what is not given
            self.check_targets()

    @property
    def is_complete(self) -> bool:
        """Whether a topology or a format is among the options; those that are not given then have their defaults."""
        return any(target.get("to") or target.get("format") for target in self.target_options)

    @property
    def of_outcome(self) -> list[str]:
        """The given options that decide what is made."""
        of_all = (*self.target_options, self.options)
        given = {name for values in of_all for name in values if values[name] is not None}
        return [name for name, option in declarations().items() if name in given and option.changes_bytes]

    @property
    def overwrite(self) -> bool:
        """Whether a finished conversion at a target is replaced."""
        return bool(self.options.get("overwrite"))

    @property
    def rules(self) -> GivenFile | None:
        """Rule table of the model family, instead of the built-in ones."""
        return self.options.get("rules")

    @property
    def config(self) -> GivenFile | None:
        """``config.json`` of a checkpoint without one."""
        return self.options.get("config")

    @property
    def allow_missing(self) -> tuple[str, ...]:
        """Patterns of keys."""
        return self.options.get("allow_missing") or ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the target's job whose files are made, in order; empty: all files."""
        return self.options.get("ranks") or ()

    @property
    def budget_bytes(self) -> int:
        """Memory budget of each worker."""
        memory: Size | None = self.options.get("memory")
        return parse_memory(DEFAULT_MEMORY) if memory is None else memory.nbytes

    @property
    def planning(self) -> PlanSettings:
        """How it is to be planned."""
        given = self.options
        return PlanSettings(
            budget_bytes=self.budget_bytes,
            compare_replicas=given.get("replicas") != "first",
            allow_replica_drift=given.get("replicas") == "report",
            allow_master_drift=given.get("master_weights") == "report",
            sizes=self.sizes,
        )

    @cached_property
    def target_requests(self) -> tuple[Request, ...]:
        """The request for each target, made by its format."""
        return tuple(map(read_target, self.target_options))

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """What alters the checkpoint, in order."""
        from paddle_reshard.pipeline.changes.kinds import changes_of
        from paddle_reshard.pipeline.request.inputs import load_adapter, load_program

        given = {name: value for name, value in self.options.items() if value is not None}
        _check_together(given, self.target_requests)
        given["lora_config"] = load_adapter(given.get("lora_config"))
        program = load_program(given.get("aoa"))
        if program is not None:  # the statements rename; a library only says which rule table is meant
            given |= {"aoa": (program, given.get("convention")), "convention": None}
        return changes_of(given, self.target_requests)

    def check_targets(self) -> None:
        """Refuse options that do not apply to the format of their target.

        Raises
        ------
        UsageError
        """
        for target in self.target_options:
            check_options(target.get("format") or DEFAULT, target)

    def check(self) -> None:
        """Refuse options that contradict each other. Until then only each option by itself has been looked at.

        Raises
        ------
        UsageError
        """
        self.changes  # noqa: B018 -- those of the targets and all changes are made once, here
        if self.ranks:
            self._check_ranks()

    def _check_ranks(self) -> None:
        asked = f"--ranks {ranks_in_words(self.ranks)}"
        if len(self.target_options) > 1:
            raise UsageError(
                f"{asked} with several targets: the ranks are those of one job; convert one by one"
            )


@dataclass(frozen=True)
class Locations:
    """Where a conversion reads and writes, and how that is reached; never from a session, which must not decide it."""

    sources: tuple[str, ...]
    """Paths or URLs: one, or those of an average."""
    targets: tuple[str, ...]
    """Empty if the conversion is only planned."""
    brought: tuple[str, ...]
    """What changes read besides the sources."""
    reading: Access
    """Access to everything that is read."""
    writing: Access
    """Access to the targets."""


def locations_of(
    sources: Sequence[PathLike], target: Targets | None, request: ConversionRequest
) -> Locations:
    """The locations that a user gave, reached as the options of a request say."""
    from paddle_reshard.storage.locate import source_access, target_access

    targets = () if target is None else target if isinstance(target, Mapping) else (target,)
    further = (name for name, option in declarations().items() if option.decides is Decides.LOCATION)
    return Locations(
        tuple(os.fspath(source) for source in sources),
        tuple(os.fspath(location) for location in targets),
        tuple(request.options[name] for name in further if request.options.get(name) is not None),
        source_access(request.options),
        target_access(request.options),
    )


def parse_request(
    options: ConversionOptions | ConvertOptions | AverageOptions, target: Targets | None = None
) -> ConversionRequest:
    """Parse the options of a conversion. Nothing else looks at what a user wrote.

    With ``resume``, options that describe no target may be completed by a session.

    Raises
    ------
    UsageError
        If an option is invalid, or does not apply to its target.
    """
    run = {name: value for name, value in _values(options, _OF_RUN).items() if value is not None}
    plan: PathLike | None = options.get("expected_plan")  # type: ignore[assignment]
    return ConversionRequest(
        tuple(_values(of_target, TARGET_OPTIONS) for of_target in _of_targets(options, target)),
        _values(options, SHARED_OPTIONS),
        expected_plan=Path(plan) if plan else None,
        **run,
    )


_OF_RUN = (*RunOptions.__annotations__, "device")


def _of_targets(options: Mapping[str, Any], target: Targets | None) -> Collection[Mapping[str, Any]]:
    """The options of each target: those of the conversion, or each of several locations has its own."""
    if not isinstance(target, Mapping):
        return [options]
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
    return target.values()


def _check_together(given: Values, targets: Sequence[Request]) -> None:
    """Refuse options of changes that contradict each other."""
    from paddle_reshard.pipeline.core.tensors import EMA, MTP

    rows, dropped, aoa = given.get("vocab_size"), given.get("drop", ()), given.get("aoa")
    if rows is not None and rows > MAX_VOCABULARY:
        raise UsageError(f"--vocab-size {rows}: at most {MAX_VOCABULARY} rows are supported")
    if EMA in dropped and any(asked.of_average for asked in targets):
        raise UsageError("--drop ema cannot be combined with --state ema")
    if MTP in dropped and aoa is not None:
        raise UsageError(
            "--drop mtp finds tensors by name, which --aoa may change; drop them with statements, NAME -> _, or in "
            "an earlier conversion"
        )
    if MTP in dropped and given.get("like") is not None:
        raise UsageError(f"--like would take what --drop {MTP} drops from the donor; use only one of the two")


def read_target(values: Values) -> Request:
    """The request for one target."""
    from paddle_reshard.pipeline.request.inputs import load_layout

    settings, names = load_layout(values.get("layout"))
    return FORMATS[values.get("format") or DEFAULT].request({**values, "layout": settings, "names": names})


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
        raise UsageError(
            "--to is missing; give the topology of the target, such as tp=2,pp=2,sharding=2; plan SRC --cards N lists "
            "those of N cards"
        )


def _misplaced(name: str, value: Any, format: str) -> str:
    """The message for an option that does not apply to a format."""
    option = flag_of(name)
    if isinstance(value, Entries):
        option += f" ({', '.join(value.values)})"
    formats = names_of(known for known in FORMATS.values() if name in known.options)
    own = ", ".join(flag_of(option) for option in FORMATS[format].options)
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
        if name in Topology.__dataclass_fields__ or name.isdigit():
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
