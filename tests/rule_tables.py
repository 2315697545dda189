"""The rule tables of the package as they are read, and as they are written.

``python -m tests.rule_tables`` writes those that extend another anew, each row as what differs, and records the digests
of all whole tables. A commit that changes one says why.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paddle_reshard.pipeline.model.rules import extends
from paddle_reshard.pipeline.model.rules.extends import expanded

FOLDER = Path(extends.__file__).parent
FIRST = ("extends", "renamed", "family", "convention", "model_types", "shared_with", "proven", "comment")
DIGESTS = Path(__file__).parent / "golden" / "rule_tables.json"
"""Table → hash of everything that it says."""


def names() -> list[str]:
    """``FAMILY.LIBRARY`` of every table."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def stated(name: str) -> dict[str, Any]:
    """A table as it is written."""
    table: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return table


def whole(name: str) -> dict[str, Any]:
    """A table with everything that it has from others."""
    table: dict[str, Any] = expanded(stated(name), name)
    return table


def digest(table: Mapping[str, Any]) -> str:
    """A hash of a whole table, whatever the order of its entries; that of its rows counts."""
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]


def differences(table: Mapping[str, Any], base: str, renamed: Mapping[str, str]) -> dict[str, Any]:
    """A whole table, as what differs from another one."""
    given = {"extends": base, **({"renamed": dict(renamed)} if renamed else {})}
    former = expanded({**given, "rules": None}, base)
    rows = defaultdict(list)
    for row in former["rules"]:
        rows[row["key"]].append(row)
    own = {name: value for name, value in table.items() if former.get(name) != value or name in FIRST}
    own |= {name: None for name in former if name not in table}
    said = [_difference(row, rows[row["key"]].pop(0) if rows[row["key"]] else {}) for row in table["rules"]]
    return {**given, **own, "rules": said}


def _difference(row: Mapping[str, Any], former: Mapping[str, Any]) -> str | dict[str, Any]:
    own = {name: value for name, value in row.items() if name == "key" or former.get(name) != value}
    own |= {name: None for name in former if name not in row}
    return row["key"] if len(own) == 1 else own


def as_text(table: Mapping[str, Any]) -> str:
    """A table as it lies in the repository: a row in a line."""
    names = [name for name in FIRST if name in table]
    names += [name for name in table if name not in (*FIRST, "items", "rules")]
    lines = [f"  {json.dumps(name)}: {json.dumps(table[name])}" for name in names]
    for name in ("items", "rules"):
        if name in table:
            rows = ",\n".join(f"    {json.dumps(_last(row, 'source'))}" for row in table[name])
            lines.append(f'  "{name}": [\n{rows}\n  ]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _last(row: Any, name: str) -> Any:
    if not isinstance(row, dict):
        return row
    return {k: v for k, v in row.items() if k != name} | {k: v for k, v in row.items() if k == name}


def shortened(name: str, table: Mapping[str, Any]) -> str:
    """The text of a whole table, as a difference from the table that it extends in the repository."""
    path = FOLDER / f"{name}.json"
    before = stated(name) if path.exists() else {}
    if "extends" not in before:
        return as_text(table)
    return as_text(differences(table, before["extends"], before.get("renamed", {})))


if __name__ == "__main__":
    for each in names():
        (FOLDER / f"{each}.json").write_text(shortened(each, whole(each)), "utf-8")
    recorded = {each: digest(whole(each)) for each in names()}
    DIGESTS.write_text(json.dumps(recorded, indent=1) + "\n", "utf-8")
