"""What alters a checkpoint on request: the kinds of values that do, what they are applied to, and what they read with.

A conversion has an ordered tuple of changes, which the parse of a request makes
(:data:`~paddle_reshard.pipeline.changes.kinds.KINDS`). Nothing heavy is imported here: a request is parsed before NumPy
is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self

    from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
    from paddle_reshard.pipeline.checkpoint.format import Request
    from paddle_reshard.pipeline.checkpoint.reading import IndexFiles
    from paddle_reshard.pipeline.model.rules.tables import RuleTables
    from paddle_reshard.storage.locate import Access
    from paddle_reshard.storage.store import Source


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Elements of the source that go into no target."""

    state: str
    reason: str
    tensors: int
    elements: int


@dataclass(frozen=True, slots=True)
class Altered:
    """A checkpoint as the changes so far leave it."""

    own: Source
    """The files of the source alone."""
    store: Source
    """The files of everything that is read."""
    source: Checkpoint
    """What is read, in the shapes that it has there."""
    wanted: Checkpoint
    """The same as the targets are to hold it: with another size of the vocabulary, or another config."""
    dropped: tuple[str, ...] = ()
    """States of the source that are excluded by request."""
    excluded: tuple[LeftOut, ...] = ()
    """What is excluded by request, counted."""

    @classmethod
    def of(cls, store: Source, checkpoint: Checkpoint) -> Altered:
        """A checkpoint that nothing has altered yet."""
        return cls(store, store, checkpoint, checkpoint).read_as(checkpoint, store)

    def read_as(self, checkpoint: Checkpoint, store: Source) -> Altered:
        """With another checkpoint to read, which the targets are to hold as it is, and the store that serves it."""
        history = replace(checkpoint.history, former_config=checkpoint.model.config)
        read = replace(checkpoint, history=history)
        return replace(self, store=store, source=read, wanted=read)

    def each(self, change: Callable[[Checkpoint], Checkpoint]) -> Altered:
        """With the same change of what is read and of what is wanted, which stay one object if they are."""
        source = change(self.source)
        wanted = source if self.wanted is self.source else change(self.wanted)
        return replace(self, source=source, wanted=wanted)


@dataclass(frozen=True, slots=True)
class Reading:
    """With what checkpoints are read: the source, and those that changes bring."""

    tables: RuleTables
    config: Mapping[str, Any] | None
    """The ``config.json`` that the user gives."""
    missing: MissingPolicy
    index_files: IndexFiles
    pieces: bool = True
    """Whether pieces of tp ranks are enough where no rule table tells the whole tensors."""


Step = Callable[[Altered, Reading], Altered]
"""A change that is ready to be applied."""


@dataclass(frozen=True)
class Change(ABC):
    """Something that alters a checkpoint on request: a value, as the request states it."""

    keeps_values: ClassVar[bool] = True
    """Whether every tensor that remains has the values of the source's tensor of that name."""
    needs_whole: ClassVar[bool] = False
    """Whether it needs whole tensors: pieces of tp ranks are not enough."""
    reads_config: ClassVar[bool] = False
    """Whether ``--config`` is for what it brings or makes, so that it may differ from the source's own."""
    option: ClassVar[str] = ""
    """The option that asks for it; empty if the targets do."""

    @classmethod
    def from_option(cls, value: Any, targets: Sequence[Request]) -> Self | None:
        """The change, if a conversion to these ``targets`` asks for it.

        Parameters
        ----------
        value
            The value of its option; ``None`` if that is not given.

        Raises
        ------
        UsageError
            If it does not apply to the targets.
        """
        return cls(value) if value else None  # type: ignore[call-arg]  # the one field of such a change

    def lets_lack(self, missing: MissingPolicy) -> MissingPolicy:
        """What the source may lack if this change is to follow."""
        return missing

    @abstractmethod
    def opened(self, access: Access) -> Step:
        """The change with what it brings open, so that a mistake there is told before the source is read."""


@dataclass(frozen=True)
class OwnChange(Change):
    """A change for which the source is enough."""

    def opened(self, access: Access) -> Step:
        """The change: there is nothing to open."""
        return self._apply

    @abstractmethod
    def _apply(self, altered: Altered, reading: Reading) -> Altered:
        """The checkpoint with the change.

        Raises
        ------
        ReshardError
            If it does not fit the checkpoint.
        """


@dataclass(frozen=True)
class LocatedChange(Change):
    """A change that takes tensors or files from another location, which the user names."""

    keeps_values: ClassVar[bool] = False
    location: str
