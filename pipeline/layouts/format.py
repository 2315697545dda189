"""What the rest of the product knows of a format.

Nothing outside a format's own folder asks which format it has before it: what differs from one to the next is a method
or a property here. ``formats.py`` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from paddle_reshard.pipeline.core.catalog import Catalog
    from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint, MissingPolicy
    from paddle_reshard.pipeline.layouts.files import LaidOut
    from paddle_reshard.pipeline.layouts.model import Model
    from paddle_reshard.pipeline.layouts.reading import SourceFiles
    from paddle_reshard.pipeline.layouts.rules import RuleTable


class FormatOption(NamedTuple):
    """An option of a target, as a format understands it."""

    help: str
    choices: tuple[str, ...] = ()
    """What it can be, where that can be listed."""


MUON, ADAMW_MINI = "Muon", "AdamWMini"
"""Optimizers that trainers save in some formats only."""
TARGET_META = FormatOption("model_meta.json of a job of the target topology, which supplies parameter names.")
"""The same for every format that stores parameter names."""


class Format(Protocol):
    """A format: what it is called, what can be asked of it, and how a checkpoint of it is recognised and read.

    Its module imports no NumPy, and what reads and makes its files is imported by the method that does: the command
    line asks every format for its name and options, and most checkpoints are of one.
    """

    @property
    def name(self) -> str:
        """What it is called by."""

    @property
    def help(self) -> str:
        """What it is, for the command line's help."""

    @property
    def options(self) -> Mapping[str, FormatOption]:
        """Name → what it means, of the options that say something about a target of it."""

    @property
    def average_options(self) -> Mapping[str, str]:
        """Options by which a target of it is made of the moving average; empty where it is beside the weights."""

    @property
    def model_only(self) -> bool:
        """Whether it holds a model and nothing of a training job: whatever else a source has is left out on purpose."""

    @property
    def starts_with(self) -> str:
        """Arguments with which a job starts from its parameters alone; empty where nothing but the files tells."""

    @property
    def cannot_hold(self) -> tuple[str, ...]:
        """What its files have no place for, though it is a training job's: names that ``--drop`` knows."""

    @property
    def holds_lora(self) -> bool:
        """Whether its files have a place for what LoRA trains."""

    @property
    def special_optimizers(self) -> tuple[str, ...]:
        """Optimizers whose states differ from parameter to parameter, or in shape, and which trainers save in it."""

    @property
    def by_table(self) -> bool:
        """Whether a rule table has to describe the model: its jobs cut tensors, or name parameters."""

    @property
    def loses_tensors(self) -> bool:
        """Whether its trainers lose tensors, so that others are taken in their place."""

    @property
    def index_as(self) -> Callable[[SourceFiles, Model], Catalog] | None:
        """How to read the parameters of a model that is known already; ``None``: it holds more than these."""

    def recognises(self, files: SourceFiles) -> bool:
        """Whether files are of it, and of no format that comes later in the table."""

    def index(
        self, files: SourceFiles, tables: Sequence[RuleTable], missing: MissingPolicy | None
    ) -> Checkpoint:
        """Understand a checkpoint from its metadata.

        Raises
        ------
        CheckpointError, PlanError
            If it is not one whole, consistent checkpoint that the rules cover.
        """

    def request(self, asked: Mapping[str, Any]) -> Request:
        """A target as it is asked for.

        ``asked`` has some of ``options``. Files that were given have been read: ``layout`` is :class:`Entries`,
        ``target_meta`` the parameter names, cell → structured key → name.

        Raises
        ------
        UsageError
            If a value makes no sense.
        """


class Entries(NamedTuple):
    """Entries of a small file that was given, not validated yet, and what it is called."""

    values: Mapping[str, Any]
    where: str


class Request(Protocol):
    """A target as it was asked for, every value read and in range."""

    @property
    def format(self) -> str:
        """Name of the format that it is a target of."""

    @property
    def of_average(self) -> bool:
        """Whether it is a model that is made of the moving average."""

    def target_for(self, source: Checkpoint) -> Target:
        """The same with what it leaves open taken from the source, or as its trainer does it."""


class Decision(NamedTuple):
    """Something of a target that follows from the source, or from what its trainer does."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Staged:
    """A target whose files are there and not published yet."""

    files: SourceFiles
    wanted: Checkpoint
    """The source as the target is to hold it."""
    states_not_carried: Collection[str]
    """States of which nothing is in it."""
    index: Callable[[], Checkpoint]
    """Reads it as any source."""


class Target(Protocol):
    """A target with everything decided: a frozen value that says how it is made and described."""

    @property
    def format(self) -> str:
        """Name of the format that it is a target of."""

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What a plan tells beside the target itself."""

    def in_words(self) -> str:
        """The target in a line, for people."""

    def facts(self) -> dict[str, str]:
        """What tells it from other targets of the same source, for its manifest."""

    def data(self) -> dict[str, Any]:
        """What is asked of it and decided, as plain data with stable names."""

    def cannot_hold_lora(self, model: Model) -> str | None:
        """Why this target cannot hold the LoRA tensors of ``model``; ``None``: it can.

        Asked only of formats with ``holds_lora``.
        """

    def lay_out(
        self, source: Checkpoint, wanted: Checkpoint, sizes: Mapping[str, int], folders: Sequence[str]
    ) -> LaidOut:
        """Every file, byte for byte, and what becomes of the source's other files.

        Parameters
        ----------
        source, wanted
            The source without the states for which there is no place, and the same as the target is to hold it.
        sizes, folders
            Path of every file of the source → size in bytes; names of folders in it.

        Raises
        ------
        PlanError
            If the source cannot become this target.
        """

    def check_staged(self, staged: Staged) -> None:
        """Refuse unless what is staged reads back as the checkpoint that was planned.

        Raises
        ------
        CheckpointError
        """
