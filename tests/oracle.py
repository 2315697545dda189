"""The judge of the converter: an independent reader of hybrid-parallel checkpoints.

It shares no code with the package. Every tensor file is opened by Paddle's own loader, the rules of
tensor parallelism and of sharding are written down a second time, and what a checkpoint must satisfy
(no hole, no overlap, zero padding, replicas that agree) is asserted on the way. Two more views of a
checkpoint serve the tests: the truth that was taken from the memory of the trainer, and the structure
of the files (which key, which shape, which tensor name, in which order).

Tensors are keyed as in the truth: ``<key>`` for the parameter, and ``<key>.<state>`` for its states
``w_0`` (master weight), ``moment1_0``, ``moment2_0``, ``beta1_pow_acc_0``, ``beta2_pow_acc_0``,
``ema_w_0`` (average of the master weight) and ``ema`` (average of a parameter without a master weight).
bfloat16 is its bit pattern as uint16.
"""

import collections
import itertools
import json
import pickle
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

MOMENTS = ("moment1_0", "moment2_0")
POWERS = ("beta1_pow_acc_0", "beta2_pow_acc_0")
SLICED = "sliced"
AFTER_PARAMETER = "accumulators named after parameters"
_NONE = np.empty(0)
MASTER = "w_0"
NAME_TABLE = "StructuredToParameterName@@"
TRUTH_DTYPES = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
ITEM_BYTES_OF_CODE = {16: 2, 15: 2, 10: 4}
CODE_OF_DTYPE = {"uint16": 16, "float16": 15, "float32": 10}
PARTS = ("tp", "pp", "shard")

Tensors = dict[str, np.ndarray]
Shape = tuple[int, ...]


# --- the truth ----------------------------------------------------------------------------------------


