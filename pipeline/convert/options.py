"""Every option of a conversion, declared once.

A declaration is the annotation of an entry of a ``TypedDict``: its name and type are what type checkers see, and the
:class:`Option` beside them says all else. The command line makes its options of them; ids, sessions, jobs and schedules
follow from what an option decides. Nothing heavy is imported here: help and completion need this module.
"""

# No "from __future__ import annotations": the annotations are the declarations, and are not to be evaluated from text.

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypedDict, TypeVar, get_type_hints

from paddle_reshard.pipeline.convert.given import GivenFile
from paddle_reshard.pipeline.core.choices import CHECKS, DEVICES, EXCHANGES, REPLICAS
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike
from paddle_reshard.pipeline.layouts.formats import DEFAULT, FORMATS, help_of_formats, option_of_formats
from paddle_reshard.storage.schemes import PLAIN_SCHEMES


class Decides(Enum):
    """What an option decides.

    Two conversions with the same id come out the same, byte for byte, or are refused for the same reason; so one is
    enough. The id follows from ``OUTCOME`` and ``LOCATION``.
    """

    OUTCOME = "what comes out, or whether that is refused"
    LOCATION = "the same, by naming a file or URL that stays where it is"
    EXECUTION = "where, how fast and with what means a conversion runs, and what it tells"
    ACCESS = "how stores are reached; holds secrets, which belong in no id and no command line"


class Kind(Enum):
    """How an option is written."""

    TEXT = "a text"
    COUNT = "a whole number from 1"
    FLAG = "given or not"
    LIST = "texts; the option can be repeated"
    FILE = "a small local file; it travels with a job, and a session keeps its text"
    ENTRIES = "a small local file of JSON, or in Python a mapping"
    OBJECT = "a JSON object, or @FILE with one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Properties of an option besides its name and type."""

    help: str
    kind: Kind = Kind.TEXT
    decides: Decides = Decides.OUTCOME
    metavar: str | None = None
    choices: Sequence[str] = ()
    suggests: bool = False
    """Whether a word that is none of the choices is answered with the one that may have been meant."""
    default: str | None = None
    """What applies where it is not given, for help to show."""
    flag: str | None = None
    """Its spelling on the command line, where that does not follow from its name."""
    kept: bool = False
    """Whether a session keeps it though it changes no byte: the plan, or how it is checked, follows from it."""
    consent: bool = False
    """Whether it is consent rather than a choice. A record that lies beside a target cannot give that: it is only kept
    that it was given."""
    not_scheduled: str = ""
    """Why it makes no sense for every checkpoint of a run alike; empty where it does."""

    @property
    def in_session(self) -> bool:
        """Whether a session keeps it: whatever decides the outcome, and nothing by which a store is reached."""
        return self.kept or self.changes_bytes

    @property
    def changes_bytes(self) -> bool:
        """Whether the outcome depends on it."""
        return self.decides in (Decides.OUTCOME, Decides.LOCATION)


def _of_formats(name: str, kind: Kind = Kind.TEXT, metavar: str | None = None) -> Option:
    """An option of targets, as the formats that have it describe it."""
    option = option_of_formats(name)
    return Option(
        kind=kind, metavar=metavar, choices=option.choices, suggests=bool(option.choices), help=option.help
    )


