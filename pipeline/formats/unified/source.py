"""Build the catalog of logical tensors from the headers of a unified checkpoint.

The files hold whole tensors by structured key, so the model follows from them and the rules. Details that the files do
not state (PaddleFormers 1.2 and PaddleNLP 3.0, ``trainer/unified_checkpoint``):

* **Transposed weights.** Files of weights have ``format: np`` if they are in Paddle's own layout. With ``save_to_hf``,
  PaddleFormers' default, they have ``format: pt`` (``transformers/model_utils.py:621-629``) and linear layers are
  transposed (:func:`~paddle_reshard.pipeline.model.weights.is_transposed`). Optimizer states and master weights are
  always in Paddle's layout.
* **Slices.** Under stage 1 v2 PaddleFormers writes the padded slices of each rank, under the same key in several files;
  the index names only the last file. Slices are joined in the order of the files, which is that of the sharding ranks
  in every pipeline stage. PaddleNLP merges them.
* **Tensor parallelism.** PaddleNLP merges the pieces of tp ranks: fused gate and up projections part by part; fused
  query, key and value projections, which are grouped by key/value head, as a whole (``naive_fuse_merge_tp`` and
  ``normal_fuse_merge_tp`` in ``transformers/conversion_utils.py``). PaddleFormers 1.2 raises an error.
* **float32 parameters** (routers) have no master weight, but are also written to ``master_weights``
  (``unified_checkpoint.py``, ``fp32_weight``): a copy.
* **Missing master weights** of 16-bit parameters (``remove_master_weight``): the loader casts the weights
  (``load_local.py``), and so does this module.
* **Missing weights** (``skip_save_model_weight``): the master weights are in ``model-*.safetensors``, and the weights
  are their cast.
* **Tied weights** are a single tensor under two keys. On one card only the last key has optimizer states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from math import prod
from typing import Any, NamedTuple

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, Job, MissingPolicy
from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
from paddle_reshard.pipeline.core.catalog import Catalog, File, check_catalog
from paddle_reshard.pipeline.core.errors import CheckpointError, CoverageError, RuleError, UnsupportedError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensor_columns import Identity
from paddle_reshard.pipeline.core.tensors import (
    ACCUMULATORS,
    MASTER_WEIGHT,
    PARAM,
    DType,
    Tensor,
    dtype_named,
    is_per_parameter,
)
from paddle_reshard.pipeline.formats.reading import TensorCollector, common_dtype, not_a_number, not_held
from paddle_reshard.pipeline.formats.sharding import (
    Parameter,
    cut_buffer,
    not_of_these_ranks,
    padded_elements,
    read_buffers,
)
from paddle_reshard.pipeline.formats.unified import UNIFIED
from paddle_reshard.pipeline.formats.unified.adapter import index_adapter
from paddle_reshard.pipeline.formats.unified.names import (
    KINDS,
    MASTER_WEIGHTS,
    MODEL,
    OPTIMIZER,
    UnifiedFile,
    check_indexes,
    holds_adapter,
    index_name,
    is_unified,
    sort_files,
    split_optimizer_key,
)
from paddle_reshard.pipeline.formats.writing import UNCUT
from paddle_reshard.pipeline.model.completeness import completed
from paddle_reshard.pipeline.model.model import Model, read_model
from paddle_reshard.pipeline.model.placement import ArrayKind, TensorCut
from paddle_reshard.pipeline.model.rules.choose import choose_table
from paddle_reshard.pipeline.model.rules.rule import expected_shape
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import RuleTables
from paddle_reshard.pipeline.model.weights import dtype_of_tag, is_transposed
from paddle_reshard.storage.files.paddle_pickle import ArrayRef
from paddle_reshard.storage.files.safetensors import Index, SafetensorsPayload

_FLOATING = ("float32", "bfloat16", "float16", "float64")
_HALVES = ("bfloat16", "float16")


class _StoredArray(NamedTuple):
    """An array in a file."""

    file: UnifiedFile
    key: str
    """Structured key under which it is stored; tied weights have several."""
    array: ArrayRef
    dtype: DType
    transposed: bool = False
    """Whether its two dims are swapped, compared with Paddle."""

    @property
    def shape(self) -> Shape:
        """Shape in Paddle's layout."""
        return self.array.shape[::-1] if self.transposed else self.array.shape


