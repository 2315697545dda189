"""``resume``: what a job goes on from on the nodes and cards that it has, made where it cannot read it as it is.

The newest complete checkpoint of a run, as ``ls`` judges it, is read as it is, or the files that the ranks of this node
read are made of it in a local folder::

    DIR/ranks-8-15/checkpoint-1000     the portion of the node with these ranks

A folder for each portion, so that a disk which nodes share by mistake holds all of them. What an earlier start left
there is used again if it is the same portion and not visibly damaged, continued if it is unfinished, and otherwise
replaced: a portion can be made again, and nothing but resuming reads it. What no manifest of a portion lists stays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from paddle_reshard.pipeline.api import clean
from paddle_reshard.pipeline.checkpoint.training_job import not_read_by_part
from paddle_reshard.pipeline.convert.conversion import ConversionReport, convert_with
from paddle_reshard.pipeline.convert.integrity import check_target_quickly, manifest_of
from paddle_reshard.pipeline.convert.plan import ConversionPlan
from paddle_reshard.pipeline.core.errors import CheckpointError, PlanError, StaleSessionError, UsageError
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.core.ranks import ranks_in_words
from paddle_reshard.pipeline.core.shown import readable_bytes
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.trainer_files import CHECKPOINT, is_by_product, steps_of
from paddle_reshard.pipeline.examine.cards import NEAREST, plan_cards
from paddle_reshard.pipeline.examine.inspection import Inspection
from paddle_reshard.pipeline.examine.launch import launch, remarks_on_change
from paddle_reshard.pipeline.examine.overview import look_at
from paddle_reshard.pipeline.formats.registry import FORMATS
from paddle_reshard.pipeline.formats.trainer_arguments import Arguments, trainer_arguments
from paddle_reshard.pipeline.request.options import ConversionOptions, ConvertOptions, declarations
from paddle_reshard.pipeline.request.parse import locations_of, parse_request
from paddle_reshard.pipeline.request.read_options import InspectOptions, ResumeOptions
from paddle_reshard.pipeline.training.launcher import Node
from paddle_reshard.storage.documents.manifest import own_manifest
from paddle_reshard.storage.listing import CheckpointRoot, LocalRoot, open_root
from paddle_reshard.storage.local.folders import remove_files
from paddle_reshard.storage.local.source import LocalSource
from paddle_reshard.storage.locate import is_local, local_path, source_access

BEGINNING = "no checkpoint"
"""Stands for the digest of what a job begins from that has no checkpoint yet."""
OF_RANKS = "ranks-"
"""How the names of folders with portions begin."""
_OF_READING = InspectOptions.__annotations__.keys() | {"allow_missing", "format", "sharding_strategy"}
"""Options with which the job of a checkpoint reads it as it is."""

Say = Callable[[str], None]
"""Tells the user a sentence."""
Check = Callable[[Arguments, Topology, str], None]
"""Refuses the arguments of a job of this topology and library, before anything is moved."""


@dataclass(frozen=True, slots=True)
class CompleteCheckpoint:
    """A complete checkpoint of a run."""

    name: str
    files: Mapping[str, str]
    """Name of each file → what changes with it."""
    seen: Inspection


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What a job goes on from."""

    checkpoint: str | None
    """Name of the checkpoint in its run; ``None``: there is none yet, the job begins."""
    path: str = ""
    """Folder from which the trainers of this node resume."""
    whole: str = BEGINNING
    """Digest of what all nodes together resume from: equal on all of them."""
    arguments: Arguments | None = None
    """Arguments with which they start."""
    topology: Topology | None = None
    library: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Start:
    """The start of a job on one node."""

    run: str
    """Path or URL of the folder with the checkpoints."""
    local: str
    """Folder of this node for the files of its ranks."""
    node: Node
    to: Topology | None
    cards: int | None
    """Number of cards of which the topology is chosen, if ``to`` does not give it."""
    options: ResumeOptions
    check: Check
    say: Say
    observe: Observer = ignore_events

    def __post_init__(self) -> None:
        if (self.to is None) == (self.cards is None):
            raise UsageError(
                "give the topology of the job, --to tp=2,pp=2, or the number of its cards, --cards N"
            )
        if not is_local(self.local):
            raise UsageError(f"{self.local}: trainers read a folder of their machine; give one as --local")
        if CHECKPOINT.fullmatch(self.run.rstrip("/").rpartition("/")[2]):
            raise UsageError(f"{self.run} is a checkpoint; give the folder of the run, in which it lies")
        if self.to is not None:
            self.node.ranks_of(self.to)

    def root(self) -> CheckpointRoot:
        """The folder with the checkpoints."""
        access = source_access(self.options)
        return open_root(self.run, access.options)

    def find(self) -> CompleteCheckpoint | None:
        """The newest complete checkpoint; ``None`` if the trainer has not finished any yet.

        Raises
        ------
        CheckpointError
            If there are only damaged ones, with which a job had better not begin anew without being asked.
        """
        here, damaged = self.root(), []
        steps = [name for _, name in steps_of(here.folders())]
        for number in reversed(range(len(steps))):
            name = steps[number]
            files = here.files(name)
            if not files:  # removed since it was listed
                continue
            seen = look_at(here, name, files, _before(here, steps[:number]), self._reading(), self.observe)
            if seen.problem is None and seen.described is not None:
                return CompleteCheckpoint(name, files, seen.described)
            self.say(f"{name} is passed over: {seen.problem}")
            if not seen.unfinished:
                damaged.append(f"{name}: {seen.problem}")
        if damaged:
            raise CheckpointError(
                f"{here.location}: has no complete checkpoint: {'; '.join(damaged)}; to begin anew, move these away"
            )
        return None

    def make_ready(self, found: CompleteCheckpoint | None, agree: Callable[[str], object]) -> ResumePoint:
        """Have everything in place from which the ranks of this node resume.

        ``agree`` is called with the digest of the whole before anything is moved; an error refuses it.
        """
        if found is None:
            agree(BEGINNING)
            return ResumePoint(None)
        location = self.root().at(found.name)
        topology = self.to or self._nearest(location)
        self.node.ranks_of(topology)
        if is_local(self.run) and reads_as_it_is(found.seen, topology, self.options):
            return self._as_it_is(found, location, topology, agree)
        return self._converted(found, location, topology, agree)

    def _reading(self) -> InspectOptions:
        return cast(
            InspectOptions, {n: v for n, v in self.options.items() if n in InspectOptions.__annotations__}
        )

    def _nearest(self, location: str) -> Topology:
        """The topology that changes least."""
        assert self.cards is not None  # noqa: S101 (checked when this was made)
        options = cast(ConversionOptions, dict(self.options))
        found = plan_cards(location, self.cards, options, self.observe)
        if found.nearest is None or found.any_topology:
            raise PlanError(
                f"{location}: of {self.cards} cards no topology is the nearest to that of the checkpoint, which is for "
                "any; give that of the job: --to tp=2,sharding=4"
                if found.any_topology or not found.has_topology
                else str(found.chosen())
            )
        self.say(f"{found.nearest.topology}, the nearest of {self.cards} cards: {NEAREST}")
        return found.nearest.topology

    def _as_it_is(
        self, found: CompleteCheckpoint, location: str, topology: Topology, agree: Callable[[str], object]
    ) -> ResumePoint:
        made = launch(location, to=topology, observe=self.observe, **self._reading())
        how = {name: value for name, value in made.arguments.items() if name != "resume_from_checkpoint"}
        whole = _digest(found.name, files_digest(found), sorted(how.items()), str(topology))
        point = ResumePoint(
            found.name, location, whole, made.arguments, topology, found.seen.convention, made.remarks
        )
        self.check(made.arguments, topology, found.seen.convention)
        agree(whole)
        self.say(f"{found.name}: the job of {topology} reads it as it is, nothing is converted")
        return point

    def _converted(
        self, found: CompleteCheckpoint, location: str, topology: Topology, agree: Callable[[str], object]
    ) -> ResumePoint:
        ranks = tuple(self.node.ranks_of(topology))
        local = LocalRoot(local_path(self.local))
        target = local.at(f"{OF_RANKS}{ranks_in_words(ranks)}/{found.name}")
        options: dict[str, Any] = {"format": _format_for(found.seen), **self.options}
        options |= {"to": topology, "ranks": ranks, "resume": True, "overwrite": True}
        request = parse_request(cast(ConvertOptions, options), target)
        wholes: list[str] = []

        def approve(conversion: ConversionPlan) -> None:
            assert conversion.portion is not None  # noqa: S101 (ranks are given)
            job = conversion.portion.job
            if why := parts_not_read(found.seen, job.format, job.strategy):
                raise UsageError(f"{found.name}: {why}: give --format hybrid-plain, or none")
            arguments = {"resume_from_checkpoint": target, **trainer_arguments(job)}
            self.check(arguments, topology, job.library)
            agree(conversion.portion.digest)
            wholes.append(conversion.portion.digest)
            self._forget_others(local, location)

        def convert() -> ConversionReport:
            return convert_with(locations_of((location,), target, request), request, self.observe, approve)

        self._check_left(Path(target))
        try:
            report = convert()
        except StaleSessionError:  # of an earlier start, from another checkpoint or for another job
            self.say(f"{target}: what an earlier start left unfinished is of no use, and removed")
            clean(target)
            report = convert()
        made = launch(target)
        size = readable_bytes(report.plan.plan.written_bytes)
        how = f"{size} written" if report.moved.written_bytes else f"{size} are there already, and used again"
        self.say(
            f"{found.name}: the files of ranks {ranks_in_words(ranks)} of {topology} are in {target}, {how}"
        )
        before = found.seen.topology
        remarks = () if before is None else tuple(remarks_on_change(before, topology, made.library))
        return ResumePoint(found.name, target, wholes[-1], made.arguments, topology, made.library, remarks)

    def _forget_others(self, local: LocalRoot, location: str) -> None:
        """Remove portions of other checkpoints of this run, of which no job resumes any more."""
        run, _, name = location.rpartition("/")
        for folder in local.folders():
            portions = LocalRoot(local.root / folder)
            for _, other in steps_of(portions.folders() if folder.startswith(OF_RANKS) else []):
                made = _portion_in(portions, other)
                source = None if made is None else made.get("source")
                at = str(source.get("location")) if isinstance(source, dict) else ""
                if made is None or other == name or at.rpartition("/")[0] != run:
                    continue
                gone = _remove(portions.root / other, made)
                said = "removed, made for an earlier start" if gone else "what else is there is kept"
                self.say(f"{portions.at(other)}: {said}")

    def _check_left(self, folder: Path) -> None:
        """Remove a portion that is visibly damaged, and what Paddle left in it when a trainer read it."""
        made = _portion_in(LocalRoot(folder.parent), folder.name)
        if made is None:
            return
        store = LocalSource(folder)
        for path in filter(is_by_product, store.sizes()):
            (folder / path).unlink(missing_ok=True)
        store = LocalSource(folder)
        if damages := check_target_quickly(store, manifest_of(store)):
            self.say(f"{folder}: {damages[0].path}: {damages[0].detail}; it is made again")
            _remove(folder, made)