class TargetOptions(TypedDict, total=False):
    """What is asked of a target. Each format says which of them it has; the others are refused."""

    format: Annotated[
        str | None,
        Option(
            choices=tuple(FORMATS),
            suggests=True,
            default=DEFAULT,
            help=help_of_formats(),
        ),
    ]
    """``"hybrid"`` (default) writes ``model_meta.json`` where the trainer does, ``"hybrid-plain"`` never;
    ``"huggingface"`` writes the model for ``transformers``: one or several ``.safetensors`` files, ``config.json``, the
    tokenizer; ``"flex"`` the FlexCheckpoint folders of PaddleFormers; ``"auto-parallel"`` the one folder of
    auto-parallel training, in which states have parameter names; ``"unified"`` the safetensors of unified
    checkpoints."""
    to: Annotated[str | Topology | None, _of_formats("to", metavar="TOPOLOGY")]
    """Topology of the target, ``"tp=2,pp=2,sharding=2"``."""
    sharding_strategy: Annotated[str | None, _of_formats("sharding_strategy")]
    """``none``, ``stage1v1``, ``stage1v2``, ``stage2`` or ``stage3``. Default: the source's where a job of the target
    topology can have it, else the trainer's own (PaddleFormers ``stage1v2``, PaddleNLP ``stage1v1``); ``none`` where
    sharding is 1. The plan says which and why."""
    state: Annotated[str | None, _of_formats("state")]
    """``"param"`` (default) writes the parameters, ``"ema"`` their exponential moving average, which is kept in
    float32, rounded to the dtype of the parameters."""
    dtype: Annotated[str | None, _of_formats("dtype")]
    """``"bfloat16"``, ``"float16"`` or ``"float32"`` for floating-point tensors, except those that the model keeps in
    float32. By default each has the dtype of its parameter, and its bits. Another one is made of the most exact values
    that the source holds, rounded once: the master weight where there is one."""
    files: Annotated[int | str | None, _of_formats("files", kind=Kind.COUNT)]
    """Data files per folder, at most; default: as many as hold 4 GiB each, for a rank of the target job reads whole
    files."""
    paddle_version: Annotated[str | None, _of_formats("paddle_version", metavar="VERSION")]
    """The Paddle that is to read the target: ``"3.3"`` (default), ``"3.2"`` or ``"3.0"``; ``"3.4"`` writes the files as
    Paddle 3.4 does, with pickle protocol 5, from which it loads arrays without a copy."""
    max_shard_size: Annotated[str | None, _of_formats("max_shard_size", metavar="SIZE")]
    """Bytes of tensors in one file, ``"5GB"``; a larger tensor has its own file."""
    layout: Annotated[PathLike | Mapping[str, Any] | None, _of_formats("layout", kind=Kind.ENTRIES)]
    """What the target job decides and no topology says: a mapping, or a JSON file."""
    target_meta: Annotated[GivenFile | None, _of_formats("target_meta", kind=Kind.FILE)]
    """``model_meta.json`` of a job of the target topology, to take parameter names from."""


