"""Every option of a conversion, declared once.

An option is an annotated entry of a ``TypedDict``. Type checkers see its name and type; its :class:`Option` holds
everything else. The options of the command line are made from these declarations, and so is what goes into ids,
sessions, jobs and schedules. Nothing heavy is imported here, because help and completion need this module.
"""

# No "from __future__ import annotations": the annotations are the declarations and must not become strings.

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, wraps
from typing import Annotated, Any, TypedDict, cast, get_type_hints

from paddle_reshard.pipeline.core.choices import (
    CONVENTIONS,
    DEVICES,
    MASTER_WEIGHTS,
    REPLICAS,
    Convention,
    Device,
    Dropped,
    Dtype,
    MasterWeights,
    ModelState,
    Replicas,
)
from paddle_reshard.pipeline.core.topology import Strategy, Topology
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike
from paddle_reshard.pipeline.formats.registry import (
    DEFAULT,
    FORMATS,
    FormatName,
    help_of_formats,
    option_of_formats,
)
from paddle_reshard.pipeline.request.arguments import Function, checked
from paddle_reshard.storage.schemes import PLAIN_SCHEMES


class Decides(Enum):
    """What an option decides.

    The id of a conversion is computed from its ``OUTCOME`` and ``LOCATION`` options: two conversions with the same id
    give the same bytes or fail for the same reason, so only one of them needs to run.
    """

    OUTCOME = "what is written, or whether it is refused"
    LOCATION = "what is written, through the contents of a file or URL, which is not copied"
    EXECUTION = "where and how fast a conversion runs, and what it reports"
    ACCESS = "how stores are accessed; may hold secrets, which belong in no id and no command line"


class Kind(Enum):
    """The form of an option's value."""

    TEXT = "a string"
    COUNT = "a positive integer"
    FLAG = "given or not"
    LIST = "strings; the option can be repeated"
    FILE = "a small local file; it is sent with a job, and a session keeps its text"
    ENTRIES = "a small local JSON file, or in Python a mapping"
    OBJECT = "a JSON object, or @FILE to read it from a file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Properties of an option besides its name and type."""

    help: str
    kind: Kind = Kind.TEXT
    decides: Decides = Decides.OUTCOME
    metavar: str | None = None
    choices: Sequence[str] = ()
    suggests: bool = False
    """Whether an unknown value is answered with the most similar choice."""
    default: str | None = None
    """The default, as shown by help."""
    flag: str | None = None
    """Spelling on the command line, if it does not follow from the name."""
    kept: bool = False
    """Whether a session keeps it although it changes no byte, because the plan or its checks depend on it."""
    consent: bool = False
    """Whether it is consent rather than a choice. A record next to a target cannot give consent: the session only
    records that the option was given."""
    variable: bool = False
    """Whether an environment variable may give it too, because a user repeats it every day."""
    of_one_source: bool = False
    """Whether it alters a single checkpoint, and makes no sense for a series of them."""
    not_scheduled: str = ""
    """Why it cannot apply to every checkpoint of a run; empty if it can."""

    @property
    def in_session(self) -> bool:
        """Whether a session keeps it: true of options that decide the outcome, false of access to stores."""
        return self.kept or self.changes_bytes

    @property
    def changes_bytes(self) -> bool:
        """Whether the outcome depends on it."""
        return self.decides in (Decides.OUTCOME, Decides.LOCATION)


def _of_formats(name: str, kind: Kind = Kind.TEXT, metavar: str | None = None) -> Option:
    """An option of targets, as described by the formats that have it."""
    option = option_of_formats(name)
    return Option(
        kind=kind, metavar=metavar, choices=option.choices, suggests=bool(option.choices), help=option.help
    )


