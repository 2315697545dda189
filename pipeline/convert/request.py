"""What a user can ask for, read and validated once.

The command line takes its choices from here, so what needs NumPy is imported where it is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, cast

from paddle_reshard.pipeline.convert.given import GivenFile
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.limits import MAX_VOCABULARY
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.layouts.formats import FORMATS, names_of

if TYPE_CHECKING:
    from paddle_reshard.pipeline.layouts.format import Request


@dataclass(frozen=True)
class ConversionRequest:
    """A conversion as it was asked for, every value read and in range."""

    forms: tuple[Request, ...]
    """What each target is to be."""
    budget_bytes: int
    compare_replicas: bool
    allow_replica_drift: bool
    check_in_full: bool
    allow_master_drift: bool
    allow_reread: bool
    vocab_pad: int | None
    vocab_trim: int | None
    dropped_states: tuple[str, ...] = ()
    """States of which no target is to have anything."""

    def __post_init__(self) -> None:
        if self.vocab_pad is not None and self.vocab_trim is not None:
            raise UsageError("the vocabulary can be padded or trimmed, not both")
        if self.vocab_pad is not None and self.vocab_pad > MAX_VOCABULARY:
            raise UsageError(f"--vocab-pad {self.vocab_pad}: at most {MAX_VOCABULARY} rows are supported")
        from paddle_reshard.pipeline.core.tensors import EMA_STATES

        if any(form.of_average for form in self.forms) and set(EMA_STATES) & set(self.dropped_states):
            raise UsageError("--drop ema leaves nothing of which --state ema could make a model")


def parse_drop(names: Sequence[str] | str) -> tuple[str, ...]:
    """The states that are dropped by these names, of :data:`~paddle_reshard.pipeline.core.tensors.DROPPABLE`.

    >>> parse_drop(["ema"])
    ('ema_master_weight', 'ema_param')

    Raises
    ------
    UsageError
    """
    from paddle_reshard.pipeline.core.tensors import DROPPABLE

    chosen = (names,) if isinstance(names, str) else tuple(names)
    for name in chosen:
        if name not in DROPPABLE:
            can = f"{', '.join(DROPPABLE)}{did_you_mean(name, DROPPABLE)}"
            raise UsageError(f"--drop {name}: cannot be left out; what can is {can}")
    return tuple(state for name, states in DROPPABLE.items() if name in chosen for state in states)


class TargetOptions(TypedDict, total=False):
    """What is asked of a target.

    Which options a format has: ``to``, ``sharding_strategy``, ``layout`` and ``target_meta`` the hybrid ones;
    ``state``, ``dtype`` and ``max_shard_size`` ``"huggingface"``; ``files`` ``"flex"``, ``"auto-parallel"`` and
    ``"unified"``; ``paddle_version`` the first two of them, ``target_meta`` the second too.
    """

    format: str | None
    """``"hybrid"`` (default) writes ``model_meta.json`` where the trainer does, ``"hybrid-plain"`` never;
    ``"huggingface"`` writes the model for ``transformers``: one or several ``.safetensors`` files, ``config.json``, the
    tokenizer; ``"flex"`` the FlexCheckpoint folders of PaddleFormers; ``"auto-parallel"`` the one folder of
    auto-parallel training, in which states have parameter names; ``"unified"`` the safetensors of unified
    checkpoints."""
    to: str | Topology | None
    """Topology of the target, ``"tp=2,pp=2,sharding=2"``."""
    sharding_strategy: str | None
    """``none``, ``stage1v1``, ``stage1v2``, ``stage2`` or ``stage3``. Default: the source's where a job of the target
    topology can have it, else the trainer's own (PaddleFormers ``stage1v2``, PaddleNLP ``stage1v1``); ``none`` where
    sharding is 1. The plan says which and why."""
    layout: PathLike | Mapping[str, Any] | None
    """What the target job decides and no topology says: a mapping, or a JSON file."""
    target_meta: GivenFile | None
    """``model_meta.json`` of a job of the target topology, to take parameter names from."""
    state: str | None
    """``"param"`` (default) writes the parameters, ``"ema"`` their exponential moving average, which is kept in
    float32, rounded to the dtype of the parameters."""
    dtype: str | None
    """``"bfloat16"``, ``"float16"`` or ``"float32"`` for all floating tensors but those that the model keeps in
    float32. By default each has the dtype of its parameter, and its bits. Another one is made of the most exact values
    that the source holds, rounded once: the master weight where there is one."""
    max_shard_size: str | None
    """Bytes of tensors in one file, ``"5GB"``; a larger tensor has its own file."""
    files: int | str | None
    """Data files per folder, at most; default: as many as hold 4 GiB each, for a rank of the target job reads whole
    files."""
    paddle_version: str | None
    """By whose classes the metadata are written: ``"3.3"`` (default), ``"3.2"`` or ``"3.0"``."""


class ConversionOptions(TargetOptions, total=False):
    """What is asked of a conversion."""

    aoa: GivenFile | None
    """Rules by which tensors get other keys, are cut, joined, transposed or cast: a file of Paddle's AOA statements.
    Keys and layouts of the targets are those that the statements make."""
    fill: PathLike | None
    """A safetensors file with tensors that no file of the source holds."""
    allow_missing: Sequence[str]
    """Patterns (``*`` stands for anything) of keys that no file holds and that may be missing in the targets too."""

    drop: Sequence[str]
    """What no target is to have though the source has it: ``"ema"``, the exponential moving average. A format that has
    no place for something refuses unless it is named here, or another target of the same conversion holds it."""

    memory: str
    """Budget of each worker, default ``"1GiB"``."""
    rules: GivenFile | None
    """A rule table for the model family, instead of those that come with the package."""
    config: GivenFile | None
    """The model's ``config.json``, for a source that has none."""
    overwrite: bool
    """Replace a checkpoint that a target already holds."""
    replicas: str
    """``"compare"`` (default): tensors that several ranks hold are compared while the first copy is moved; ``"first"``:
    only the first is looked at."""
    allow_replica_drift: bool
    """Report copies that differ instead of refusing."""
    check: str
    """Parameters and master weights of the source are held against each other: ``"sample"`` (default) in full where
    both are loaded anyway, else by a few runs of every array; ``"full"``: every element, whatever has to be read."""
    allow_master_drift: bool
    """Keep parameters that are not the cast of their master weights, and report them, instead of refusing."""
    allow_reread: bool
    """Read source bytes several times where the budget demands it, instead of refusing."""
    no_space_check: bool
    """Do not compare the free space of the targets' disks with what will be written: for those that do not tell it."""
    vocab_pad: int | None
    """Give the targets a vocabulary of this many rows: new ones are zero in every state."""
    vocab_trim: int | None
    """The same with fewer rows; what is trimmed is gone."""
    storage_options: Mapping[str, Any] | None
    """What fsspec needs to reach a store that is not a local folder: credentials, endpoint, profile."""
    source_storage_options: Mapping[str, Any] | None
    """The same for the source alone, in place of ``storage_options``."""
    target_storage_options: Mapping[str, Any] | None
    """The same for the targets alone."""
    allow_scheme: Sequence[str]
    """Schemes of URLs that are opened beside the plain ones: ``("sftp",)``."""
    allow_links: bool
    """Follow links in the source that lead out of it."""