def _portion_in(portions: LocalRoot, name: str) -> Mapping[str, Any] | None:
    """The manifest of a portion of ours; ``None`` if there is none."""
    made = own_manifest(portions.read(f"{name}/{MANIFEST}"))
    return made if made is not None and "portion" in made else None


def _remove(folder: Path, made: Mapping[str, Any]) -> bool:
    """Remove what the manifest of a portion lists, and what Paddle left beside that. Whether nothing else was there."""
    listed = made.get("files")
    known = {MANIFEST, *(listed if isinstance(listed, dict) else ())}
    return remove_files(folder, [p for p in LocalSource(folder).sizes() if p in known or is_by_product(p)])


def reads_as_it_is(found: Inspection, topology: Topology, options: ResumeOptions) -> bool:
    """Whether the trainers of a job find in a checkpoint what they ask for, and no other files are asked for."""
    altering = {name for name, value in options.items() if value and declarations()[name].changes_bytes}
    format = FORMATS[found.format]
    if (
        altering - _OF_READING
        or format.model_only
        or found.not_loaded.by(topology)
        or parts_not_read(found, found.format, found.sharding_strategy)
    ):
        return False
    if found.topology is not None:
        return (
            options.get("format") in (None, found.format)
            and options.get("sharding_strategy") in (None, found.sharding_strategy)
            # Data-parallel ranks write no files, unless they share experts out.
            and _without_dp(topology, found) == _without_dp(found.topology, found)
        )
    return (
        not options.get("format")
        and not options.get("sharding_strategy")
        and format.loaded_with(found.convention, "none") is not None
    )


