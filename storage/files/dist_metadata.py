"""The ``.metadata`` file of a dist checkpoint: which piece of which tensor is in which file.

A dist checkpoint (FlexCheckpoint, auto-parallel) is a folder of data files and a ``.metadata`` file: a pickle of three
of Paddle's classes. It has had four forms, under two module paths:

======== ============================================ ================================== =======================
Paddle   module                                       ``LocalTensorMetadata``            ``LocalTensorIndex``
======== ============================================ ================================== =======================
2.6      ``paddle.distributed.checkpoint.metadata``   global_offset, local_shape         tensor_key,
                                                                                         global_offset
3.0, 3.1 the same                                     + dtype                            the same
3.2      ``paddle.distributed.flex_checkpoint``       + global_shape                     the same
         ``.dcp.metadata``
3.3      the same                                     + is_flattened, flattened_range    + is_flattened,
                                                                                         flattened_range,
                                                                                         replica_id, local_shape
======== ============================================ ================================== =======================

Further attributes are accepted if they cannot change a value: those in :data:`REMARKS`, which describe the writer, and
any that is ``None``. All others are errors.

``Metadata`` has ``state_dict_metadata`` (key → pieces), ``storage_metadata`` (index of a piece → file) and, since
3.0, ``flat_mapping`` (key → its path in the nested dict). Checked in the wheels of 2.6.2, 3.0.0, 3.2.0 and 3.3.1.

*Reading.* :func:`parse_dist_metadata` parses the pickle opcode by opcode, as
:mod:`~paddle_reshard.storage.files.paddle_pickle` does and with the same guarantee: nothing is imported, nothing is
called. Real files have millions of entries, so the result is columns, and runs of similar entries are parsed by
:mod:`~paddle_reshard.storage.files.dist_metadata_rows`.

*Writing.* :func:`encode_dist_metadata` writes any of the four forms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from paddle_reshard.pipeline.core.errors import FormatError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.upstream import NEWEST_PADDLE
from paddle_reshard.storage.files.dist_metadata_rows import IndexColumns, IndexRows, PieceRows
from paddle_reshard.storage.files.dist_metadata_values import (
    DEFAULTS,
    INDEX,
    INDEX_FIELDS,
    PIECE,
    PIECE_FIELDS,
    Memo,
)
from paddle_reshard.storage.files.framed_pickle import FramedPickle, UnframedPickle
from paddle_reshard.storage.files.paddle_pickle import (
    ARRAY_GLOBALS,
    Global,
    Instance,
    Machine,
    Window,
    is_file_name,
    shown_text,
)

READ_AHEAD_BYTES: Final = 1 << 23
"""Size of one ranged read."""
MAX_FILE_BYTES: Final = 1 << 31
"""Largest file; one of 227 MiB describes four million pieces."""

METADATA: Final = "Metadata"
_MODULES: Final = (
    "paddle.distributed.checkpoint.metadata",
    "paddle.distributed.flex_checkpoint.dcp.metadata",
)
_NAMED: Final = ("scalar", "dtype", "OrderedDict", "encode", "bytes")
_GLOBALS: Final[Mapping[tuple[str, str], Global]] = {
    **{name: allowed for name, allowed in ARRAY_GLOBALS.items() if name[1] in _NAMED},
    **{(module, kind): Global(None, kind) for module in _MODULES for kind in (METADATA, PIECE, INDEX)},
}
"""All globals that such a file may name: the three classes, and those by which NumPy integers are pickled."""

GENERATIONS: Final[Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]]] = {
    "2.6": (_MODULES[0], PIECE_FIELDS[:2], INDEX_FIELDS[:2]),
    "3.0": (_MODULES[0], PIECE_FIELDS[:3], INDEX_FIELDS[:2]),
    "3.2": (_MODULES[1], PIECE_FIELDS[:4], INDEX_FIELDS[:2]),
    "3.3": (_MODULES[1], PIECE_FIELDS, INDEX_FIELDS),
}
"""Paddle version that introduced a form → module, attributes of a piece, attributes of an index."""

PIECE_COLUMNS: Final = np.dtype(
    [
        ("key", np.int32),  # index into DistMetadata.keys
        ("dtype", np.int32),  # index into DistMetadata.dtypes; -1: unknown
        ("global_offset", np.int32),  # index into DistMetadata.shapes
        ("local_shape", np.int32),  # index into DistMetadata.shapes
        ("global_shape", np.int32),  # index into DistMetadata.shapes; -1: unknown
        ("flattened_range", np.int32),  # index into DistMetadata.shapes; -1: the piece is not flattened
    ]
)
LOCATION_COLUMNS: Final = np.dtype(
    [
        ("piece", np.int32),  # index into DistMetadata.pieces
        ("file", np.int32),  # index into DistMetadata.files
        ("replica", np.int32),  # replica_id; -1: none
    ]
)

REMARKS: Final = ("model_type", "checkpoint_version", "erniebot_commit_id", "paddle_commit_id")
"""Attributes of ``Metadata`` in Paddle's develop branch after 3.3 (``dcp/metadata.py``) that describe the writer."""

