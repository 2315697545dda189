"""Apply an AOA program to a catalog.

The result is a new catalog; no value is touched. Statements name keys: a parameter, its optimizer states and its
averages are transformed alike. Boxes are cut, moved and transposed. A cast gives the parameter a dtype that differs
from that of its fragments; master weights, moments and averages keep their dtypes.

A scalar that an optimizer keeps for each parameter (``beta1_pow_acc``) goes to every part of a split. The scalars of
concatenated tensors become copies of a single one, which the plan compares bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paddle_reshard.pipeline.changes.aoa.follow import target_catalog
from paddle_reshard.pipeline.changes.aoa.language import AoaProgram
from paddle_reshard.pipeline.changes.aoa.run import Interpreter
from paddle_reshard.pipeline.changes.aoa.sources import SourceTensors
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.errors import PlanError
from paddle_reshard.pipeline.model.completeness import completed
from paddle_reshard.pipeline.model.model import read_model
from paddle_reshard.pipeline.model.rules.choose import choose_table
from paddle_reshard.pipeline.model.rules.literal import literal_table
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import RuleTables


@dataclass(frozen=True)
class AoaOutcome:
    """The result of applying a program."""

    catalog: Catalog
    """The tensors of the target, with fragments in the source's files."""
    dropped: tuple[str, ...]
    """Names that statements drop (``name -> _``)."""
    idle: tuple[str, ...]
    """File and line of each statement that matches no tensor of the source."""
    unmade: tuple[str, ...]
    """Names of tensors that the target is to have, but no file holds (``_ -> name``)."""
    statements: Mapping[str, tuple[str, ...]]
    """Key of the target → the statements that made it, in order, with file and line."""


def apply_aoa(catalog: Catalog, program: AoaProgram, untied: Collection[str] = ()) -> AoaOutcome:
    """Make the catalog of the target from that of the source.

    Keys that no statement names are kept. Names that end up with the same values become a single tensor with aliases,
    except those in ``untied``, which get a tensor of their own.

    Raises
    ------
    UsageError
        If a statement cannot be reversed or expanded, with its line.
    PlanError
        If a tensor does not exist, is made twice, is not used, or does not fit the operation, if a cast would round
        twice, or if no tensor is left; with file, line and tensor.
    UnsupportedError
        If tensors of the source are mixed.
    """
    source = SourceTensors(catalog)
    run = Interpreter(source, program)
    run.all()
    outputs = run.outputs()
    if not outputs:
        raise PlanError(f"{program.where}: its statements leave no tensor, so there is nothing to write")
    made = target_catalog(source, outputs, frozenset(untied))
    unmade = [name for name in run.unmade if name not in outputs]
    followed = run.statements(outputs.keys())
    return AoaOutcome(made, tuple(run.dropped), tuple(run.idle), tuple(unmade), followed)


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
    table = _table_of_outcome(outcome, source, tables, config, library)
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


def _table_of_outcome(
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
