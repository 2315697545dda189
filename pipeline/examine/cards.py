"""``plan --cards``: the topologies of a number of cards that a checkpoint can be converted to, and what each costs.

Every division of the cards among the axes is offered to the code that makes targets, which refuses what the trainer
could not train; there are no rules of divisibility here. Nothing is laid out: tensors that differ only in layer and
expert are counted, so that hundreds of topologies of a large model take seconds.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import log2
from typing import Any, NamedTuple, cast

from paddle_reshard.pipeline.changes.change import Altered
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.files import SourceListing
from paddle_reshard.pipeline.checkpoint.format import LOADED, JobTarget, NotLoaded, RankBytes
from paddle_reshard.pipeline.checkpoint.training_job import not_read_by_part
from paddle_reshard.pipeline.convert.conversion import read_source
from paddle_reshard.pipeline.convert.plan import source_in_words
from paddle_reshard.pipeline.core.catalog import ITEMSIZES, volumes
from paddle_reshard.pipeline.core.errors import PlanError, UnsupportedError, UsageError
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.shown import (
    Facts,
    Result,
    ToCopy,
    by_reason,
    counted,
    readable_bytes,
    readable_seconds,
)
from paddle_reshard.pipeline.core.tensors import in_words
from paddle_reshard.pipeline.core.topology import Topology, number_of_cards, sharding_in_words
from paddle_reshard.pipeline.core.trainer_files import is_marker
from paddle_reshard.pipeline.core.units import PathLike, texts_of
from paddle_reshard.pipeline.examine.launch import AVERAGE_IGNORED, Launch, reads_average, remarks_on_change
from paddle_reshard.pipeline.formats.registry import DEFAULT, FORMATS, names_of
from paddle_reshard.pipeline.formats.targets import outline, starts_anew
from paddle_reshard.pipeline.formats.trainer_arguments import Arguments, trainer_arguments
from paddle_reshard.pipeline.request.options import (
    ConversionOptions,
    Decides,
    Kind,
    Targets,
    declarations,
    flag_of,
)
from paddle_reshard.pipeline.request.parse import (
    ConversionRequest,
    Values,
    check_options,
    locations_of,
    parse_request,
    read_target,
)
from paddle_reshard.tasks.index import index_here

TARGET = "TARGET"
"""Stands for the location of a target in commands."""
NOT_COUNTED = (
    "gradients, activations and communication buffers are not counted, and the average is in host memory"
)
HOW_LONG = "one worker that reads and writes 1 GB/s at once"
NEAREST = "resumes at once, and the files lose no state; of such, keeps tp, then pp, ep, dp and sharding most closely"
_AXES = ("tp", "pp", "ep", "dp", "sharding", "vpp")
"""In the order in which a topology is to keep them. Tensor and pipeline parallelism decide what a card computes and
holds; ranks that read different samples can be replaced by accumulating gradients."""
SHOWN_TOPOLOGIES = 3
"""Topologies that a sentence names of which it is true."""
DROPPED = "dropped, as requested"
_OF_READING = frozenset(
    {"format", "sharding_strategy", "rules", "config", "lora_config", "allow_missing", "allow_links"}
)
"""Options with which a checkpoint can be of the topology already."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A topology to which the checkpoint can be converted."""

    topology: Topology
    strategy: str
    """Sharding strategy."""
    strategy_reason: str
    """Why the strategy was chosen."""
    fullest: RankBytes
    """What the rank with most bytes on its card holds."""
    read_bytes: int
    """Bytes of the tensors in the source; 0 if nothing needs converting."""
    written_bytes: int
    """Bytes of the tensors in the target."""
    lost: tuple[tuple[str, str], ...]
    """``(state or file, why it is not in the target)``."""
    states_lost: tuple[str, ...]
    """States among them."""
    arguments: Arguments
    """Arguments with which the trainer starts; empty if they are not known."""
    not_resumed: str
    """Why the trainer does not go on at once, with optimizer and schedule; empty if it does."""
    remarks: tuple[str, ...]
    """What the job does differently because its topology is another."""
    command: str
    """The command that converts; empty if the checkpoint is for this topology already."""
    ignores_average: bool = False
    """Whether its trainer reads no average, and that of the source does."""
    nearest: bool = False
    """Whether it is the one that changes least."""

    @property
    def seconds(self) -> float:
        """Time that one worker needs to read and write at 1 GB/s, both at once."""
        return max(self.read_bytes, self.written_bytes) / 1e9

    @property
    def launch_line(self) -> str:
        """The trainer's arguments, quoted for a shell; empty if they are not known."""
        return Launch("", "", 0, self.arguments, (), ()).command_line()


