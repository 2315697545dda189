"""A checkpoint under the names and in the layouts of another library (``--convention``).

The rule tables of both libraries give the form of each tensor in a Hugging Face checkpoint. A tensor of the source's
library is split into its parts there, and these are joined to the tensors of the target's library. Both are boxes of
the source's tensors, like the results of AOA statements, and all states follow. If both libraries fuse a tensor alike,
only its name changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paddle_reshard.pipeline.changes.aoa.follow import target_catalog
from paddle_reshard.pipeline.changes.aoa.sources import SourceTensors
from paddle_reshard.pipeline.changes.aoa.values import Span, Value, assembled, concatenated, permuted, split
from paddle_reshard.pipeline.changes.change import Altered, Reading
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.checkpoint.stages import is_apart
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.errors import RuleError, UnsupportedError
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import EMA_PARAM, HEAD, PARAM
from paddle_reshard.pipeline.indexing.small_files import trainer_state_for
from paddle_reshard.pipeline.model.completeness import completed
from paddle_reshard.pipeline.model.forms import (
    UNUSED,
    PartsOfTensor,
    form_of,
    matches_of,
    parts_of_tensors,
    spans_of,
)
from paddle_reshard.pipeline.model.model import AUTOMATIC, Model, read_model
from paddle_reshard.pipeline.model.rules.entries import TIED, Config, ties_words
from paddle_reshard.pipeline.model.rules.libraries import conventions_of, library_of
from paddle_reshard.pipeline.model.rules.rule import HuggingFaceForm, evaluate_sizes
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import RuleTables


def in_convention(convention: str, altered: Altered, reading: Reading) -> Altered:
    """A checkpoint as another library has it: names, layouts, config, and the state of its trainer.

    Raises
    ------
    RuleError
        Naming a tensor whose form in a Hugging Face checkpoint a table does not give, or a family that the library does
        not have.
    UnsupportedError
        For LoRA.
    """
    translated = _to_convention(altered.source, convention, reading)
    rewritten = trainer_state_for(altered.own, convention)
    translated = replace(translated, history=replace(translated.history, rewritten=rewritten))
    return replace(altered, source=translated, wanted=_configured_for(translated, convention))


def _to_convention(source: Checkpoint, convention: str, reading: Reading) -> Checkpoint:
    """A checkpoint with the names and layouts of another library; its config is the given one, or the source's."""
    model, tables = source.model, reading.tables
    config = model.config if reading.config is None else reading.config
    own = convention == model.table.convention and not model.table.recipe
    recipe = _recipe_for(model.table, tables, config) if own else None
    if recipe is None and (own or convention in model.table.shared_with) and model.table.version is None:
        return replace(source, model=replace(model, config=config))
    if (not_known := model.table.not_known) is not None:
        raise RuleError(
            f"model type {config.get('model_type')!r}",
            f"{not_known}, so the names of its tensors in {convention} are not known; pass a table with --rules FILE",
        )
    if model.has_lora:
        raise UnsupportedError(
            f"LoRA with the names of {convention}: not supported; merge it into its base with --merge-into BASE"
        )
    for tensor in model.tensors:
        if is_apart(tensor, model) and ties_words(config):
            raise RuleError(
                tensor.key,
                f"it is a tensor of its own in the source, and {tensor.rule.tied_to} in a "
                f"model with {TIED}; say {TIED}=false in the config given with --config, or drop it with --drop {HEAD}",
            )
    table = recipe or _table_of(convention, tables, model.table, config)
    return _translated(source, table, config, reading.missing)


def _recipe_for(former: RuleTable, tables: RuleTables, config: Config) -> RuleTable | None:
    """The table of the recipe that trains such models of the library, if the config is that of one."""
    for table in tables:
        of_library = table.convention == former.convention and former.family in table.library_types
        if of_library and config.get("model_type") in table.model_types:
            return table
    return None


def _table_of(convention: str, tables: RuleTables, former: RuleTable, config: Config) -> RuleTable:
    model_type = config.get("model_type")
    for table in tables:
        of_library = convention in (table.convention, *table.shared_with) and not table.recipe
        if model_type in table.model_types and of_library and table.version is None:
            return table
    if former.library_types and model_type in former.model_types:
        raise RuleError(
            f"model type {model_type!r}",
            f"it is that of the recipe {former.recipe}; give the config.json of the model that is to train on with "
            f"--config FILE, with model_type {' or '.join(former.library_types)}; a source without config.json needs "
            "two conversions, the first with its own and without --convention",
        )
    families = sorted({name for t in tables if t.convention == convention for name in t.model_types})
    raise RuleError(
        f"model type {model_type!r}",
        f"there is no {convention} rule table for {former.family} (known: {', '.join(families)})",
    )


def _configured_for(checkpoint: Checkpoint, convention: str) -> Checkpoint:
    """Remove the version of the source's library from the config, if keys of the convention are not that library's.

    No version of the other library is added: keys of tensors determine the library that a checkpoint is for.
    """
    model = checkpoint.model
    library = library_of(model.config)
    if library is None or convention in conventions_of(library):
        return checkpoint
    config = {name: value for name, value in model.config.items() if name != f"{library}_version"}
    return replace(checkpoint, model=replace(model, config=config))


