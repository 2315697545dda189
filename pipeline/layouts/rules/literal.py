"""A rule table of a model that no table describes: every key has a row of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NoReturn

from paddle_reshard.pipeline.core.errors import PlanError, RuleError
from paddle_reshard.pipeline.core.file_names import CONFIG
from paddle_reshard.pipeline.layouts.rules import (
    HuggingFaceForm,
    Item,
    Rule,
    RuleTable,
    ShippedTables,
    candidate_tables,
    library_of,
)
from paddle_reshard.pipeline.layouts.rules.entries import Config

FAMILY = "by its keys"
_ITEM = Item("model", "", repeated=True)


@dataclass(frozen=True)
class LiteralTable(RuleTable):
    """Rows that are keys. A tensor is whole and goes out as it is, under its key.

    It tells nothing of tensor parallelism, of the order of layers or of parameter names.
    """

    def find(self, key: str, config: Config) -> tuple[Rule, int | None]:
        """The row for ``key``; of no layer."""
        rule = self._rows.get(key)
        if rule is None:
            raise RuleError(key, "no such tensor is in the model")
        return rule, None

    @cached_property
    def _rows(self) -> dict[str, Rule]:
        return {rule.key: rule for rule in self.rules}


def literal_table(keys: Collection[str], origin: RuleTable) -> RuleTable:
    """The table of a model with these keys, made of one that ``origin`` describes."""
    rules = tuple(
        Rule(key, _ITEM.name, "", "the key itself", huggingface=HuggingFaceForm((key,))) for key in keys
    )
    return LiteralTable(
        FAMILY,
        origin.convention,
        (),
        (_ITEM,),
        rules,
        muon_exclude_patterns=origin.muon_exclude_patterns,
    )


@dataclass(frozen=True, slots=True)
class StoredJob:
    """The job that wrote the files by which a model is known: only one with the same degrees reads them."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    def differing(self, degrees: Mapping[str, int]) -> str:
        """Those of the ``degrees`` of another job that are not its own, in words; of other axes those above 1."""
        return ", ".join(f"{axis}={n}" for axis, n in degrees.items() if n != getattr(self, axis, 1))


@dataclass(frozen=True, slots=True)
class StoredRule(Rule):
    """What files tell of a tensor; everything else is refused.

    Which dim tp cut, and what is fused, they do not tell. A tensor of several tp ranks is what they hold, one behind
    the other along the first dim: each of as many ranks gets back what it had.
    """

    job: StoredJob = StoredJob()
    expert: bool = False
    """Whether it belongs to a routed expert that some expert ranks hold."""

    @property
    def of_expert(self) -> bool:
        """Whether its tensor belongs to one routed expert."""
        return self.expert

    def split_dim(self, config: Config, tp: int, key: str | None = None) -> int | None:
        """The first dim, for as many ranks as wrote the files.

        Raises
        ------
        RuleError
            For any other number: no file tells which dim they cut, and what is fused.
        """
        if tp != self.job.tp:
            raise RuleError(self.key, _not_known(f"which dim tp={tp} cuts, and what is fused"))
        return self.split

    def class_for(self, pp: int, tp: int, sequence_parallel: bool, ep: int = 1) -> str:
        """Nothing; the files give the whole name.

        Raises
        ------
        RuleError
            For a job in which names differ, or where no file gives any.
        """
        if self.parameter_name is None or StoredJob(tp, pp, ep) != self.job:
            raise RuleError(self.key, _not_known("its parameter name in such a job"))
        return self.name_class