def _without_dp(topology: Topology, found: Inspection) -> tuple[int, ...]:
    shares_experts = found.topology is not None and found.topology.dp > 1
    axes = topology.tp, topology.pp, topology.vpp, topology.sharding, topology.ep
    return (*axes, topology.dp) if shares_experts else axes


def parts_not_read(found: Inspection, format: str, strategy: str | None) -> str:
    """Why the trainer does not read the parts of ranks by ``load_sharded_model``; empty: it does, or whole files."""
    reads = FORMATS[format].loaded_with(found.convention, strategy or "none") or {}
    if found.adapter is not None and "load_sharded_model" in reads:  # docs/lora.md
        return "with load_sharded_model the trainer gives LoRA adapters to the first rank alone"
    return not_read_by_part(reads, found.convention, (t.accumulators for t in found.tensors))


def _format_for(found: Inspection) -> str:
    """The format in which ranks find files of their own."""
    if "to" in FORMATS[found.format].options:
        return "hybrid-plain" if parts_not_read(found, found.format, "stage1v2") else found.format
    return "flex" if found.convention == "paddleformers" else "hybrid"


def files_digest(found: CompleteCheckpoint) -> str:
    """A digest of the listing of a checkpoint: equal where nodes see the same files in the same state."""
    return _digest(sorted(found.files.items()))


def _before(here: CheckpointRoot, earlier: list[str]) -> frozenset[str]:
    """The files of the last of the ``earlier`` checkpoints that the trainer wrote."""
    for name in reversed(earlier):
        files = here.files(name)
        if MANIFEST not in files:
            return frozenset(files)
    return frozenset()


def _digest(*values: Any) -> str:
    text = json.dumps(values)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
