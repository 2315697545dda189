"""Interpret a dist checkpoint: its metadata locate the tensors, and a rule table describes the model.

Resolves tied weights, parameters that are casts of their master weight, and the parameter names of auto-parallel
training.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, Final

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, Job, MissingPolicy
from paddle_reshard.pipeline.checkpoint.format import LOADED, NotLoaded
from paddle_reshard.pipeline.checkpoint.lora import check_matrices, marked_base
from paddle_reshard.pipeline.checkpoint.parameter_names import CellNames
from paddle_reshard.pipeline.checkpoint.training_job import beyond_adam, taken_for_copies
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.errors import (
    CheckpointError,
    CoverageError,
    PlanError,
    RuleError,
    UnsupportedError,
)
from paddle_reshard.pipeline.core.file_names import CONFIG
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import EMA_MASTER_WEIGHT, EMA_PARAM, MASTER_WEIGHT, PARAM, Tensor
from paddle_reshard.pipeline.formats.flex import AUTO_PARALLEL, FLEX
from paddle_reshard.pipeline.formats.flex.names import (
    EMA_STATE,
    FOLDERS,
    LIBRARY,
    METADATA,
    MODEL_STATE,
    Name,
    folder_of,
    is_paddleformers_folder,
    is_state_dict,
    layer_number,
    renumbered,
)
from paddle_reshard.pipeline.formats.flex.source import DataFile, Fused, catalog_flex, not_fused, read_names
from paddle_reshard.pipeline.formats.reading import not_held
from paddle_reshard.pipeline.model.completeness import completed
from paddle_reshard.pipeline.model.lora_config import Adapter
from paddle_reshard.pipeline.model.model import Model, predict_parameter_names, read_model
from paddle_reshard.pipeline.model.optimizers import check_states
from paddle_reshard.pipeline.model.rules.choose import (
    DESCRIBE,
    candidate_tables,
    choose_table,
    is_known,
    what_is_known,
)
from paddle_reshard.pipeline.model.rules.literal import StoredKey, stored_table
from paddle_reshard.pipeline.model.rules.rule import Rule, evaluate_sizes, expected_shape
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import RuleTables
from paddle_reshard.storage.files.dist_metadata import DistMetadata
from paddle_reshard.storage.files.paddle_pickle import ArrayRef

_BY_CONFIG: Final = "give that of the model with --config FILE"
_DIST_TENSOR: Final = re.compile(r"\.dist(_|$)")
_BY_AUTO_PARALLEL: Final = (
    "an auto-parallel job wrote these folders, as its parameter names tell (.dist), so that tensors which were cut are "
    "in logical order; no real checkpoint of such a job has been seen"
)
_AS_PADDLE: Final = (
    "without config.json nothing tells whether parts are fused in tensors that ranks cut: their pieces are joined as "
    "the metadata say, as paddle.distributed.load_state_dict joins them"
)
_AUTOMATIC: Final = re.compile(r"(eager_tmp|generated_tensor)_\d+")


def read_flex(
    metadata: Mapping[str, DistMetadata],
    files: Mapping[str, DataFile],
    config: Mapping[str, Any],
    tables: RuleTables,
    lr_scheduler: Any,
    missing: MissingPolicy,
    adapter: Adapter | None = None,
) -> Checkpoint:
    """Interpret a dist checkpoint.

    ``metadata`` and ``files`` are the contents of every ``.metadata`` file and of every data file, by path; ``config``
    is empty where there is none; ``lr_scheduler`` and ``adapter`` are the contents of ``scheduler.pdparams`` and
    ``lora_config.json``.
    """
    auto_parallel = _is_auto_parallel(metadata)
    dist_tensors = auto_parallel or _of_dist_tensors(files)
    names = _as_in_the_model(read_names(metadata), tables, config)
    identities = [name for of_file in names.values() for name in of_file]
    keys = list(dict.fromkeys(key for key, state in identities if state == PARAM or not auto_parallel))
    table = _choose_table(metadata, keys, tables, config, auto_parallel)
    find = table.finder(config)
    rules = {key: find(key)[0] for key in keys}
    twins = {key: rule.twin(config, key) or key for key, rule in rules.items()}
    if stacked := {key: rule for key, rule in rules.items() if rule.of_experts}:
        metadata, files = _with_two_dims(metadata, files, names, stacked)
        _refuse_sonic(metadata, names, stacked, config)
    # In auto-parallel checkpoints, keys of states are parameter names, which are replaced below.
    tied = {path: [(twins.get(key, key), state) for key, state in of] for path, of in names.items()}
    # A dist tensor of auto-parallel training is the logical one, however many ranks cut it.
    fused = not_fused if dist_tensors else partial(_fused, table, config)
    catalog, blocks = catalog_flex(metadata, files, tied, fused)
    if table.not_known is not None and not dist_tensors:  # no row says what is fused; a name may
        blocks = dict.fromkeys((key for key in keys if _name_in_module(key) in _fused_names(tables)), 1)
    program: tuple[CellNames, ...] = ()
    if auto_parallel:
        stored_names = _stored_names(names, metadata, files)
        predicted = _predicted_names(catalog, table, config)
        catalog = _renamed(catalog, stored_names or predicted, twins)
        program = (_of_states(catalog, stored_names, predicted, min(files)),)
    model = marked_base(read_model(catalog.tensors, table, config))
    check_matrices(model, adapter)
    model = completed(model, missing.lets_lack, mtp=not missing.drops_mtp)
    _check(model, catalog)
    return Checkpoint(
        format=AUTO_PARALLEL if auto_parallel else FLEX,
        catalog=_with_implied(catalog, model),
        own_files=frozenset([*metadata, *files]),
        model=model,
        job=Job(lr_scheduler=lr_scheduler, names=program),
        has_ema=not {EMA_PARAM, EMA_MASTER_WEIGHT}.isdisjoint(catalog.tensors.states),
        adapter=adapter,
        unproven=_unproven(metadata, config, dist_tensors and not auto_parallel),
        fused_over=_fused_over(blocks, rules, table),
    )


def _fused_over(blocks: Mapping[str, int], rules: Mapping[str, Rule], table: RuleTable) -> tuple[int, int]:
    """See :attr:`Checkpoint.fused_over`."""
    over = {False: 0, True: 0}
    for key, count in blocks.items():
        shared_out = rules[key].of_expert_rank and table.expert_axis is not None
        if (
            count > 1 or not shared_out or table.expert_axis == "ep"
        ):  # ranks of tp may have whole experts, too
            over[shared_out] = max(over[shared_out], count)
    return over[False], over[True]


def not_loaded(checkpoint: Checkpoint) -> NotLoaded:
    """Which jobs read fused parts as if they were not fused: the trainer's loader (PaddleFormers 1.2, Paddle 3.3.1
    ``load_state_dict``) cuts ``[gate | up]`` in the middle for two ranks, of which each expects a half of both."""
    if why := beyond_adam(checkpoint.model.kinds_of_states):
        return NotLoaded(why)
    if (unmarked := taken_for_copies(checkpoint.model.tensors)) is not None:
        return NotLoaded(under_tp=unmarked, instead="hybrid")
    tp, expert_tp = checkpoint.fused_over
    if not (tp or expert_tp):
        return LOADED
    cut = max(tp, expert_tp)
    where = "with tp" if cut == 1 else f"with another tp than that of the files, {cut},"
    why = (
        f"in a job {where} the trainer cuts tensors with fused parts, such as gate and up, as if they were not fused: "
        "their values would be wrong, without an error"
    )
    if checkpoint.model.table.not_known is not None:
        why += f". Whether this model has any is not known without its {CONFIG} (--config FILE)"
    return NotLoaded(under_tp=why, tp=tp, expert_tp=expert_tp, instead=FLEX)


def _is_auto_parallel(metadata: Mapping[str, DistMetadata]) -> bool:
    """Whether auto-parallel training wrote the folders; those of PaddleFormers must all be there."""
    kinds = {is_paddleformers_folder(path): path for path in metadata}
    if len(kinds) > 1:
        raise CheckpointError(
            f"{kinds[True]} belongs to a checkpoint of PaddleFormers, {kinds[False]} to one of auto-parallel "
            "training: a folder must hold a single checkpoint"
        )
    if False in kinds:
        return not _is_state_dict(metadata)
    _check_all_there({folder_of(path).rpartition("/")[2] for path in metadata})
    return False


def _of_dist_tensors(files: Mapping[str, DataFile]) -> bool:
    """Whether an auto-parallel job wrote the files: Paddle puts ``.dist`` behind the name of a parameter that it makes
    a dist tensor (Paddle 3.3.1 ``base/framework.py:7879``), and states are named after their parameter."""
    names = (name for file in files.values() for name in file.parameter_names.values())
    return any(_DIST_TENSOR.search(name) for name in names)


def _as_in_the_model(
    names: Mapping[str, Sequence[Name]], tables: RuleTables, config: Mapping[str, Any]
) -> dict[str, list[Name]]:
    """The names with the numbers that layers have in the model, where keys number them higher.

    PaddleFleet counted the empty layers at the head of its pipeline (``num_empty_layers_add_in_head``), and does not in
    later versions. A model has a layer 0, so the lowest number tells.
    """
    stored_names = {path: list(of_path) for path, of_path in names.items()}
    known = candidate_tables(tables, config) if is_known(tables, config) else []
    entries = {table.shifted_by for table in known} - {None}
    shift = max((entry for name in entries if type(entry := config.get(str(name))) is int), default=0)
    numbers = [
        number
        for of_path in stored_names.values()
        for key, _ in of_path
        if (number := layer_number(key)) is not None
    ]
    if shift < 1 or min(numbers, default=0) != shift:
        return stored_names
    return {
        path: [(renumbered(key, -shift), state) for key, state in of_path]
        for path, of_path in stored_names.items()
    }


def _with_two_dims(
    metadata: Mapping[str, DistMetadata],
    files: Mapping[str, DataFile],
    names: Mapping[str, Sequence[Name]],
    stacked: Collection[str],
) -> tuple[dict[str, DistMetadata], dict[str, DataFile]]:
    """Metadata and data files with two dims for the tensors of several experts."""
    described, held = {}, dict(files)
    for path, of_path in metadata.items():
        of_experts = {
            stored for stored, (key, _) in zip(of_path.keys, names[path], strict=True) if key in stacked
        }
        described[path] = with_two_dims(path, of_path, of_experts)
        for file_path, file in files.items():
            if folder_of(file_path) == folder_of(path):
                held[file_path] = replace(file, arrays=arrays_with_two_dims(file.arrays, of_experts))
    return described, held


def _refuse_sonic(
    metadata: Mapping[str, DistMetadata],
    names: Mapping[str, Sequence[Name]],
    stacked: Mapping[str, Rule],
    config: Mapping[str, Any],
) -> None:
    """Refuse experts as SonicMoE computes with them, ``[experts * columns, rows]``: ``sharded_state_dict`` turns them
    into the grouped form, and whether the rows of gate and up alternate in others is not known."""
    for path, of_path in metadata.items():
        for number, _, _, _, whole, _ in of_path.pieces.tolist():
            key, _ = names[path][number]
            if key not in stacked or whole < 0:
                continue
            form, expected = stacked[key].huggingface, expected_shape(stacked[key], config, key)
            if form is None or form.stacked is None or expected is None:
                continue
            (experts,) = evaluate_sizes([form.stacked], config, key)
            turned = (experts * expected[1], expected[0] // experts)
            if of_path.shapes[whole] == turned != expected:
                raise UnsupportedError(
                    f"{key}: stored as {turned}, as SonicMoE computes with its experts (using_sonic_moe), and not as "
                    f"{expected}. The trainer saves the latter in a FlexCheckpoint. In the former, either the rows of "
                    "gate and up alternate or all of gate come first, which the file does not tell. Load it with the "
                    "job that wrote it, and save it as a FlexCheckpoint"
                )


def _choose_table(
    metadata: Mapping[str, DistMetadata],
    keys: Sequence[str],
    tables: RuleTables,
    config: Mapping[str, Any],
    auto_parallel: bool,
) -> RuleTable:
    """The rule table of the model's family, or for an unknown family a table derived from a FlexCheckpoint.

    The files do not state what is fused, so tensors of an unknown family must be stored uncut. A state dict of no model
    is joined as its metadata say (:data:`_AS_PADDLE`), except under keys in which a family fuses something.
    """
    if not config and auto_parallel:
        raise PlanError(f"{CONFIG} is missing; {_BY_CONFIG}")
    if config and (auto_parallel or is_known(tables, config)):
        return choose_table(tables, keys, config, AUTO_PARALLEL if auto_parallel else FLEX)
    fused = None if config or not _is_state_dict(metadata) else _fused_names(tables)
    for path, described in metadata.items():
        for key, offset in described.pieces[["key", "global_offset"]].tolist():
            may_be_fused = fused is None or _name_in_module(described.keys[key]) in fused
            if may_be_fused and any(described.shapes[offset]):
                cut = (
                    f"{path} describes pieces of {described.keys[key]} that begin at {described.shapes[offset]}: what "
                    "is fused in a tensor that was cut is not known"
                )
                if not config:
                    raise PlanError(f"{CONFIG} is missing, and {cut}; {_BY_CONFIG}")
                raise RuleError(
                    f"model type {config.get('model_type')!r}",
                    f"{what_is_known(tables, config)}, and {cut}; {DESCRIBE}",
                )
    keys_alone = [StoredKey(key) for key in keys]
    known = what_is_known(tables, config)
    return stored_table(keys_alone, config, ordered=False, convention=LIBRARY, known=known)


def _unproven(metadata: Mapping[str, DistMetadata], config: Mapping[str, Any], dist_tensors: bool) -> str:
    if dist_tensors:
        return _BY_AUTO_PARALLEL
    cut = any(any(of.shapes[at]) for of in metadata.values() for at in of.pieces["global_offset"].tolist())
    return _AS_PADDLE if cut and not config else ""


def _is_state_dict(metadata: Mapping[str, DistMetadata]) -> bool:
    return all(is_state_dict(path, held.flat_mapping.values()) for path, held in metadata.items())


def _fused_names(tables: RuleTables) -> set[str]:
    """Names under which any family fuses something, as ``qkv_proj.weight``."""
    rules = (rule for table in tables for rule in table.rules)
    return {_name_in_module(rule.key) for rule in rules if rule.parts > 1 or rule.part_widths}


def _name_in_module(key: str) -> str:
    return ".".join(key.split(".")[-2:])


def _check_all_there(folders: Set[str]) -> None:
    """Check that all folders exist: the trainer writes them together, even empty ones."""
    wanted = {MODEL_STATE} if folders <= {MODEL_STATE, EMA_STATE} else {*FOLDERS} - {EMA_STATE}
    if missing := sorted(wanted - folders):
        raise CheckpointError(
            f"{missing[0]}/ is missing or has no {METADATA} file, beside {', '.join(sorted(folders))}: the trainer "
            "writes them together"
        )


def _fused(table: RuleTable, config: Mapping[str, Any], key: str) -> Fused | None:
    rule, _ = table.find(key, config)
    shares = rule.shares(config)
    return None if len(shares) == 1 or rule.split is None else (rule.split, shares)


def _check(model: Model, catalog: Catalog) -> None:
    """Check that every trained tensor has all optimizer states, in its own shape."""
    check_states(model)
    index = catalog.index()
    trained = [t for t in model.tensors if t.trained and t.tied_to is None]
    has_ema = any(state in (EMA_PARAM, EMA_MASTER_WEIGHT) for _, state in index)
    # If there are master weights, only float32 parameters lack one. Parameters with one are all stored, or all omitted.
    any_master = any(t.master for t in trained)
    all_stored = any(t.master and (t.key, PARAM) in index for t in trained)
    for tensor in trained:
        has_master = tensor.master or (any_master and tensor.dtype.name != "float32")
        needed = [MASTER_WEIGHT] if has_master else []
        needed += [EMA_MASTER_WEIGHT if has_master else EMA_PARAM] if has_ema else []
        needed += [PARAM] if all_stored else []
        for state in needed:
            if (tensor.key, state) not in index:
                raise not_held(tensor.key, state)
    shapes = {t.key: t.global_shape for t in model.tensors}
    for catalog_tensor in catalog.tensors:
        if catalog_tensor.global_shape not in (shapes[catalog_tensor.key], (1,)):
            raise CoverageError(
                catalog_tensor.label,
                f"shape {catalog_tensor.global_shape}, but the parameter has {shapes[catalog_tensor.key]}",
            )


def _with_implied(catalog: Catalog, model: Model) -> Catalog:
    """The catalog with parameters that no file holds added as casts of their master weights."""
    aliases, index = model.aliases, catalog.index()
    tensors = list(catalog.tensors)
    implied = {}
    for of_model in model.tensors:
        if of_model.tied_to is None and not of_model.missing and (of_model.key, PARAM) not in index:
            implied[len(tensors)] = index[of_model.key, MASTER_WEIGHT]
            tensors.append(Tensor(of_model.key, PARAM, of_model.dtype, of_model.global_shape))
    shared = (PARAM, EMA_PARAM)
    named = [replace(t, aliases=aliases.get(t.key, ())) if t.state in shared else t for t in tensors]
    return replace(catalog, tensors=Tensors(named), implied=implied)


# ---------------------------------------------------------------------------------------- parameter names


def _stored_names(
    names: Mapping[str, Sequence[Name]], metadata: Mapping[str, DistMetadata], files: Mapping[str, DataFile]
) -> dict[str, str]:
    """Structured key → parameter name in the data files; empty if they have no names."""
    names_of: dict[str, str] = {}
    for path, folder_names in names.items():
        keys = dict(zip(metadata[path].keys, folder_names, strict=True))
        for data_path, file in sorted(files.items()):
            for stored, full_name in file.parameter_names.items():
                key, state = keys.get(stored, ("", ""))
                if state != PARAM or _AUTOMATIC.fullmatch(full_name):
                    continue
                name = full_name.removesuffix(".dist")
                if names_of.setdefault(key, name) != name:
                    raise CoverageError(
                        key,
                        f"has the parameter names {names_of[key]} and {name} in different files",
                        (data_path,),
                    )
    return names_of


def _predicted_names(catalog: Catalog, table: RuleTable, config: Mapping[str, Any]) -> dict[str, str]:
    """Structured key → parameter name in a program of one rank, by the naming rules."""
    parameters = read_model([t for t in catalog.tensors if t.state == PARAM], table, config)
    return predict_parameter_names(parameters.tensors, config, 1, 1, False)


def _of_states(
    catalog: Catalog, stored: Mapping[str, str], predicted: Mapping[str, str], path: str
) -> CellNames:
    """The names under which optimizer states are stored; ``path`` is a file that tells them."""
    held = {key for key, state in catalog.index() if state not in (PARAM, EMA_PARAM, EMA_MASTER_WEIGHT)}
    names = {key: name for key, name in stored.items() if key in held}
    return CellNames("", path, names, {key: predicted[key] for key in names})


def _renamed(catalog: Catalog, names: Mapping[str, str], twins: Mapping[str, str]) -> Catalog:
    """The catalog with structured keys for all states."""
    keys: dict[str, str] = {}
    for structured, name in names.items():
        identity = twins.get(structured, structured)
        if keys.setdefault(name, identity) != identity:
            raise CoverageError(
                structured, f"it and {keys[name]} have the same parameter name {name}, but are not tied"
            )
    tensors: dict[Name, Tensor] = {}
    for tensor in catalog.tensors:
        key = keys.get(tensor.key) if tensor.state != PARAM else tensor.key
        if key is None:
            raise CoverageError(
                tensor.label,
                "no parameter of the model has this name, neither in the data files nor by the naming rules of the "
                "rule table",
            )
        if (key, tensor.state) in tensors:
            raise CoverageError(f"{key} ({tensor.state})", f"stored under two names, also {tensor.key}")
        tensors[key, tensor.state] = replace(tensor, key=key)
    return replace(catalog, tensors=Tensors(tensors.values()))


SHAPES = ("global_offset", "local_shape", "global_shape")
"""Columns of a piece that hold shapes."""


def with_two_dims(path: str, metadata: DistMetadata, stacked: Collection[str]) -> DistMetadata:
    """The same metadata, with the first two of three dims joined where experts lie along the first.

    PaddleFleet's trainer writes the parameters of grouped experts with three dims, ``[experts, rows, columns]``, and
    their optimizer states with two, ``[experts * rows, columns]``; before that, and where it saves asynchronously, all
    have two (``trainer/trainer.py``, ``restore_fused_expert_3d_layout``). Both are the same bytes.

    ``stacked`` are the keys of tensors that hold several experts. A ``CoverageError`` names a piece that ends within an
    expert, which is no box of the two dims.
    """
    shapes = {shape: number for number, shape in enumerate(metadata.shapes)}
    pieces = metadata.pieces.copy()
    for piece in pieces:
        columns = [int(piece[name]) for name in SHAPES]
        key = metadata.keys[int(piece["key"])]
        if min(columns) < 0 or key not in stacked:
            continue
        offset, local, whole = (metadata.shapes[column] for column in columns)
        if len(whole) != 3:
            continue
        if any(offset[1:]) or local[1:] != whole[1:]:
            raise CoverageError(
                key,
                f"a piece of {local} at {offset} of {whole} cuts the {whole[0]} experts themselves, which is not "
                "supported; save with expert parallelism that distributes whole experts",
                (path,),
            )
        for name, shape in zip(
            SHAPES, (_joined(dims, whole) for dims in (offset, local, whole)), strict=True
        ):
            piece[name] = shapes.setdefault(shape, len(shapes))
    return replace(metadata, shapes=tuple(shapes), pieces=pieces)


def arrays_with_two_dims(arrays: Mapping[str, ArrayRef], stacked: Collection[str]) -> dict[str, ArrayRef]:
    """Key → array of a data file, the same way; those in Fortran order stay as they are, and are refused later."""
    return {
        key: replace(array, shape=_joined(array.shape, array.shape))
        if len(array.shape) == 3 and array.axes is None and key in stacked
        else array
        for key, array in arrays.items()
    }


def _joined(shape: Shape, whole: Shape) -> Shape:
    return shape[0] * whole[1], shape[2]