class ConversionOptions(TargetOptions, total=False):
    """What is asked of a conversion."""

    aoa: Annotated[
        GivenFile | None,
        Option(
            kind=Kind.FILE,
            help="AOA statements that rename, split, concatenate, transpose or cast tensors; --config must "
            "then describe the resulting model.",
        ),
    ]
    """Rules by which tensors get other keys, are cut, joined, transposed or cast: a file of Paddle's AOA statements.
    Keys and layouts of the targets are those that the statements make."""
    fill: Annotated[
        PathLike | None,
        Option(
            decides=Decides.LOCATION,
            consent=True,
            metavar="FILE",
            help="Safetensors file or URL with tensors that SRC lacks.",
        ),
    ]
    """A safetensors file with tensors that no file of the source holds."""
    merge_into: Annotated[
        PathLike | None,
        Option(
            decides=Decides.LOCATION,
            consent=True,
            metavar="BASE",
            help="Base model, any checkpoint that stores its parameters: merge the LoRA in SRC into it, and convert "
            "the result.",
        ),
    ]
    """The base model of a source that holds LoRA: what is converted is the base with the adapter merged into it."""
    lora_config: Annotated[
        GivenFile | None,
        Option(
            kind=Kind.FILE,
            help="The adapter's lora_config.json, for a checkpoint of LoRA training without one.",
        ),
    ]
    """The adapter's ``lora_config.json``, for a source that has none."""
    memory: Annotated[
        str,
        Option(
            decides=Decides.EXECUTION, kept=True, default=DEFAULT_MEMORY, help="Memory budget of each worker."
        ),
    ]
    """Budget of each worker, default ``"1GiB"``."""
    rules: Annotated[
        GivenFile | None,
        Option(
            kind=Kind.FILE,
            help="Rule table of the model family, instead of the built-in tables.",
        ),
    ]
    """A rule table for the model family, instead of those that come with the package."""
    config: Annotated[
        GivenFile | None,
        Option(kind=Kind.FILE, help="The model's config.json, for a checkpoint without one."),
    ]
    """The model's ``config.json``, for a source that has none."""
    allow_missing: Annotated[
        Sequence[str],
        Option(
            kind=Kind.LIST,
            metavar="PATTERN",
            help="Allow keys that are missing from the checkpoint to be missing from the target too; * "
            "matches anything.",
        ),
    ]
    """Patterns (``*`` stands for anything) of keys that no file holds and that may be missing in the targets too."""
    replicas: Annotated[
        str,
        Option(
            choices=REPLICAS,
            default=REPLICAS[0],
            help="Tensors with copies on several ranks: compare all copies, or use the first.",
        ),
    ]
    """``"compare"`` (default): tensors that several ranks hold are compared while the first copy is moved; ``"first"``:
    only the first is looked at."""
    allow_replica_drift: Annotated[
        bool, Option(kind=Kind.FLAG, help="Use the first copy where copies differ, and report it.")
    ]
    """Report copies that differ instead of refusing."""
    check: Annotated[
        str,
        Option(
            decides=Decides.EXECUTION,
            kept=True,
            choices=CHECKS,
            default=CHECKS[0],
            help="How to compare parameters with their stored master weights: what is loaded anyway and "
            "samples of every other array, or every element.",
        ),
    ]
    """Parameters and master weights of the source are held against each other: ``"sample"`` (default) in full where
    both are loaded anyway, else by a few runs of every array; ``"full"``: every element, whatever has to be read."""
    allow_master_drift: Annotated[
        bool,
        Option(
            kind=Kind.FLAG,
            help="Keep parameters that differ from their rounded master weights, and report them.",
        ),
    ]
    """Keep parameters that are not the cast of their master weights, and report them, instead of refusing."""
    allow_reread: Annotated[
        bool,
        Option(
            kind=Kind.FLAG,
            decides=Decides.EXECUTION,
            kept=True,
            help="Read source bytes several times if --memory is too small to read them once.",
        ),
    ]
    """Read source bytes several times where the budget demands it, instead of refusing."""
    no_space_check: Annotated[
        bool,
        Option(
            kind=Kind.FLAG,
            decides=Decides.EXECUTION,
            help="Do not check that the target's disk has enough free space.",
        ),
    ]
    """Do not compare the free space of the targets' disks with what will be written: for those that do not tell it."""
    vocab_pad: Annotated[
        int | None,
        Option(kind=Kind.COUNT, help="Pad the vocabulary with zeros to this number of rows."),
    ]
    """Give the targets a vocabulary of this many rows: new ones are zero in every state."""
    vocab_trim: Annotated[
        int | None, Option(kind=Kind.COUNT, help="Trim the vocabulary to this number of rows.")
    ]
    """The same with fewer rows; what is trimmed is gone."""
    drop: Annotated[
        Sequence[str],
        Option(
            kind=Kind.LIST,
            metavar="NAME",
            help="Exclude a part from every target: ema, the moving average, or mtp, the layers of multi-token "
            "prediction. Required if a target cannot hold it, unless another --target does. Can be repeated.",
        ),
    ]
    """Parts to exclude from every target: ``"ema"``, the exponential moving average; ``"mtp"``, the layers of
    multi-token prediction (``num_nextn_predict_layers`` in ``config.json`` becomes 0). A format that cannot hold an
    average refuses it unless it is named here, or another target of the same conversion holds it."""
    allow_links: Annotated[
        bool,
        Option(
            kind=Kind.FLAG,
            consent=True,
            help="Follow links that lead out of the source's folder.",
        ),
    ]
    """Follow links in the source that lead out of it."""
    storage_options: Annotated[
        Mapping[str, Any] | None,
        Option(
            kind=Kind.OBJECT,
            decides=Decides.ACCESS,
            help="Options with which fsspec opens the store: key, secret, endpoint_url, profile, … They "
            "are never printed or stored; @FILE keeps them out of the list of processes.",
        ),
    ]
    """What fsspec needs to reach a store that is not a local folder: credentials, endpoint, profile."""
    allow_scheme: Annotated[
        Sequence[str],
        Option(
            kind=Kind.LIST,
            decides=Decides.EXECUTION,
            metavar="NAME",
            help=f"Also open URLs of this scheme. Always allowed: {', '.join(sorted(PLAIN_SCHEMES))}.",
        ),
    ]
    """Schemes of URLs that are opened in addition to the plain ones: ``("sftp",)``."""
    source_storage_options: Annotated[
        Mapping[str, Any] | None,
        Option(
            kind=Kind.OBJECT,
            decides=Decides.ACCESS,
            help="The same for the source only; replaces --storage-options.",
        ),
    ]
    """The same for the source only; replaces ``storage_options``."""
    target_storage_options: Annotated[
        Mapping[str, Any] | None,
        Option(
            kind=Kind.OBJECT,
            decides=Decides.ACCESS,
            help="The same for the target only; replaces --storage-options.",
        ),
    ]
    """The same for the targets alone."""
    overwrite: Annotated[bool, Option(kind=Kind.FLAG, help="Replace an existing checkpoint at the target.")]
    """Replace a checkpoint that a target already holds."""


