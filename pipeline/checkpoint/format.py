"""The interface of a checkpoint format.

Code outside a format's folder never checks which format it deals with: all differences are fields here.
``formats/registry.py`` lists the formats.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, runtime_checkable

from paddle_reshard.pipeline.core.topology import STRATEGIES, Topology

if TYPE_CHECKING:
    from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, Donor, MissingPolicy
    from paddle_reshard.pipeline.checkpoint.files import LaidOut, SourceListing
    from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
    from paddle_reshard.pipeline.checkpoint.training_job import TrainingJob
    from paddle_reshard.pipeline.core.catalog import Catalog
    from paddle_reshard.pipeline.model.model import Model
    from paddle_reshard.pipeline.model.rules.tables import RuleTables


class FormatOption(NamedTuple):
    """An option of a target, with the meaning that a format gives it."""

    help: str
    choices: tuple[str, ...] = ()
    """Possible values, if they can be listed."""
    default: str = ""
    """The default, where formats differ in nothing else."""


MAX_SHARD_SIZE = FormatOption(
    "maximum size of the tensors in a file; a larger tensor has its own, with its states if the format keeps them "
    "together."
)
"""Shared by all formats of whole tensors."""
SHARDING_STRATEGY = FormatOption(
    "sharding strategy of the target job. Default: the source's if the target's topology "
    "allows it, otherwise the trainer's default: PaddleFormers stage1v2, PaddleNLP stage1v1.",
    STRATEGIES,
)
PADDLE_VERSION = FormatOption(
    "Paddle version that is to read the target: 3.0, 3.2, 3.3 (default), or 3.4 for pickles of protocol 5."
)
"""Shared by all formats that Paddle itself reads."""


class NotLoaded(NamedTuple):
    """Why the trainers do not load a checkpoint, in sentences with a way out; empty: they do."""

    ever: str = ""
    """In no job."""
    under_tp: str = ""
    """In jobs with another degree of tensor parallelism than ``tp``."""
    with_stages: str = ""
    """In jobs with pipeline stages."""
    tp: int = 1
    """0: ``under_tp`` does not depend on it."""
    expert_tp: int = 0
    """The same for routed experts, of which ranks of ``ep`` have whole ones."""
    instead: str = ""
    """A format that such a job loads, where from this one it starts, with wrong values."""
    alone: str = ""
    """In jobs on one card."""

    def by(self, topology: Topology) -> str:
        """Why a job of this topology does not."""
        of_expert = 1 if topology.ep > 1 else topology.tp
        other_tp = self.tp not in (0, topology.tp) or self.expert_tp not in (0, of_expert)
        return (
            self.ever
            or (self.under_tp if other_tp else "")
            or (self.with_stages if topology.pp > 1 else "")
            or (self.alone if topology.world_size == 1 else "")
        )

    @property
    def reasons(self) -> tuple[str, ...]:
        """All of them, whatever the job."""
        return tuple(filter(None, (self.ever, self.under_tp, self.with_stages, self.alone)))


LOADED: Final = NotLoaded()
"""Every job loads it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Format:
    """A format, as data: its name and options, what trainers do with it, and how its checkpoints are read.

    The defaults are those of a format with whole tensors of parameters and states, in files that say nothing of ranks.

    The module of a format does not import NumPy, and its functions import what reads and writes files: the command line
    needs the names and options of all formats, but a command rarely uses more than two.
    """

    name: str
    help: str
    recognises: Callable[[SourceFiles], bool]
    """Whether files have this format, provided that no later format in the table recognises them."""
    index: Callable[[SourceFiles, RuleTables, MissingPolicy], Checkpoint]
    """Interprets a checkpoint from its metadata.

    A ``CheckpointError`` or ``PlanError`` if it is incomplete or inconsistent, or no rule covers a tensor.
    """
    request: Callable[[Mapping[str, Any]], Request]
    """Parses the options of a target, some of :attr:`options`; a ``UsageError`` if a value is invalid.

    Files have already been read: ``layout`` is :class:`Entries`, and ``names``, from a ``model_meta.json`` in it, maps
    cell → structured key → parameter name.
    """
    index_as: Callable[[SourceFiles, Model], Catalog] | None = None
    """Reads the parameters of a known model; ``None`` for formats that hold more than parameters."""
    read_donor: Callable[[SourceFiles], Donor] | None = None
    """Reads the model that completes a target (``--like``); ``None`` for formats whose targets take nothing."""
    options: Mapping[str, FormatOption]
    """Name → option, for the options that apply to a target of this format."""
    needs_topology: bool = False
    """Whether a target must be given the topology of its job (``to``)."""
    average_options: Mapping[str, str] = field(default_factory=dict)
    """Options that export the moving average as a model; empty if the format stores it along with the weights."""
    model_only: bool = False
    """Whether it holds only a model, so that everything else in a source is omitted intentionally."""
    starts_with: str = ""
    """Arguments with which a job starts from its parameters alone; empty where nothing but the files tells."""
    starts_with_masters: str = ""
    """Arguments with which a job starts from parameters and master weights alone; empty where none can."""
    cannot_hold: tuple[str, ...] = ()
    """Parts of a training checkpoint that its files cannot hold: names that ``--drop`` accepts."""
    holds_lora: bool = False
    """Whether its files can hold LoRA."""
    special_optimizers: tuple[str, ...] = ()
    """Optimizers with unusual states (fewer for some parameters, or other shapes) that trainers save in it."""
    by_table: bool = False
    """Whether it needs a rule table, because its jobs cut tensors or name parameters."""
    loaded_with: Callable[[str, str], Mapping[str, str | bool] | None] = lambda library, strategy: None
    """Arguments with which a trainer reads it and goes on saving it; ``None``: it cannot, or how is not known."""
    not_loaded: Callable[[Checkpoint], NotLoaded] = lambda checkpoint: LOADED
    """Which jobs of a trainer do not load a checkpoint of this format, though its arguments are known."""
    rank_of: Callable[[str], Mapping[str, int] | None] = lambda path: None
    """Axis → coordinate of the rank that writes a file, as far as its name tells; ``None``: no rank does."""
    process_of: Callable[[str], int | None] = lambda path: None
    """Number of the process that wrote a file, for formats whose file names hold no coordinates; else ``None``."""


