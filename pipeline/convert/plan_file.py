"""Save a plan to a file, and compare it with one: a sequence of Arrow streams, with nothing that could be executed.

The first stream is a header without rows; its metadata identify the file. A stream follows for each table: the tensors,
and the files that are read, written and carried. Any Arrow library can read the file, stream by stream. Nothing here
makes a plan of it: what is run is always planned anew, and compared with the file (docs/decisions/010-saved-plans.md).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paddle_reshard.pipeline.core.errors import FormatError, PlanError, UsageError
from paddle_reshard.pipeline.core.extras import require
from paddle_reshard.pipeline.planning.plan import Plan
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json
from paddle_reshard.storage.local.folders import written_whole

require("pyarrow", "arrow", "a saved plan")
import pyarrow as pa  # noqa: E402 (only once it is known to be there)

FORMAT = "paddle-reshard plan"
GENERATION = 4
BATCH_ROWS = 1 << 16
"""Rows per record batch: small enough that saving does not take the memory of a second plan."""
_COMPRESSION = "lz4"
_FIRST_BYTES = b"\xff\xff\xff\xff"
"""First bytes of every Arrow stream."""

_TEXT, _WHOLE = pa.string(), pa.int64()
_FILE = pa.schema({"path": _TEXT, "size_bytes": _WHOLE})
_TABLES = {
    "tensors": pa.schema(
        {
            "key": _TEXT,
            "state": _TEXT,
            "dtype": _TEXT,
            "global_shape": pa.list_(_WHOLE),
            "aliases": pa.list_(_TEXT),
        }
    ),
    "source_files": _FILE,
    "target_files": _FILE,
    "carried": pa.schema({"source_path": _TEXT, "target_path": _TEXT, "size_bytes": _WHOLE}),
}
"""What tells a reader how two plans differ; the id covers the rest."""


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan, replacing an existing file."""
    header = {
        "format": FORMAT,
        "generation": GENERATION,
        "plan_id": plan.plan_id,
        "budget_bytes": plan.budget_bytes,
    }
    with written_whole(path, UsageError) as file:
        _write(file, "header", pa.schema([]), (), json.dumps(header | {"digest": _digest(header)}))
        for name, rows in _rows_of(plan).items():
            _write(file, name, _TABLES[name], _batches(rows, _TABLES[name]))


def _write(
    file: Any, name: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch], facts: str = "{}"
) -> None:
    described = schema.with_metadata({"table": name, "facts": facts})
    # Waking threads for the columns of each batch would take longer than compressing them.
    options = pa.ipc.IpcWriteOptions(compression=_COMPRESSION, use_threads=False)
    with pa.ipc.new_stream(file, described, options=options) as stream:
        for batch in batches:
            stream.write_batch(batch)


def _rows_of(plan: Plan) -> dict[str, Sequence[tuple[Any, ...]]]:
    """The rows of every table."""
    return {
        "tensors": [
            (key, state, dtype.name, shape, aliases)
            for key, state, dtype, shape, aliases in plan.tensors.fields()
        ],
        "source_files": [(f.path, f.size_bytes) for f in plan.source_files],
        "target_files": [(f.path, f.size_bytes) for f in plan.target_files],
        "carried": [(c.source_path, c.target_path, c.size_bytes) for c in plan.carried],
    }


def _batches(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    for first in range(0, len(rows), BATCH_ROWS):
        columns = list(zip(*rows[first : first + BATCH_ROWS], strict=True))
        arrays = [pa.array(c, type=field.type) for c, field in zip(columns, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


# ---------------------------------------------------------------------------------------------- comparing


def check_is_saved(plan: Plan, path: Path) -> None:
    """Refuse unless ``plan`` is the plan in a file, with a :class:`PlanError` that says what has changed.

    Of the file only the id counts, and what tells two plans apart.
    """
    with _opened(path) as file:
        header = _read_header(file, str(path))
        saved = header.get("plan_id")
        if saved == plan.plan_id:
            return
        change = _first_change(header.get("budget_bytes"), _read_tables(file, str(path)), plan)
    raise PlanError(f"{path} holds the plan {saved}, but this conversion has {plan.plan_id}: {change}")


def _first_change(budget_bytes: int | None, then: Mapping[str, pa.Table], plan: Plan) -> str:
    """What differs between a saved plan, given by its budget and tables, and another one."""
    now = {
        name: pa.Table.from_batches(_batches(rows, _TABLES[name]), _TABLES[name])
        for name, rows in _rows_of(plan).items()
    }
    for side in ("source", "target"):
        sizes, new_sizes = (
            dict(zip(*(column.to_pylist() for column in tables[f"{side}_files"].columns), strict=True))
            for tables in (then, now)
        )
        for path in sorted(sizes.keys() | new_sizes.keys()):
            if sizes.get(path) != new_sizes.get(path):
                was, is_now = (
                    "is missing" if size is None else f"has {size} bytes"
                    for size in (sizes.get(path), new_sizes.get(path))
                )
                return f"the {side}'s file {path} {was} in the saved plan and {is_now} now"
    if budget_bytes != plan.budget_bytes:
        return f"the budget was {budget_bytes} bytes and is {plan.budget_bytes}"
    if any(then[name] != now[name] for name in ("tensors", "carried")):
        return "the tensors or the carried files differ"
    return (
        "the same files, but made in different parts or order: options, the store of the target (was it planned "
        "without DST?) or the version of this package differ"
    )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with path.open("rb") as file:
            yield file
    except (pa.ArrowException, MemoryError) as error:  # a damaged length asks for any number of bytes
        raise _malformed(str(path), f"not a complete plan file: {error}") from error
    except OSError as error:
        if error.errno is None:  # raised by Arrow for a truncated file
            raise _malformed(str(path), f"not a complete plan file: {error}") from error
        raise UsageError(f"{path}: the plan cannot be read: {error}") from error


def _digest(facts: dict[str, Any]) -> str:
    """Digest of the header's facts; the tables are covered by the plan id."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _read_header(file: Any, path: str) -> dict[str, Any]:
    if file.read(len(_FIRST_BYTES)) != _FIRST_BYTES:
        raise _malformed(path, f"not a {FORMAT}")
    file.seek(0)
    with pa.ipc.open_stream(file) as stream:
        list(stream)
        text = (stream.schema.metadata or {}).get(b"facts", b"{}")
    try:
        facts = parse_json(text)
    except JsonError as error:
        raise _malformed(path, f"not a {FORMAT}") from error
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise _malformed(path, f"not a {FORMAT}")
    if facts.pop("digest", None) != _digest(facts):
        raise _malformed(path, "its header was changed")
    if facts.get("generation") != GENERATION:
        raise _malformed(
            path,
            f"has generation {facts.get('generation')!r}; this version reads {GENERATION}: make the plan again",
        )
    return facts


def _read_tables(file: Any, path: str) -> dict[str, pa.Table]:
    """The tables of a file that stands behind its header."""
    tables = {}
    for name, expected in _TABLES.items():
        with pa.ipc.open_stream(file) as stream:
            found, schema = (stream.schema.metadata or {}).get(b"table"), stream.schema.remove_metadata()
            if found != name.encode() or schema != expected:
                raise _malformed(path, f"the table {name!r} is missing or has unexpected columns")
            tables[name] = pa.Table.from_batches(stream, schema)
        tables[name].validate(full=True)
        if any(column.null_count for column in tables[name].columns):
            raise _malformed(path, f"the table {name!r} has missing values")
    return tables


def _malformed(path: str, detail: str) -> FormatError:
    return FormatError("bad_plan_file", path, None, detail)
