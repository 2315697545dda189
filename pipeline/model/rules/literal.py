"""Rule tables for models of unknown families: one row per key."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NoReturn

from paddle_reshard.pipeline.core.errors import PlanError, RuleError
from paddle_reshard.pipeline.core.file_names import CONFIG
from paddle_reshard.pipeline.model.rules.choose import DESCRIBE, NOT_KNOWN
from paddle_reshard.pipeline.model.rules.entries import Config
from paddle_reshard.pipeline.model.rules.items import Item
from paddle_reshard.pipeline.model.rules.libraries import library_of
from paddle_reshard.pipeline.model.rules.rule import HuggingFaceForm, Rule
from paddle_reshard.pipeline.model.rules.table import RuleTable

FAMILY = "by its keys"
_ITEM = Item("model", "", repeated=True)


@dataclass(frozen=True, slots=True)
class StoredJob:
    """Degrees of the job that wrote the files; only jobs with the same degrees can read them."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    def differing(self, degrees: Mapping[str, int]) -> str:
        """The ``degrees`` that differ from this job's, in words. Axes that this job does not list count as 1.

        For ``tp=2``, the degrees ``tp=4, pp=1, vpp=2`` give ``"tp=4, vpp=2"``.
        """
        return ", ".join(f"{axis}={n}" for axis, n in degrees.items() if n != getattr(self, axis, 1))


@dataclass(frozen=True, slots=True)
class StoredRule(Rule):
    """The row of a tensor by its files alone; whatever they do not say is refused.

    They do not say which dim tp has cut, or what is fused. A tensor of several tp ranks is therefore their parts in a
    row along the first dim; in a job with as many ranks, each gets its own part back. Two ranks with parts of
    ``(8, 4)`` make a tensor of ``(16, 4)``, whatever tp has cut.
    """

    job: StoredJob = StoredJob()
    expert: bool = False
    known: str = NOT_KNOWN

    @property
    def of_expert(self) -> bool:
        """Whether its tensor belongs to one routed expert."""
        return self.expert

    def split_dim(self, config: Config, tp: int, key: str | None = None) -> int | None:
        """The first dim in a job with as many tp ranks; in any other, no file says which dim is cut."""
        if tp != self.job.tp:
            raise RuleError(
                self.key, _not_described(self.known, f"which dim tp={tp} cuts, and what is fused")
            )
        return self.split

    def class_for(self, pp: int, tp: int, sequence_parallel: bool, ep: int = 1) -> str:
        """An empty class, because the files give the whole parameter name; refused if they do not give this job's."""
        if self.parameter_name is None or StoredJob(tp, pp, ep) != self.job:
            raise RuleError(self.key, _not_described(self.known, "its parameter name in such a job"))
        return self.name_class


@dataclass(frozen=True)
class StoredTable(RuleTable):
    """The table of a model by its files alone, if there is no rule table for the family: its rows are keys."""

    job: StoredJob = StoredJob()
    ordered: bool = False
    """Whether the rows are in the order of ``model.parameters()``, and give parameter names."""
    marked: bool = False
    """Whether the files give ``is_distributed`` for every tensor."""
    known: str = NOT_KNOWN

    def finder(self, config: Config) -> Callable[[str], tuple[Rule, int | None]]:
        """Finds the row for a key; no layer."""

        def find(key: str) -> tuple[Rule, int | None]:
            rule = self._rows.get(key)
            if rule is None:
                raise RuleError(key, "no such tensor is in the model")
            return rule, None

        return find

    @cached_property
    def _rows(self) -> dict[str, Rule]:
        return {rule.key: rule for rule in self.rules}

    @property
    def not_known(self) -> str:
        """What rule tables know about the family, in words."""
        return self.known

    @property
    def ranks_in_a_row(self) -> int:
        """The tp degree of the job that wrote the files."""
        return self.job.tp

    def check_job(
        self, config: Config, degrees: Mapping[str, int], stages_given: bool, marked: str | None = None
    ) -> None:
        """Refuse a hybrid-parallel target that the files do not determine."""
        if not self.ordered:
            self.refuse(config, "the order of parameters, and their names; the source's format has neither")
        if changed := self.job.differing(degrees):
            self.refuse(
                config, f"what {changed} changes: how tensors are cut or distributed, and their names"
            )
        if stages_given and self.job.pp > 1:
            self.refuse(
                config, "which layers follow each other in a stage: omit segmentation and comm_overlap"
            )
        if marked is not None and not self.marked:
            self.refuse(config, marked)

    def check_known(self, config: Config, what: str) -> None:
        """Refuse a target that needs ``what``: no file tells it."""
        self.refuse(config, what)

    def check_whole(self, config: Config) -> None:
        """Refuse a use of whole tensors if tp has cut them."""
        if self.job.tp > 1:
            self.refuse(config, f"which dim its tp={self.job.tp} ranks have cut, and what is fused")

    def check_keys(self, config: Config) -> None:
        """Refuse a target that has the model's own keys, if the source's files may have different ones.

        The trainer saves some models of several parts with Hugging Face keys (PaddleFormers 1.2 qwen2_5_vl: ``visual.``
        instead of ``model.visual.``); ``model_meta.json`` and a FlexCheckpoint have the model's own keys.
        """
        if self.ordered and not self.marked and "text_config" in config:
            self.refuse(config, "which keys its tensors have in the model: model_state may rename them")

    def refuse(self, config: Config, missing: str) -> NoReturn:
        """Refuse a target, naming what is ``missing``."""
        if not config:
            raise PlanError(
                f"{CONFIG} is missing, and the other files do not tell {missing}; pass the model's with --config FILE"
            )
        raise RuleError(f"model type {config.get('model_type')!r}", _not_described(self.known, missing))