class Entries(NamedTuple):
    """Entries of a small file, not yet validated, and its name."""

    values: Mapping[str, Any]
    where: str


class Request(Protocol):
    """A requested target, with all values parsed and in range."""

    @property
    def format(self) -> str:
        """Name of its format."""

    @property
    def of_average(self) -> bool:
        """Whether it exports the moving average as a model."""

    @property
    def of_stored_parameters(self) -> bool:
        """Whether it holds nothing but parameters as they are stored, so that nothing else of a source is needed."""

    def target_for(self, source: Checkpoint) -> Target:
        """The target, with open choices taken from the source or from the trainer's defaults."""


@dataclass(frozen=True)
class Staged:
    """A target whose files are written but not yet published."""

    files: SourceFiles
    wanted: Checkpoint
    """The source with all requested changes applied."""
    states_not_carried: Collection[str]
    index: Callable[[], Checkpoint]
    """Reads it as a source."""


class Target(Protocol):
    """A target with all choices made: a frozen value that lays out, describes and checks its files."""

    @property
    def format(self) -> str:
        """Name of its format."""

    def in_words(self) -> str:
        """One-line description of the target."""

    def facts(self) -> dict[str, str]:
        """Facts that distinguish it from other targets of the same source, for its manifest."""

    def data(self) -> dict[str, Any]:
        """Its options and choices, as plain data with stable names."""

    def cannot_hold_lora(self, model: Model) -> str | None:
        """Why this target cannot hold the LoRA tensors of ``model``; ``None``: it can.

        Asked only of formats with ``holds_lora``.
        """

    def lay_out(self, source: Checkpoint, wanted: Checkpoint, listing: SourceListing) -> LaidOut:
        """Lay out every tensor file, byte for byte, and decide about the source's small files.

        ``source`` lacks states that the format cannot hold; ``wanted`` is the same with all requested changes applied;
        ``listing`` is of the source. A ``PlanError`` says why the source cannot become this target.
        """

    def check_staged(self, staged: Staged) -> None:
        """Check that the staged files read back as the planned checkpoint; a ``CheckpointError`` if not."""


class RankBytes(NamedTuple):
    """What a rank of a job holds, in bytes by state."""

    parameters: int
    """As the rank trains with them, whether or not its files hold them."""
    master_weights: int
    moments: int
    """All states of the optimizer but the master weights."""
    ema: int

    @property
    def on_card(self) -> int:
        """Without the average, which the trainer keeps in the memory of the host."""
        return self.parameters + self.master_weights + self.moments


@dataclass(frozen=True, slots=True)
class Outline:
    """What is known of a target without laying out a file."""

    fullest: RankBytes
    """The rank with most bytes on its card."""
    tensor_bytes: int
    """Bytes of all tensors in its files, padding included."""
    not_carried: tuple[tuple[str, str], ...]
    """``(path, why it is not in the target)``."""
    states_not_carried: tuple[str, ...] = ()
    """States that its format cannot hold."""


@runtime_checkable
class JobTarget(Target, Protocol):
    """A target for a job of one topology, in which every rank reads files of its own."""

    @property
    def topology(self) -> Topology:
        """The topology of the job."""

    @property
    def strategy(self) -> str:
        """Its sharding strategy."""

    @property
    def strategy_reason(self) -> str:
        """Why it has this strategy, for users."""

    def job(self, source: Checkpoint) -> TrainingJob:
        """The job that goes on training the source in this topology."""

    def outline(self, source: Checkpoint, wanted: Checkpoint, listing: SourceListing) -> Outline:
        """What :meth:`lay_out` would make of the same arguments, without the files; errors are the same."""
