"""Apply an AOA program to a catalog.

The result is a new catalog; no value is touched. Statements name keys: a parameter, its optimizer states and its
averages are transformed alike. Boxes are cut, moved and transposed. A cast gives the parameter a dtype that differs
from that of its fragments; master weights, moments and averages keep their dtypes.

A scalar that an optimizer keeps for each parameter (``beta1_pow_acc``) goes to every part of a split. The scalars of
concatenated tensors become copies of a single one, which the plan compares bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from paddle_reshard.pipeline.changes.aoa.follow import target_catalog
from paddle_reshard.pipeline.changes.aoa.language import AoaProgram
from paddle_reshard.pipeline.changes.aoa.run import Interpreter
from paddle_reshard.pipeline.changes.aoa.sources import SourceTensors
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.errors import PlanError


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