_SHAPES: Final = ("global_offset", "local_shape", "global_shape", "flattened_range")
_MAX_REMARKS: Final = 32
_MOST_DIMS: Final = 64
_MAX_SIZE: Final = 1 << 60
"""Largest offset, extent or number of elements of a piece: the sum of two fits an int64, and hashes are unique."""

T = TypeVar("T")
U = TypeVar("U", str, int)
Remark: TypeAlias = str | int | float | None
Columns = npt.NDArray[np.void]
Ids = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
IdColumns = Mapping[str, Ids]
"""Name of a column → a value id of each row."""


@dataclass(frozen=True, eq=False)
class DistMetadata:
    """One ``.metadata`` file as columns."""

    keys: tuple[str, ...]
    """Every key, ascending."""
    dtypes: tuple[str, ...]
    """Every dtype, by Paddle's name without ``paddle.``, ascending."""
    shapes: tuple[Shape, ...]
    """Every offset, shape and range, ascending; the columns refer to it."""
    files: tuple[str, ...]
    """Every data file, ascending."""
    pieces: Columns
    """One row of :data:`PIECE_COLUMNS` per piece, sorted by key and offset; all rows differ."""
    locations: Columns
    """One row of :data:`LOCATION_COLUMNS` per piece and file that holds it, sorted by both; at least one per piece."""
    flat_mapping: Mapping[str, tuple[str, ...]]
    """Key → path in the nested dict; empty if the file has none."""
    remarks: Mapping[str, Remark] = field(default_factory=dict)
    """Attributes of later versions of Paddle → value. None of them affects a tensor."""

    def __post_init__(self) -> None:
        if self.pieces.dtype != PIECE_COLUMNS or self.locations.dtype != LOCATION_COLUMNS:
            raise TypeError("pieces and locations must have the columns PIECE_COLUMNS and LOCATION_COLUMNS")
        self.pieces.flags.writeable = False
        self.locations.flags.writeable = False


def parse_dist_metadata(read: Callable[[int, int], bytes], size_bytes: int, path: str) -> DistMetadata:
    """Read one ``.metadata`` file of any form without executing it.

    ``read(byte_offset, nbytes)`` returns exactly ``nbytes`` bytes. It is called for up to :data:`READ_AHEAD_BYTES` at a
    time, once for each byte of the file. ``path`` is for messages only.

    Raises
    ------
    UnsafePickleError
        If the file uses an opcode, a global or a call that is not on the allow-list (``forbidden_*``).
    FormatError
        If it is truncated, gives a wrong length, or contradicts itself: a piece outside its tensor, a duplicate piece
        or index, a piece without an index or the reverse. ``reason`` says which.
    """
    if size_bytes > MAX_FILE_BYTES:
        detail = f"{size_bytes} bytes, at most {MAX_FILE_BYTES} are read"
        raise FormatError("file_too_large", path, None, detail)
    machine = _Machine(Window(read, size_bytes, path, READ_AHEAD_BYTES))
    root, _ = machine.run()
    return replace(
        _Assembly(machine.values, path).result(*_columns_of(root, machine)), remarks=machine.remarks
    )


# ---------------------------------------------------------------------------------------------- from opcodes


