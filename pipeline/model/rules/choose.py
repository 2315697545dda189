"""Choose the rule table of a checkpoint, by its config and its keys; and say what the tables know, if none fits."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

from paddle_reshard.pipeline.core.errors import RuleError
from paddle_reshard.pipeline.core.file_names import CONFIG
from paddle_reshard.pipeline.model.rules.entries import LABELS, Config
from paddle_reshard.pipeline.model.rules.libraries import PADDLEFLEET, conventions_of, library_of
from paddle_reshard.pipeline.model.rules.rule import HuggingFaceForm, Rule, expected_shape
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import RuleTables

_WITH_CLASSIFIERS: Final = "paddleformers"
_CLASSIFIERS: Final = ("ForSequenceClassification", "ForTokenClassification")
_HEADLESS: Final = ("Model", "SentenceEmbedding")
"""How the names of classes end that have ``score.weight``, and of those that have no head."""
_HEAD: Final = "lm_head.weight"
SCORE: Final = "score.weight"
_SCORE_BIAS: Final = "score.bias"


def choose_table(
    tables: RuleTables,
    keys: Iterable[str],
    config: Config,
    format: str | None = None,
    stages_known: bool = False,
    library: str | None = None,
) -> RuleTable:
    """The table that has a row for every key; of several, the one that is for all formats.

    ``stages_known``: whether it is known if the job that wrote the keys has pipeline stages. ``library``: the only one
    whose tables are meant, where ``config.json`` does not say it.

    Raises
    ------
    RuleError
        If there is none, naming the first key, in alphabetical order, that the closest table lacks; if several fit;
        or if the table does not tell enough for ``format``.
    """
    keys = sorted(set(keys))
    candidates = candidate_tables(tables, config)
    if library is not None:
        candidates = [table for table in candidates if library in (table.convention, *table.shared_with)]
        if not candidates:
            raise RuleError(
                f"model type {config.get('model_type')!r}", f"there is no {library} rule table for it"
            )
    refusals = [table.unsupported_option(config, stages_known) for table in candidates]
    if all(refusals):
        raise refusals[0] or RuleError(f"model type {config.get('model_type')!r}", NOT_KNOWN)
    beyond = [(table, refused) for table, refused in zip(candidates, refusals, strict=True) if refused]
    candidates = [table for table, refused in zip(candidates, refusals, strict=True) if not refused]
    failures = [_failures(table, keys, config) for table in candidates]
    fitting = [table for table, failed in zip(candidates, failures, strict=True) if not failed]
    if len(fitting) > 1:
        fitting = [table for table in fitting if table.formats is None] or fitting
        fitting = [table for table in fitting if table.version is None] or fitting
    if len(fitting) > 1:
        versions = " or ".join(f"{table.convention}_version" for table in fitting)
        raise RuleError(
            f"model type {config.get('model_type')!r}",
            f"several rule tables fit: {', '.join(table.named for table in fitting)}; give it the {CONFIG} "
            f"that its trainer wrote: {versions} in it says which",
        )
    if fitting:
        if format is not None:
            fitting[0].check_format(format, config)
        return fitting[0]
    for table, refused in beyond:
        if not _failures(table, keys, config):
            raise refused
    raise _why_none_fits(candidates, failures, keys, config)


def _why_none_fits(
    candidates: Sequence[RuleTable],
    failures: Sequence[dict[str, RuleError]],
    keys: Sequence[str],
    config: Config,
) -> RuleError:
    """The error about keys for which every table lacks rows, by the closest table."""
    for table, failed in zip(candidates, failures, strict=True):
        if len(failed) == len(keys) and (beginning := _lacking(keys, table, config)):
            return RuleError(
                keys[0],
                f"all {len(keys)} tensors have the keys of {table.named} without {beginning!r}: the family's base "
                "class, without a head, saved them. Let it describe itself in its job (paddle_reshard.describe), or "
                "pass a table with these keys with --rules FILE",
            )
    nearest, failed = min(zip(candidates, failures, strict=True), key=lambda pair: len(pair[1]))
    first, error = next(iter(failed.items()))
    if another := of_another_model([*failed], keys, nearest, config):
        return another
    why = nearest.why_missing(first, config)
    return RuleError(first, why) if why else error


def _lacking(keys: Collection[str], table: RuleTable, config: Config) -> str:
    """The beginning of a model's keys that these lack, as those of its base class do; empty if that is not why."""
    starts = {rule.key.partition("layers.{layer}")[0] for rule in table.rules if "layers.{layer}" in rule.key}
    return next(
        (start for start in sorted(starts - {""}) if not _failures(table, [start + k for k in keys], config)),
        "",
    )


