"""Apply an AOA program to a whole checkpoint: rename, split, concatenate, transpose or cast its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paddle_reshard.pipeline.changes.aoa.apply import AoaOutcome, apply_aoa
from paddle_reshard.pipeline.changes.aoa.language import AoaProgram
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.model.completeness import completed
from paddle_reshard.pipeline.model.model import read_model
from paddle_reshard.pipeline.model.rules.choose import choose_table
from paddle_reshard.pipeline.model.rules.literal import literal_table
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import RuleTables


def rewrite(
    source: Checkpoint,
    program: AoaProgram,
    tables: RuleTables | None,
    config: Mapping[str, Any] | None,
    library: str | None = None,
) -> Checkpoint:
    """The checkpoint that results from a program, with the given ``config.json`` or the source's.

    One of the tables, of the given library if there is one, must describe the resulting keys; ``None``: the targets
    write tensors as the program makes them.
    """
    config = source.model.config if config is None else config
    outcome = apply_aoa(source.catalog, program)
    table = _table(outcome, source, tables, config, library)
    if own := _own_tensors(outcome, table, config):
        outcome = apply_aoa(source.catalog, program, untied=own)
    model = read_model(outcome.catalog.tensors, table, config)
    if tables is not None and not model.has_lora:
        completed(model)
    return replace(
        source,
        catalog=outcome.catalog,
        model=model,
        job=replace(source.job, sequence_parallel=None),
        history=replace(source.history, statements=outcome.statements),
        not_carried=(
            *source.not_carried,
            *((name, f"dropped by {program.where}") for name in outcome.dropped),
            *((where, "this statement matches no tensor of the source") for where in outcome.idle),
            *((name, f"no file holds it; {program.where} leaves it to the model") for name in outcome.unmade),
        ),
    )


def _table(
    outcome: AoaOutcome,
    source: Checkpoint,
    tables: RuleTables | None,
    config: Mapping[str, Any],
    library: str | None,
) -> RuleTable:
    """The table that describes all names of the resulting model."""
    keys = dict.fromkeys(key for tensor in outcome.catalog.tensors for key in (tensor.key, *tensor.aliases))
    if tables is None:
        return literal_table(keys, source.model.table)
    return choose_table(tables, keys, config, library=library)


def _own_tensors(outcome: AoaOutcome, table: RuleTable, config: Mapping[str, Any]) -> set[str]:
    """Aliases that the model does not tie to their tensor: they are written as tensors of their own."""
    return {
        alias
        for tensor in outcome.catalog.tensors
        for alias in tensor.aliases
        if table.find(alias, config)[0].twin(config, alias) != tensor.key
    }