Arrays = Mapping[Identity, list[_StoredArray]]
"""All arrays of each tensor."""


def index_unified(files: SourceFiles, tables: RuleTables, missing: MissingPolicy) -> Checkpoint:
    """A unified checkpoint with optimizer states, or weights alone.

    Raises
    ------
    CheckpointError, PlanError
        Naming the file, the tensor and the two values, if the checkpoint is incomplete or inconsistent, or cannot be
        interpreted exactly.
    """
    if holds_adapter(files.sizes):
        return index_adapter(files, tables)
    config, payloads = files.config(), files.headers
    if files.pickles:
        raise CheckpointError(
            f"{files.pickles[0]}: a tensor file whose name has no meaning in a unified checkpoint"
        )
    with_states = is_unified(files.sizes)
    kinds = KINDS if with_states else (MODEL,)
    indexes = {index_name(kind): index for kind in kinds if (index := _index(files, kind)) is not None}
    in_order = sort_files(payloads)
    check_indexes(in_order, payloads, indexes)
    arrays = _arrays(in_order, payloads, config)
    table = choose_table(tables, dict.fromkeys(key for key, _ in arrays), config, UNIFIED)
    _refuse_unknown_dtypes(arrays, table, config)
    arrays = _joined_twins(arrays, payloads, table, config)
    model = read_model(_tensors(arrays, table, config), table, config)
    model = completed(model, missing.lets_lack, mtp=not missing.drops_mtp)
    catalog = _catalog(arrays, model, in_order, files.sizes)
    _check_states(model)
    check_catalog(catalog)
    return Checkpoint(
        format=UNIFIED,
        catalog=catalog,
        own_files=frozenset([*payloads, *indexes]),
        model=model,
        job=Job(lr_scheduler=files.lr_scheduler() if with_states else None),
    )


def _index(files: SourceFiles, kind: str) -> Index | None:
    """The index of a kind. That of optimizer states which are not merged names no files."""
    path = index_name(kind)
    if kind == OPTIMIZER and path in files.sizes and "weight_map" not in (facts := files.json(path)):
        return Index({}, {}, facts)
    return files.weight_index(path)


# ---------------------------------------------------------------------------------------- arrays and tensors


def _arrays(
    files: Sequence[UnifiedFile], payloads: Mapping[str, SafetensorsPayload], config: Mapping[str, Any]
) -> dict[Identity, list[_StoredArray]]:
    """All arrays of each tensor, in the order of the files."""
    arrays: dict[Identity, list[_StoredArray]] = {}
    masters_only = _masters_only(files, payloads, config)
    for file in files:
        payload = payloads[file.path]
        for stored_key, array in payload.tensors.items():
            if file.kind == OPTIMIZER:
                key, state = split_optimizer_key(stored_key, file.path)
            else:
                is_param = file.kind == MODEL and not masters_only
                key, state = stored_key, PARAM if is_param else MASTER_WEIGHT
            dtype = dtype_of_tag(payload.tags[stored_key], f"{file.path}: {stored_key}")
            _check_dtype(key, state, dtype, file)
            arrays.setdefault((key, state), []).append(_StoredArray(file, key, array, dtype))
    for key in [key for key, state in arrays if state == MASTER_WEIGHT]:
        param = arrays.get((key, PARAM))
        if param and param[0].dtype.name == "float32":
            param += arrays.pop((key, MASTER_WEIGHT))
    for (key, state), stored in arrays.items():
        common_dtype(key, state, [(array.dtype, array.file.path) for array in stored])
    return arrays