class TargetOptions(TypedDict, total=False):
    """Options of a target. Each format declares which it supports; the rest are refused."""

    format: Annotated[
        FormatName | None,
        Option(choices=tuple(FORMATS), suggests=True, default=DEFAULT, help=help_of_formats()),
    ]
    to: Annotated[str | int | Mapping[str, int] | Topology | None, _of_formats("to", metavar="TOPOLOGY")]
    sharding_strategy: Annotated[Strategy | None, _of_formats("sharding_strategy")]
    state: Annotated[ModelState | None, _of_formats("state")]
    dtype: Annotated[Dtype | None, _of_formats("dtype")]
    paddle_version: Annotated[str | None, _of_formats("paddle_version", metavar="VERSION")]
    max_shard_size: Annotated[str | int | None, _of_formats("max_shard_size", metavar="SIZE")]
    layout: Annotated[PathLike | Mapping[str, Any] | None, _of_formats("layout", kind=Kind.ENTRIES)]


class ConversionOptions(TargetOptions, total=False):
    """Options that describe a conversion."""

    aoa: Annotated[
        PathLike | None,
        Option(
            kind=Kind.FILE,
            of_one_source=True,
            help="AOA statements that rename, split, concatenate, transpose or cast tensors; --config must "
            "then describe the resulting model.",
        ),
    ]
    convention: Annotated[
        Convention | None,
        Option(
            choices=CONVENTIONS,
            suggests=True,
            of_one_source=True,
            help="Library that will continue training: the tensors get its names and layouts. Default: the source's.",
        ),
    ]
    fill: Annotated[
        PathLike | None,
        Option(
            decides=Decides.LOCATION,
            consent=True,
            metavar="BASE",
            of_one_source=True,
            help="Checkpoint in any format and topology, Hugging Face model, or safetensors file that has "
            "what the source lacks (parameters that were not trained, buffers): only that is taken from "
            "it. A file has the source's keys, or is of a published model.",
        ),
    ]
    merge_into: Annotated[
        PathLike | None,
        Option(
            decides=Decides.LOCATION,
            consent=True,
            metavar="BASE",
            of_one_source=True,
            help="Base model, any checkpoint that stores its parameters: merge the LoRA in the source into it "
            "and convert the result.",
        ),
    ]
    like: Annotated[
        PathLike | None,
        Option(
            decides=Decides.LOCATION,
            consent=True,
            metavar="DIR",
            of_one_source=True,
            help="Hugging Face model that training began from: an export takes from it what the source lacks "
            "(tensors that were not trained, tokenizer, entries of config.json) and must have all of its "
            "tensors, in their shapes.",
        ),
    ]
    lora_config: Annotated[
        PathLike | None,
        Option(
            kind=Kind.FILE,
            of_one_source=True,
            help="The adapter's lora_config.json, for a LoRA checkpoint without one.",
        ),
    ]
    memory: Annotated[
        str | int,
        Option(
            metavar="SIZE",
            decides=Decides.EXECUTION,
            kept=True,
            variable=True,
            default=DEFAULT_MEMORY,
            help="Memory budget of each worker, as in 512MiB or 4GiB.",
        ),
    ]
    rules: Annotated[
        PathLike | None,
        Option(kind=Kind.FILE, help="Rule table of the model family, instead of the built-in tables."),
    ]
    config: Annotated[
        PathLike | None,
        Option(
            kind=Kind.FILE,
            help="The model's config.json, for a checkpoint without one; refused where its own says otherwise.",
        ),
    ]
    allow_missing: Annotated[
        Sequence[str],
        Option(
            kind=Kind.LIST,
            metavar="PATTERN",
            help="Keys that may be missing from the checkpoint, and then from the target too; * matches "
            "anything.",
        ),
    ]
    replicas: Annotated[
        Replicas,
        Option(
            choices=REPLICAS,
            default=REPLICAS[0],
            help="Tensors that several ranks store. compare: compare all copies while the first is moved, and refuse "
            "copies that differ; report: use the first of those too, and report them; first: read only the first.",
        ),
    ]
    master_weights: Annotated[
        MasterWeights,
        Option(
            choices=MASTER_WEIGHTS,
            default=MASTER_WEIGHTS[0],
            help="compare: refuse parameters that are not their master weights, rounded; report: keep both, and report "
            "them; from-parameters: make master weights from the parameters of a checkpoint that holds nothing else, "
            "for a job that starts from them with a new optimizer.",
        ),
    ]
    vocab_size: Annotated[
        int | None,
        Option(
            kind=Kind.COUNT,
            help="Number of rows that the vocabulary is to have: new ones are zero in every state, and those beyond it "
            "are dropped.",
        ),
    ]
    ranks: Annotated[
        str | Sequence[int] | None,
        Option(
            metavar="RANKS",
            help="Make only the files that these ranks of the target's job read, as in 8-15 or 0,2: the "
            "portion of one node. Ids and digest are those of the whole, so that nodes can compare them.",
            not_scheduled="each node of a job makes its own portion",
        ),
    ]
    drop: Annotated[
        Sequence[Dropped],
        Option(
            kind=Kind.LIST,
            metavar="NAME",
            of_one_source=True,
            help="Exclude from every target: ema, the moving average; mtp, the layers of multi-token "
            "prediction (num_nextn_predict_layers in config.json becomes 0); head, the output layer of "
            "an ernie_pretrain job with stages, where the target ties it to the word embedding and they "
            "differ. What no target can hold is refused unless it is excluded here. Can be repeated.",
        ),
    ]
    allow_links: Annotated[
        bool,
        Option(kind=Kind.FLAG, consent=True, help="Follow links that lead out of the checkpoint's folder."),
    ]
    storage_options: Annotated[
        Mapping[str, Any] | None,
        Option(
            kind=Kind.OBJECT,
            decides=Decides.ACCESS,
            variable=True,
            help="Options with which fsspec opens the stores: key, secret, endpoint_url, profile, … Under source or "
            "target: for that store alone, in place of the others. Under the name of a scheme, as in "
            '{"sftp": {…}}: for its URLs, which are opened only then; always opened are '
            f"{', '.join(sorted(PLAIN_SCHEMES))}. Options are never printed or stored; @FILE keeps them out of the "
            "list of processes.",
        ),
    ]
    overwrite: Annotated[bool, Option(kind=Kind.FLAG, help="Replace the finished conversion at the target.")]


