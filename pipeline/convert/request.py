"""Requests: the options of a user, parsed and validated once.

The command line imports this module, so anything that needs NumPy is imported where it is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paddle_reshard.pipeline.convert.options import (
    CONVERSION_OPTIONS,
    TARGET_OPTIONS,
    AverageOptions,
    ConversionOptions,
    ConvertOptions,
    RunOptions,
    TargetOptions,
    check_names,
    flag_of,
)
from paddle_reshard.pipeline.core.choices import DEVICES, EXCHANGES
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.limits import MAX_VOCABULARY
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.units import texts_of
from paddle_reshard.pipeline.layouts.formats import FORMATS, names_of
from paddle_reshard.pipeline.planning.settings import PlanSettings, PlanSizes

if TYPE_CHECKING:
    from paddle_reshard.pipeline.convert.given import KeptFile
    from paddle_reshard.pipeline.layouts.format import Request
    from paddle_reshard.storage.locate import Access


@dataclass(frozen=True)
class Locations:
    """The paths and URLs of a conversion, and how to access them."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    """Empty if the conversion is only planned."""
    fill: str | None
    """A checkpoint or file with missing tensors."""
    merge_into: str | None
    """The base model of an adapter."""
    like: str | None
    """The Hugging Face model that gives what the source lacks."""
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
    aoa: Path | KeptFile | None
    rules: Path | KeptFile | None
    config: Path | KeptFile | None
    lora_config: Path | KeptFile | None
    convention: str | None
    """The library whose names and layouts the targets have, where that is not to be the source's."""
    allow_missing: tuple[str, ...]
    """Patterns of keys."""
    planning: PlanSettings
    fingerprint: str
    check_in_full: bool
    vocab_pad: int | None
    vocab_trim: int | None
    makes_master_weights: bool = False
    """Whether to make master weights from parameters."""
    dropped: tuple[str, ...] = ()
    """What to exclude from every target: names in :data:`~paddle_reshard.pipeline.core.tensors.DROPPABLE`."""

    def __post_init__(self) -> None:
        if self.vocab_pad is not None and self.vocab_trim is not None:
            raise UsageError("the vocabulary can be padded or trimmed, not both")
        if self.vocab_pad is not None and self.vocab_pad > MAX_VOCABULARY:
            raise UsageError(f"--vocab-pad {self.vocab_pad}: at most {MAX_VOCABULARY} rows are supported")
        from paddle_reshard.pipeline.core.tensors import EMA, MTP

        if any(asked.of_average for asked in self.target_requests) and EMA in self.dropped:
            raise UsageError("--drop ema cannot be combined with --state ema")
        if self.convention is not None and self.aoa is not None:
            raise UsageError("--convention and --aoa both give tensors other keys; convert in two steps")
        if MTP in self.dropped and self.aoa is not None:
            raise UsageError(
                "--drop mtp finds tensors by name, which --aoa may change; drop them with statements, NAME -> _, or in "
                "an earlier conversion"
            )


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Where and how a conversion runs."""

    cluster: str = "inline"
    workers: int | None = None
    label_selector: tuple[str, ...] = ()
    exchange: str = EXCHANGES[0]
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
    """The options of a conversion without its source and target, so that they can apply to many checkpoints."""

    options: ConversionOptions
    """As given, without defaults: an omitted option may be in a session."""
    run: RunSettings = RunSettings()
    sizes: PlanSizes = PlanSizes()


def read_run(options: RunOptions | ConvertOptions | AverageOptions) -> RunSettings:
    """The run settings among ``options``."""
    names = RunSettings.__dataclass_fields__.keys()
    chosen: dict[str, Any] = {name: value for name, value in options.items() if name in names}
    if plan := chosen.get("expected_plan"):
        chosen["expected_plan"] = Path(plan)
    if selector := chosen.get("label_selector"):
        chosen["label_selector"] = texts_of(selector)
    chosen["resume"] = bool(chosen.get("resume") or chosen.get("take_over"))
    return RunSettings(**chosen)


def read_settings(options: ConvertOptions) -> ConversionSettings:
    """The options of :func:`~paddle_reshard.convert` as a value.

    Raises
    ------
    TypeError
        If an option is unknown.
    """
    check_names(options, ConvertOptions)
    return ConversionSettings(conversion_options(options), read_run(options))


def conversion_options(options: ConvertOptions | AverageOptions) -> ConversionOptions:
    """The options that describe the conversion."""
    chosen = {name: value for name, value in options.items() if name in CONVERSION_OPTIONS}
    return cast(ConversionOptions, chosen)


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
    if name == "layout" and isinstance(value, Mapping):
        option += f" ({', '.join(value)})"
    formats = names_of(known for known in FORMATS.values() if name in known.options)
    own = " and ".join(flag_of(option) for option in FORMATS[format].options)
    return f"{option} does not apply to --format {format}, only to {formats}; options for {format}: {own}"


_TARGET = re.compile(rf"(?P<location>.+?):(?P<format>{'|'.join(FORMATS)})(?::(?P<options>.*))?")


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
        given[name] = value
    if axes:
        given["to"] = ",".join(axes)
    check_options(match["format"], given)
    return match["location"], cast(TargetOptions, given)