def _masters_only(
    files: Sequence[UnifiedFile], payloads: Mapping[str, SafetensorsPayload], config: Mapping[str, Any]
) -> bool:
    """Whether the files of weights hold master weights: ``skip_save_model_weight``."""
    kinds = {file.kind for file in files}
    tags = {tag for file in files if file.kind == MODEL for tag in payloads[file.path].tags.values()}
    trained_in = config.get("dtype", config.get("torch_dtype"))
    if MASTER_WEIGHTS in kinds or OPTIMIZER not in kinds or tags != {"F32"} or trained_in == "float32":
        return False
    if trained_in == "bfloat16":
        return True
    raise UnsupportedError(
        f"all weights are float32 and config.json says dtype={trained_in!r}: only for float32 and bfloat16 is it known "
        "whether they are weights or master weights (skip_save_model_weight)"
    )


def _refuse_unknown_dtypes(arrays: Arrays, table: RuleTable, config: Mapping[str, Any]) -> None:
    """Refuse mixtures of experts without weights: master weights do not show which parameters are float32."""
    if any(state == PARAM for _, state in arrays):
        return
    find = table.finder(config)
    for key, state in arrays:
        if state == MASTER_WEIGHT and ".experts." in find(key)[0].key:
            raise UnsupportedError(
                f"{key}: the files of a mixture of experts hold master weights but no weights "
                "(skip_save_model_weight); which parameters are float32 is not stored, so the weights cannot be derived"
            )


def _check_dtype(key: str, state: str, dtype: DType, file: UnifiedFile) -> None:
    if state == PARAM or dtype.name == "float32" or (state in ACCUMULATORS and dtype.name in _FLOATING):
        return
    expected = "float32" if state == MASTER_WEIGHT else "a floating dtype"
    raise CoverageError(f"{key} ({state})", f"stored as {dtype.name}, {expected} is expected", (file.path,))


def _joined_twins(
    arrays: Arrays,
    payloads: Mapping[str, SafetensorsPayload],
    table: RuleTable,
    config: Mapping[str, Any],
) -> dict[Identity, list[_StoredArray]]:
    """Merge tied weights under their common key, and mark transposed arrays.

    Arrays stored under the common key come first. Only weights can be transposed.
    """

    def oriented(key: str, stored: _StoredArray) -> _StoredArray:
        path = stored.file.path
        if stored.file.kind != MODEL:
            return stored
        layout = payloads[path].metadata.get("format")
        transposed = is_transposed(key, stored.array.shape, layout, path, table, config)
        return stored._replace(transposed=transposed)

    find = table.finder(config)
    twins = {key: find(key)[0].twin(config, key) for key, _ in arrays}
    joined: dict[Identity, list[_StoredArray]] = {}
    for tied in (False, True):
        for (key, state), stored in arrays.items():
            if (twins[key] is not None) == tied:
                identity = twins[key] or key
                of_tensor = joined.setdefault((identity, state), [])
                of_tensor += [oriented(identity, array) for array in stored]
    return joined


def _tensors(arrays: Arrays, table: RuleTable, config: Mapping[str, Any]) -> list[Tensor]:
    """The logical tensors, including those that are cast from others."""
    shapes = {key: _shape(key, arrays, table, config) for key, _ in arrays}
    tensors = [
        Tensor(key, state, stored[0].dtype, (1,) if is_per_parameter(state) else shapes[key])
        for (key, state), stored in arrays.items()
    ]
    if any(state == MASTER_WEIGHT for _, state in arrays):
        return tensors
    trained = {key for key, state in arrays if state in ACCUMULATORS}
    return tensors + [
        Tensor(key, MASTER_WEIGHT, dtype_named("float32"), shapes[key])
        for key in shapes
        if key in trained and (key, PARAM) in arrays and arrays[key, PARAM][0].dtype.name in _HALVES
    ]