def _translated(
    source: Checkpoint, table: RuleTable, config: Mapping[str, Any], policy: MissingPolicy
) -> Checkpoint:
    """The source's tensors, joined to those of a table; ``policy`` says what it may lack."""
    values = SourceTensors(source.catalog)
    parts = _cut_all(source.model, values)
    matches = matches_of(parts, table, config)
    if unknown := sorted(key for key, match in matches.items() if match is None):
        raise RuleError(
            unknown[0],
            f"no row of the {table.convention} rule table {table.family!r} has this key in a Hugging Face checkpoint: "
            f"the source's model ({source.model.table.family}, {source.model.table.convention}) has this tensor, and "
            f"{table.convention}'s {table.family} has not",
        )
    outputs = {
        key: _joined(key, of_tensor, parts, config)
        for key, of_tensor in parts_of_tensors(matches, config).items()
    }
    catalog, untrained = _without_states_of_buffers(
        target_catalog(values, outputs, frozenset()), table, config
    )
    model = read_model(catalog.tensors, table, config)
    kept = [t for t in model.tensors if not (policy.drops_mtp and t.rule.item in table.mtp_items)]
    completed(replace(model, tensors=tuple(kept)), policy.lets_lack, mtp=not policy.drops_mtp)
    missing = [tensor.key for tensor in source.model.tensors if tensor.missing]
    unused = [tensor.key for tensor in source.model.tensors if tensor.rule.unused and not tensor.missing]
    return replace(
        source,
        catalog=_with_aliases(catalog, model),
        model=model,
        job=replace(source.job, sequence_parallel=None),
        not_carried=(
            *source.not_carried,
            *((key, "no file of the source holds it, which was allowed") for key in missing),
            *((key, UNUSED) for key in unused),
            *((label, f"{table.convention} does not train it") for label in untrained),
        ),
    )


def _without_states_of_buffers(
    catalog: Catalog, table: RuleTable, config: Config
) -> tuple[Catalog, list[str]]:
    """The catalog without optimizer states of what is a buffer in the library, and what that leaves out."""
    find = table.finder(config)
    dropped = {
        number: tensor.label
        for number, tensor in enumerate(catalog.tensors)
        if tensor.state not in (PARAM, EMA_PARAM)
        and ((rule := find(tensor.key)[0]).untrained or rule.name_class == AUTOMATIC)
    }
    kept = [number for number in range(len(catalog.tensors)) if number not in dropped]
    return catalog.only(kept) if dropped else catalog, sorted(dropped.values())


def _cut_all(model: Model, source: SourceTensors) -> dict[str, Value]:
    """Key in a Hugging Face checkpoint → what it is made of, for all tensors of a model."""
    parts: dict[str, Value] = {}
    for tensor in model.tensors:
        if tensor.is_alias or tensor.missing or tensor.rule.unused:
            continue
        form = form_of(tensor, model)
        value = source.values[tensor.tied_to or tensor.key]
        for number, of_expert in enumerate(_experts(value, form, model.config, tensor.key)):
            for part, cut in enumerate(_cut(of_expert, form, model.config, tensor.key)):
                key = tensor.rule.fill_in(form.key_of(part, number), tensor.key)
                if key in parts:
                    raise RuleError(
                        tensor.key, f"it and another tensor would both be {key} in a Hugging Face checkpoint"
                    )
                parts[key] = _swapped(cut) if form.transposed else cut
    return parts


def _experts(value: Value, form: HuggingFaceForm, config: Config, key: str) -> list[Value]:
    """One value per expert if several are stacked, otherwise the whole tensor."""
    if form.stacked is None:
        return [value]
    if len(value.shape) != 2:
        raise _own_dim(key)
    return split(value, 0, evaluate_sizes([form.stacked], config, key)[0])


def _own_dim(key: str) -> RuleError:
    return RuleError(
        key,
        "its experts are stacked along a dim of their own, with which names of another library are not supported; "
        "convert to a Hugging Face checkpoint, and that to the other library's names",
    )


def _cut(value: Value, form: HuggingFaceForm, config: Config, key: str) -> list[Value]:
    """The tensors that are fused along the last dim."""
    if len(form.keys) == 1:
        return [value]
    axis = len(value.shape) - 1
    return [
        assembled(
            [value],
            [value.shape[axis]],
            [Span(0, span.here, span.here + span.extent) for span in spans],
            axis,
        )
        for spans in spans_of(form, config, key, value.shape[axis])
    ]


def _joined(key: str, of_tensor: PartsOfTensor, parts: Mapping[str, Value], config: Config) -> Value:
    """A tensor of the other library."""
    if of_tensor.form.stacked is not None and len(of_tensor.rule.shape or ()) != 2:
        raise _own_dim(key)
    experts = []
    for keys in of_tensor.keys:
        values = [_swapped(parts[part]) if of_tensor.form.transposed else parts[part] for part in keys]
        experts.append(_fused(values, of_tensor.form, config, key))
    return experts[0] if len(experts) == 1 else concatenated(experts, 0)


def _fused(values: Sequence[Value], form: HuggingFaceForm, config: Config, key: str) -> Value:
    if len(form.keys) == 1:
        return values[0]
    axis = len(values[0].shape) - 1
    extents = [value.shape[axis] for value in values]
    spans = sorted(
        (span.here, number, span)
        for number, of_value in enumerate(spans_of(form, config, key, sum(extents)))
        for span in of_value
    )
    pieces = [Span(number, span.there, span.there + span.extent) for _, number, span in spans]
    return assembled(values, extents, pieces, axis)


def _swapped(value: Value) -> Value:
    """The value with its last two dims swapped."""
    dims = len(value.shape)
    return permuted(value, (*range(dims - 2), dims - 1, dims - 2))


def _with_aliases(catalog: Catalog, model: Model) -> Catalog:
    """The same catalog, with the keys of tied tensors as aliases of the tensors that they are tied to."""
    aliases = model.aliases
    named = [
        replace(t, aliases=aliases.get(t.key, ())) if t.state in (PARAM, EMA_PARAM) else t
        for t in catalog.tensors
    ]
    return replace(catalog, tensors=Tensors(named))