class RefusedTopology(NamedTuple):
    """A division of the cards among the axes that is not possible."""

    topology: Topology
    reason: str


@dataclass(frozen=True, repr=False)
class CardsPlan(Result):
    """What a checkpoint can become on a number of cards."""

    path: str
    source: str
    """Format and topology of the checkpoint, in words."""
    cards: int
    format: str
    """Format of the targets."""
    alternatives: tuple[Alternative, ...]
    """The nearest first."""
    refused: tuple[RefusedTopology, ...]
    any_topology: bool
    """Whether the trainer reads the checkpoint in any of these topologies as it is."""
    has_topology: bool
    """Whether the checkpoint is for a topology, to which others can be near."""
    not_loaded: NotLoaded = LOADED
    """Why the trainer reads a checkpoint that is for no topology in some of them only."""

    def __iter__(self) -> Iterator[Alternative]:
        """The alternatives, the nearest first."""
        return iter(self.alternatives)

    @property
    def nearest(self) -> Alternative | None:
        """The alternative that changes least; ``None`` if the source is not for any topology."""
        return next((alternative for alternative in self.alternatives if alternative.nearest), None)

    def distinct(self) -> tuple[Alternative, ...]:
        """The alternatives without those whose data-parallel ranks could as well share out the optimizer states."""
        sharded = {
            (replace(topology, sharding=1, dp=1), topology.sharding)
            for topology in (alternative.topology for alternative in self.alternatives)
            if topology.dp == 1
        }
        return tuple(
            alternative
            for alternative in self.alternatives
            if alternative.topology.dp == 1
            or (
                replace(alternative.topology, sharding=1, dp=1),
                alternative.topology.sharding * alternative.topology.dp,
            )
            not in sharded
        )

    def chosen(self) -> Alternative:
        """The nearest; a :class:`PlanError` if there is none, or the checkpoint needs no conversion."""
        here = f"{self.path}: for {self.cards} cards"
        launch = shlex.join(["paddle-reshard", "launch", self.path])
        nearest = self.nearest
        for _, words in self._as_it_is():
            raise PlanError(f"{here} no topology is the nearest: {words}")
        if nearest is None:
            (first, *_) = self.alternatives
            why = "it is for no topology, so none is near"
            if self.has_topology:
                lost = first.not_resumed or f"{in_words(first.states_lost)} would be lost"
                why = f"no topology resumes at once with all states: with {first.topology}, {lost}"
            raise PlanError(
                f"{here} {why}; choose one of those that plan --cards lists, and give it with --to"
            )
        if not nearest.command:
            raise PlanError(f"{here} the job with {nearest.topology} reads it as it is: {launch}")
        return nearest

    def advice(self) -> Facts:
        """What to do: convert to the nearest topology and start the job, and what to know of that one."""
        facts = self._as_it_is()
        best = self.nearest
        if best is None:
            return facts
        facts.append(("nearest", f"{best.topology}: {NEAREST}"))
        if best.command:
            facts.append(("convert", ToCopy(best.command)))
        if best.launch_line:
            facts.append(("start with", ToCopy(best.launch_line)))
        facts += [("lost", f"{names}: {why}") for why, names in by_reason(best.lost)]
        return facts + [("note", remark) for remark in best.remarks]

    def _in_short(self) -> str:
        return f"{self.path}: {counted(len(self.alternatives), 'topology')} for {self.cards} cards"

    def facts(self) -> Facts:
        """Every topology in a line, with what it needs, and how a job starts from it."""
        facts = [("checkpoint", self.path), ("from", self.source), ("cards", str(self.cards))]
        facts += self._as_it_is()
        for alternative in self.alternatives:
            mark = ", nearest" if alternative.nearest else ""
            facts.append((str(alternative.topology), f"{self._in_line(alternative)}{mark}"))
            if alternative.command:
                facts.append(("", alternative.command))
            if alternative.launch_line:
                facts.append(("", alternative.launch_line))
        return [*facts, *self.notes()]

    def notes(self) -> Facts:
        """What is lost, what differs, why topologies are refused, and what the figures mean."""
        facts = [("on a card", f"the fullest rank; {NOT_COUNTED}"), ("time", HOW_LONG)]
        if self.nearest is not None:
            facts.append(("nearest", NEAREST))
        facts += self._shared("lost", lambda one: [f"{names}: {why}" for why, names in by_reason(one.lost)])
        facts += self._shared("note", lambda one: one.remarks)
        facts += self._shared("not resumed", lambda one: [one.not_resumed] if one.not_resumed else [])
        return facts + [("refused", f"{refusal.topology}: {refusal.reason}") for refusal in self.refused]

    def _shared(self, name: str, sentences_of: Callable[[Alternative], Iterable[str]]) -> Facts:
        """What alternatives have in common, each sentence once, with the topologies of which it is true."""
        said: dict[str, list[str]] = {}
        for alternative in self.alternatives:
            for sentence in sentences_of(alternative):
                said.setdefault(sentence, []).append(str(alternative.topology))
        every = len(self.alternatives)
        return [
            (name, sentence if len(of) == every else f"{_some(of)}: {sentence}")
            for sentence, of in said.items()
        ]

    def _as_it_is(self) -> Facts:
        if self.any_topology:
            return [("as it is", f"the trainer reads it in each of these topologies: {self._launch()}")]
        if self.not_loaded.alone:
            return [("not as it is", self.not_loaded.alone)]
        why = {"tp": self.not_loaded.under_tp, "pp": self.not_loaded.with_stages}
        axes = [axis for axis, reason in why.items() if reason]
        if not axes:
            return []
        tp, reasons = (
            max(self.not_loaded.tp, self.not_loaded.expert_tp),
            "; ".join(why[axis] for axis in axes),
        )
        where = f"with tp={tp}" if tp > 1 else f"without {' and '.join(axes)}"
        return [("as it is", f"the trainer reads it in those {where}: {self._launch()}; {reasons}")]

    def _launch(self) -> str:
        return shlex.join(["paddle-reshard", "launch", self.path, "--to"]) + " TOPOLOGY"

    def _in_line(self, alternative: Alternative) -> str:
        held = alternative.fullest
        return (
            f"{sharding_in_words(alternative.strategy)}; on a card {readable_bytes(held.on_card)} "
            f"(parameters {readable_bytes(held.parameters)}, master weights {readable_bytes(held.master_weights)}, "
            f"moments {readable_bytes(held.moments)}); average {readable_bytes(held.ema)}; to read "
            f"{readable_bytes(alternative.read_bytes)}, to write {readable_bytes(alternative.written_bytes)}, "
            f"{readable_seconds(alternative.seconds)}; "
            f"{'does not resume' if alternative.not_resumed else 'resumes'} at once"
        )