def _shape(key: str, arrays: Arrays, table: RuleTable, config: Mapping[str, Any]) -> Shape:
    """Global shape of a parameter, from its weight, its master weight or the rules, in this order."""
    if stored := arrays.get((key, PARAM)):
        return stored[0].shape
    masters = arrays.get((key, MASTER_WEIGHT))
    if masters is None:
        states = sorted(state for other, state in arrays if other == key)
        raise CoverageError(key, f"nothing but its {', '.join(states)} is stored")
    if len(masters[0].shape) > 1:
        return masters[0].shape
    expected = expected_shape(table.find(key, config)[0], config, key)
    if expected is None:
        raise RuleError(
            key,
            "only its flattened master weight is stored, and its rule has no shape; add 'shape' to its row in a copy "
            "of the rule table and pass it with --rules FILE",
        )
    return expected


def _refuse_means(arrays: Arrays) -> None:
    """Refuse the states of AdamWMini, of which only ``moment2`` looks like a slice."""
    of_moment2 = [array for (_, state), stored in arrays.items() if state == "moment2" for array in stored]
    if of_moment2 and all(array.shape == (1,) for array in of_moment2):
        raise UnsupportedError(
            "the optimizer is AdamWMini, which keeps moment2 as one number per parameter; its states are not read from "
            "a unified checkpoint. Move the files optimizer*, master_weights* and scheduler.pdparams away, and the "
            "parameters are converted"
        )


# ------------------------------------------------------------------------------------------------ the catalog


class _Cutting:
    """How tensor parallelism and sharding cut parameters into stored arrays."""

    def __init__(self, model: Model, files: Sequence[UnifiedFile]) -> None:
        self.model = model
        self.by_key = {tensor.key: tensor for tensor in model.tensors}
        self.tp = max((file.tp for file in files), default=0) + 1
        self.degrees = _sharding_degrees(files)

    def cut(self, key: str, file: UnifiedFile) -> TensorCut:
        """How tensor parallelism cuts a tensor in a file."""
        return self.model.cut(self.by_key[key], self.tp) if file.of_rank else UNCUT

    def sliced(self, arrays: Arrays) -> bool:
        """Whether states are stored as slices, which must then be those of all states for some sharding degree."""
        sliced = any(
            state != PARAM
            and not is_per_parameter(state)
            and len(self.by_key[key].global_shape) > 1
            and all(len(array.shape) == 1 for array in stored)
            for (key, state), stored in arrays.items()
        )
        if sliced:
            self._check_lengths(arrays)
            self._check_ranks(arrays)
        return sliced

    def _check_lengths(self, arrays: Arrays) -> None:
        """Check the lengths of slices; experts may have a smaller sharding degree than other parameters."""
        totals: dict[Identity, set[int]] = {}
        for (key, state), stored in arrays.items():
            if state == PARAM or is_per_parameter(state):
                continue
            if whole := [array for array in stored if len(array.shape) != 1]:
                _refuse_means(arrays)
                raise CoverageError(
                    f"{key} ({state})",
                    f"stored with shape {whole[0].shape}, but other tensors are stored as 1-D slices",
                    (whole[0].file.path,),
                )
            for _, group in groupby(stored, key=_copy_of):
                totals.setdefault((key, state), set()).add(sum(array.shape[0] for array in group))
        for of_experts in (False, True):
            chosen = {i: t for i, t in totals.items() if self.by_key[i[0]].rule.of_expert == of_experts}
            degrees = [1, *self.degrees] if of_experts else self.degrees
            misfits = [self._misfit(chosen, degree, arrays) for degree in degrees or [1]]
            if (last := misfits[-1]) is not None and None not in misfits:
                raise last

    def _misfit(
        self, totals: Mapping[Identity, set[int]], degree: int, arrays: Arrays
    ) -> CoverageError | None:
        """Why slices cannot be those of a sharding degree, or ``None``."""
        for (key, state), element_counts in totals.items():
            tensor = self.by_key[key]
            cut = self.cut(key, arrays[key, state][0].file)
            elements = prod(cut.local_shape(key, tensor.global_shape))
            expected = padded_elements(elements, tensor.dtype, degree)
            if element_counts != {expected}:
                return CoverageError(
                    f"{key} ({state})",
                    f"its slices have {max(element_counts)} elements in total, but {elements} elements padded for "
                    f"sharding={degree} are {expected}",
                    tuple(array.file.path for array in arrays[key, state]),
                )
        return None

    def _check_ranks(self, arrays: Arrays) -> None:
        """Check that ranks with files of their own hold equal parts of communication buffers."""
        held: dict[tuple[str, int, int], dict[str, dict[int, int]]] = {}
        for (key, state), stored in arrays.items():
            for array in stored:
                if array.file.of_rank and state != PARAM and not is_per_parameter(state):
                    of_rank = held.setdefault((state, array.file.tp, array.file.pp), {}).setdefault(key, {})
                    of_rank[array.file.number] = array.shape[0]
        stages = 1 + max((pp for _, _, pp in held), default=0)
        for (state, _, pp), elements_of in held.items():
            # Experts have buffers of their own under expert parallelism, of which these files do not tell.
            misfits = [self._misplaced(elements_of, stages, experts) for experts in ({False, True}, {False})]
            if None not in misfits:
                key, wanted = misfits[0] or ("", {})
                raise CoverageError(
                    f"{key} ({state})",
                    not_of_these_ranks({rank: (n,) for rank, n in elements_of[key].items()}, wanted),
                    tuple(array.file.path for array in arrays[key, state] if array.file.pp == pp),
                )

    def _misplaced(
        self, held: Mapping[str, Mapping[int, int]], stages: int, experts: set[bool]
    ) -> tuple[str, dict[int, Shape]] | None:
        """The first key of which ranks hold other slices than they must, with the shapes of those."""
        listed = [
            Parameter(tensor.key, prod(cut.local_shape(tensor.key, tensor.global_shape)), tensor.dtype)
            for tensor in self.model.as_built(stages)
            if tensor.key in held and tensor.rule.of_expert in experts
            for cut in [self.model.cut(tensor, self.tp)]
        ]
        for buffer in read_buffers(listed, held):
            for key, cut in cut_buffer(buffer, max(self.degrees, default=1)).items():
                wanted = {rank: piece.elements for rank, piece in cut.items()}
                if held[key] != wanted:
                    return key, {rank: (elements,) for rank, elements in wanted.items()}
        return None