class RunOptions(TypedDict, total=False):
    """Where and how a conversion runs."""

    cluster: Annotated[
        str,
        Option(
            decides=Decides.EXECUTION,
            variable=True,
            default="inline",
            metavar="inline|ray|ray:ADDRESS",
            help="Where the conversion runs: inline, in this process; ray, on the Ray cluster that "
            "RAY_ADDRESS gives, or on a local one that is started for this run; ray:ADDRESS, on the "
            "cluster at that address.",
        ),
    ]
    workers: Annotated[
        int | None,
        Option(
            kind=Kind.COUNT,
            decides=Decides.EXECUTION,
            help="On Ray: number of workers. Default: as many as the cluster has room for. Inline: number "
            "of groups at a time. Default: two per processor.",
        ),
    ]
    resume: Annotated[
        bool,
        Option(
            kind=Kind.FLAG,
            decides=Decides.EXECUTION,
            help="Continue an interrupted conversion, if there is one; where it ended on another machine, once its "
            "lock has expired, after two minutes at most. A finished target is only checked quickly, and refused if it "
            "is visibly damaged. Without --to and --format, its original options are used; --memory may always be "
            "omitted. Of several targets, give the locations alone, in the original order. Give --fill, --merge-into, "
            "--like, --allow-links and options for stores again: a stored record must not decide them.",
        ),
    ]


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
    device: Annotated[
        Device,
        Option(
            decides=Decides.EXECUTION,
            choices=DEVICES,
            default=DEVICES[0],
            help="gpu: on Ray, one GPU per worker, through Paddle.",
        ),
    ]


Targets = PathLike | Mapping[PathLike, TargetOptions]
"""One location, with the options of the conversion; or several locations, each with options of its own."""