def _some(topologies: Sequence[str]) -> str:
    """The first topologies, and how many more there are.

    >>> _some(["tp=2", "pp=2", "dp=2", "sharding=2"])
    'tp=2; pp=2; dp=2 and 1 more'
    """
    rest = len(topologies) - SHOWN_TOPOLOGIES
    return "; ".join(topologies[:SHOWN_TOPOLOGIES]) + (f" and {rest} more" if rest > 0 else "")


def plan_cards(
    source: PathLike, cards: int, options: ConversionOptions, observe: Observer = ignore_events
) -> CardsPlan:
    """:func:`paddle_reshard.plan` for a number of cards; a :class:`PlanError` if no topology is possible."""
    format = options.get("format") or DEFAULT
    _check(cards, format, options)
    request = parse_request({**options, "to": Topology(dp=cards)})
    request.check()
    altered = read_source(
        locations_of((source,), None, request), request, partial(index_here, observe=observe)
    )
    store, checkpoint = altered.store, altered.source
    checkpoint.model.table.check_format(format, checkpoint.model.config)
    offer = _Offer(altered, request)
    alternatives, refused = [], []
    for topology in _topologies(cards, checkpoint):
        try:
            alternatives.append(offer.alternative(topology))
        except PlanError as error:
            refused.append(RefusedTopology(topology, str(error).removeprefix(f"{topology}: ")))
    if not alternatives:
        reasons = "; ".join(dict.fromkeys(refusal.reason for refusal in refused))
        raise PlanError(f"{store.location}: no topology of {cards} cards is possible: {reasons}")
    any_topology = _any_topology(checkpoint)
    not_loaded = FORMATS[checkpoint.format].not_loaded(checkpoint) if any_topology else LOADED
    not_loaded = not_loaded if cards == 1 else not_loaded._replace(alone="")
    return CardsPlan(
        store.location,
        source_in_words(checkpoint),
        cards,
        format,
        tuple(_by_nearness(alternatives, offer.before)),
        tuple(refused),
        any_topology and not not_loaded.reasons,
        offer.before is not None,
        not_loaded,
    )