def of_another_model(
    unknown: Sequence[str], keys: Collection[str], table: RuleTable, config: Config
) -> RuleError | None:
    """The refusal of keys of which most are ``unknown``: no row is missing then, but the config of their model.

    A head of another class is one key, and its refusal says which class.
    """
    if len(unknown) > len(keys) / 2 and len(keys) > 1 and not table.without_forms:
        return RuleError(
            unknown[0],
            f"{len(unknown)} of {len(keys)} tensors are none of {table.named}, which {CONFIG} names (model_type "
            f"{config.get('model_type')!r}): it must be that of the model in the files",
        )
    if SCORE in unknown and table.convention != _WITH_CLASSIFIERS:
        return RuleError(
            SCORE,
            f"the classifiers of {table.convention} are not known, only those of {_WITH_CLASSIFIERS}: a model of the "
            f"hub is read as one of these with --convention {_WITH_CLASSIFIERS}",
        )
    if SCORE in unknown:
        return RuleError(
            SCORE,
            f"only classifiers and reward models have it in place of {_HEAD}: {CONFIG} has to name their class in "
            f"architectures, as ...{_CLASSIFIERS[0]}, and says {config.get('architectures')}",
        )
    if _SCORE_BIAS in unknown:
        return RuleError(
            _SCORE_BIAS, f"the classifiers of {table.convention} have no bias, so none can hold it"
        )
    return None


def candidate_tables(tables: RuleTables, config: Config) -> list[RuleTable]:
    """The tables for the model type and the library in the config.

    Raises
    ------
    RuleError
        If there are none.
    """
    if candidates := candidates_for(tables, config):
        return candidates
    known = what_is_known(tables, config)
    if known == NOT_KNOWN:
        known += f" (known: {', '.join(sorted({name for t in tables for name in t.model_types}))})"
    if "model_type" not in config:
        raise RuleError(
            CONFIG, f"it has no model_type, which names the family{known.removeprefix(NOT_KNOWN)}"
        )
    raise RuleError(f"model type {config.get('model_type')!r}", f"{known}; {DESCRIBE}")


def candidates_for(tables: RuleTables, config: Config) -> list[RuleTable]:
    """The tables for the model type and the library in the config; none for a family that they do not know."""
    model_type, library = config.get("model_type"), library_of(config)
    return [
        _with_its_head(table, config)
        for table in tables.that_mention(str(model_type))
        if (not table.model_types or model_type in table.model_types)
        and (library is None or tables.for_any_family or table.convention in conventions_of(library))
    ]


def says_the_same(described: RuleTable, known: RuleTable, config: Config) -> bool:
    """Whether a table has all that a described one says of the model: keys, shapes, cuts and ties."""
    rows = {rule.key: rule for rule in known.rules if rule.applies(config)}
    cut = any(job.tp > 1 for job in described.described or ())
    for rule in described.rules:
        row = rows.get(rule.key)
        if row is None:
            return False
        try:
            same = rule.shape is None or expected_shape(rule, config) == expected_shape(row, config)
            ties = (rule.twin(config, rule.key), row.twin(config, rule.key))
        except RuleError:
            return False
        parts = rule.parts_unknown or rule.fused_parts == row.fused_parts
        if not same or (cut and (rule.split != row.split or not parts)) or (ties[0] and ties[0] != ties[1]):
            return False
    return True


def class_with_another_head(config: Config) -> str | None:
    """The class in ``architectures``, if it has another head than that for language models, or need not have one."""
    classes = config.get("architectures")
    name = str(classes[0]) if isinstance(classes, list) and classes else ""
    return name if name.endswith((*_CLASSIFIERS, *_HEADLESS)) else None


def _with_its_head(table: RuleTable, config: Config) -> RuleTable:
    """The table with the head of the class in ``architectures``, if that is none that a pipeline can train.

    Classifiers and reward models have ``score.weight`` in place of the language head: ``nn.Linear`` without a split and
    without a bias, whole on every rank, ``[hidden, labels]`` (``tests/facts``: ``Qwen3ForSequenceClassification`` and
    others). Embedding models, and what ``AutoModel`` saves, need not have a head at all (``Qwen3SentenceEmbedding``,
    ``Qwen3Model``).
    """
    name = class_with_another_head(config)
    if (
        name is None
        or table.convention != _WITH_CLASSIFIERS
        or not any(rule.key == _HEAD for rule in table.rules)
    ):
        return table
    rules = tuple(
        rule if rule.key != _HEAD else _score(rule) if name.endswith(_CLASSIFIERS) else _may_lack(rule, name)
        for rule in table.rules
    )
    return replace(table, rules=rules, items=tuple(replace(item, layer_class="") for item in table.items))