def _catalog(arrays: Arrays, model: Model, files: Sequence[UnifiedFile], sizes: Mapping[str, int]) -> Catalog:
    """The tensors in the files, and those that are cast from others."""
    cutting = _Cutting(model, files)
    sliced = cutting.sliced(arrays)
    stored = TensorCollector([File(file.path, sizes[file.path]) for file in files], model.aliases, cutting.tp)
    for (key, state), of_tensor in arrays.items():
        shape = cutting.by_key[key].global_shape
        if is_per_parameter(state):
            _add_numbers(stored, key, state, of_tensor)
            continue
        index = stored.tensor(key, state, of_tensor[0].dtype, shape)
        for _, group in groupby(of_tensor, key=_copy_of):
            of_rank = list(group)
            cut = cutting.cut(key, of_rank[0].file)
            if sliced and state != PARAM:
                _add_slices(stored, index, cut, cut.local_shape(key, shape), of_rank)
            else:
                _add_whole(stored, index, cut, cut.local_shape(key, shape), of_rank)
    return stored.catalog(_imply(stored, model, arrays))


def _add_numbers(stored: TensorCollector, key: str, state: str, arrays: Sequence[_StoredArray]) -> None:
    """Every rank that holds a piece of a parameter holds a copy of its numbers."""
    dtype = arrays[0].dtype
    index = stored.tensor(key, state, dtype, (1,))
    kind = ArrayKind((1,), UNCUT, dtype.itemsize)
    for file, _, array, _, _ in arrays:
        if prod(array.shape) != 1:
            raise not_a_number(key, state, array.shape, file.path)
        stored.place(index, kind, dtype, 0, stored.copy(index, 0), file.path, array.byte_offset)