class RunOptions(TypedDict, total=False):
    """Where and how a conversion runs."""

    cluster: Annotated[
        str,
        Option(
            decides=Decides.EXECUTION,
            default="inline",
            metavar="inline|ray|ray:ADDRESS",
            help="Where the conversion runs.",
        ),
    ]
    """``"inline"`` (default): in this process. ``"ray"``: on the Ray cluster that ``RAY_ADDRESS`` names, else on one
    that is started for it; ``"ray:ADDRESS"``: on that one."""
    workers: Annotated[
        int | None,
        Option(
            kind=Kind.COUNT,
            decides=Decides.EXECUTION,
            help="On Ray: number of workers. Default: as many as the cluster has room for. Inline: number "
            "of groups at a time. Default: two per processor.",
        ),
    ]
    """On Ray, the number of workers; default: as many as there is room for. In this process, the number of groups at a
    time; default: two per processor."""
    exchange: Annotated[
        str,
        Option(
            decides=Decides.EXECUTION,
            choices=EXCHANGES,
            default=EXCHANGES[0],
            help="On Ray: whether several workers share a group through the object store.",
        ),
    ]
    """On Ray, whether several workers share a group through the object store: ``"auto"`` (default), ``"always"``,
    ``"never"``."""
    resume: Annotated[
        bool,
        Option(
            kind=Kind.FLAG,
            decides=Decides.EXECUTION,
            help="Continue an interrupted conversion, if there is one. Without --to and --format, its "
            "original options are used; --memory, --check and --allow-reread may always be omitted. "
            "Give --fill, --merge-into, --allow-links and options for stores again.",
        ),
    ]
    """Continue an unfinished run of this conversion, if there is one. If the targets are finished, only look at them;
    one that is visibly damaged is refused. Without ``to`` and ``format``, the original options are used; ``memory``,
    ``check`` and ``allow_reread`` may always be omitted. With several targets, ``target`` maps their places to ``{}``,
    in the same order. What a record must not decide is given again: ``fill``, ``allow_links``, and options for
    stores."""
    take_over: Annotated[
        bool,
        Option(
            kind=Kind.FLAG,
            decides=Decides.EXECUTION,
            help="Resume a conversion that has ended on another machine, without waiting for its lock to expire.",
        ),
    ]
    """Resume even if that run was on another machine and may still be alive; implies ``resume``."""


