"""Save a plan to a file and load it: a sequence of Arrow streams, with nothing that could be executed.

The first stream is a header without rows; its metadata identify the file. A stream follows for each table of the plan.
Any Arrow library can read the file, stream by stream.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.catalog import File
from paddle_reshard.pipeline.core.columns import narrowed
from paddle_reshard.pipeline.core.errors import CheckpointError, FormatError, PlanError, UsageError
from paddle_reshard.pipeline.core.extras import require
from paddle_reshard.pipeline.core.literals import Literals
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import Tensor, dtype_named
from paddle_reshard.pipeline.planning.ops import OP, Ops
from paddle_reshard.pipeline.planning.parts import PART
from paddle_reshard.pipeline.planning.plan import BAND, CarriedFile, Plan
from paddle_reshard.storage.documents.strict_json import JsonError, parse_json

require("pyarrow", "arrow", "a saved plan")
import pyarrow as pa  # noqa: E402 (only once it is known to be there)

FORMAT = "paddle-reshard plan"
GENERATION = 3
BATCH_ROWS = 1 << 16
"""Rows per record batch: small enough that saving does not take the memory of a second plan."""
_COMPRESSION = "lz4"
_FIRST_BYTES = b"\xff\xff\xff\xff"
"""First bytes of every Arrow stream."""

Rows = npt.NDArray[np.void]

_NUMBER = np.dtype([("value", np.int64)])
_ROWS = {"op_groups": _NUMBER, "bands": BAND, "parts": PART, "group_peaks": _NUMBER}
_LENGTHS = {f"{side}_length": f"{side}_stop_after_{side}_byte" for side in ("source", "target")}
_OPS = {
    (name, dim): _LENGTHS.get(name, name) + (f"_{dim}" if OP[name].shape else "") for name, dim in Ops.COLUMNS
}
"""Column of ops → its name in the file."""
_WIDTHS = (pa.int8(), pa.int16(), pa.int32(), pa.int64())
_FILE = pa.schema([("path", pa.string()), ("size_bytes", pa.int64())])
_TABLES = {
    "tensors": pa.schema(
        [
            ("key", pa.string()),
            ("state", pa.string()),
            ("dtype", pa.string()),
            ("global_shape", pa.list_(pa.int64())),
            ("aliases", pa.list_(pa.string())),
        ]
    ),
    "source_files": _FILE,
    "target_files": _FILE,
    "carried": pa.schema(
        [("source_path", pa.string()), ("target_path", pa.string()), ("size_bytes", pa.int64())]
    ),
    "literals": pa.schema(
        [("template", pa.int64()), ("byte_offset", pa.int64()), ("content", pa.large_binary())]
    ),
    "literal_files": pa.schema([("file", pa.int64()), ("template", pa.int64())]),
}
_SCALARS = (
    "budget_bytes",
    "allow_replica_drift",
    "allow_master_drift",
    "compared_only",
    "read_once_budget_bytes",
)


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan, replacing an existing file.

    Raises
    ------
    UsageError
        If the file cannot be written.
    """
    header = {
        "format": FORMAT,
        "generation": GENERATION,
        "plan_id": plan.plan_id,
        **{name: getattr(plan, name) for name in _SCALARS},
    }
    try:
        with path.open("wb") as file:
            _write(file, "header", pa.schema([]), (), json.dumps(header | {"digest": _digest(header)}))
            _write_narrow(file, "ops", {_OPS[name]: column for name, column in plan.ops.narrow()})
            for name, dtype in _ROWS.items():
                rows = np.ascontiguousarray(getattr(plan, name)).view(dtype)
                _write_narrow(
                    file, name, {field: narrowed(rows[field], len(rows)) for field in dtype.names or ()}
                )
            for name, columns in _tables_of(plan).items():
                schema = _TABLES[name]
                _write(file, name, schema, _batches(columns, schema))
            templates, files = plan.literals.templates()
            _write(file, "literals", _TABLES["literals"], _batches_of_literals(templates))
            schema = _TABLES["literal_files"]
            _write(file, "literal_files", schema, _batches(files, schema))
    except OSError as error:
        raise UsageError(f"{path}: the plan cannot be saved: {error}") from error


