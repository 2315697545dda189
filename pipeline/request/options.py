"""Every option of a conversion, declared once.

An option is an annotated entry of a ``TypedDict``. Type checkers see its name and type; its :class:`Option` holds
everything else. The options of the command line are made from these declarations, and so is what goes into ids,
sessions, jobs and schedules. Nothing heavy is imported here, because help and completion need this module.
"""

# No "from __future__ import annotations": the annotations are the declarations and must not become strings.

import ast
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, wraps
from textwrap import indent
from typing import Annotated, Any, TypedDict, TypeVar, cast, get_type_hints

from paddle_reshard.pipeline.core.choices import (
    CHECKS,
    CONVENTIONS,
    DEVICES,
    EXCHANGES,
    FINGERPRINTS,
    MASTER_WEIGHTS,
    REPLICAS,
    Checks,
    Convention,
    Device,
    Dropped,
    Dtype,
    Exchange,
    Fingerprinted,
    MasterWeights,
    ModelState,
    Quantised,
    Replicas,
)
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.pipeline.core.topology import Strategy, Topology
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike
from paddle_reshard.pipeline.formats.registry import (
    DEFAULT,
    FORMATS,
    FormatName,
    help_of_formats,
    option_of_formats,
)
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
        Option(
            choices=tuple(FORMATS),
            suggests=True,
            default=DEFAULT,
            help=help_of_formats(),
        ),
    ]
    """``"hybrid"`` (default): with ``model_meta.json`` if the trainer writes one; ``"hybrid-plain"``: without it.
    ``"huggingface"``: ``.safetensors`` files, ``config.json`` and tokenizer for ``transformers``. ``"flex"``:
    FlexCheckpoint folders of PaddleFormers. ``"auto-parallel"``: the single folder of auto-parallel training, with
    parameter names. ``"unified"``: the safetensors files of unified checkpoints."""
    to: Annotated[str | Mapping[str, int] | Topology | None, _of_formats("to", metavar="TOPOLOGY")]
    """Topology of the target, ``"tp=2,pp=2,sharding=2"`` or ``{"tp": 2, "pp": 2, "sharding": 2}``; omitted axes are 1.
    """
    sharding_strategy: Annotated[Strategy | None, _of_formats("sharding_strategy")]
    """``none``, ``stage1v1``, ``stage1v2``, ``stage2`` or ``stage3``. Default: ``none`` if sharding is 1; otherwise the
    source's strategy if the target topology allows it, else the trainer's default (PaddleFormers ``stage1v2``,
    PaddleNLP ``stage1v1``). The plan states the choice and the reason."""
    state: Annotated[ModelState | None, _of_formats("state")]
    """``"param"`` (default): the parameters; ``"ema"``: their exponential moving average, rounded from float32 to the
    dtype of the parameters."""
    dtype: Annotated[Dtype | None, _of_formats("dtype")]
    """``"bfloat16"``, ``"float16"`` or ``"float32"`` for floating-point tensors, except those that the model keeps in
    float32. Default: the parameter's own dtype and bits. Any different dtype is rounded once from the most precise
    values in the source, the master weight if there is one."""
    files: Annotated[int | str | None, _of_formats("files", kind=Kind.COUNT)]
    """Maximum number of data files per folder. Default: one for each 4 GiB, because a rank of the target job reads
    whole files."""
    paddle_version: Annotated[str | None, _of_formats("paddle_version", metavar="VERSION")]
    """The Paddle version that will read the target: ``"3.3"`` (default), ``"3.2"`` or ``"3.0"``; ``"3.4"`` uses pickle
    protocol 5, as Paddle 3.4 does, which then loads arrays without copying."""
    quantize: Annotated[Quantised | None, _of_formats("quantize")]
    """``"fp8"``: the linear layers of the decoder as 8-bit floats (e4m3) with a scale for each block of 128 × 128
    elements, as DeepSeek-V3 is published, from the master weights if there are any."""
    max_shard_size: Annotated[str | int | None, _of_formats("max_shard_size", metavar="SIZE")]
    """Maximum bytes of tensors per file, ``"5GB"``; a larger tensor gets a file of its own."""
    card: Annotated[bool, _of_formats("card", kind=Kind.FLAG)]
    """Also write a model card, ``README.md``, that says what the model was made from."""
    layout: Annotated[PathLike | Mapping[str, Any] | None, _of_formats("layout", kind=Kind.ENTRIES)]
    """Settings of the target job that its topology does not determine: a mapping, or a JSON file."""
    target_meta: Annotated[PathLike | None, _of_formats("target_meta", kind=Kind.FILE)]
    """``model_meta.json`` of a job with the target topology, to take parameter names from."""


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
    """A file of Paddle's AOA statements, which rename, split, concatenate, transpose or cast tensors. The targets have
    the resulting keys and shapes."""
    convention: Annotated[
        Convention | None,
        Option(
            choices=CONVENTIONS,
            suggests=True,
            of_one_source=True,
            help="Library that will continue training: the tensors get its names and layouts. Default: the source's.",
        ),
    ]
    """The library whose names and layouts the targets have: ``"paddleformers"``, ``"paddlenlp"`` or ``"paddlefleet"``.
    ``None``: the source's."""
    fill: Annotated[
        PathLike | None,
        Option(
            decides=Decides.LOCATION,
            consent=True,
            metavar="BASE",
            of_one_source=True,
            help="Checkpoint in any format, Hugging Face model, or safetensors file that has what SRC lacks "
            "(parameters that were not trained, buffers): only that is taken from it.",
        ),
    ]
    """A checkpoint in any format and topology, a Hugging Face model, or a safetensors file, that has what the source
    lacks: parameters that were not trained, and buffers. Only that is taken from it; a file must hold nothing else."""
    merge_into: Annotated[
        PathLike | None,
        Option(
            decides=Decides.LOCATION,
            consent=True,
            metavar="BASE",
            of_one_source=True,
            help="Base model, any checkpoint that stores its parameters: merge the LoRA in SRC into it and convert "
            "the result.",
        ),
    ]
    """The base model of a source that holds LoRA: the adapter is merged into it, and the result is converted."""
    like: Annotated[
        PathLike | None,
        Option(
            decides=Decides.LOCATION,
            consent=True,
            metavar="DIR",
            of_one_source=True,
            help="Hugging Face model that training began from: an export takes from it what SRC lacks (tensors that "
            "were not trained, tokenizer, entries of config.json) and must have all of its tensors, in their shapes.",
        ),
    ]
    """The Hugging Face model that training began from: an export takes from it what the source lacks (tensors that were
    not trained, tokenizer, entries of ``config.json``) and must have all of its tensors, in their shapes."""
    lora_config: Annotated[
        PathLike | None,
        Option(
            kind=Kind.FILE,
            of_one_source=True,
            help="The adapter's lora_config.json, for a LoRA checkpoint without one.",
        ),
    ]
    """The adapter's ``lora_config.json``, for a source without one."""
    memory: Annotated[
        str,
        Option(
            metavar="SIZE",
            decides=Decides.EXECUTION,
            kept=True,
            variable=True,
            default=DEFAULT_MEMORY,
            help="Memory budget of each worker, as in 512MiB or 4GiB.",
        ),
    ]
    """Memory budget of each worker, default ``"1GiB"``."""
    rules: Annotated[
        PathLike | None,
        Option(
            kind=Kind.FILE,
            help="Rule table of the model family, instead of the built-in tables.",
        ),
    ]
    """A rule table for the model family, instead of the built-in tables."""
    config: Annotated[
        PathLike | None,
        Option(kind=Kind.FILE, help="The model's config.json, for a checkpoint without one."),
    ]
    """The model's ``config.json``, for a source without one."""
    allow_missing: Annotated[
        Sequence[str],
        Option(
            kind=Kind.LIST,
            metavar="PATTERN",
            help="Allow keys that are missing from the checkpoint to be missing from the target too; * "
            "matches anything.",
        ),
    ]
    """Patterns of keys (``*`` matches anything) that may be missing from the source, and then from the targets too."""
    replicas: Annotated[
        Replicas,
        Option(
            choices=REPLICAS,
            default=REPLICAS[0],
            help="Tensors with copies on several ranks: compare all copies, or use the first.",
        ),
    ]
    """For tensors stored by several ranks: ``"compare"`` (default) compares all copies while moving the first;
    ``"first"`` reads only the first."""
    allow_replica_drift: Annotated[
        bool, Option(kind=Kind.FLAG, help="If copies differ, use the first and report it.")
    ]
    """If copies differ, use the first and report it, instead of refusing."""
    check: Annotated[
        Checks,
        Option(
            decides=Decides.EXECUTION,
            kept=True,
            choices=CHECKS,
            default=CHECKS[0],
            help="How to compare parameters with their stored master weights: every element that is loaded anyway "
            "plus samples of the remaining arrays, or every element.",
        ),
    ]
    """How parameters are compared with their stored master weights: ``"sample"`` (default) compares every element if
    both are loaded anyway, otherwise samples of every array; ``"full"`` reads and compares every element."""
    fingerprint: Annotated[
        Fingerprinted,
        Option(
            decides=Decides.EXECUTION,
            kept=True,
            choices=FINGERPRINTS,
            default=FINGERPRINTS[0],
            help="Record fingerprints of tensors in the target's manifest: none; of tensors that pass through memory "
            "and those that the source's manifest has; or of all, reading what the storage copied.",
        ),
    ]
    """Fingerprints of tensors in the manifests of the targets. ``"off"`` (default): none. ``"known"``: of tensors whose
    bytes pass through memory, and those in the source's manifest. ``"full"``: of all; what the storage copied is read
    for it."""
    allow_master_drift: Annotated[
        bool,
        Option(
            kind=Kind.FLAG,
            help="Keep parameters that differ from their rounded master weights, and report them.",
        ),
    ]
    """Keep parameters that differ from their rounded master weights and report them, instead of refusing."""
    allow_reread: Annotated[
        bool,
        Option(
            kind=Kind.FLAG,
            decides=Decides.EXECUTION,
            kept=True,
            help="Read source bytes several times if --memory is too small to read them once.",
        ),
    ]
    """Read source bytes several times if the budget requires it, instead of refusing."""
    no_space_check: Annotated[
        bool,
        Option(
            kind=Kind.FLAG,
            decides=Decides.EXECUTION,
            help="Do not check that the target's disk has enough free space.",
        ),
    ]
    """Do not check the free space of the targets' disks, for disks that do not report it correctly."""
    vocab_pad: Annotated[
        int | None,
        Option(kind=Kind.COUNT, help="Pad the vocabulary with zeros to this number of rows."),
    ]
    """Pad the vocabulary to this number of rows; new rows are zero in every state."""
    vocab_trim: Annotated[
        int | None, Option(kind=Kind.COUNT, help="Trim the vocabulary to this number of rows.")
    ]
    """Trim the vocabulary to this number of rows; the rest is dropped."""
    ranks: Annotated[
        str | Sequence[int] | None,
        Option(
            metavar="RANKS",
            help="Make only the files that these ranks of the target's job read, as in 8-15 or 0,2: the portion of one "
            "node.",
            not_scheduled="each node of a job makes its own portion",
        ),
    ]
    """Global ranks of the target's job, ``"8-15"`` or ``range(8, 16)``: make only the files that they read. Ids and
    digest are those of the whole, so that nodes can compare them."""
    master_weights: Annotated[
        MasterWeights,
        Option(
            choices=MASTER_WEIGHTS,
            default=MASTER_WEIGHTS[0],
            help="from-parameters: make master weights from the parameters of a checkpoint that holds nothing else, "
            "for a job that starts from them with a new optimizer.",
        ),
    ]
    """``"stored"`` (default): the source's, if it has any. ``"from-parameters"``, for a source that holds parameters
    only: their values as float32, for a job that starts from them."""
    drop: Annotated[
        Sequence[Dropped],
        Option(
            kind=Kind.LIST,
            metavar="NAME",
            of_one_source=True,
            help="Exclude from every target: ema, the moving average, mtp, the layers of multi-token prediction, or "
            "head, an output layer of its own where the target ties it to the word embedding. Required if no --target "
            "can hold it. Can be repeated.",
        ),
    ]
    """What to exclude from every target: ``"ema"``, the exponential moving average; ``"mtp"``, the layers of
    multi-token prediction (``num_nextn_predict_layers`` in ``config.json`` becomes 0); ``"head"``, the output layer of
    an ``ernie_pretrain`` job with stages, where the target ties it to the word embedding and they differ. What no
    target can hold is refused unless it is excluded here."""
    allow_links: Annotated[
        bool,
        Option(
            kind=Kind.FLAG,
            consent=True,
            help="Follow links that lead out of the source's folder.",
        ),
    ]
    """Follow links that lead out of the source's folder."""
    storage_options: Annotated[
        Mapping[str, Any] | None,
        Option(
            kind=Kind.OBJECT,
            decides=Decides.ACCESS,
            variable=True,
            help="Options with which fsspec opens the store: key, secret, endpoint_url, profile, … They "
            "are never printed or stored; @FILE keeps them out of the list of processes.",
        ),
    ]
    """fsspec options to access stores that are not local folders: credentials, endpoint, profile."""
    allow_scheme: Annotated[
        Sequence[str],
        Option(
            kind=Kind.LIST,
            decides=Decides.EXECUTION,
            metavar="NAME",
            help=f"Also open URLs of this scheme. Always allowed: {', '.join(sorted(PLAIN_SCHEMES))}.",
        ),
    ]
    """URL schemes to open in addition to those that are always allowed: ``("sftp",)``."""
    source_storage_options: Annotated[
        Mapping[str, Any] | None,
        Option(
            kind=Kind.OBJECT,
            decides=Decides.ACCESS,
            variable=True,
            help="The same for the source only; replaces --storage-options.",
        ),
    ]
    """``storage_options`` for the source only."""
    target_storage_options: Annotated[
        Mapping[str, Any] | None,
        Option(
            kind=Kind.OBJECT,
            decides=Decides.ACCESS,
            variable=True,
            help="The same for the target only; replaces --storage-options.",
        ),
    ]
    """``storage_options`` for the targets only."""
    overwrite: Annotated[bool, Option(kind=Kind.FLAG, help="Replace an existing checkpoint at the target.")]
    """Replace an existing checkpoint at a target."""


