"""What a user can ask for, read and validated once.

The command line takes its choices from here, so what needs NumPy is imported where it is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypedDict, cast

from paddle_reshard.pipeline.convert.given import GivenFile
from paddle_reshard.pipeline.core.errors import PlanError, UnsupportedError, UsageError
from paddle_reshard.pipeline.core.limits import MAX_BUFFER_MB, MAX_ELEMENTS, MAX_VOCABULARY
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.pipeline.core.topology import STRATEGIES, Topology
from paddle_reshard.pipeline.core.units import PathLike, parse_count, parse_size
from paddle_reshard.pipeline.layouts.huggingface.choices import EMA, EXPORTED_STATES, FLOATING
from paddle_reshard.storage.formats.typed_json import Bounds, EntryError, typed

if TYPE_CHECKING:
    from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint
    from paddle_reshard.pipeline.layouts.flex.target import FlexTarget
    from paddle_reshard.pipeline.layouts.huggingface.target import HuggingFaceTarget
    from paddle_reshard.pipeline.layouts.hybrid.target import HybridTarget
    from paddle_reshard.pipeline.layouts.unified.target import UnifiedTarget

_OF_HYBRID = ("to", "sharding_strategy", "layout", "target_meta")
FORMATS: Mapping[str, tuple[str, ...]] = {
    "hybrid": _OF_HYBRID,
    "hybrid-plain": _OF_HYBRID,
    "huggingface": ("state", "dtype", "max_shard_size"),
    "flex": ("files", "paddle_version"),
    "auto-parallel": ("files", "paddle_version", "target_meta"),
    "unified": ("files",),
}
"""Target format → options that say something about a target of it."""


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """What the target job decides and no topology says; ``None``: as the source, or the trainer's default."""

    comm_buffer_size_MB: Annotated[int, Bounds(1, MAX_BUFFER_MB)] | None = None
    """Stage 1 v2: ``sharding_comm_buffer_size_MB``; the trainer's default is 256."""
    comm_overlap: bool | None = None
    """Stage 1 v2 with pp > 1: ``sharding_comm_overlap``; default off, buffers of 128 MB when on."""
    sort_parameters: bool | None = None
    """Stage 1 v1: ``FLAGS_sharding_sort_parameters``; default on."""
    sequence_parallel: bool | None = None
    """Default: as the source, off where the source cannot tell."""
    segmentation: str | tuple[int, ...] | None = None
    """``"uniform"``, ``"layer:Regex"`` or a list of item numbers; default: as the model class does."""
    stage3_segment_size: Annotated[int, Bounds(0, MAX_ELEMENTS)] | None = None
    """Elements above which stage 3 cuts a parameter, 0 to cut every one; the trainer's default is 2**20."""
    experts_over_tp: bool | None = None
    """Families with a choice (ernie4_5_moe, ``moe_group``): whole experts spread over tp ranks; default: as the source,
    and as the trainer where tp = 1 cannot tell: on."""
    use_unified_moe: bool | None = None
    """Families with a choice (glm4_moe): the unified layer of expert parallelism; default: as the source, else off."""
    convention: str | None = None
    """``"paddleformers"`` or ``"paddlenlp"``; default: the source's."""

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> LayoutOptions:
        """Read from JSON, or from a mapping that is as JSON has it.

        Raises
        ------
        UsageError
            If an entry is unknown or a value is not what it can be.
        """
        try:
            return typed(dict(values), cls)
        except EntryError as error:
            raise UsageError(f"{where}: {error}") from error


@dataclass(frozen=True)
class HybridRequest:
    """A hybrid-parallel target as it was asked for."""

    topology: Topology
    strategy: str | None
    """``None``: as the source where the target can have it, else the trainer's default."""
    sharded_saving: bool
    layout: LayoutOptions
    names: Mapping[str, Mapping[str, str]] | None
    """Cell → structured key → parameter name of the target job, where they are given."""

    def __post_init__(self) -> None:
        if self.strategy not in (None, *STRATEGIES):
            raise UsageError(
                f"unknown sharding strategy {self.strategy!r}; known are {', '.join(STRATEGIES)}"
                f"{did_you_mean(self.strategy, STRATEGIES)}"
            )

    def target_for(self, source: Checkpoint) -> HybridTarget:
        """The target job's choices, the open ones taken from the source or the trainer's defaults.

        Where the trainer allows one value only (under expert parallelism), that is the default.
        """
        from paddle_reshard.pipeline.layouts.hybrid.sharding import DEFAULT_SEGMENT_ELEMENTS, ShardingOptions
        from paddle_reshard.pipeline.layouts.hybrid.target import HybridTarget, with_default_strategy

        layout, topology = self.layout, self.topology
        convention = source.model.table.convention
        if layout.convention not in (None, convention):
            raise UnsupportedError(
                f"convention {layout.convention!r}: the source is {convention}, and this version does not "
                "translate between the libraries"
            )
        over = self._experts_over(source)
        overlap = bool(layout.comm_overlap)
        buffer_mb = layout.comm_buffer_size_MB or (128 if overlap else 256)
        sequence_parallel = source.sequence_parallel or (topology.ep > 1 and topology.tp > 1 and over is None)
        if layout.sequence_parallel is not None:
            sequence_parallel = layout.sequence_parallel
        target = HybridTarget(
            topology=replace(topology, ep=1) if over == "dp" else topology,
            strategy=self.strategy or "none",
            sharded_saving=self.sharded_saving,
            sharding=ShardingOptions(
                buffer_bytes=buffer_mb << 20,
                comm_overlap=overlap,
                sort_parameters=layout.sort_parameters is not False,
                segment_elements=DEFAULT_SEGMENT_ELEMENTS
                if layout.stage3_segment_size is None
                else layout.stage3_segment_size,
            ),
            sequence_parallel=bool(sequence_parallel),
            segmentation=layout.segmentation,
            names=self.names,
            experts_over=over,
            unified_experts=bool(
                source.unified_experts if layout.use_unified_moe is None else layout.use_unified_moe
            ),
        )
        return target if self.strategy else with_default_strategy(target, source)

    def _experts_over(self, source: Checkpoint) -> str | None:
        """The axis beside ``ep`` over which the target's experts are spread.

        PaddleNLP has no axis for it: its experts are spread over data-parallel ranks.
        """
        asked, topology = self.layout.experts_over_tp, self.topology
        if source.model.table.convention == "paddlenlp" and topology.ep > 1:
            if topology.ep != topology.dp:
                raise PlanError(
                    f"ep={topology.ep} with dp={topology.dp}: PaddleNLP spreads experts over data-parallel "
                    "ranks, so both must be the same"
                )
            return "dp"
        by_default = source.model.table.experts_over == "tp" and (
            source.spread == "tp" or source.topology is None or source.topology.tp == 1
        )
        return "tp" if (by_default if asked is None else asked) else None