def _write(
    file: Any,
    name: str,
    schema: pa.Schema,
    batches: Sequence[pa.RecordBatch] | Iterator[pa.RecordBatch],
    facts: str = "{}",
) -> None:
    described = schema.with_metadata({"table": name, "facts": facts})
    # Waking threads for the columns of each batch would take longer than compressing them.
    options = pa.ipc.IpcWriteOptions(compression=_COMPRESSION, use_threads=False)
    with pa.ipc.new_stream(file, described, options=options) as stream:
        for batch in batches:
            stream.write_batch(batch)


def _write_narrow(file: Any, table: str, columns: Mapping[str, npt.NDArray[Any]]) -> None:
    """Columns of whole numbers, each as narrow as its values allow."""
    schema = pa.schema([(name, pa.from_numpy_dtype(column.dtype)) for name, column in columns.items()])
    batches = (
        pa.RecordBatch.from_arrays(
            [
                pa.array(np.ascontiguousarray(column[first : first + BATCH_ROWS]))
                for column in columns.values()
            ],
            schema=schema,
        )
        for first in range(0, max(map(len, columns.values())), BATCH_ROWS)
    )
    _write(file, table, schema, batches)


def _batches_of_literals(literals: Literals) -> Iterator[pa.RecordBatch]:
    schema = _TABLES["literals"]
    files, offsets, sizes = literals.files, literals.offsets, literals.sizes
    pieces, content = literals.contents(), bytearray()
    for first in range(0, len(sizes), BATCH_ROWS):
        here = slice(first, first + BATCH_ROWS)
        ends = np.r_[0, np.cumsum(sizes[here])]
        while len(content) < ends[-1]:
            content += next(pieces)
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(bytes(content[: ends[-1]]))]
        del content[: ends[-1]]
        texts = pa.Array.from_buffers(pa.large_binary(), len(ends) - 1, buffers)
        yield pa.RecordBatch.from_arrays(
            [pa.array(files[here]), pa.array(offsets[here]), texts], schema=schema
        )


def _tables_of(plan: Plan) -> dict[str, Sequence[tuple[Any, ...]]]:
    """The tables whose rows are Python values."""
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


# ------------------------------------------------------------------------------------------------ reading


def saved_plan_id(path: Path) -> str:
    """The id of the plan in a file, according to its header.

    Raises
    ------
    UsageError, FormatError
        As :func:`load_plan`.
    """
    with _opened(path) as file:
        return str(_read_header(file, str(path)).get("plan_id"))


def check_is_saved(plan: Plan, path: Path) -> None:
    """Refuse unless ``plan`` is the plan in a file.

    Raises
    ------
    PlanError
        With what has changed.
    UsageError, FormatError
        As :func:`load_plan`.
    """
    saved = saved_plan_id(path)
    if saved != plan.plan_id:
        change = _first_change(load_plan(path), plan)
        raise PlanError(f"{path} holds the plan {saved}, but this conversion has {plan.plan_id}: {change}")


def _first_change(then: Plan, now: Plan) -> str:
    for side, before, after in (
        ("source", then.source_files, now.source_files),
        ("target", then.target_files, now.target_files),
    ):
        sizes, new_sizes = ({f.path: f.size_bytes for f in files} for files in (before, after))
        for path in sorted(sizes.keys() | new_sizes.keys()):
            if sizes.get(path) != new_sizes.get(path):
                was, is_now = (
                    "is missing" if size is None else f"has {size} bytes"
                    for size in (sizes.get(path), new_sizes.get(path))
                )
                return f"the {side}'s file {path} {was} in the saved plan and {is_now} now"
    if then.budget_bytes != now.budget_bytes:
        return f"the budget was {then.budget_bytes} bytes and is {now.budget_bytes}"
    if then.tensors != now.tensors or then.carried != now.carried:
        return "the tensors or the carried files differ"
    return (
        "the same files, but made in different parts or order: options or the version of this package differ"
    )


def load_plan(path: Path) -> Plan:
    """Load a saved plan.

    Raises
    ------
    UsageError
        If the file cannot be read.
    FormatError
        If it is not a plan, has an unknown generation, is truncated, or does not match its id.
    """
    with _opened(path) as file:
        return _read_plan(file, str(path))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with path.open("rb") as file:
            yield file
    except pa.ArrowException as error:
        raise _malformed(str(path), f"not a complete plan file: {error}") from error
    except OSError as error:
        if error.errno is None:  # raised by Arrow for a truncated file
            raise _malformed(str(path), f"not a complete plan file: {error}") from error
        raise UsageError(f"{path}: the plan cannot be read: {error}") from error