class _Machine(Machine):
    """The pickle machine with the classes of a ``.metadata`` file, and a fast path for each of its two entries."""

    __slots__ = ("indexes", "pieces", "remarks", "values")

    def __init__(self, window: Window) -> None:
        super().__init__(window, _GLOBALS)
        self.remarks: dict[str, Remark] = {}
        self.values = Memo()
        self.pieces = PieceRows(self, self.values)
        self.indexes = IndexRows(self, self.values)

    def is_key(self, value: object) -> bool:
        return isinstance(value, str) or (isinstance(value, Instance) and value.kind == INDEX)

    def make(self, kind: str) -> Instance:
        """Make a new instance, after all complete instances that the fast path can parse.

        The stack is the same before and after: the class of the instance has just been popped from it.
        """
        lane = {PIECE: self.pieces, INDEX: self.indexes}.get(kind)
        if lane is None:
            return Instance(kind)
        return lane.follow()

    def remember(self, index: int | None) -> None:
        memo = self.values
        if index is not None and index != len(memo):
            reason = "memo_overwritten" if index < len(memo) else "memo_out_of_order"
            self.bad(reason, f"stores value {index} when {len(memo)} are stored")
        if self.stack[-1] is None:
            self.bad("bad_memo", "stores None, which pickles never refer to")
        memo.append(self.stack[-1])

    def recall(self, index: int) -> object:
        if index >= len(self.values):
            self.bad("missing_memo", f"refers to value {index}, which was never stored")
        value = self.values[index]
        if _is_container(value):
            self.bad("shared_value", f"refers to value {index}, a container that may occur only once")
        return value


def _is_container(value: object) -> bool:
    """Whether a value may have only one owner: any container except a finished list of numbers, one for each dim."""
    if isinstance(value, list):
        return not 0 < len(value) <= _MOST_DIMS or not all(type(v) is int for v in value)
    return isinstance(value, (dict, Instance))


# ------------------------------------------------------------------------------------------------ to columns


class _Numbering:
    """Distinct values, numbered in the order of their first use."""

    def __init__(self) -> None:
        self.ids: dict[Any, int] = {}

    def add(self, value: Any) -> int:
        return self.ids.setdefault(value, len(self.ids))

    def __getitem__(self, number: int) -> Any:
        return list(self.ids)[number]


def _columns_of(
    root: object, machine: _Machine
) -> tuple[IdColumns, IndexColumns, dict[str, tuple[str, ...]]]:
    """Pieces and indexes as columns of value ids, and the paths in the nested dict, from the unpickled root."""
    path = machine.window.path
    if not isinstance(root, Instance) or root.kind != METADATA or root.state is None:
        _bad(path, "bad_metadata", f"the root is not an instance of {METADATA}")
    state = dict(root.state)
    pieces = _piece_columns(state.pop("state_dict_metadata", None), machine)
    indexes = _index_columns(state.pop("storage_metadata", None), machine)
    flat_mapping = _flat_mapping(state.pop("flat_mapping", None), path)
    for name, value in state.items():
        _remark(machine, METADATA, name, value)
    return pieces, indexes, flat_mapping


def _remark(machine: _Machine, kind: str, name: object, value: object) -> None:
    """Record an unknown attribute if it cannot change a value; otherwise refuse it."""
    path = machine.window.path
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        _bad(path, "unknown_attribute", f"{kind} has {_printable(name)}")
    describes_writer = kind == METADATA and name in REMARKS and isinstance(value, (str, int, float))
    if value is not None and not describes_writer:
        _bad(
            path,
            "unknown_attribute",
            f"{kind} has {_printable(name)}, which is not None and may affect how values are stored; this "
            f"version reads the metadata of Paddle up to {NEWEST_PADDLE}",
        )
    if len(machine.remarks) < _MAX_REMARKS:
        machine.remarks[name if kind == METADATA else f"{kind}.{name}"] = value  # type: ignore[assignment]


def _piece_columns(table: object, machine: _Machine) -> IdColumns:
    """``key`` and the attributes of a piece."""
    lane, values, path = machine.pieces, machine.values, machine.window.path
    if table is None:
        table = {}
    if not isinstance(table, dict) or (lane.owner is not None and lane.owner is not table):
        _bad(path, "bad_metadata", "state_dict_metadata is not a dict of lists of pieces")
    slow = []
    for key, pieces in table.items():
        if not isinstance(key, str) or not isinstance(pieces, list):
            _bad(path, "bad_metadata", "state_dict_metadata is not a dict of lists of pieces")
        key_id = values.add(key)
        for piece in pieces:
            slow.append((key_id, *_attributes(piece, PIECE, lane.fields, machine)))
        lane.keys.append(key_id)
    counted = Counter(values.value(key_id) for key_id in lane.keys)
    if len(counted) < len(lane.keys):
        twice = counted.most_common(1)[0][0]
        _bad(path, "duplicate_key", f"the key {_printable(twice)} appears twice in one dict")
    return lane.columns(slow)