Form: TypeAlias = "HybridRequest | HuggingFaceTarget | FlexTarget | UnifiedTarget"
"""A target as it was asked for."""


@dataclass(frozen=True)
class ConversionRequest:
    """A conversion as it was asked for, every value read and in range."""

    forms: tuple[Form, ...]
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
        from paddle_reshard.pipeline.layouts.huggingface.target import HuggingFaceTarget

        averages = [form for form in self.forms if isinstance(form, HuggingFaceTarget) and form.state == EMA]
        if averages and set(EMA_STATES) & set(self.dropped_states):
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


def parse_huggingface(state: str | None, dtype: str | None, max_shard_size: str | None) -> HuggingFaceTarget:
    """What goes out as a Hugging Face checkpoint; ``None``: the default of :class:`HuggingFaceTarget`."""
    from paddle_reshard.pipeline.core.tensors import dtype_named
    from paddle_reshard.pipeline.layouts.huggingface.target import HuggingFaceTarget

    defaults = HuggingFaceTarget()
    if state not in (None, *EXPORTED_STATES):
        raise UsageError(
            f"unknown state {state!r}; known are {', '.join(EXPORTED_STATES)}{did_you_mean(state, EXPORTED_STATES)}"
        )
    if dtype not in (None, *FLOATING):
        raise UsageError(
            f"unknown dtype {dtype!r}; known are {', '.join(FLOATING)}{did_you_mean(dtype, FLOATING)}"
        )
    shard_bytes = defaults.max_shard_bytes if max_shard_size is None else parse_size(max_shard_size)
    if shard_bytes < 1:
        raise UsageError(f"--max-shard-size {max_shard_size} holds nothing")
    return HuggingFaceTarget(
        state or defaults.state, None if dtype is None else dtype_named(dtype), shard_bytes
    )


def parse_flex(
    auto_parallel: bool,
    files: int | str | None,
    paddle_version: str | None,
    names: Mapping[str, Mapping[str, str]] | None,
) -> FlexTarget:
    """A dist checkpoint; ``None``: the default of :class:`FlexTarget`. ``names`` are those of its one cell.

    Raises
    ------
    UsageError
    """
    from paddle_reshard.pipeline.layouts.flex.target import FlexTarget

    if names is not None and len(names) != 1:
        raise UsageError(
            f"--target-meta names {len(names)} cells; auto-parallel training has the names of one program"
        )
    return FlexTarget(
        auto_parallel,
        None if files is None else parse_count(files),
        paddle_version or FlexTarget().generation,
        None if names is None else next(iter(names.values())),
    )


def parse_unified(files: int | str | None) -> UnifiedTarget:
    """A unified checkpoint; ``None``: the default of :class:`UnifiedTarget`."""
    from paddle_reshard.pipeline.layouts.unified.target import UnifiedTarget

    return UnifiedTarget() if files is None else UnifiedTarget(parse_count(files))


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
        if name in TARGET_OPTIONS and name != "format" and name not in FORMATS[format] and value:
            raise UsageError(_misplaced(name, value, format))
    if "to" in FORMATS[format] and not given.get("to"):
        raise UsageError("--to is missing: the topology of the target, tp=2,pp=2,sharding=2")


def _misplaced(name: str, value: Any, format: str) -> str:
    """Why an option cannot be meant, and which could be."""
    option = f"--{name.replace('_', '-')}"
    if name == "layout" and isinstance(value, Mapping):
        option += f" ({', '.join(value)})"
    formats = " and ".join(known for known, options in FORMATS.items() if name in options)
    own = " and ".join(f"--{option.replace('_', '-')}" for option in FORMATS[format])
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
    axes: list[str] = []
    for item in filter(None, (match["options"] or "").split(",")):
        name, mark, value = (part.strip() for part in item.partition("="))
        name = name.replace("-", "_")
        if name in Topology.__dataclass_fields__:
            axes.append(item.strip())
            continue
        if name not in TARGET_OPTIONS or name == "format":
            own = ", ".join(name.replace("_", "-") for name in FORMATS[match["format"]] if name != "to")
            known = f"an axis or {own}" if "to" in FORMATS[match["format"]] else own
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
