"""Read the small files that a user gives along with a checkpoint: rule tables, layouts, names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddle_reshard.pipeline.checkpoint.format import Entries
from paddle_reshard.pipeline.core.errors import CheckpointError, UsageError
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.formats.model_meta import ENTRIES, parse_names
from paddle_reshard.pipeline.model.lora_config import Adapter, parse_adapter
from paddle_reshard.pipeline.model.rules.parse import parse_rule_table
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import RuleTables, shipped_tables
from paddle_reshard.pipeline.request.given_file import GivenFile, read_object, read_text

if TYPE_CHECKING:
    from paddle_reshard.pipeline.changes.aoa.language import AoaProgram

File = PathLike | GivenFile


def given_inputs(
    rules: PathLike | None, config: PathLike | None, convention: str | None = None
) -> tuple[RuleTables, dict[str, Any] | None]:
    """The rule tables and ``config.json`` with which to interpret a checkpoint, those of a library first."""
    return load_tables(rules, convention), load_config(config)


def check_convention(wanted: str | None, location: str, table: RuleTable) -> None:
    """Refuse to describe a checkpoint as that of another library than it is of."""
    if wanted is not None and wanted not in (table.convention, *table.shared_with):
        raise UsageError(
            f"--convention {wanted}: {location} is {table.convention}'s {table.family} and no other library's; convert "
            "writes the names and layouts of another"
        )


def load_tables(rules: File | None, preferred: str | None = None) -> RuleTables:
    """The rule table in a file, or the built-in tables, those of the preferred library first."""
    if rules is None:
        return shipped_tables(preferred)
    return RuleTables([parse_rule_table(read_text(rules), str(rules))])


def load_config(config: File | None) -> dict[str, Any] | None:
    """The given ``config.json``."""
    return None if config is None else read_object(config)


def load_adapter(lora_config: File | None) -> Adapter | None:
    """The adapter described by the given ``lora_config.json``."""
    return None if lora_config is None else parse_adapter(read_object(lora_config), str(lora_config))


def load_program(aoa: File | None) -> AoaProgram | None:
    """The AOA statements in a file."""
    if aoa is None:
        return None
    from paddle_reshard.pipeline.changes.aoa.language import parse_aoa

    return parse_aoa(read_text(aoa), str(aoa))


def load_layout(
    layout: Entries | GivenFile | None,
) -> tuple[Entries | None, dict[str, dict[str, str]] | None]:
    """The settings of a layout, and cell → structured key → parameter name of a ``model_meta.json`` in it."""
    if not isinstance(layout, GivenFile):
        return layout, None
    values = read_object(layout)
    try:
        names = parse_names(values)
    except CheckpointError as error:
        raise UsageError(f"{layout}: {error}") from error
    settings = {name: values[name] for name in values if name not in ENTRIES}
    return Entries(settings, str(layout)) if settings else None, names