def _index_columns(table: object, machine: _Machine) -> IndexColumns:
    lane = machine.indexes
    if table is None:
        table = {}
    if not isinstance(table, dict) or (lane.owner is not None and lane.owner is not table):
        _bad(machine.window.path, "bad_metadata", "storage_metadata is not a dict of indexes and files")
    slow = [
        (*_attributes(index, INDEX, lane.fields, machine), machine.values.add(file))
        for index, file in table.items()
    ]
    return lane.columns(slow)


def _attributes(instance: object, kind: str, fields: Sequence[str], machine: _Machine) -> Iterator[int]:
    path = machine.window.path
    if not isinstance(instance, Instance) or instance.kind != kind or instance.state is None:
        _bad(path, "bad_metadata", f"expected an instance of {kind}, found something else")
    for name in instance.state:
        if name not in fields:
            _remark(machine, kind, name, instance.state[name])
    for name in fields:
        yield machine.values.add(instance.state.get(name, DEFAULTS.get(name)))


def _flat_mapping(table: object, path: str) -> dict[str, tuple[str, ...]]:
    if table is None:
        return {}
    if not isinstance(table, dict):
        _bad(path, "bad_metadata", "flat_mapping is not a dict")
    for key, names in table.items():
        known = isinstance(key, str) and isinstance(names, tuple) and names
        if not known or not all(isinstance(part, str) for part in names):
            _bad(path, "bad_metadata", f"flat_mapping of {_printable(key)} is not a tuple of names")
    return table


