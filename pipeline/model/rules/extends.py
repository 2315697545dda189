"""Tables that say what differs from a table of the package: ``"extends": "qwen2.paddleformers"``.

A row that is only a key is that of the other table. A row with a key of the other table has all that it does not say
itself from there, ``null`` takes an entry away; any other row stands for itself. The rows are in the order of their own
table, and those that it does not name are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.pipeline.model.rules.table import renamed_prefix
from paddle_reshard.storage.documents.strict_json import parse_json

_OWN: Final = (
    "family",
    "convention",
    "model_types",
    "shared_with",
    "proven",
    "version",
    "lora",
    "peft_prefixes",
    "comment",
)
"""Entries of the table itself, which no table has from another."""
_KEYS: Final = ("key", "tied_to", "only_with", "built_after", "key_pp")
"""Entries of a row that are keys."""


def expanded(entries: Any, where: str) -> Any:
    """The entries of a table that extends no other. Entries of a wrong type are left to who reads them."""
    if not isinstance(entries, dict) or "extends" not in entries:
        return entries
    own = dict(entries)
    base = expanded(_shipped(own.pop("extends"), where), where)
    prefixes = own.pop("renamed", {})
    if not isinstance(prefixes, dict) or not all(isinstance(to, str) for to in prefixes.values()):
        raise UsageError(
            f"{where}: 'renamed' gives beginnings of keys, each with another; found {prefixes!r}"
        )
    former = [_renamed(row, prefixes) for row in base["rules"]]
    table = {**{name: value for name, value in base.items() if name not in _OWN}, **own}
    if isinstance(rows := own.get("rules"), list):
        table["rules"] = list(_rows(rows, former, where))
    else:
        table["rules"] = former if rows is None else rows
    return {name: value for name, value in table.items() if value is not None}


def _shipped(name: Any, where: str) -> Any:
    """The entries of a table of the package."""
    paths = {path.stem: path for path in Path(__file__).parent.glob("*.json")}
    if not isinstance(name, str) or name not in paths:
        raise UsageError(
            f"{where}: extends {name!r}, which is no table of the package{did_you_mean(str(name), paths)}"
        )
    return parse_json(paths[name].read_bytes())


def _rows(rows: list[Any], former: list[dict[str, Any]], where: str) -> Iterator[Any]:
    by_key: dict[str, list[dict[str, Any]]] = {}
    for row in former:
        by_key.setdefault(row["key"], []).append(row)
    for row in rows:
        said = {"key": row} if isinstance(row, str) else row
        if not isinstance(said, dict) or not isinstance(said.get("key"), str):
            yield row
            continue
        of_key = by_key.get(said["key"], [])
        if not of_key and isinstance(row, str):
            raise UsageError(
                f"{where}: {row!r} is no row of the table that this one extends; write the whole row"
            )
        merged = {**(of_key.pop(0) if of_key else {}), **said}  # rows of one key are taken in their order
        yield {name: value for name, value in merged.items() if value is not None}


def _renamed(row: Mapping[str, Any], prefixes: Mapping[str, str]) -> dict[str, Any]:
    """A row with other beginnings of its keys, here and in Hugging Face checkpoints."""
    changed: dict[str, Any] = {name: renamed_prefix(row[name], prefixes) for name in _KEYS if name in row}
    if (form := row.get("huggingface")) is not None:
        changed["huggingface"] = {**form, "keys": [renamed_prefix(key, prefixes) for key in form["keys"]]}
    return {**row, **changed}
