"""Read the small files that a user gives along with a checkpoint: rule tables, layouts, names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_reshard.pipeline.convert.given import GivenFile, KeptFile
from paddle_reshard.pipeline.core.errors import CheckpointError, UsageError
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.layouts.format import Entries
from paddle_reshard.pipeline.layouts.lora_config import Adapter, parse_adapter
from paddle_reshard.pipeline.layouts.model_meta import parse_names
from paddle_reshard.pipeline.layouts.rules.parse import parse_rule_table
from paddle_reshard.pipeline.layouts.rules.tables import RuleTables, shipped_tables
from paddle_reshard.storage.formats.strict_json import parse_json

if TYPE_CHECKING:
    from paddle_reshard.pipeline.aoa.language import AoaProgram

File = Path | KeptFile


def as_file(given: GivenFile | None) -> File | None:
    """A given file as a ``Path``, unless a session kept its text."""
    return given if given is None or isinstance(given, KeptFile) else Path(given)


def given_inputs(
    rules: GivenFile | None, config: GivenFile | None
) -> tuple[RuleTables, dict[str, Any] | None]:
    """The rule tables and ``config.json`` with which to interpret a checkpoint."""
    return (
        load_tables(as_file(rules)),
        load_config(as_file(config)),
    )


def load_tables(rules: File | None, preferred: str | None = None) -> RuleTables:
    """The rule table in a file, or the built-in tables, those of the preferred library first."""
    if rules is None:
        return shipped_tables(preferred)
    return RuleTables([parse_rule_table(read_text(rules), str(rules))])


def load_config(config: File | None) -> dict[str, Any] | None:
    """The given ``config.json``."""
    return None if config is None else _read_object(config)


def load_adapter(lora_config: File | None) -> Adapter | None:
    """The adapter described by the given ``lora_config.json``."""
    return None if lora_config is None else parse_adapter(_read_object(lora_config), str(lora_config))


def load_program(aoa: File | None) -> AoaProgram | None:
    """The AOA statements in a file."""
    if aoa is None:
        return None
    from paddle_reshard.pipeline.aoa.language import parse_aoa

    return parse_aoa(read_text(aoa), str(aoa))


def read_layout_file(layout: Path) -> dict[str, Any]:
    """The entries of a layout file, not yet validated."""
    return _read_object(layout)


def load_layout(layout: PathLike | Mapping[str, Any] | None) -> Entries | None:
    """The entries of a layout, from a JSON file or a mapping, not yet validated."""
    if layout is None or isinstance(layout, Mapping):
        return None if layout is None else Entries(layout, "layout")
    return Entries(read_layout_file(Path(layout)), str(layout))


def load_target_names(target_meta: File | None) -> dict[str, dict[str, str]] | None:
    """Cell → structured key → parameter name, from a ``model_meta.json`` for the target topology."""
    if target_meta is None:
        return None
    try:
        return parse_names(_read_object(target_meta))
    except CheckpointError as error:
        raise UsageError(f"{target_meta}: {error}") from error


def read_text(path: File) -> str:
    """The text of a given file.

    Raises
    ------
    UsageError
        If it cannot be read or is not UTF-8.
    """
    if isinstance(path, KeptFile):
        return path.text
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error


def _read_object(path: File) -> dict[str, Any]:
    try:
        value = parse_json(read_text(path))
    except ValueError as error:
        raise UsageError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: expected a JSON object")
    return value