def read_truth(path: Path) -> Tensors:
    """Read the logical tensors that the trainer had in memory when it saved."""
    return {
        key: np.frombuffer(entry["data"], TRUTH_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for key, entry in safetensors.deserialize(Path(path).read_bytes())
    }


def shapes_of(truth: Mapping[str, np.ndarray]) -> dict[str, Shape]:
    """Return the global shape of every parameter of a truth."""
    states = (MASTER, *MOMENTS, *POWERS, "ema_w_0")
    return {key: tensor.shape for key, tensor in truth.items() if not key.endswith(states)}


def assert_same_tensors(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    """Assert that two sets of tensors agree in names, shapes, dtypes and in every bit."""
    missing, surplus = sorted(set(expected) - set(actual)), sorted(set(actual) - set(expected))
    assert not missing, f"{len(missing)} tensors are missing: {missing[:4]}"
    assert not surplus, f"{len(surplus)} tensors are not expected: {surplus[:4]}"
    different = [
        difference for key in expected if (difference := _difference(key, actual[key], expected[key]))
    ]
    assert not different, f"{len(different)} of {len(expected)} tensors differ: {different[:4]}"


def _difference(key: str, actual: np.ndarray, expected: np.ndarray) -> str:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{key}: {actual.shape} {actual.dtype}, not {expected.shape} {expected.dtype}"
    if _same_bits(actual, expected):
        return ""
    bits = f"u{actual.dtype.itemsize}"
    unequal = np.flatnonzero(
        np.ascontiguousarray(actual).view(bits) != np.ascontiguousarray(expected).view(bits)
    )
    return f"{key}: {unequal.size} of {actual.size} elements, the first at {unequal[0]}"


def _same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and left.tobytes() == right.tobytes()


def _all_same_bits(arrays: list[np.ndarray]) -> bool:
    return all(_same_bits(arrays[0], other) for other in arrays[1:])


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, to the nearest, ties to even; the result is the bit pattern."""
    assert values.dtype == np.float32
    assert not np.isnan(values).any()
    bits = values.view(np.uint32).astype(np.uint64)
    below, lowest_kept = bits & 0xFFFF, (bits >> 16) & 1
    up = (below > 0x8000) | ((below == 0x8000) & (lowest_kept == 1))
    return ((bits >> 16) + up).astype(np.uint16)


# --- files --------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Coordinate:
    """The ranks in a file name; a part that is absent counts as rank 0."""

    tp: int = 0
    pp: int = 0
    shard: int = 0

    @property
    def cell(self) -> "Coordinate":
        """The same (tp, pp), whatever the shard."""
        return Coordinate(self.tp, self.pp)


@dataclass
class TensorFiles:
    """The files of one kind, by coordinate, and the parts that their names spell out."""

    paths: dict[Coordinate, Path] = field(default_factory=dict)
    parts: set[tuple[str, ...]] = field(default_factory=set)


_TENSOR_FILE = re.compile(
    r"(?:((?:lora_)?model_state)(?:\.(\w+))?\.pdparams|(optimizer|ema)(?:\.(\w+))?\.pdopt)"
)
_PLAIN_STATE_FILES = ("scheduler.pdparams", "scaler.pdparams")
_FOREIGN = (".distcp", ".metadata", ".safetensors", ".tmp", ".part", ".partial", ".lock")


def is_tensor_file(name: str) -> bool:
    """Whether a file of this name holds tensors or plain state as written by ``paddle.save``."""
    return name.endswith((".pdparams", ".pdopt"))


def find_files(directory: Path) -> dict[str, TensorFiles]:
    """Sort the files of a checkpoint by kind and coordinate; a name outside the grammar is an error."""
    found: dict[str, TensorFiles] = collections.defaultdict(TensorFiles)
    for path in sorted(Path(directory).iterdir()):
        assert not path.name.endswith(_FOREIGN), f"{path.name} does not belong into a hybrid checkpoint"
        if path.name in _PLAIN_STATE_FILES or not is_tensor_file(path.name):
            continue
        match = _TENSOR_FILE.fullmatch(path.name)
        assert match, f"{path.name}: not a name that the trainer writes"
        kind, suffix = (match[1], match[2]) if match[1] else (match[3], match[4])
        coordinate, parts = _parse_suffix(path.name, suffix or "")
        assert coordinate not in found[kind].paths, f"{path.name}: a second file of this coordinate"
        found[kind].paths[coordinate] = path
        found[kind].parts.add(parts)
    return dict(found)


def _parse_suffix(name: str, suffix: str) -> tuple[Coordinate, tuple[str, ...]]:
    ranks: dict[str, int] = {}
    for text in suffix.split("_") if suffix else ():
        match = re.fullmatch(r"(tp|pp|shard)(\d+)", text)
        assert match, f"{name}: unknown part {text!r}"
        assert match[1] not in ranks, f"{name}: {match[1]} twice"
        assert match[2] == f"{int(match[2]):02d}", f"{name}: rank {match[2]} is not padded to two digits"
        ranks[match[1]] = int(match[2])
    assert list(ranks) == [part for part in PARTS if part in ranks], f"{name}: parts are out of order"
    return Coordinate(ranks.get("tp", 0), ranks.get("pp", 0), ranks.get("shard", 0)), tuple(ranks)


def check_product(files: TensorFiles, degrees: Mapping[str, int]) -> None:
    """Assert that a kind has one file per coordinate, and names exactly the axes with a degree above 1."""
    expected = {Coordinate(*ranks) for ranks in itertools.product(*(range(degrees[part]) for part in PARTS))}
    names = sorted(path.name for path in files.paths.values())
    assert set(files.paths) == expected, f"not one file per rank of {dict(degrees)}: {names}"
    spelled = tuple(part for part in PARTS if degrees[part] > 1)
    assert files.parts == {spelled}, f"file names should spell {spelled}, not {files.parts}: {names}"


def degrees_of(files: TensorFiles) -> dict[str, int]:
    """Return the degrees that the coordinates of the optimizer files imply."""
    return {part: 1 + max(getattr(coordinate, part) for coordinate in files.paths) for part in PARTS}


@cache
def _paddle_load() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import of Paddle warns about a missing ccache
        import paddle
    return paddle.load


def load_with_paddle(path: Path) -> dict[str, Any]:
    """Open one file with Paddle's own loader; the name table is kept, bfloat16 stays uint16."""
    load = _paddle_load()
    with warnings.catch_warnings():
        # Files written with NumPy 1 name `numpy.core`, which NumPy 2 still resolves, with a warning.
        warnings.filterwarnings("ignore", "numpy.core", DeprecationWarning)
        loaded = load(str(path), return_numpy=True, keep_name_table=True)
    assert isinstance(loaded, dict), f"{path.name}: holds a {type(loaded).__name__}"
    return loaded


# --- one cell -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parameter:
    """What a cell says about one of its parameters before any state is read."""

    name: str
    shape: Shape
    item_bytes: int


@dataclass
class Cell:
    """The tensors of one (tp, pp) coordinate: its parameters and the pieces in its shards."""

    label: str
    degree: int
    strategy: str
    parameters: dict[str, Parameter]
    stored: Tensors
    optimizer: list[dict[tuple[str, str], np.ndarray]]
    ema: list[dict[tuple[str, str], np.ndarray]]

    def tensors(self) -> dict[str, Tensors]:
        """Return the tp-local tensors as {key: {state: array}}; the parameter itself is state ''."""
        result: dict[str, Tensors] = {}
        masters_alone = {state for shard in self.optimizer for _, state in shard} == {MASTER}
        for key, parameter in self.parameters.items():
            states = {
                state: self._join(self.optimizer, key, parameter, state)
                for state in ((MASTER,) if masters_alone else (MASTER, *MOMENTS, *POWERS))
                if state != MASTER or self._has_master(parameter)
            }
            result[key] = {"": self._parameter(key, parameter, states), **states}
        for key, parameter in self.parameters.items() if self.ema else ():
            if self._has_master(parameter):
                result[key]["ema_w_0"] = self._join(self.ema, key, parameter, MASTER)
            else:
                result[key]["ema"] = self._single(self.ema, key, parameter, "ema")
        self._check_tied(result)
        return result

    def _has_master(self, parameter: Parameter) -> bool:
        return any((parameter.name, MASTER) in shard for shard in self.optimizer)

    def _parameter(self, key: str, parameter: Parameter, states: Tensors) -> np.ndarray:
        if key not in self.stored:
            assert MASTER in states, f"{self.label}: {key} is neither stored nor implied by a master weight"
            assert parameter.item_bytes == 2, f"{self.label}: {key} is not bfloat16 and not stored"
            return round_to_bfloat16(states[MASTER])
        array = self.stored[key]
        assert array.shape == parameter.shape, f"{self.label}: {key} is {array.shape}, not {parameter.shape}"
        assert array.dtype.itemsize == parameter.item_bytes, f"{self.label}: {key} is {array.dtype}"
        assert (parameter.item_bytes == 2) == (MASTER in states), f"{self.label}: {key} and its master weight"
        return array

    def _join(self, shards: list, key: str, parameter: Parameter, state: str) -> np.ndarray:
        if self.strategy == "ShardingV2":
            return self._concatenate(shards, key, parameter, state)
        if self.strategy == "Stage3":
            return self._everywhere(shards, key, parameter, state)
        return self._single(shards, key, parameter, state)

    def _everywhere(self, shards: list, key: str, parameter: Parameter, state: str) -> np.ndarray:
        """Stage 3: a slice of equal length in every shard, or the same whole tensor in every shard."""
        where = f"{self.label}: {key} {state}"
        pieces = [shard[parameter.name, state] for shard in shards if (parameter.name, state) in shard]
        assert len(pieces) == self.degree, f"{where} is in {len(pieces)} of {self.degree} shards"
        if state in POWERS or (parameter.name, SLICED) not in shards[0]:
            expected = (1,) if state in POWERS else parameter.shape
            assert pieces[0].shape == expected, f"{where} is {pieces[0].shape}, not {expected}"
            assert _all_same_bits(pieces), f"{where} differs between shards"
            return pieces[0]
        numel = int(np.prod(parameter.shape))
        unit = 256 // parameter.item_bytes
        aligned = -(-numel // unit) * unit
        each = -(-aligned // self.degree)
        assert all(p.shape == (each,) for p in pieces), (
            f"{where}: {[p.shape for p in pieces]}, not {each} each"
        )
        flat = np.concatenate(pieces)
        assert not flat[numel:].tobytes().strip(b"\0"), f"{where}: the padding is not zero"
        return flat[:numel].reshape(parameter.shape)

    def _single(self, shards: list, key: str, parameter: Parameter, state: str) -> np.ndarray:
        held = [shard[parameter.name, state] for shard in shards if (parameter.name, state) in shard]
        assert len(held) == 1, f"{self.label}: {key} {state} is in {len(held)} of {len(shards)} shards"
        expected = (1,) if state in POWERS else parameter.shape
        assert held[0].shape == expected, f"{self.label}: {key} {state} is {held[0].shape}, not {expected}"
        return held[0]

    def _concatenate(self, shards: list, key: str, parameter: Parameter, state: str) -> np.ndarray:
        where = f"{self.label}: {key} {state}"
        holders = [rank for rank, shard in enumerate(shards) if (parameter.name, state) in shard]
        assert holders, f"{where} is in no shard"
        assert holders == list(range(holders[0], holders[-1] + 1)), f"{where} is in shards {holders}"
        pieces = [shards[rank][parameter.name, state] for rank in holders]
        if state in POWERS:
            moments = [rank for rank, shard in enumerate(shards) if (parameter.name, MOMENTS[0]) in shard]
            assert holders == moments, f"{where} is in shards {holders}, its moments in {moments}"
            assert pieces[0].shape == (1,), f"{where} is {pieces[0].shape}"
            assert _all_same_bits(pieces), f"{where} differs between shards {holders}"
            return pieces[0]
        assert all(piece.ndim == 1 and piece.size for piece in pieces), f"{where} is not made of flat slices"
        flat = np.concatenate(pieces)
        numel = int(np.prod(parameter.shape))
        unit = 256 // parameter.item_bytes * self.degree
        padded = -(-numel // unit) * unit
        assert flat.size == padded, f"{where} has {flat.size} elements with padding, not {padded}"
        assert not flat[numel:].tobytes().strip(b"\0"), f"{where}: the padding is not zero"
        return flat[:numel].reshape(parameter.shape)

    def _check_tied(self, tensors: dict[str, Tensors]) -> None:
        """Two keys with one parameter name are one tensor: the copies must agree."""
        first: dict[str, str] = {}
        for key, parameter in self.parameters.items():
            twin = first.setdefault(parameter.name, key)
            assert _same_bits(tensors[key][""], tensors[twin][""]), f"{self.label}: {key} differs from {twin}"

    def check_balance(self) -> None:
        """Every buffer of stage 1 v2 is cut into equal ranges, so all shards hold equally many elements."""
        if self.strategy != "ShardingV2":
            return
        for shards in (self.optimizer, self.ema):
            for state in (MASTER, *MOMENTS):
                sizes = [sum(a.size for (_, s), a in shard.items() if s == state) for shard in shards]
                assert len(set(sizes)) <= 1, f"{self.label}: shards of unequal size, {state}: {sizes}"


def split_optimizer(label: str, raw: Mapping[str, Any], names: set[str]) -> dict[tuple[str, str], np.ndarray]:
    """Take an optimizer file apart into {(parameter name, state): array}; nothing may be left over."""
    masters = {name.removeprefix("slice@"): array for name, array in raw.get("master_weights", {}).items()}
    result = {(name, MASTER): array for name, array in masters.items()}
    marked = {
        name.removeprefix("slice@") for name in raw.get("master_weights", {}) if name.startswith("slice@")
    }
    spelled_out: set[bool] = set()
    for name in names:
        for state in (*MOMENTS, *POWERS):
            spellings = (f"{name}_fp32_master_0_{state}", f"{name}_{state}", f"slice@{name}_{state}")
            found = [spelled for spelled in spellings if spelled in raw]
            assert len(found) <= 1, f"{label}: {found}"
            for spelled in found:
                assert name in masters or spelled != spellings[0], (
                    f"{label}: {spelled} without a master weight"
                )
                result[name, state] = raw[spelled]
                if name in masters:
                    spelled_out.add(spelled == spellings[0])
                if spelled == spellings[2]:
                    assert name not in masters, f"{label}: {spelled} beside a master weight"
                    marked.add(name)
    if raw.keys() == {"master_weights"}:  # a job starts from these
        return result
    assert "LR_Scheduler" in raw, f"{label}: no LR_Scheduler"
    accumulators = set(raw) - {"master_weights", "LR_Scheduler", NAME_TABLE}
    assert len(spelled_out) <= 1, f"{label}: accumulators of master weights in two spellings"
    unknown = set(masters) - names
    assert not unknown, f"{label}: master weights of unknown parameters: {sorted(unknown)[:4]}"
    assert len(accumulators) == len(result) - len(masters), f"{label}: {_left_over(accumulators, result)}"
    if NAME_TABLE in raw:
        assert raw[NAME_TABLE] == {key: key for key in accumulators}, (
            f"{label}: the name table is not identity"
        )
    states: dict[str, set[str]] = collections.defaultdict(set)
    for name, state in result:
        assert result[name, state].dtype == np.float32, f"{label}: {name} {state} is not float32"
        states[name].add(state)
    for name, held in states.items():
        assert held - {MASTER} == {*MOMENTS, *POWERS}, f"{label}: {name} has only {sorted(held)}"
    if spelled_out == {False}:
        result["", AFTER_PARAMETER] = np.empty(0, np.float32)
    result.update({(name, SLICED): np.empty(0, np.float32) for name in marked})
    return result


def _left_over(accumulators: set[str], result: Iterable[tuple[str, str]]) -> str:
    known = {f"{name}{infix}_{state}" for name, state in result for infix in ("", "_fp32_master_0")}
    return f"unknown keys {sorted(accumulators - known)[:4]}"


def split_ema(
    label: str, raw: Mapping[str, Any], names: Mapping[str, str]
) -> dict[tuple[str, str], np.ndarray]:
    """Take an EMA file apart: averages of master weights, and of parameters by structured name."""
    result = {}
    for name, array in raw.get("master_weights", {}).items():
        result[name.removeprefix("slice@"), MASTER] = array
        if name.startswith("slice@"):
            result[name.removeprefix("slice@"), SLICED] = np.empty(0, np.float32)
    for key in set(raw) - {"master_weights", NAME_TABLE}:
        assert key in names, f"{label}: unknown key {key}"
        result[names[key], "ema"] = raw[key]
    for (name, _), array in result.items():
        assert name in names.values(), f"{label}: {name} is unknown"
        assert array.dtype == np.float32, f"{label}: {name} is {array.dtype}"
    return result


# --- the checkpoint -----------------------------------------------------------------------------------


def read_checkpoint(directory: Path, shapes: Mapping[str, Shape]) -> Tensors:
    """Read any hybrid checkpoint to whole tensors and assert on the way that it is sound.

    ``shapes`` maps every parameter to its global shape: the dim along which tensor parallelism cut it
    is the one in which the local shape differs.
    """
    directory = Path(directory)
    files = find_files(directory)
    with_lora = "lora_model_state" in files
    if with_lora:
        assert "model_state" not in files, f"{directory.name}: both kinds of model_state"
        files["model_state"] = files.pop("lora_model_state")
    assert set(files) - {"ema"} == {"model_state", "optimizer"}, f"{directory.name}: has only {sorted(files)}"
    meta_path = directory / "model_meta.json"
    meta = json.loads(meta_path.read_bytes()) if meta_path.exists() else None

    degrees = degrees_of(files["optimizer"])
    check_product(files["optimizer"], degrees)
    check_product(files["model_state"], degrees if meta and not with_lora else {**degrees, "shard": 1})
    if "ema" in files:
        check_product(files["ema"], degrees)

    raw = {kind: {c: load_with_paddle(p) for c, p in of.paths.items()} for kind, of in files.items()}
    _check_schedulers(directory, raw["optimizer"])
    if meta:
        _check_parallel_config(meta, degrees)
    if meta and with_lora:
        for label, entry in meta["sharding_metas"].items():
            of_cell = [
                file for c, file in raw["model_state"].items() if f"tp{c.tp:02d}_pp{c.pp:02d}" == label
            ]
            meta["sharding_metas"][label] = _what_lora_trains(label, entry, of_cell)
    stages = [
        [_build_cell(Coordinate(tp, pp), degrees, raw, meta) for tp in range(degrees["tp"])]
        for pp in range(degrees["pp"])
    ]
    if not meta:
        _settle_strategy([cell for cells in stages for cell in cells])
    for cell in [cell for cells in stages for cell in cells]:
        cell.check_balance()
    joined = [_join_tp(pp, cells, shapes) for pp, cells in enumerate(stages)]
    result = _join_pp(joined, shapes)
    _check_tied_embeddings(directory, result)
    return result


def _build_cell(cell: Coordinate, degrees: Mapping[str, int], raw: Mapping[str, Any], meta: Any) -> Cell:
    label = f"tp{cell.tp:02d}_pp{cell.pp:02d}"
    model = [file for coordinate, file in sorted(raw["model_state"].items()) if coordinate.cell == cell]
    stored, table = _merge_model_shards(label, model)
    entry = meta["sharding_metas"][label] if meta else None
    if entry:
        mapping = entry["structure_name_mapping"]
        assert table.items() <= mapping.items(), f"{label}: names in the files differ from model_meta.json"
        parameters = _parameters_of_meta(label, entry)
    else:
        parameters = {k: Parameter(table[k], a.shape, a.dtype.itemsize) for k, a in stored.items()}
    names = {key: parameter.name for key, parameter in parameters.items()}

    optimizer, ema = (
        [
            split(f"{kind} {label}_shard{c.shard:02d}", file, known)
            for c, file in sorted(files.items())
            if c.cell == cell
        ]
        for kind, split, known, files in (
            ("optimizer", split_optimizer, set(names.values()), raw["optimizer"]),
            ("ema", split_ema, names, raw.get("ema", {})),
        )
    )
    sharded = _strategy_of_files(optimizer, parameters, degrees["shard"], entry)
    strategy = entry["sharding_strategy"] if entry else sharded
    result = Cell(label, degrees["shard"], strategy, parameters, stored, optimizer, ema)
    if entry:
        assert strategy == sharded, (
            f"{label}: {strategy} in model_meta.json, but the files look like {sharded}"
        )
        _check_meta_entry(result, entry, model)
    for shard in ema:
        assert _held(shard) <= _held(*optimizer), f"{label}: an average without a master weight"
    return result


def _what_lora_trains(label: str, entry: Mapping[str, Any], model: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an entry of model_meta.json without the base, and without the ``model.`` before each key."""
    held = [key for raw in model for key in raw[NAME_TABLE]]
    listed = set(entry["structure_name_mapping"])
    assert {f"model.{key}" for key in held} <= listed, f"{label}: not all of LoRA is in model_meta.json"
    assert listed == set(entry["param_meta"]), f"{label}: param_meta has other keys"
    assert all(key.startswith("model.") for key in listed), f"{label}: keys without model. in model_meta.json"
    assert not any("lora_" in key for key in listed - {f"model.{key}" for key in held}), f"{label}: more LoRA"
    narrowed = {
        part: {key: entry[part][f"model.{key}"] for key in held}
        for part in ("structure_name_mapping", "param_meta")
    }
    return {**entry, **narrowed, "lora": True}


def _settle_strategy(cells: list[Cell]) -> None:
    """A cell of one-dim parameters only may look like either variant of stage 1; the others tell."""
    telling = [cell.strategy for cell in cells if any(len(p.shape) > 1 for p in cell.parameters.values())]
    for cell in cells:
        if telling and all(len(p.shape) == 1 for p in cell.parameters.values()):
            cell.strategy = telling[0]


def _strategy_of_files(
    shards: list[dict[tuple[str, str], np.ndarray]],
    parameters: Mapping[str, Parameter],
    degree: int,
    entry: Mapping[str, Any] | None,
) -> str:
    """Tell how the state lies in its shards; a cell of one-dim parameters only may look like either stage 1."""
    if degree == 1:
        return "ShardingV1"
    if any(state == SLICED for shard in shards for _, state in shard):
        return "Stage3"
    shapes = {parameter.name: parameter.shape for parameter in parameters.values()}
    everywhere = any(
        len(shapes[name]) > 1
        and all(shard.get((name, state), _NONE).shape == shapes[name] for shard in shards)
        for name, state in shards[0]
        if state == MOMENTS[0]
    )
    if everywhere:
        return "Stage3"
    if any(("", AFTER_PARAMETER) in shard for shard in shards):
        return "Stage2"
    if entry and all(len(shape) == 1 for shape in shapes.values()):
        return entry["sharding_strategy"]
    flat = all(array.ndim == 1 for shard in shards for array in shard.values())
    return "ShardingV2" if flat else "ShardingV1"


def _held(*shards: Mapping[tuple[str, str], np.ndarray]) -> set[tuple[str, Shape]]:
    return {(name, a.shape) for shard in shards for (name, state), a in shard.items() if state == MASTER}


def _merge_model_shards(label: str, shards: list[dict[str, Any]]) -> tuple[Tensors, dict[str, str]]:
    stored: Tensors = {}
    table: dict[str, str] = {}
    for raw in shards:
        assert NAME_TABLE in raw, f"{label}: a model_state file without a name table"
        names = raw[NAME_TABLE]
        assert list(names) == [key for key in raw if key != NAME_TABLE], (
            f"{label}: name table and tensors differ"
        )
        twice = set(names) & set(stored)
        assert not twice, f"{label}: in two shards: {sorted(twice)[:4]}"
        stored.update({key: raw[key] for key in names})
        table.update(names)
    return stored, table


def _parameters_of_meta(label: str, entry: Mapping[str, Any]) -> dict[str, Parameter]:
    mapping, described = entry["structure_name_mapping"], entry["param_meta"]
    assert list(mapping) == list(described), f"{label}: param_meta and structure_name_mapping differ"
    return {
        key: Parameter(name, tuple(described[key][0]), ITEM_BYTES_OF_CODE[described[key][1]])
        for key, name in mapping.items()
    }


def _check_parallel_config(meta: Mapping[str, Any], degrees: Mapping[str, int]) -> None:
    config = meta["parallel_config"]
    spelled = {
        part: config[f"{name}_degree"] for part, name in zip(PARTS, ("mp", "pp", "sharding"), strict=True)
    }
    assert spelled == dict(degrees), f"model_meta.json says {spelled}, the file names say {dict(degrees)}"
    cells = {f"tp{tp:02d}_pp{pp:02d}" for tp in range(degrees["tp"]) for pp in range(degrees["pp"])}
    assert set(meta["sharding_metas"]) == cells, (
        f"model_meta.json has the cells {sorted(meta['sharding_metas'])}"
    )


def _check_meta_entry(cell: Cell, entry: Mapping[str, Any], model: list[dict[str, Any]]) -> None:
    """Assert that the owners in model_meta.json are those of the files, and the dtypes too."""
    for key, array in cell.stored.items():
        code = entry["param_meta"][key][1]
        assert code == CODE_OF_DTYPE[array.dtype.name], (
            f"{cell.label}: {key} is {array.dtype}, not code {code}"
        )
    owners = entry["param2rank"]
    if cell.strategy == "ShardingV2":
        assert owners == {}, f"{cell.label}: stage 1 v2 with owners"
        return
    held = {name: rank for rank, shard in enumerate(cell.optimizer) for name, _ in shard}
    assert owners == held, f"{cell.label}: param2rank differs from the optimizer files"
    for rank, raw in enumerate([] if entry.get("lora") else model):
        strangers = [key for key, name in raw[NAME_TABLE].items() if owners[name] != rank]
        assert not strangers, f"{cell.label}: not owned by shard {rank}: {strangers[:4]}"


def _check_schedulers(directory: Path, optimizer: Mapping[Coordinate, dict[str, Any]]) -> None:
    states = [file.get("LR_Scheduler") for file in optimizer.values()]
    if (directory / "scheduler.pdparams").exists():
        states.append(load_with_paddle(directory / "scheduler.pdparams"))
    assert all(state == states[0] for state in states), "the LR_Scheduler differs between files"


def _join_tp(pp: int, cells: list[Cell], shapes: Mapping[str, Shape]) -> dict[str, Tensors]:
    for cell in cells[1:]:
        same = list(cell.parameters) == list(cells[0].parameters)
        assert same, f"{cell.label} and {cells[0].label} hold different parameters"
    local = [cell.tensors() for cell in cells]
    result: dict[str, Tensors] = {}
    for key in local[0]:
        assert key in shapes, f"stage {pp}: unknown parameter {key}"
        assert all(set(rank[key]) == set(local[0][key]) for rank in local), f"stage {pp}: states of {key}"
        result[key] = {
            state: _join_tp_tensor(
                f"stage {pp}: {key} {state}",
                [rank[key][state] for rank in local],
                (1,) if state in POWERS else tuple(shapes[key]),
                fused=key.endswith(("gate_up_fused_proj.weight", "up_gate_proj.lora_B")),
            )
            for state in local[0][key]
        }
    return result


def _join_tp_tensor(where: str, parts: list[np.ndarray], shape: Shape, *, fused: bool) -> np.ndarray:
    local = parts[0].shape
    assert all(part.shape == local and part.dtype == parts[0].dtype for part in parts), (
        f"{where}: unequal parts"
    )
    if local == shape:
        assert _all_same_bits(parts), f"{where}: the replicas on the tp ranks differ"
        return parts[0]
    assert len(local) == len(shape), f"{where}: {local} cannot be a part of {shape}"
    cut = [dim for dim in range(len(shape)) if local[dim] != shape[dim]]
    assert len(cut) == 1, f"{where}: {local} is not a cut of {shape} along one dim"
    dim = cut[0]
    assert local[dim] * len(parts) == shape[dim], f"{where}: {len(parts)} parts {local} do not make {shape}"
    if fused:  # each rank holds its part of gate, then its part of up
        halves = [np.split(part, 2, axis=dim) for part in parts]
        parts = [gate for gate, _ in halves] + [up for _, up in halves]
    return np.concatenate(parts, axis=dim)


def _join_pp(stages: list[dict[str, Tensors]], shapes: Mapping[str, Shape]) -> Tensors:
    result: Tensors = {}
    seen: set[str] = set()
    for pp, stage in enumerate(stages):
        twice = seen & set(stage)
        assert not twice, f"stage {pp} repeats {sorted(twice)[:4]}"
        seen |= set(stage)
        for key, states in stage.items():
            result.update({f"{key}.{state}" if state else key: array for state, array in states.items()})
    missing = set(shapes) - seen
    assert not missing, f"{len(missing)} parameters are in no stage: {sorted(missing)[:4]}"
    return result


def _check_tied_embeddings(directory: Path, tensors: Tensors) -> None:
    """With tied embeddings the head is the embedding, also where two stages keep a copy each."""
    config = directory / "config.json"
    if not config.exists() or not json.loads(config.read_bytes()).get("tie_word_embeddings"):
        return
    prefix = next(key for key in tensors if key.endswith("embed_tokens.weight"))
    for key in [key for key in tensors if key.startswith("lm_head.weight")]:
        twin = prefix + key.removeprefix("lm_head.weight")
        assert _same_bits(tensors[key], tensors[twin]), f"{key} differs from {twin} although they are tied"


def strategy_of(directory: Path) -> str:
    """Tell how optimizer state lies in its shards; without sharding it is ``none``."""
    optimizer = find_files(directory)["optimizer"]
    if degrees_of(optimizer)["shard"] == 1:
        return "none"
    files = [load_with_paddle(path) for path in optimizer.paths.values()]
    masters = [name for file in files for name in file.get("master_weights", {})]
    entries = [name for file in files for name in file if isinstance(file[name], np.ndarray)]
    if any(name.startswith("slice@") for name in (*masters, *entries)):
        return "stage3"
    moments = [{name for name in file if MOMENTS[0] in name and file[name].ndim > 1} for file in files]
    if set.intersection(*moments):
        return "stage3"
    if masters and not any("_fp32_master_0" in name for name in entries):
        return "stage2"
    flat = all(a.ndim == 1 for file in files for a in file.values() if isinstance(a, np.ndarray))
    return "stage1v2" if flat else "stage1v1"


def check_distribution(directory: Path, shapes: Mapping[str, Shape]) -> None:
    """Assert that model_meta.json calls a tensor distributed exactly when tensor parallelism cut it."""
    meta = json.loads((Path(directory) / "model_meta.json").read_bytes())
    for label, entry in meta["sharding_metas"].items():
        for key, (shape, _, is_distributed, *_) in entry["param_meta"].items():
            assert is_distributed == (tuple(shape) != tuple(shapes[key])), f"{label}: {key} {is_distributed=}"


# --- the structure ------------------------------------------------------------------------------------

Entry = tuple[str, Shape | None, str, Any]
ALLOWED = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy.core.multiarray", "scalar"): np.float64(0).__reduce__()[0],
    ("numpy._core.multiarray", "scalar"): np.float64(0).__reduce__()[0],
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "tuple"): tuple,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) in ALLOWED, f"a checkpoint file names {module}.{name}"
        return ALLOWED[module, name]


def unpickle(path: Path) -> Any:
    """Read a pickle that may hold only arrays and plain containers; (name, array) tuples stay tuples."""
    with Path(path).open("rb") as file:
        return _Unpickler(file, encoding="latin1").load()


def structure(directory: Path) -> dict[str, list[Entry]]:
    """Describe every tensor file: its keys in order, with shape, dtype and tensor name or plain value.

    A tensor is ``(path, shape, dtype, name)``; the name is None where the file keeps it in its name
    table. A container or plain value is ``(path, None, type, value)``. Nested keys are joined by '/'.
    """
    paths = sorted(path for path in Path(directory).iterdir() if is_tensor_file(path.name))
    return {path.name: list(_describe("", unpickle(path))) for path in paths}


def _describe(path: str, value: Any) -> Iterable[Entry]:
    if isinstance(value, dict):
        yield path, None, type(value).__name__, len(value)
        for key, child in value.items():
            yield from _describe(f"{path}/{key}" if path else key, child)
    elif isinstance(value, np.ndarray):
        yield path, value.shape, _dtype_and_order(value), None
    elif type(value) is tuple and len(value) == 2 and isinstance(value[1], np.ndarray):
        yield path, value[1].shape, _dtype_and_order(value[1]), value[0]
    else:
        yield path, None, type(value).__name__, value


def _dtype_and_order(array: np.ndarray) -> str:
    return array.dtype.str if array.flags.c_contiguous else f"{array.dtype.str} column-major"


def expected_ema(optimizer: list[Entry]) -> list[Entry]:
    """Derive the structure of an EMA file of a run with master weights from its optimizer file."""
    masters = [entry for entry in optimizer if entry[0].split("/")[0] == "master_weights"]
    return [("", None, "dict", 1), *masters]


def expected_structure(real: Mapping[str, list[Entry]], *, ema: bool) -> dict[str, list[Entry]]:
    """Derive what a conversion to a real checkpoint's topology must look like, with or without EMA files."""
    expected = {name: entries for name, entries in real.items() if not name.startswith("ema")}
    if ema:
        optimizers = [name for name in expected if name.startswith("optimizer")]
        expected |= {name.replace("optimizer", "ema"): expected_ema(expected[name]) for name in optimizers}
    return expected


def assert_same_structure(actual: Mapping[str, list[Entry]], expected: Mapping[str, list[Entry]]) -> None:
    """Assert that two checkpoints have the same files with the same entries in the same order."""
    assert sorted(actual) == sorted(expected)
    for name in sorted(expected):
        pairs = itertools.zip_longest(actual[name], expected[name])
        for position, (mine, real) in enumerate(pairs):
            assert mine == real, f"{name}, entry {position}: {mine}, but the trainer writes {real}"


def ordered_json(path: Path) -> Any:
    """Read JSON with objects as lists of pairs, so that a comparison sees the order of keys."""
    return json.loads(Path(path).read_bytes(), object_pairs_hook=list)