def with_topology(
    source: PathLike,
    target: Targets | None,
    options: Mapping[str, Any],
    say: Callable[[str], object] = lambda said: None,
) -> Any:
    """The options of a conversion, with the nearest topology where ``to`` is a number of cards; ``say`` is told of it.

    Raises
    ------
    PlanError
        If no topology of so many cards is the nearest, or the checkpoint needs no conversion for it.
    """
    cards = None if isinstance(target, Mapping) else number_of_cards(options.get("to"))
    if cards is None:
        return options
    check_options(options.get("format") or DEFAULT, options)
    listed = {name: options[name] for name in ConversionOptions.__annotations__ if name in options}
    found = plan_cards(source, cards, cast(ConversionOptions, {**listed, "to": None, "ranks": None}))
    topology = found.chosen().topology
    of = counted(len(found.alternatives), "possible topology")
    say(f"{topology}, the nearest of {of} for {cards} cards: {NEAREST}")
    return {**options, "to": topology}


def _check(cards: int, format: str, options: ConversionOptions) -> None:
    """Refuse options that leave no topology to choose, or a format that has none."""
    number_of_cards(cards)
    if options.get("to"):
        raise UsageError("--cards lists topologies, and --to gives one; use only one of the two")
    if options.get("ranks"):
        raise UsageError("--cards lists topologies, and --ranks are those of one; use only one of the two")
    if format in FORMATS and "to" not in FORMATS[format].options:
        having = names_of([other for other in FORMATS.values() if "to" in other.options], "or")
        raise UsageError(f"--format {format} has no topology, any job reads it; --cards is for {having}")