class RunOptions(TypedDict, total=False):
    """Where and how a conversion runs."""

    cluster: Annotated[
        str,
        Option(
            decides=Decides.EXECUTION,
            variable=True,
            default="inline",
            metavar="inline|ray|ray:ADDRESS",
            help="Where the conversion runs.",
        ),
    ]
    """``"inline"`` (default): in this process. ``"ray"``: on the Ray cluster given by ``RAY_ADDRESS``, or on a local
    cluster started for this run. ``"ray:ADDRESS"``: on the cluster at that address."""
    workers: Annotated[
        int | None,
        Option(
            kind=Kind.COUNT,
            decides=Decides.EXECUTION,
            help="On Ray: number of workers. Default: as many as the cluster has room for. Inline: number "
            "of groups at a time. Default: two per processor.",
        ),
    ]
    """On Ray, the number of workers; default: as many as the cluster has room for. Inline, the number of groups at a
    time; default: two per processor."""
    label_selector: Annotated[
        Sequence[str],
        Option(
            kind=Kind.LIST,
            decides=Decides.EXECUTION,
            metavar="KEY=VALUE",
            help="On Ray: run workers only on nodes with this label, as in ray.io/availability-zone=us-east-1a. Also "
            "KEY=!VALUE, KEY=in(A,B) and KEY=!in(A,B). Can be repeated.",
        ),
    ]
    """On Ray, the labels of the nodes on which workers run: ``("ray.io/availability-zone=us-east-1a",)``. Also
    ``KEY=!VALUE``, ``KEY=in(A,B)`` and ``KEY=!in(A,B)``; all must hold. Default: all nodes."""
    exchange: Annotated[
        Exchange,
        Option(
            decides=Decides.EXECUTION,
            choices=EXCHANGES,
            default=EXCHANGES[0],
            help="On Ray: whether several workers share a group through the object store.",
        ),
    ]
    """On Ray, whether several workers share a group through the object store: ``"auto"`` (default), ``"always"`` or
    ``"never"``."""
    resume: Annotated[
        bool,
        Option(
            kind=Kind.FLAG,
            decides=Decides.EXECUTION,
            help="Continue an interrupted conversion, if there is one. Without --to and --format, its "
            "original options are used; --memory, --check, --fingerprint and --allow-reread may always be omitted. "
            "Give --fill, --merge-into, --like, --allow-links and options for stores again.",
        ),
    ]
    """Continue an interrupted conversion, if there is one. Finished targets are only checked quickly; one that is
    visibly damaged is refused. Without ``to`` and ``format``, the original options are used; ``memory``, ``check`` and
    ``allow_reread`` may always be omitted. With several targets, ``target`` maps each location to ``{}``, in the
    original order. Give ``fill``, ``merge_into``, ``like``, ``allow_links`` and options for stores again: a stored
    record must not decide them."""
    take_over: Annotated[
        bool,
        Option(
            kind=Kind.FLAG,
            decides=Decides.EXECUTION,
            help="Resume a conversion that has ended on another machine, without waiting for its lock to expire.",
        ),
    ]
    """Resume although the lock of a run on another machine has not expired; implies ``resume``."""


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
    """A file written by ``plan --save``; refuse unless this conversion has the same plan."""
    device: Annotated[
        Device,
        Option(
            decides=Decides.EXECUTION,
            choices=DEVICES,
            default=DEVICES[0],
            help="gpu: on Ray, one GPU per worker, through Paddle.",
        ),
    ]
    """``"cpu"`` (default): NumPy. ``"gpu"``, on Ray: one GPU per worker, through Paddle."""
    verify: Annotated[
        bool,
        Option(
            kind=Kind.FLAG,
            decides=Decides.EXECUTION,
            help="Finally read every byte of the target and compare it with the checksums; with --resume "
            "also for a target that is already finished.",
        ),
    ]
    """Finally read every byte of all targets and compare it with the checksums, even if a target was already
    finished."""