def _not_described(known: str, missing: str) -> str:
    return f"{known}, and the source's files do not tell {missing}; {DESCRIBE}"


def literal_table(keys: Collection[str], origin: RuleTable) -> RuleTable:
    """The table of a model with these keys, which a program has made from a model that ``origin`` describes."""
    rules = tuple(
        Rule(key, _ITEM.name, "", "the key itself", huggingface=HuggingFaceForm((key,))) for key in keys
    )
    return StoredTable(
        FAMILY,
        origin.convention,
        (),
        (_ITEM,),
        rules,
        muon_exclude_patterns=origin.muon_exclude_patterns,
    )


@dataclass(frozen=True, slots=True)
class StoredKey:
    """The facts about a key in the files of a checkpoint."""

    key: str
    parameter_name: str | None = None
    tied_to: str | None = None
    """An earlier key with the same parameter name."""
    distributed: bool | None = None
    """``is_distributed`` of ``model_meta.json``; ``None`` without it."""
    stage: int = 0
    scalar: bool = False
    expert: bool = False
    """Whether it belongs to a routed expert that some expert ranks hold."""


def stored_table(
    keys: Iterable[StoredKey],
    config: Config,
    ordered: bool,
    job: StoredJob = StoredJob(),
    convention: str | None = None,
    of_family: RuleTable | None = None,
    known: str = NOT_KNOWN,
) -> StoredTable:
    """Make a table from the files of a model; ``keys`` in the order of the files.

    Parameters
    ----------
    convention
        The library that wrote them, if their format determines it; otherwise ``config.json`` has to say it.
    of_family
        The rule table of the family, if there is one that does not tell enough for their format: it gives their form
        in a Hugging Face checkpoint.
    known
        What rule tables know about the family (:func:`what_is_known`).
    """
    family = str(config.get("model_type", "not known"))
    convention = convention or library_of(config)
    if convention is None:
        raise RuleError(
            f"model type {family!r}",
            f"{known}, and config.json does not tell which library wrote the checkpoint: add paddleformers_version or "
            "paddlenlp_version, with which its sharding can change, or write a table and pass it with --rules FILE",
        )
    keys = list(keys)
    form = _forms(of_family, config, job)
    # A stage is one item: its tensors stay together.
    stages = tuple(Item(_stage(number), "DecoderLayer", repeated=True) for number in range(job.pp))
    return StoredTable(
        family,
        convention,
        (),
        stages,
        tuple(_stored_rule(key, job, form(key.key), known) for key in keys),
        expert_axis="ep" if job.ep > 1 else None,
        job=job,
        ordered=ordered,
        marked=all(key.distributed is not None for key in keys),
        known=known,
    )


def _forms(
    of_family: RuleTable | None, config: Config, job: StoredJob
) -> Callable[[str], HuggingFaceForm | None]:
    """Key → the form of a tensor in a Hugging Face checkpoint, where it is known to be whole."""
    if of_family is None or job.tp > 1:
        return lambda key: None
    find = of_family.finder(config)

    def form(key: str) -> HuggingFaceForm | None:
        rule, _ = find(key)
        if rule.huggingface is None:
            return None
        spelled = rule.huggingface.keys
        return replace(rule.huggingface, keys=tuple(rule.fill_in(key_there, key) for key_there in spelled))

    return form


def _stage(number: int) -> str:
    return f"stage {number}"


def _stored_rule(stored: StoredKey, job: StoredJob, form: HuggingFaceForm | None, known: str) -> StoredRule:
    name = stored.parameter_name
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
        huggingface=form,
        job=job,
        expert=stored.expert,
        known=known,
    )