def _add_slices(
    stored: TensorCollector, index: int, cut: TensorCut, local: Shape, arrays: Sequence[_StoredArray]
) -> None:
    """One copy of a rank's piece, in consecutive slices of its flattening."""
    rank = arrays[0].file.tp if cut.dim is not None else 0
    copy, start = stored.copy(index, rank), 0
    for file, _, array, dtype, _ in arrays:
        stop = start + array.shape[0]
        kind = ArrayKind(local, cut, dtype.itemsize, (start, stop))
        stored.place(index, kind, dtype, rank, copy, file.path, array.byte_offset)
        start = stop


def _add_whole(
    stored: TensorCollector, index: int, cut: TensorCut, local: Shape, arrays: Sequence[_StoredArray]
) -> None:
    """Copies of a rank's piece."""
    rank = arrays[0].file.tp if cut.dim is not None else 0
    for array in arrays:
        path, dtype = array.file.path, array.dtype
        if array.shape != local:
            raise CoverageError(
                stored.tensors[index].label,
                f"stored with shape {array.shape}, {local} is expected",
                (path,),
            )
        kind = ArrayKind(local, cut, dtype.itemsize, None, (1, 0) if array.transposed else None)
        stored.place(index, kind, dtype, rank, stored.copy(index, rank), path, array.array.byte_offset)


def _imply(stored: TensorCollector, model: Model, arrays: Arrays) -> dict[int, int]:
    """Tensors that no file holds → their source: parameters are cast from master weights, and vice versa."""
    implied = {}
    index = {identity: number for number, identity in enumerate(arrays)}
    for tensor in model.tensors:
        of, shape = tensor.key, tensor.global_shape
        if tensor.tied_to is not None:
            continue
        if not index.keys() & {(of, PARAM), (of, MASTER_WEIGHT)}:
            continue  # no file has anything of it: refused before, unless it was allowed to be missing
        if (of, PARAM) not in index:
            implied[stored.tensor(of, PARAM, tensor.dtype, shape)] = index[of, MASTER_WEIGHT]
        elif tensor.master and (of, MASTER_WEIGHT) not in index:
            master = stored.tensor(of, MASTER_WEIGHT, dtype_named("float32"), shape)
            implied[master] = index[of, PARAM]
    return implied


def has_tied_states_once(checkpoint: Checkpoint) -> bool:
    """Whether tied weights have their optimizer states under one of their keys only, in one copy."""
    fragments, index = checkpoint.catalog.fragments, checkpoint.catalog.index()
    tied = {tensor.tied_to for tensor in checkpoint.model.tensors if tensor.tied_to}
    numbers = [index[key, state] for key in tied for state in ACCUMULATORS if (key, state) in index]
    return any(not fragments["replica"][fragments["tensor"] == number].any() for number in numbers)


def _check_states(model: Model) -> None:
    """Check that all trained tensors have the same optimizer states, and a master weight if they need one."""
    trained = [t for t in model.tensors if t.trained and t.tied_to is None]
    wanted = {name for t in trained for name in t.accumulators}
    masters = any(t.master for t in trained)
    for tensor in trained:
        if tensor.dtype.name not in _FLOATING:
            raise CoverageError(
                f"{tensor.key} (param)",
                f"trained, but stored as {tensor.dtype.name}; a floating dtype is expected",
            )
        lacking = sorted(wanted - set(tensor.accumulators))
        if masters and not tensor.master and tensor.dtype.name in _HALVES:
            lacking.append(MASTER_WEIGHT)
        if lacking:
            raise not_held(tensor.key, lacking[0])


def _copy_of(stored: _StoredArray) -> tuple[str, str, int]:
    """Identifies the copy that a slice belongs to."""
    return stored.key, stored.file.kind, stored.file.tp


def _sharding_degrees(files: Iterable[UnifiedFile]) -> list[int]:
    """Possible sharding degrees above 1: the divisors of the number of ranks."""
    own = [file.number for file in files if file.of_rank]
    ranks = max(own) + 1 if own else sum(file.kind == OPTIMIZER for file in files)
    return [degree for degree in range(2, ranks + 1) if ranks % degree == 0]