TARGET_OPTIONS = tuple(TargetOptions.__annotations__)
CONVERSION_OPTIONS = tuple(ConversionOptions.__annotations__)
"""Those of targets among them."""


def check_options(format: str, given: Mapping[str, Any]) -> None:
    """Refuse options that say nothing about a target of this format; empty ones were not given.

    Raises
    ------
    UsageError
    """
    if format not in FORMATS:
        raise UsageError(
            f"unknown format {format!r}; known are {', '.join(FORMATS)}{did_you_mean(format, FORMATS)}"
        )
    for name, value in given.items():
        if name in TARGET_OPTIONS and name != "format" and name not in FORMATS[format].options and value:
            raise UsageError(_misplaced(name, value, format))
    if "to" in FORMATS[format].options and not given.get("to"):
        raise UsageError("--to is missing: the topology of the target, tp=2,pp=2,sharding=2")


def _misplaced(name: str, value: Any, format: str) -> str:
    """Why an option cannot be meant, and which could be."""
    option = f"--{name.replace('_', '-')}"
    if name == "layout" and isinstance(value, Mapping):
        option += f" ({', '.join(value)})"
    formats = names_of(known for known in FORMATS.values() if name in known.options)
    own = " and ".join(f"--{option.replace('_', '-')}" for option in FORMATS[format].options)
    return f"{option} says nothing about a target of the format {format}, only about {formats}; {format} has {own}"


_TARGET = re.compile(rf"(?P<place>.+?):(?P<format>{'|'.join(FORMATS)})(?::(?P<options>.*))?")


def parse_target(text: str, resume: bool = False) -> tuple[str, TargetOptions]:
    """Place and options of ``DST:FORMAT:NAME=VALUE,…``; the axes of a topology are names too.

    With ``resume`` it may be ``DST`` alone: what was begun there says the rest.

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
            f"--target {text!r}: write DST:FORMAT or DST:FORMAT:NAME=VALUE,…, FORMAT one of {', '.join(FORMATS)}"
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
    return match["place"], cast(TargetOptions, given)


def parse_choice(value: str, choices: tuple[str, str], what: str) -> bool:
    """Whether ``value`` is the first of two choices; anything else is refused by name."""
    if value not in choices:
        raise UsageError(f"unknown {what} {value!r}; known are {', '.join(choices)}")
    return value == choices[0]