TARGET_OPTIONS = tuple(TargetOptions.__annotations__)
CONVERSION_OPTIONS = tuple(ConversionOptions.__annotations__)
"""Includes those of targets."""

_OF_PROGRESS = {
    "observe": "Called with events that report progress.",
    "progress": "Show progress as lines on stderr.",
}
"""What the parameters of functions that report progress are."""


@cache
def declarations() -> Mapping[str, Option]:
    """Option name → declaration, in the order in which help lists them."""
    types = get_type_hints(ConvertOptions, include_extras=True)
    return {name: types[name].__metadata__[0] for name in ConvertOptions.__annotations__}


def of_one_source() -> tuple[str, ...]:
    """Options that make no sense for a series of checkpoints."""
    return tuple(name for name, option in declarations().items() if option.of_one_source)


def with_options(options: Any) -> Callable[[Function], Function]:
    """Make ``help``, the reference and completion list the ``options``, a TypedDict, of a function with ``**options``.

    Each has its type, its default, and its help. Type checkers know them from the annotation ``Unpack[…]``; whoever
    has none is told by :func:`~paddle_reshard.pipeline.request.arguments.checked`.
    """

    def spell_out(function: Function) -> Function:
        signature = inspect.signature(function)
        if "progress" in signature.parameters:
            function = _shows_progress(function)
        function = checked(function, options)
        *own, _ = signature.parameters.values()
        types = get_type_hints(options)
        named = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=_default_of(name), annotation=types[name]
            )
            for name in options.__annotations__
        ]
        function.__signature__ = signature.replace(parameters=[*own, *named])  # type: ignore[attr-defined]
        described = {name: text for name, text in _OF_PROGRESS.items() if name in signature.parameters}
        described |= {name: _in_python(help_of(name, options)) for name in options.__annotations__}
        if function.__doc__:
            entries = (f"{name}\n    {text}" for name, text in described.items())
            section = "\n".join(("Other Parameters", "----------------", *entries))
            function.__doc__ = f"{inspect.cleandoc(function.__doc__)}\n\n{section}\n"
        return function

    return spell_out


def _shows_progress(function: Function) -> Function:
    """The function, which prints its progress as lines on stderr if ``progress`` is true."""

    @wraps(function)
    def observed(*args: Any, progress: bool = False, **kwargs: Any) -> Any:
        if not progress:
            return function(*args, **kwargs)
        from paddle_reshard.pipeline.request.progress_lines import printed

        show, also = printed(), kwargs.pop("observe", None)

        def observe(event: Any) -> None:
            show(event)
            if also is not None:
                also(event)

        return function(*args, observe=observe, **kwargs)

    return cast(Function, observed)


def help_of(name: str, options: Any = None) -> str:
    """What an option is: as it is declared, or as the ``options`` of another function, a TypedDict, say of it."""
    if options is not None:
        hints = get_type_hints(options, include_extras=True)
        said = [text for text in getattr(hints[name], "__metadata__", ()) if isinstance(text, str)]
        if said:
            return said[0]
    return declarations()[name].help


def _in_python(help: str) -> str:
    """The help of an option in the words of Python: other options by their names, marked up for documents.

    >>> _in_python("Instead of --allow-links; * matches anything.")
    'Instead of ``allow_links``; ``*`` matches anything.'
    """
    names = {flag_of(name): f"``{name}``" for name in declarations()}
    named = re.sub(r"--[a-z-]+", lambda flag: names.get(flag[0], flag[0]), help)
    return re.sub(r"(?<!\S)\*(?!\S)", "``*``", named)


def _default_of(name: str) -> Any:
    """The default of an option in Python."""
    option = declarations()[name]
    return {Kind.FLAG: False, Kind.LIST: ()}.get(option.kind, option.default)


def flag_of(name: str) -> str:
    """The spelling of an option on the command line.

    >>> flag_of("allow_links"), flag_of("expected_plan")
    ('--allow-links', '--plan')
    """
    known = declarations().get(name)
    return (known and known.flag) or f"--{name.replace('_', '-')}"
