"""Every kind of change, in the order in which a conversion applies them.

What each does is in a module of its own, which is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from paddle_reshard.pipeline.changes.change import Altered, Change, LocatedChange, OwnChange, Reading, Step
from paddle_reshard.pipeline.core.choices import MasterWeights
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.tensors import MTP
from paddle_reshard.pipeline.formats.registry import FORMATS, formats_to_complete, names_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from paddle_reshard.pipeline.changes.aoa.language import AoaProgram
    from paddle_reshard.pipeline.checkpoint.checkpoint import MissingPolicy
    from paddle_reshard.pipeline.checkpoint.format import Request
    from paddle_reshard.pipeline.model.lora_config import Adapter
    from paddle_reshard.storage.locate import Access


@dataclass(frozen=True)
class Fill(LocatedChange):
    """``--fill``: what the source lacks, from another checkpoint or a file."""

    option: ClassVar[str] = "fill"

    def lets_lack(self, missing: MissingPolicy) -> MissingPolicy:
        """Anything that it may bring."""
        return replace(missing, fills=True)

    def opened(self, access: Access) -> Step:
        """The change, with the checkpoint or file open."""
        from paddle_reshard.pipeline.changes.fill import filled, open_filling

        return partial(filled, open_filling(self.location, access))


@dataclass(frozen=True)
class GiveAdapter(OwnChange):
    """``--lora-config``: the ``lora_config.json`` of a source that has none."""

    option: ClassVar[str] = "lora_config"
    adapter: Adapter

    def _apply(self, altered: Altered, reading: Reading) -> Altered:
        from paddle_reshard.pipeline.checkpoint.lora import with_adapter

        return altered.each(lambda checkpoint: with_adapter(checkpoint, self.adapter, altered.own.location))


@dataclass(frozen=True)
class MergeInto(LocatedChange):
    """``--merge-into``: the base model, with the LoRA of the source added to it."""

    option: ClassVar[str] = "merge_into"
    needs_whole: ClassVar[bool] = True
    reads_config: ClassVar[bool] = True

    def opened(self, access: Access) -> Step:
        """The change, with the base open."""
        from paddle_reshard.pipeline.changes.merge import merged
        from paddle_reshard.pipeline.indexing.opening import open_checkpoint

        return partial(merged, open_checkpoint(self.location, access))


@dataclass(frozen=True)
class Rewrite(OwnChange):
    """``--aoa``: tensors renamed, split, concatenated, transposed or cast by AOA statements."""

    option: ClassVar[str] = "aoa"
    keeps_values: ClassVar[bool] = False
    needs_whole: ClassVar[bool] = True
    reads_config: ClassVar[bool] = True
    program: AoaProgram
    library: str | None
    """``--convention``: the library whose rule tables describe the source and the result; ``None``: files tell it."""
    by_table: bool
    """Whether the targets need a rule table for the result."""

    @classmethod
    def from_option(
        cls, value: tuple[AoaProgram, str | None] | None, targets: Sequence[Request]
    ) -> Self | None:
        """The change, if statements are given."""
        return None if value is None else cls(*value, needs_rule_table(targets))

    def _apply(self, altered: Altered, reading: Reading) -> Altered:
        from paddle_reshard.pipeline.changes.aoa.apply import rewrite
        from paddle_reshard.pipeline.changes.as_stored import as_statements_see, check_library

        if self.library is not None:
            check_library(altered.source, self.library)
        tables = reading.tables if self.by_table else None
        seen = as_statements_see(altered, reading)
        return seen.each(
            lambda checkpoint: rewrite(checkpoint, self.program, tables, reading.config, self.library)
        )


@dataclass(frozen=True)
class ToConvention(OwnChange):
    """``--convention``: the names and layouts of another library."""

    option: ClassVar[str] = "convention"
    keeps_values: ClassVar[bool] = False
    reads_config: ClassVar[bool] = True
    library: str

    def _apply(self, altered: Altered, reading: Reading) -> Altered:
        from paddle_reshard.pipeline.changes.convention import in_convention

        return in_convention(self.library, altered, reading)


@dataclass(frozen=True)
class DivideAverage(OwnChange):
    """An average that started at zero, divided by the sum of its weights: a target is to be a model made of it."""

    targets: int

    @classmethod
    def from_option(cls, value: None, targets: Sequence[Request]) -> Self | None:
        """The change, if a target is a model made of the average."""
        return cls(len(targets)) if any(asked.of_average for asked in targets) else None

    def _apply(self, altered: Altered, reading: Reading) -> Altered:
        from paddle_reshard.pipeline.changes.average import divided

        return divided(altered, self.targets)


@dataclass(frozen=True)
class Drop(OwnChange):
    """``--drop``: without its average, its layers of multi-token prediction, or a head of its own."""

    option: ClassVar[str] = "drop"
    names: tuple[str, ...]
    """Names in :data:`~paddle_reshard.pipeline.core.tensors.DROPPABLE`."""

    def lets_lack(self, missing: MissingPolicy) -> MissingPolicy:
        """Layers of multi-token prediction, if those are dropped."""
        return replace(missing, drops_mtp=MTP in self.names)

    def _apply(self, altered: Altered, reading: Reading) -> Altered:
        from paddle_reshard.pipeline.changes.drop import without

        return without(altered, self.names)


@dataclass(frozen=True)
class MakeMasterWeights(OwnChange):
    """``--master-weights from-parameters``: master weights of a model that has only its parameters."""

    option: ClassVar[str] = "master_weights"

    @classmethod
    def from_option(cls, value: MasterWeights | None, targets: Sequence[Request]) -> Self | None:
        """The change, if they are not to be those that are stored."""
        return cls() if value == "from-parameters" else None

    def _apply(self, altered: Altered, reading: Reading) -> Altered:
        from paddle_reshard.pipeline.changes.masters import with_master_weights

        return altered.each(with_master_weights)


@dataclass(frozen=True)
class ResizeVocabulary(OwnChange):
    """``--vocab-size``: more rows in the vocabulary, all of them zero, or fewer."""

    option: ClassVar[str] = "vocab_size"
    rows: int

    def _apply(self, altered: Altered, reading: Reading) -> Altered:
        from paddle_reshard.pipeline.changes.vocab import resize_vocabulary

        return replace(altered, wanted=resize_vocabulary(altered.wanted, self.rows))


@dataclass(frozen=True)
class Like(LocatedChange):
    """``--like``: what an export lacks, from the model that training began from."""

    option: ClassVar[str] = "like"

    @classmethod
    def from_option(cls, value: str | None, targets: Sequence[Request]) -> Self | None:
        """The change, if a model is given."""
        change = super().from_option(value, targets)
        formats = formats_to_complete()
        if change is not None and any(FORMATS[asked.format] not in formats for asked in targets):
            raise UsageError(f"--like applies only to --format {names_of(formats, 'or')}")
        return change

    def opened(self, access: Access) -> Step:
        """The change, with the model open."""
        from paddle_reshard.pipeline.changes.like import completed
        from paddle_reshard.storage.locate import open_source

        return partial(completed, open_source(self.location, *access))


KINDS: Final[tuple[type[Change], ...]] = (
    Fill,
    GiveAdapter,
    MergeInto,
    Rewrite,
    ToConvention,
    DivideAverage,
    Drop,
    MakeMasterWeights,
    ResizeVocabulary,
    Like,
)
"""In this order: a change sees the names, states and shapes that those before it leave."""


def changes_of(given: Mapping[str, Any], targets: Sequence[Request]) -> tuple[Change, ...]:
    """What a conversion with these options to these targets changes; small files among the options are parsed."""
    asked = (kind.from_option(given.get(kind.option), targets) for kind in KINDS)
    return tuple(change for change in asked if change is not None)


def needs_rule_table(targets: Sequence[Request]) -> bool:
    """Whether the targets need a rule table, to cut tensors or to name parameters."""
    by_table = {FORMATS[asked.format].by_table for asked in targets}
    if len(by_table) > 1:
        described = names_of(format for format in FORMATS.values() if format.by_table)
        raise UsageError(
            f"with --aoa, the formats {described} need a rule table for the resulting model, and the rest must not "
            "have one; use separate conversions"
        )
    return by_table.pop()
