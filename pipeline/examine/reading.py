"""How ``verify``, ``diff`` and ``fingerprint`` read checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddle_reshard.clusters.choose import choose_engine
from paddle_reshard.clusters.engine import Engine
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.checkpoint.reading import check_given_config
from paddle_reshard.pipeline.core.choices import READ_REPLICAS, parse_choice
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.events import Observer
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.pipeline.core.units import DEFAULT_MEMORY, PathLike, parse_memory, texts_of
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.indexing.opening import open_checkpoint
from paddle_reshard.pipeline.indexing.pair import Contents, index_pair
from paddle_reshard.pipeline.model.rules.tables import RuleTables
from paddle_reshard.pipeline.planning.compare import SIDE_A, SIDE_B
from paddle_reshard.pipeline.planning.metadata import check_metadata, spare_bytes
from paddle_reshard.pipeline.planning.settings import PlanSettings, PlanSizes
from paddle_reshard.pipeline.request.inputs import check_convention, given_inputs
from paddle_reshard.storage.locate import Access, is_local, source_access, target_access
from paddle_reshard.storage.store import Source
from paddle_reshard.storage.views import JoinedSource, Mount


@dataclass(frozen=True)
class Reader:
    """Reads checkpoints as the options of a function that only reads say."""

    access: tuple[Access, Access]
    """Access to the first checkpoint, and to the second."""
    rules: PathLike | None
    config: PathLike | None
    convention: str | None
    """The library as whose model one that fits several is read."""
    missing: MissingPolicy
    planning: PlanSettings
    engine: Engine
    """Where groups are run."""
    observe: Observer

    @classmethod
    def of(cls, options: Mapping[str, Any], observe: Observer, sizes: PlanSizes = PlanSizes()) -> Reader:
        """The reader that options ask for."""
        budget_bytes = parse_memory(options.get("memory", DEFAULT_MEMORY))
        compare_replicas = parse_choice(
            options.get("replicas", READ_REPLICAS[0]), READ_REPLICAS, "choice of replicas"
        )
        engine = choose_engine(options.get("cluster", "inline"), options.get("workers"), budget_bytes)
        return cls(
            access=(source_access(options), target_access(options)),
            rules=options.get("rules"),
            config=options.get("config"),
            convention=options.get("convention"),
            missing=MissingPolicy(allowed=texts_of(options.get("allow_missing", ()))),
            planning=PlanSettings(budget_bytes, compare_replicas, sizes=sizes),
            engine=engine.observed(observe),
            observe=observe,
        )

    def open(self, location: str) -> Source:
        """Open a checkpoint."""
        return open_checkpoint(location, self.access[0])

    def index(self, store: Source, pieces: bool = False) -> Checkpoint:
        """Index a checkpoint, see :func:`index_checkpoint`."""
        indexing = self.engine.indexing(self.observe)
        tables, config = self._inputs()
        check_given_config(store, config)
        checkpoint = index_checkpoint(store, tables, config, self.missing, indexing, pieces)
        check_convention(self.convention, store.location, checkpoint.model.table)
        return checkpoint

    def _inputs(self) -> tuple[RuleTables, dict[str, Any] | None]:
        return given_inputs(self.rules, self.config, self.convention)

    def open_two(self, a: str, b: str) -> list[Source]:
        """Open two checkpoints that are to be compared."""
        return list(map(open_checkpoint, (a, b), self.access))

    def index_two(self, stores: Sequence[Source]) -> tuple[Contents, Contents]:
        """Index two checkpoints that are to be compared, within the memory of the process that runs groups."""
        sides = index_pair(
            stores[0], stores[1], *self._inputs(), self.missing, self.engine.indexing(self.observe)
        )
        if self.engine.in_process:
            tensors = max(len(side.catalog.tensors) for side in sides)
            pieces = max(len(side.catalog.fragments) for side in sides)
            check_metadata(tensors, pieces, 0, self.planning.budget_bytes, spare_of(stores))
        return sides


def joined(stores: Sequence[Source]) -> JoinedSource:
    """The files of two checkpoints, by their paths in the plan of a comparison."""
    return JoinedSource((Mount(SIDE_A, stores[0]), Mount(SIDE_B, stores[1])))


def all_local(stores: Sequence[Source]) -> bool:
    """Whether all files are on disks of this machine."""
    return all(is_local(store.location) for store in stores)


def spare_of(stores: Sequence[Source]) -> int:
    """Part of a process's footprint that is free for metadata while these stores are read."""
    return spare_bytes(all_local(stores))


def check_states(chosen: Collection[str], known: Collection[str]) -> None:
    """Refuse states that no tensor is of, and a choice of none, with which any two checkpoints would be equal."""
    if not chosen:
        raise UsageError(f"no state is chosen; known: {', '.join(sorted(known))}")
    if unknown := set(chosen) - set(known):
        raise UsageError(
            f"neither checkpoint has the state {min(unknown)!r}; known: {', '.join(sorted(known))}"
            f"{did_you_mean(min(unknown), known)}"
        )