Targets = PathLike | Mapping[PathLike, TargetOptions]
"""One location, with the options of the conversion; or several locations, each with options of its own."""

TARGET_OPTIONS = tuple(TargetOptions.__annotations__)
CONVERSION_OPTIONS = tuple(ConversionOptions.__annotations__)
"""Includes those of targets."""


@cache
def declarations() -> Mapping[str, Option]:
    """Option name → declaration, in the order in which help lists them."""
    types = get_type_hints(ConvertOptions, include_extras=True)
    return {name: types[name].__metadata__[0] for name in ConvertOptions.__annotations__}


def of_one_source() -> tuple[str, ...]:
    """Options that make no sense for a series of checkpoints."""
    return tuple(name for name, option in declarations().items() if option.of_one_source)


Function = TypeVar("Function", bound=Callable[..., Any])


def takes(options: Any) -> Callable[[Function], Function]:
    """Make ``help``, the reference and completion list the ``options``, a TypedDict, of a function with ``**options``.

    Each has its type, its default, and the sentences that stand below its declaration. Type checkers know them from the
    annotation ``Unpack[…]``.
    """

    def spell_out(function: Function) -> Function:
        signature = inspect.signature(function)
        if "observe" in signature.parameters:
            function = _shown_in_notebooks(function)
        *own, _ = signature.parameters.values()
        types = get_type_hints(options)
        named = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=_default_of(name), annotation=types[name]
            )
            for name in options.__annotations__
        ]
        function.__signature__ = signature.replace(parameters=[*own, *named])  # type: ignore[attr-defined]
        said = _sentences(options)
        told = [f"{name}\n{indent(said[name], '    ')}" for name in options.__annotations__ if name in said]
        if told and function.__doc__:
            section = "\n".join(("Other Parameters", "----------------", *told))
            function.__doc__ = f"{inspect.cleandoc(function.__doc__)}\n\n{section}\n"
        return function

    return spell_out