class AverageOptions(ConversionOptions, RunOptions, total=False):
    """Options of ``average``."""


class ConvertOptions(ConversionOptions, RunOptions, total=False):
    """Options of ``convert``."""

    expected_plan: Annotated[
        PathLike | None,
        Option(
            flag="--plan",
            kind=Kind.FILE,
            not_scheduled="is the plan of one conversion; every checkpoint has its own",
            help="File written by plan --save; refuse unless this conversion has the same plan.",
        ),
    ]
    """A file written by ``plan --save``: refuse unless this conversion has the same plan."""
    device: Annotated[
        str,
        Option(
            decides=Decides.EXECUTION,
            choices=DEVICES,
            default=DEVICES[0],
            help="gpu: on Ray, one GPU per worker, through Paddle.",
        ),
    ]
    """``"cpu"`` (default): NumPy. ``"gpu"``, on Ray: one GPU for each worker, and Paddle."""
    verify: Annotated[
        bool,
        Option(
            kind=Kind.FLAG,
            decides=Decides.EXECUTION,
            help="Finally read every byte of the target and compare it with the checksums; with --resume "
            "also for a target that is already finished.",
        ),
    ]
    """Finally read every byte of all targets and compare it with the checksums, also of targets that were finished
    before."""


Targets = PathLike | Mapping[PathLike, TargetOptions]
"""A target, whose options are those of the conversion, or several targets with options of their own."""

TARGET_OPTIONS = tuple(TargetOptions.__annotations__)
CONVERSION_OPTIONS = tuple(ConversionOptions.__annotations__)
"""Those of targets among them."""
RUN_OPTIONS = tuple(name for name in ConvertOptions.__annotations__ if name not in CONVERSION_OPTIONS)
"""The further options of ``convert``."""


@cache
def declarations() -> Mapping[str, Option]:
    """Name of every option → its declaration, in the order in which help lists them."""
    types = get_type_hints(ConvertOptions, include_extras=True)
    return {name: types[name].__metadata__[0] for name in ConvertOptions.__annotations__}


Function = TypeVar("Function", bound=Callable[..., Any])


def takes(options: Any) -> Callable[[Function], Function]:
    """Let ``help`` and completion list each of the ``options``, a TypedDict, that a function takes as ``**options``.

    Type checkers know them from its annotation, ``Unpack[…]``.
    """

    def spell_out(function: Function) -> Function:
        signature = inspect.signature(function)
        *own, _ = signature.parameters.values()
        types = get_type_hints(options)
        named = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=_default_of(name), annotation=types[name]
            )
            for name in options.__annotations__
        ]
        function.__signature__ = signature.replace(parameters=[*own, *named])  # type: ignore[attr-defined]
        return function

    return spell_out


def _default_of(name: str) -> Any:
    """What applies in Python where an option is not given."""
    option = declarations()[name]
    return {Kind.FLAG: False, Kind.LIST: ()}.get(option.kind, option.default)


def check_names(given: Mapping[str, Any], options: Any) -> None:
    """Refuse keyword arguments that are not among the ``options``, a TypedDict, as Python would.

    Raises
    ------
    TypeError
    """
    for name in given:
        if name not in options.__annotations__:
            raise TypeError(f"unknown option {name!r}{did_you_mean(name, options.__annotations__)}")


def flag_of(name: str) -> str:
    """How an option is spelled on the command line.

    >>> flag_of("allow_reread"), flag_of("expected_plan")
    ('--allow-reread', '--plan')
    """
    known = declarations().get(name)
    return (known and known.flag) or f"--{name.replace('_', '-')}"


def is_complete(target: Targets, options: Mapping[str, Any]) -> bool:
    """Whether a request says what is to come out, so that all it leaves out is meant to be as by default."""
    asked = target.values() if isinstance(target, Mapping) else [options]
    return any(of_target.get("to") or of_target.get("format") for of_target in asked)