@dataclass(frozen=True)
class StoredTable(LiteralTable):
    """What the files of a checkpoint tell of its model, whose family no rule table knows."""

    job: StoredJob = StoredJob()
    ordered: bool = False
    """Whether the rows are in the order of ``model.parameters()``, and give parameter names."""
    marked: bool = False
    """Whether the files tell of every tensor whether it is ``is_distributed``."""

    def check_job(self, config: Config, degrees: Mapping[str, int], stages_given: bool) -> None:
        """Refuse a hybrid-parallel target of which the files do not tell everything.

        Parameters
        ----------
        degrees
            Axis → degree in the target, of the axes that change more than which rank holds an optimizer state.
        stages_given
            Whether the target decides by itself what is in which stage or virtual stage.

        Raises
        ------
        RuleError
            Naming what is missing.
        """
        if not self.ordered:
            self.refuse(config, "the order of parameters, and their names; this format holds neither")
        if changed := self.job.differing(degrees):
            self.refuse(
                config, f"what {changed} changes: how tensors are cut or distributed, and their names"
            )
        if stages_given and self.job.pp > 1:
            self.refuse(
                config, "which layers follow each other in a stage: leave segmentation and comm_overlap out"
            )

    def check_whole(self, config: Config) -> None:
        """Refuse a use of whole tensors where the files tell only what each tp rank holds.

        Raises
        ------
        RuleError
        """
        if self.job.tp > 1:
            self.refuse(config, f"which dim its tp={self.job.tp} ranks have cut, and what is fused")

    def check_keys(self, config: Config) -> None:
        """Refuse a target that goes by the model's own keys, if the source's files may have others.

        The trainer saves some models of several parts under the keys of their Hugging Face form (PaddleFormers 1.2
        qwen2_5_vl: ``visual.`` for ``model.visual.``); ``model_meta.json`` and a FlexCheckpoint have the model's own.

        Raises
        ------
        RuleError
        """
        if self.ordered and not self.marked and "text_config" in config:
            self.refuse(config, "which keys its tensors have in the model: model_state may rename them")

    def refuse(self, config: Config, missing: str) -> NoReturn:
        """Refuse a target because of what is ``missing``.

        Raises
        ------
        PlanError
        """
        if not config:
            raise PlanError(
                f"{CONFIG} is missing, and the other files do not tell {missing}; give that of the model with "
                "--config FILE"
            )
        raise RuleError(f"model type {config.get('model_type')!r}", _not_known(missing))


def _not_known(missing: str) -> str:
    return (
        f"no rule table knows it, and the source's files do not tell {missing}. Write a table and pass it with "
        "--rules FILE"
    )


@dataclass(frozen=True, slots=True)
class StoredKey:
    """What files tell of a key."""

    key: str
    name: str | None = None
    """Parameter name."""
    tied_to: str | None = None
    """The key before it that has the same parameter name."""
    distributed: bool | None = None
    """``is_distributed`` of ``model_meta.json``; ``None`` without it."""
    stage: int = 0
    """The pipeline stage that holds it."""
    scalar: bool = False
    """Whether it has no dims."""
    expert: bool = False
    """Whether it belongs to a routed expert that some expert ranks hold."""


def is_known(tables: Sequence[RuleTable], config: Config) -> bool:
    """Whether one of the tables is for the model's family; one that a user gives is for any."""
    if not isinstance(tables, ShippedTables):
        return True
    try:
        candidate_tables(tables, config)
    except RuleError:
        return False
    return True


def stored_table(
    keys: Iterable[StoredKey],
    config: Config,
    ordered: bool,
    job: StoredJob = StoredJob(),
    convention: str | None = None,
) -> StoredTable:
    """The table of a model that is known by its files alone; ``keys`` in the order of the files.

    ``convention`` is the library that wrote them, where their format tells.

    Raises
    ------
    RuleError
        If ``config.json`` does not tell which library wrote them.
    """
    family = str(config.get("model_type", "not known"))
    convention = convention or library_of(config)
    if convention is None:
        raise RuleError(
            f"model type {family!r}",
            "no rule table knows it, and config.json does not tell which library wrote the checkpoint "
            "(paddleformers_version or paddlenlp_version); write one and pass it with --rules FILE",
        )
    keys = list(keys)
    # A stage is one item: what it holds stays together.
    stages = tuple(Item(_stage(number), "DecoderLayer", repeated=True) for number in range(job.pp))
    return StoredTable(
        family,
        convention,
        (),
        stages,
        tuple(_stored_rule(key, job) for key in keys),
        expert_axis="ep" if job.ep > 1 else None,
        job=job,
        ordered=ordered,
        marked=all(key.distributed is not None for key in keys),
    )


def _stage(number: int) -> str:
    return f"stage {number}"


def _stored_rule(stored: StoredKey, job: StoredJob) -> StoredRule:
    name = stored.name
    return StoredRule(
        stored.key,
        _stage(stored.stage),
        "",
        "the files",
        split=0 if job.tp > 1 and not stored.scalar else None,
        parameter_name=None if name is None else name.replace("{", "{{").replace("}", "}}"),
        tied_to=stored.tied_to,
        always_tied=stored.tied_to is not None,
        is_distributed="always" if stored.distributed else "never",
        job=job,
        expert=stored.expert,
    )