def _read_plan(file: Any, path: str) -> Plan:
    facts = _read_header(file, path)
    values: dict[str, Any] = {name: facts[name] for name in _SCALARS if name in facts}
    values["ops"] = _read_ops(file, path)
    for name, dtype in _ROWS.items():
        widest = {field: dtype[field] for field in dtype.names or ()}
        blocks = (_rows_of(batch, dtype) for batch in _read(file, name, partial(_is_narrow, widest), path))
        values[name] = np.concatenate([np.zeros(0, dtype=dtype), *blocks])
    for name in ("op_groups", "group_peaks"):
        values[name] = values[name]["value"]
    tables = {}
    for name, schema in _TABLES.items():
        batches = _read(file, name, schema, path)
        tables[name] = [row for batch in batches for row in zip(*map(_values, batch.columns), strict=True)]
    try:
        plan = Plan(
            tensors=Tensors(
                Tensor(key, state, dtype_named(dtype), tuple(shape), tuple(aliases))
                for key, state, dtype, shape, aliases in tables["tensors"]
            ),
            source_files=tuple(File(*row) for row in tables["source_files"]),
            target_files=tuple(File(*row) for row in tables["target_files"]),
            literals=Literals.of_templates(Literals(tables["literals"]), tables["literal_files"]),
            carried=tuple(CarriedFile(*row) for row in tables["carried"]),
            **values,
        )
        found = plan.plan_id
    except (TypeError, ValueError, CheckpointError) as error:
        raise _malformed(path, f"holds invalid values: {error}") from error
    if found != facts.get("plan_id"):
        raise _malformed(path, f"its header names the plan {facts.get('plan_id')}, but it holds {found}")
    _check_numbers(plan, path)
    return plan


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


def _read_ops(file: Any, path: str) -> Ops:
    blocks: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in _OPS.values()}
    widest = {column: OP[name].base for (name, _), column in _OPS.items()}
    for batch in _read(file, "ops", partial(_is_narrow, widest), path):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            blocks[name].append(column.to_numpy(zero_copy_only=False))
    none = np.zeros(0, dtype=np.int8)
    return Ops.of_columns(
        {column: np.concatenate([none, *blocks.pop(_OPS[column])]) for column in Ops.COLUMNS}
    )


def _is_narrow(widest: Mapping[str, np.dtype[Any]], schema: pa.Schema) -> bool:
    """Whether a table has these columns of whole numbers, none wider than in memory."""
    return schema.names == list(widest) and all(
        kind in _WIDTHS and kind.bit_width <= 8 * most.itemsize
        for kind, most in zip(schema.types, widest.values(), strict=True)
    )


def _read(
    file: Any, name: str, schema: pa.Schema | Callable[[pa.Schema], bool], path: str
) -> Iterator[pa.RecordBatch]:
    """The next table of the file, which must be ``name``."""
    with pa.ipc.open_stream(file) as stream:
        table, found = (stream.schema.metadata or {}).get(b"table"), stream.schema.remove_metadata()
        fits = schema(found) if callable(schema) else found == schema
        if table != name.encode() or not fits:
            raise _malformed(path, f"the table {name!r} is missing or has unexpected columns")
        for batch in stream:
            batch.validate(full=True)
            if any(column.null_count for column in batch.columns):
                raise _malformed(path, f"the table {name!r} has missing values")
            yield batch


def _rows_of(batch: pa.RecordBatch, dtype: np.dtype[Any]) -> Rows:
    rows = np.zeros(batch.num_rows, dtype=dtype)
    for name, column in zip(dtype.names or (), batch.columns, strict=True):
        rows[name] = column.to_numpy(zero_copy_only=False)
    return rows


def _check_numbers(plan: Plan, path: str) -> None:
    """Check that all groups, files and tensors named by rows exist."""
    for what, numbers, count in plan.numbers():
        wrong = numbers[(numbers < 0) | (numbers >= count)]
        if len(wrong):
            raise _malformed(path, f"names the {what} {int(wrong[0])}, but there are {count}")
    if len(plan.op_groups) != len(plan.ops):
        raise _malformed(path, f"has {len(plan.ops)} ops, but groups for {len(plan.op_groups)}")


def _values(column: pa.Array) -> list[Any]:
    return column.to_pylist()


def _malformed(path: str, detail: str) -> FormatError:
    return FormatError("bad_plan_file", path, None, detail)