def _score(head: Rule) -> Rule:
    """``saved_transposed``: ``transpose_weight_keys`` of the classes, by which the trainer swaps dims, lack it."""
    return Rule(
        key=SCORE,
        item=head.item,
        name_class="linear",
        shape=("hidden_size", LABELS),
        source="paddleformers 1.2.0 transformers/qwen3/modeling.py: Qwen3ForSequenceClassification",
        huggingface=HuggingFaceForm((SCORE,), transposed=True, saved_transposed=False),
    )


def _may_lack(head: Rule, name: str) -> Rule:
    return replace(head, optional=head.optional or f"{name} has no language head")


def is_known(tables: RuleTables, config: Config, format: str | None = None) -> bool:
    """Whether one of the tables is for the model's family, and tells enough for ``format`` if that is given.

    A table that the user passes is for any family and format.
    """
    if tables.for_any_family:
        return True
    return any(format is None or table.is_for(format) for table in candidates_for(tables, config))


def is_beyond(tables: RuleTables, keys: Iterable[str], config: Config, stages_known: bool) -> bool:
    """Whether the tables of a family, which has to have one, say that they do not describe such a model."""
    keys = list(keys)
    return all(
        table.unsupported_option(config, stages_known)
        or any(re.match(start, key) for start in table.unsupported_keys for key in keys)
        for table in candidate_tables(tables, config)
    )


def table_of_other_formats(tables: RuleTables, keys: Iterable[str], config: Config) -> RuleTable | None:
    """The table with a row for every key, whichever formats it is for; ``None`` if there is none."""
    try:
        return choose_table(tables, keys, config)
    except RuleError:
        return None


NOT_KNOWN: Final = "no rule table knows it"
DESCRIBE: Final = (
    "call paddle_reshard.describe(model, to=FILE) once in a job of this model, and pass FILE with --rules"
)
"""How a table comes to be where there is none."""


def what_is_known(tables: RuleTables, config: Config) -> str:
    """What the tables know about the family in the config, in words, where they do not tell enough.

    >>> from paddle_reshard.pipeline.model.rules.tables import shipped_tables
    >>> what_is_known(shipped_tables(), {"model_type": "granite"})
    'the paddlefleet rule table knows it in the formats flex and huggingface only'
    >>> what_is_known(shipped_tables(), {"model_type": "granite", "paddlenlp_version": "3.0"})
    'no rule table knows it as paddlenlp trains it, only as paddlefleet does'
    >>> what_is_known(shipped_tables(), {"model_type": "mamba"})
    'no rule table knows it'
    """
    model_type, library = config.get("model_type"), library_of(config)
    likely = tables.that_mention(str(model_type))
    of_family = [table for table in likely if model_type in table.model_types]
    own = [table for table in of_family if library is None or table.convention in conventions_of(library)]
    if limited := [table for table in own if table.formats is not None]:
        return (
            f"the {limited[0].convention} rule table knows it in the formats "
            f"{' and '.join(limited[0].formats or ())} only"
        )
    if of_family and not own:
        others = " and ".join(sorted({table.convention for table in of_family}))
        return f"{NOT_KNOWN} as {library} trains it, only as {others} does"
    return NOT_KNOWN


def keys_in_model(tables: RuleTables, saved: Iterable[str], config: Config) -> dict[str, str]:
    """Keys in files that the model's class has saved itself → keys in the model; empty if the class renames none."""
    renaming = [table for table in candidates_for(tables, config) if table.saved_prefixes]
    return {key: renaming[0].key_saved_as(key) for key in saved} if renaming else {}


def keys_of_stages(tables: RuleTables, config: Config) -> dict[str, str]:
    """Keys that tensors have in jobs with pipeline stages only → keys in the model."""
    return {
        rule.key_pp: rule.key
        for table in candidates_for(tables, config)
        for rule in table.rules
        if rule.key_pp and rule.applies(config) and rule.key_pp not in {row.key for row in table.rules}
    }


def tables_to_train_with(tables: RuleTables, config: Config) -> list[RuleTable]:
    """The tables for a model that no library has given names yet: those of the library that is to train it."""
    candidates = [table for table in candidate_tables(tables, config) if table.version is None]
    candidates = [table for table in candidates if not table.recipe] or candidates
    wanted = tables.preferred or (PADDLEFLEET if library_of(config) == PADDLEFLEET else None)
    if wanted is not None:
        own = [table for table in candidates if table.convention == wanted]
        return own or [table for table in candidates if wanted in table.shared_with] or candidates
    return [table for table in candidates if table.formats is None] or candidates


def _failures(table: RuleTable, keys: Iterable[str], config: Config) -> dict[str, RuleError]:
    """The keys for which a table has no row, each with the error that says so."""
    find = table.finder(config)
    failures: dict[str, RuleError] = {}
    for key in keys:
        try:
            find(key)
        except RuleError as error:
            failures[key] = error
    return failures