def _topologies(cards: int, checkpoint: Checkpoint) -> Iterator[Topology]:
    """Every division of the cards among the axes, those without expert parallelism first.

    Virtual stages are as in the source, or none: any other number would be a choice of the job.
    """
    sizes = [size for size in range(1, cards + 1) if cards % size == 0]
    experts = any(tensor.rule.of_expert for tensor in checkpoint.model.tensors)
    virtual = {1, 1 if checkpoint.job.topology is None else checkpoint.job.topology.vpp}
    for ep, vpp in product(sizes if experts else (1,), sorted(virtual)):
        for tp, pp, sharding in product(sizes, repeat=3):
            if cards % (tp * pp * sharding) == 0 and (vpp == 1 or pp > 1):
                yield Topology(tp, pp, vpp, sharding, ep, cards // (tp * pp * sharding))


def _any_topology(checkpoint: Checkpoint) -> bool:
    """Whether the trainer of the checkpoint reads its format in any topology."""
    if checkpoint.job.topology is not None:
        return False
    return FORMATS[checkpoint.format].loaded_with(checkpoint.model.table.library, "none") is not None


def _by_nearness(alternatives: Sequence[Alternative], source: Topology | None) -> list[Alternative]:
    """The alternatives, those that change least first, and the nearest marked."""
    if source is None:
        return sorted(alternatives, key=lambda alternative: alternative.fullest.on_card)

    def distance(alternative: Alternative) -> tuple[float, ...]:
        apart = (log2(getattr(alternative.topology, axis) / getattr(source, axis)) for axis in _AXES)
        return (alternative.ignores_average, *map(abs, apart))

    ordered = sorted(alternatives, key=distance)
    nearest = next((one for one in ordered if not one.not_resumed and not one.states_lost), None)
    return [replace(alternative, nearest=alternative is nearest) for alternative in ordered]


@dataclass(frozen=True)
class _Offer:
    """A checkpoint and the options of a request, from which each topology's alternative is made."""

    altered: Altered
    request: ConversionRequest

    @property
    def before(self) -> Topology | None:
        """The topology of the checkpoint, as ``to`` gives it: ``ep`` also where data-parallel ranks share experts."""
        job = self.altered.source.job
        if job.topology is None or job.expert_axis != "dp":
            return job.topology
        return replace(job.topology, ep=job.topology.dp)

    @property
    def _reads_average(self) -> bool:
        """Whether the source's own job goes on with an average that is kept."""
        source = self.altered.source
        loaded_with = FORMATS[source.format].loaded_with(
            source.model.table.convention, source.job.strategy or "none"
        )
        kept = source.has_ema and self.altered.wanted.has_ema
        return kept and reads_average(loaded_with or {}, None)

    @property
    def options(self) -> Values:
        """The options without the topology."""
        given = {**self.request.target_options[0], **self.request.options}
        return {name: value for name, value in given.items() if name != "to"}

    def alternative(self, topology: Topology) -> Alternative:
        """The alternative for a topology, with its costs; a :class:`PlanError` if it is not possible."""
        source, wanted = self.altered.source, self.altered.wanted
        store = self.altered.store
        target = read_target({**self.options, "to": topology}).target_for(source)
        if not isinstance(target, JobTarget):
            raise UsageError(f"--format {target.format} has no topology, any job reads it")
        layout = outline(source, wanted, target, SourceListing(store.sizes(), store.folders))
        is_already = self._is_already(topology, target)
        anew = starts_anew(source, target) or source.history.masters_made
        arguments, not_resumed = self._arguments(target, is_already, anew)
        lost = [(state, f"the format {target.format} cannot hold it") for state in layout.states_not_carried]
        lost += [(path, why) for path, why in layout.not_carried if not is_marker(path)]
        ignores_average = (  # of a trainer whose arguments are not known, nothing is said
            self._reads_average
            and not is_already
            and bool(arguments)
            and not reads_average(arguments, topology)
        )
        if ignores_average:
            lost.append(("the average", f"in the files, and ignored: {AVERAGE_IGNORED}"))
        before, library = self.before, self.altered.source.model.table.convention
        return Alternative(
            topology=topology,
            strategy=target.strategy,
            strategy_reason=target.strategy_reason,
            fullest=layout.fullest,
            read_bytes=0 if is_already else self._stored_bytes,
            written_bytes=0 if is_already else layout.tensor_bytes,
            states_lost=(*self.altered.dropped, *layout.states_not_carried),
            lost=() if is_already else (*((s, DROPPED) for s in self.altered.dropped), *lost),
            arguments=arguments,
            not_resumed=not_resumed,
            remarks=() if before is None else tuple(remarks_on_change(before, topology, library)),
            ignores_average=ignores_average,
            command="" if is_already else self._command(topology),
        )

    @cached_property
    def _stored_bytes(self) -> int:
        """Bytes of all arrays in the files."""
        fragments = self.altered.source.catalog.fragments
        return int((volumes(fragments) * ITEMSIZES[fragments["dtype"]]).sum())

    def _is_already(self, topology: Topology, target: JobTarget) -> bool:
        """Whether the job of a target reads the checkpoint as it is, and no option asks for other files."""
        before, source = self.before, self.altered.source
        if before is not None and source.job.expert_axis != "dp":
            before = replace(before, dp=topology.dp)  # data-parallel ranks write no files
        return (
            topology == before
            and target.strategy == source.job.strategy
            and self.options.get("format") in (None, source.format)
            and not FORMATS[source.format].not_loaded(source).ever
            and not any(
                value and declarations()[name].changes_bytes and name not in _OF_READING
                for name, value in self.options.items()
            )
        )

    def _arguments(self, target: JobTarget, is_already: bool, anew: bool) -> tuple[Arguments, str]:
        """The trainer's arguments for a target, and why the job would not resume at once; empty if it would."""
        job, source = target.job(self.altered.wanted), self.altered.source
        if is_already:
            job = replace(job, format=source.format, comm_overlap=source.job.comm_overlap)
        try:
            known = trainer_arguments(job)
        except UnsupportedError as error:
            return {}, str(error)
        arguments = {"resume_from_checkpoint": self.altered.store.location if is_already else TARGET, **known}
        if not anew:
            kinds = self.altered.wanted.model.kinds_of_states
            return arguments, not_read_by_part(arguments, job.library, kinds)
        return arguments | {"ignore_load_lr_and_optim": True}, "the source has no optimizer states"

    def _command(self, topology: Topology) -> str:
        words = ["paddle-reshard", "convert", self.altered.store.location, TARGET, "--to", str(topology)]
        for name, value in self.options.items():
            words += _spelled(name, value)
        return shlex.join(words)


def _spelled(name: str, value: Any) -> list[str]:
    """An option as it is given to a command; nothing of stores, whose options may hold secrets."""
    option = declarations()[name]
    if option.decides is Decides.ACCESS or option.default == value or not value:
        return []
    if option.kind is Kind.FLAG:
        return [flag_of(name)]
    if isinstance(value, Mapping):
        value = f"{name.upper()}.json"
    values = texts_of(value) if option.kind is Kind.LIST else (value,)
    return [word for text in values for word in (flag_of(name), str(text))]