class _Distinct:
    """The distinct keys, dtypes, shapes and files. Each is checked once and numbered."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.keys, self.dtypes, self.shapes, self.files = (_Numbering() for _ in range(4))

    def key(self, value: object) -> int:
        if not isinstance(value, str) or not value:
            _bad(self.path, "bad_key", "a key that is not text")
        return self.keys.add(value)

    def file(self, value: object) -> int:
        if not isinstance(value, str) or not is_file_name(value):
            _bad(self.path, "bad_file", f"{_printable(value)} is not the name of a file next to the metadata")
        return self.files.add(value)

    def dtype(self, value: object) -> int:
        if value is None:
            return -1
        if not isinstance(value, str) or not value:
            _bad(self.path, "bad_dtype", "a dtype that is not text")
        return self.dtypes.add(value)

    def shape(self, value: object) -> int:
        shape = self.shape_or_none(value)
        if shape < 0:
            _bad(self.path, "bad_shape", "a piece without an offset or a shape")
        return shape

    def shape_or_none(self, value: object) -> int:
        if value is None:
            return -1
        known = isinstance(value, (tuple, list)) and len(value) <= _MOST_DIMS
        if not known or not all(type(v) is int and 0 <= v < _MAX_SIZE for v in value):  # type: ignore[attr-defined]
            _bad(self.path, "bad_shape", "an offset, shape or range that is not a tuple of sizes below 2**60")
        return self.shapes.add(tuple(value))  # type: ignore[arg-type]

    def flag(self, value: object) -> int:
        if not isinstance(value, bool):
            _bad(self.path, "bad_range", "is_flattened is not a flag")
        return int(value)

    def replica(self, value: object) -> int:
        if value is None:
            return -1
        if type(value) is not int or not 0 <= value < 1 << 31:
            _bad(self.path, "bad_replica", f"replica_id {_printable(value)} is not a small number")
        return value


class _Locations(NamedTuple):
    """Which piece is in which file, a row per index."""

    piece: Ids
    file: Ids
    replica: Ids


class _Assembly:
    """Columns of value ids → checked columns of the result."""

    def __init__(self, values: Memo, path: str) -> None:
        self.values, self.path = values, path
        self.distinct = _Distinct(path)

    def result(
        self,
        piece_columns: IdColumns,
        index_columns: IndexColumns,
        flat_mapping: Mapping[str, tuple[str, ...]],
    ) -> DistMetadata:
        pieces = self._pieces(piece_columns)
        locations = self._locations(pieces, index_columns)
        _end_with_tensor(pieces, self.distinct)
        metadata = _in_order(self.distinct, pieces, locations, flat_mapping)
        # Here and not before, because the files of a key are nearly ascending once they are in order.
        key = metadata.pieces["key"][metadata.locations["piece"]]
        pairs = _packed(key, metadata.locations["file"])
        _no_doubles("two_pieces_in_one_file", self.path, metadata.keys, key, pairs)
        return metadata

    def _column(self, ids: Ids, convert: Callable[[object], int]) -> Ids:
        """``convert`` of every value, called once for each distinct id."""
        used = np.zeros(self.values.count, dtype=bool)
        used[ids] = True
        converted = np.full(self.values.count, -1, dtype=np.int32)
        for value_id in np.flatnonzero(used).tolist():
            converted[value_id] = convert(self.values.value(value_id))
        return converted[ids]

    def _range(self, rows: IdColumns) -> Ids:
        ranges = self._column(rows["flattened_range"], self.distinct.shape_or_none)
        flags = self._column(rows["is_flattened"], self.distinct.flag)
        if ((ranges >= 0) != (flags > 0)).any():
            _bad(self.path, "bad_range", "is_flattened and flattened_range contradict each other")
        return ranges

    def _pieces(self, rows: IdColumns) -> Columns:
        column, distinct = self._column, self.distinct
        pieces = np.empty(len(rows["key"]), dtype=PIECE_COLUMNS)
        pieces["key"] = column(rows["key"], distinct.key)
        pieces["dtype"] = column(rows["dtype"], distinct.dtype)
        pieces["global_offset"] = column(rows["global_offset"], distinct.shape)
        pieces["local_shape"] = column(rows["local_shape"], distinct.shape)
        pieces["global_shape"] = column(rows["global_shape"], distinct.shape_or_none)
        pieces["flattened_range"] = self._range(rows)
        _check_geometry(pieces, distinct)
        return pieces

    def _locations(self, pieces: Columns, rows: IndexColumns) -> _Locations:
        column, distinct = self._column, self.distinct
        replica, file = column(rows.replica, distinct.replica), column(rows.file, distinct.file)
        named = rows.named
        key = column(named["tensor_key"], distinct.key)
        offset = column(named["global_offset"], distinct.shape)
        local = column(named["local_shape"], distinct.shape_or_none)
        flat = self._range(named)
        # Up to 3.2 an index has neither shape nor range: then offsets identify the pieces of a key.
        has_shape = bool(len(local)) and bool((local >= 0).all())
        if not has_shape and (local >= 0).any():
            _bad(self.path, "bad_index", "some indexes have a local_shape and some have none")
        own, wanted = [_packed(pieces["key"], pieces["global_offset"])], [_packed(key, offset)]
        if has_shape:
            own.append(_packed(pieces["local_shape"], pieces["flattened_range"]))
            wanted.append(_packed(local, flat))
        indexed = _find_pieces(pieces["key"], *_numbered(own, wanted), key, distinct)
        lost = np.ones(len(pieces), dtype=bool)
        lost[indexed] = False
        if lost.any():
            name = distinct.keys[pieces["key"][np.flatnonzero(lost)[0]]]
            _bad(self.path, "lost_piece", f"no file holds a piece of {shown_text(name)}")
        locations = _Locations(np.repeat(indexed.astype(np.int32), rows.lengths), file, replica)
        pairs = _packed(locations.piece, locations.replica)
        _no_doubles("duplicate_index", self.path, distinct.keys, pieces["key"][locations.piece], pairs)
        return locations


def _check_geometry(pieces: Columns, distinct: _Distinct) -> None:
    """Check that every piece is inside its tensor, and every range inside its piece."""
    shapes = list(distinct.shapes.ids)
    extents = _as_matrix(shapes)
    dims = np.array([len(shape) for shape in shapes], dtype=np.int64)
    elements = np.array([min(prod(shape), _MAX_SIZE) for shape in shapes], dtype=np.int64)
    offset, local = pieces["global_offset"], pieces["local_shape"]
    whole, flat = pieces["global_shape"], pieces["flattened_range"]
    wrong = dims[offset] != dims[local]
    # A piece that is not flattened may reach beyond the end of its tensor (_end_with_tensor).
    begin, size = extents[offset], extents[local]
    end = np.where(flat[:, None] >= 0, begin + size, np.maximum(begin, size))
    wrong |= (whole >= 0) & ((dims[whole] != dims[local]) | (end > extents[whole]).any(axis=1))
    start, stop = extents[flat, 0], extents[flat, 1]
    wrong |= (flat >= 0) & ((dims[flat] != 2) | (start > stop) | (stop > elements[local]))
    if wrong.any():
        row = pieces[np.flatnonzero(wrong)[0]]
        given = [shapes[i] if i >= 0 else None for i in (row[name] for name in _SHAPES)]
        _bad(
            distinct.path,
            "bad_piece",
            f"a piece of {shown_text(distinct.keys[row['key']])} contradicts itself: "
            + ", ".join(f"{name} {shape}" for name, shape in zip(_SHAPES, given, strict=True)),
        )


def _end_with_tensor(pieces: Columns, distinct: _Distinct) -> None:
    """Let pieces that reach beyond the end of their tensor end with it, as the arrays in the files do.

    Paddle says of 5 columns on 4 ranks that the first three have two each (``balanced_split`` in ``dcp/utils.py``):
    the file of the third holds one, which is what its loader reads.
    """
    shapes = list(distinct.shapes.ids)
    extents = _as_matrix(shapes)
    beyond = (
        extents[pieces["global_offset"]] + extents[pieces["local_shape"]] > extents[pieces["global_shape"]]
    ).any(axis=1) & (pieces["global_shape"] >= 0)
    for row in np.flatnonzero(beyond).tolist():
        offset, local, whole = (shapes[pieces[name][row]] for name in _SHAPES[:3])
        ended = tuple(min(n, end - at) for at, n, end in zip(offset, local, whole, strict=True))
        pieces["local_shape"][row] = distinct.shape(ended)


def _find_pieces(
    of_pieces: Ids, own: Longs, wanted: Longs, of_indexes: Ids, distinct: _Distinct
) -> npt.NDArray[np.int64]:
    """The piece of each index, by their numbers ``own`` and ``wanted``. None may be missing or duplicate."""
    order = np.argsort(own, kind="stable")
    own = own[order]
    double = np.flatnonzero(own[1:] == own[:-1])
    if len(double):
        name = distinct.keys[of_pieces[order[double[0]]]]
        _bad(distinct.path, "duplicate_piece", f"two pieces of {shown_text(name)} are identical")
    at = np.searchsorted(own, wanted)
    exists = at < len(own)
    exists[exists] = own[at[exists]] == wanted[exists]
    if not exists.all():
        name = distinct.keys[of_indexes[np.flatnonzero(~exists)[0]]]
        detail = f"storage_metadata has an index for a piece of {shown_text(name)} that does not exist"
        _bad(distinct.path, "unknown_piece", detail)
    return order[at]


def _no_doubles(
    reason: str, path: str, keys: Sequence[str] | _Numbering, key: Ids, pairs: npt.NDArray[np.int64]
) -> None:
    """Check that no pair occurs twice; ``key`` is the key of each."""
    twice = _first_double(pairs)
    if twice is not None:
        name = keys[int(key[twice])]
        _bad(path, reason, f"a piece of {shown_text(name)} appears twice in storage_metadata")


def _in_order(
    distinct: _Distinct, pieces: Columns, locations: _Locations, flat_mapping: Mapping[str, tuple[str, ...]]
) -> DistMetadata:
    """Sort values and rows, so that the result does not depend on which entries were parsed in runs."""
    keys, key_order = _ascending(distinct.keys)
    dtypes, dtype_order = _ascending(distinct.dtypes)
    shapes, shape_order = _ascending(distinct.shapes)
    files, file_order = _ascending(distinct.files)
    pieces["key"], pieces["dtype"] = key_order[pieces["key"]], dtype_order[pieces["dtype"]]
    for name in _SHAPES:
        pieces[name] = shape_order[pieces[name]]
    first = _packed(pieces["key"], pieces["global_offset"])
    second = _packed(pieces["local_shape"], pieces["flattened_range"])
    order = np.lexsort((second, first))
    moved = np.empty(len(order), dtype=np.int32)
    moved[order] = np.arange(len(order))
    piece, file = moved[locations.piece], file_order[locations.file]
    location_order = np.argsort(_packed(piece, file), kind="stable")
    rows = np.empty(len(piece), dtype=LOCATION_COLUMNS)
    for name, column in (("piece", piece), ("file", file), ("replica", locations.replica)):
        rows[name] = column[location_order]
    return DistMetadata(keys, dtypes, shapes, files, pieces[order], rows, flat_mapping)


def _bad(path: str, reason: str, detail: str) -> NoReturn:
    raise FormatError(reason, path, None, detail)


def _as_matrix(shapes: Sequence[Shape]) -> npt.NDArray[np.int64]:
    """A row per shape, padded with zeros."""
    width = max([2, *map(len, shapes)])
    return np.array([(*shape, *(0,) * (width - len(shape))) for shape in shapes], dtype=np.int64).reshape(
        -1, width
    )


def _packed(high: Ids, low: Ids) -> npt.NDArray[np.int64]:
    """Two columns of ids from -1 on as one column."""
    packed = high.astype(np.int64)
    packed <<= 32
    packed += low  # in place: these columns are as long as the file
    packed += 1
    return packed


def _numbered(
    own: Sequence[npt.NDArray[np.int64]], wanted: Sequence[npt.NDArray[np.int64]]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """One number per row of several columns, the same for equal rows; -1 if not among ``own``."""
    own_numbers, wanted_numbers = np.zeros(len(own[0]), np.int64), np.zeros(len(wanted[0]), np.int64)
    for ours, theirs in zip(own, wanted, strict=True):
        known = np.unique(ours)
        at = np.searchsorted(known, theirs)
        exists = at < len(known)
        exists[exists] = known[at[exists]] == theirs[exists]
        own_numbers = own_numbers * len(known) + np.searchsorted(known, ours)
        wanted_numbers = np.where(exists & (wanted_numbers >= 0), wanted_numbers * len(known) + at, -1)
    return own_numbers, wanted_numbers


def _first_double(values: npt.NDArray[np.int64]) -> int | None:
    if (values[1:] > values[:-1]).all():
        return None
    ascending = np.sort(values)
    if (ascending[1:] != ascending[:-1]).all():
        return None
    order = np.argsort(values, kind="stable")
    double = np.flatnonzero(values[order][1:] == values[order][:-1])
    return int(order[double[0] + 1])


def _ascending(table: _Numbering) -> tuple[tuple[Any, ...], Ids]:
    """The values in order, and the new number of each old one; -1 stays -1."""
    ordered = sorted(table.ids)
    numbers = np.full(len(ordered) + 1, -1, dtype=np.int32)
    for new, value in enumerate(ordered):
        numbers[table.ids[value]] = new
    return tuple(ordered), numbers


def _printable(value: object) -> str:
    """A value for a message; containers are not printed, because their length is unbounded."""
    if isinstance(value, str):
        return shown_text(value)
    return str(value) if type(value) is int and value.bit_length() < 64 else f"a {type(value).__name__}"


# ---------------------------------------------------------------------------------------------------- writing


def encode_dist_metadata(metadata: DistMetadata, generation: str = "3.3", protocol: int = 4) -> bytes:
    """Bytes of a ``.metadata`` file for Paddle. :func:`parse_dist_metadata` reads them back as the same value.

    ``generation`` is the form, a key of :data:`GENERATIONS`. Protocol 4 is written without frames; 5 as ``pickle``
    writes these objects for a single process, in frames of which Paddle 3.4 can read the first ones alone.

    Raises
    ------
    ValueError
        If the form cannot hold ``metadata``: a flattened piece, a replica, a missing dtype.
    """
    if generation not in GENERATIONS:
        raise ValueError(f"generation {generation!r}; known: {', '.join(GENERATIONS)}")
    out = bytearray()
    file = (FramedPickle if protocol == 5 else UnframedPickle)(lambda _, data: out.extend(data))
    _MetadataEncoder(metadata, generation, file).write()
    file.finish()
    return bytes(out)


class _MetadataEncoder:
    """Writes the objects as one process shares them: each key, file name and name of an attribute is one object.

    With protocol 5, which ``pickle`` writes so, also offset, shape and range of a piece with those of its index.
    """

    def __init__(self, metadata: DistMetadata, generation: str, file: FramedPickle | UnframedPickle) -> None:
        self.metadata, self.file = metadata, file
        self.pieces: list[tuple[int, ...]] = metadata.pieces.tolist()
        self.module, self.piece_fields, self.index_fields = GENERATIONS[generation]
        self.has_mapping = generation != "2.6"
        if "dtype" in self.piece_fields and (metadata.pieces["dtype"] < 0).any():
            raise ValueError(f"Paddle {generation} requires a dtype for every piece")
        lossy = (metadata.pieces["flattened_range"] >= 0).any() or (metadata.locations["replica"] >= 0).any()
        if "flattened_range" not in self.piece_fields and lossy:
            raise ValueError(f"the metadata of Paddle {generation} has no flattened pieces and no replicas")
        if metadata.flat_mapping and not self.has_mapping:
            raise ValueError(f"the metadata of Paddle {generation} has no flat_mapping")
        self.attributes: dict[str, int] = {}
        self.keys: dict[str, int] = {}
        self.files: dict[int, int] = {}
        self.shared = {name: np.full(len(metadata.pieces), -1, np.int64) for name in _SHARED}
        """Memo indexes of the tuples of each piece; -1: not stored."""

    def write(self) -> None:
        tables = {
            "state_dict_metadata": self._pieces_by_key,
            "storage_metadata": self._locations,
            **({"flat_mapping": self._paths} if self.has_mapping else {}),
        }
        self._instance(METADATA, tables, lambda name: tables[name]())

    def _instance(self, kind: str, names: Iterable[str], save: Callable[[str], object]) -> None:
        file = self.file

        def attribute(name: str) -> None:
            self._text(self.attributes, name, name)
            save(name)

        file.named(self.module, kind)
        file.numbers(())
        file.emit(b"\x81")
        file.memoize()
        file.dict_of(names, attribute)
        file.emit(b"b")

    def _text(self, known: dict[U, int], name: U, text: str) -> None:
        """Write a string that is the same object at every use."""
        if name in known:
            self.file.recall(known[name])
        else:
            known[name] = self.file.text(text)

    def _pieces_by_key(self) -> None:
        metadata = self.metadata
        order = np.argsort(metadata.pieces["key"], kind="stable")
        starts = np.searchsorted(metadata.pieces["key"][order], np.arange(len(metadata.keys) + 1)).tolist()

        def entry(numbered: tuple[str, tuple[int, int]]) -> None:
            key, (start, stop) = numbered
            self._text(self.keys, key, key)
            self.file.list_of(order[start:stop].tolist(), self._piece)

        self.file.dict_of(zip(metadata.keys, pairwise(starts), strict=True), entry)

    def _piece(self, number: int) -> None:
        ids = _named(self.pieces[number])
        self._instance(PIECE, self.piece_fields, lambda name: self._attribute(number, name, ids))

    def _locations(self) -> None:
        def entry(location: tuple[int, int, int]) -> None:
            number, file, replica = location
            ids = {**_named(self.pieces[number]), "replica_id": replica}
            self._instance(INDEX, self.index_fields, lambda name: self._attribute(number, name, ids))
            self._text(self.files, file, self.metadata.files[file])

        self.file.dict_of(self.metadata.locations.tolist(), entry)

    def _paths(self) -> None:
        def entry(mapped: tuple[str, tuple[str, ...]]) -> None:
            key, path = mapped
            self._text(self.keys, key, key)
            self.file.tuple_of(path, lambda part: self._text(self.keys, part, part))

        self.file.dict_of(self.metadata.flat_mapping.items(), entry)

    def _attribute(self, number: int, name: str, ids: Mapping[str, int]) -> None:
        """Write an attribute of a piece or of its index."""
        file = self.file
        if name == "is_flattened":
            file.simple(ids["flattened_range"] >= 0)
        elif name == "tensor_key":
            key = self.metadata.keys[ids["key"]]
            self._text(self.keys, key, key)
        elif ids[name] < 0:
            file.simple(None)
        elif name == "dtype":
            file.text(self.metadata.dtypes[ids[name]])
        elif name == "replica_id":
            file.simple(ids[name])
        elif name in self.shared and self.shared[name][number] >= 0:
            file.recall(int(self.shared[name][number]))
        else:
            stored = file.numbers(self.metadata.shapes[ids[name]])
            if stored is not None and name in self.shared:
                self.shared[name][number] = stored


_SHARED: Final = ("global_offset", "local_shape", "flattened_range")


def _named(piece: tuple[int, ...]) -> dict[str, int]:
    return dict(zip(PIECE_COLUMNS.names or (), piece, strict=True))