def _shown_in_notebooks(function: Function) -> Function:
    """The function, which draws its progress if it is called in a notebook without an observer."""

    @wraps(function)
    def observed(*args: Any, **kwargs: Any) -> Any:
        if "observe" in kwargs or "IPython" not in sys.modules:
            return function(*args, **kwargs)
        from paddle_reshard.pipeline.request.notebook import drawn, in_notebook

        if not in_notebook():
            return function(*args, **kwargs)
        with drawn() as observe:
            return function(*args, observe=observe, **kwargs)

    return cast(Function, observed)


def _sentences(options: Any) -> dict[str, str]:
    """Option → what it is: the text below its declaration, in the TypedDict itself or where its name is declared."""
    found: dict[str, str] = {}
    for module in dict.fromkeys((__name__, options.__module__)):
        texts = _texts_below(module)
        for kind, of_kind in texts.items():
            if kind != options.__name__:
                found |= {name: text for name, text in of_kind.items() if name not in found}
        found |= texts.get(options.__name__, {})
    return found


@cache
def _texts_below(module: str) -> Mapping[str, Mapping[str, str]]:
    """Class of a module → name of an entry → the text below it; empty where a module has no source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:
        return {}
    found: dict[str, dict[str, str]] = {}
    for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for entry, below in zip(kind.body, kind.body[1:], strict=False):
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                value = below.value if isinstance(below, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    found.setdefault(kind.name, {})[entry.target.id] = inspect.cleandoc(value.value)
    return found


def _default_of(name: str) -> Any:
    """The default of an option in Python."""
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
    """The spelling of an option on the command line.

    >>> flag_of("allow_reread"), flag_of("expected_plan")
    ('--allow-reread', '--plan')
    """
    known = declarations().get(name)
    return (known and known.flag) or f"--{name.replace('_', '-')}"
