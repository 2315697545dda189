"""Which files are a hybrid-parallel checkpoint, also with weights in safetensors files, and what they hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
from paddle_reshard.pipeline.core.errors import (
    WITHOUT_OPTIMIZER,
    CheckpointError,
    CoverageError,
    UnsupportedError,
    of_optimizer,
)
from paddle_reshard.pipeline.core.file_names import MODEL_META
from paddle_reshard.pipeline.core.limits import MAX_TARGET_FILES
from paddle_reshard.pipeline.core.trainer_files import is_of_optimizer
from paddle_reshard.pipeline.formats.hybrid import HYBRID
from paddle_reshard.pipeline.formats.hybrid.entries import FileEntries, index_rank_file
from paddle_reshard.pipeline.formats.hybrid.names import (
    PIECE_INDEX,
    WEIGHTS,
    hybrid_name,
    parse_rank_file,
    piece_of,
)
from paddle_reshard.pipeline.formats.hybrid.source import read_hybrid
from paddle_reshard.pipeline.formats.model_meta import ModelMeta, parse_model_meta
from paddle_reshard.pipeline.model.model import ModelTensor, model_order
from paddle_reshard.pipeline.model.rules.choose import choose_table, keys_in_model
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import RuleTables
from paddle_reshard.pipeline.model.weights import dtype_of_tag, is_transposed
from paddle_reshard.storage.files.paddle_pickle import STRUCTURED_NAMES

if TYPE_CHECKING:
    from paddle_reshard.storage.files.safetensors import SafetensorsPayload

_NO_CONFIG = (
    ". A model of no library, such as an nn.Layer of your own, has none: a file with "
    '{"paddleformers_version": "1.2.0"} and nothing else is enough to change its sharding'
)


def index_hybrid(files: SourceFiles, tables: RuleTables, missing: MissingPolicy) -> Checkpoint:
    """Read a hybrid-parallel checkpoint, also with weights in safetensors files next to hybrid optimizer states.

    Raises
    ------
    CheckpointError, PlanError
        Naming the file, the tensor and the two values, if the checkpoint is incomplete or inconsistent, or cannot be
        interpreted exactly.
    """
    sizes = files.sizes
    ranks = {path: size for path, size in sizes.items() if parse_rank_file(path) is not None}
    _refuse_unknown_tensor_files(files, ranks)
    meta = parse_model_meta(files.json(MODEL_META)) if MODEL_META in sizes else None
    roots = files.index_anywhere(index_rank_file, files.store, ranks)
    own_index = _check_pieces(files, roots)
    if files.safetensors:
        return _read_weights_and_states(files, roots, meta, tables, missing)
    checkpoint = read_hybrid(
        sizes, roots, meta, files.config(else_=_NO_CONFIG), tables, missing, files.adapter()
    )
    return replace(checkpoint, own_files=checkpoint.own_files | own_index)


def _refuse_unknown_tensor_files(files: SourceFiles, ranks: Collection[str]) -> None:
    """Refuse files that could hold tensors and have an unknown name, and folders without files of tensors."""
    if unknown := [path for path in files.pickles if path not in ranks]:
        path = next((path for path in unknown if not is_of_optimizer(path)), unknown[0])
        if is_of_optimizer(path):
            raise of_optimizer(
                UnsupportedError(
                    f"{path}: states of a unified checkpoint in Paddle's own files, which are not converted: the "
                    f"trainer writes and reads them in safetensors files only; {WITHOUT_OPTIMIZER}"
                )
            )
        raise CheckpointError(f"{path}: unknown name of a tensor file in a hybrid-parallel checkpoint")
    if not ranks:
        raise CheckpointError(
            f"{files.store.location}: no checkpoint found: no model_state or optimizer file, no .metadata, no "
            ".safetensors"
        )


def _check_pieces(files: SourceFiles, roots: Mapping[str, FileEntries]) -> set[str]:
    """Check that the pieces of a model are all there, each with the keys of the index; the index, if there is one."""
    pieces = {path: piece for path in sorted(roots) if (piece := piece_of(path)) is not None}
    if not pieces:
        return set()
    counts = {count for _, count in pieces.values()}
    wanted = {(number, count) for count in counts for number in range(1, min(count, MAX_TARGET_FILES) + 1)}
    if lacking := sorted(wanted - {*pieces.values()}):
        number, count = lacking[0]
        raise CheckpointError(
            f"model_state-{number:05d}-of-{count:05d}.pdparams is missing: {min(pieces)} is one of {max(counts)} pieces"
        )
    held: dict[str, str] = {}
    for path in pieces:
        for key in roots[path].names():
            if key == STRUCTURED_NAMES:
                continue
            if key in held:
                raise CoverageError(key, "two files hold it", (held[key], path))
            held[key] = path
    index = files.weight_index(PIECE_INDEX)
    if index is None:
        return set()
    if odd := sorted(key for key in {*held, *index.weight_map} if held.get(key) != index.weight_map.get(key)):
        says, does = (where.get(odd[0], "no file") for where in (index.weight_map, held))
        raise CoverageError(odd[0], f"{PIECE_INDEX} says that {says} holds it, but {does} does")
    return {PIECE_INDEX}


def _read_weights_and_states(
    files: SourceFiles,
    roots: Mapping[str, FileEntries],
    meta: ModelMeta | None,
    tables: RuleTables,
    missing: MissingPolicy,
) -> Checkpoint:
    """Interpret one with weights in safetensors files like a hybrid checkpoint with the same contents.

    PaddleFormers 1.2 writes them by default (``save_to_hf``) if the format is neither unified nor FlexCheckpoint: a
    ``model[.tpNN_ppNN].safetensors`` replaces every ``model_state[.tpNN_ppNN].pdparams``
    (``transformers/model_utils.py``, ``save_pretrained``). It holds the same pieces of the same tensors under the same
    keys, but linear layers are transposed, and parameter names are missing.

    ``roots`` are those of all tensor files but the weights; they, the other arguments and the errors are those of
    :func:`~.hybrid.source.read_hybrid`.
    """
    payloads, config, sizes = files.headers, files.config(), files.sizes
    saved = {key for payload in payloads.values() for key in payload.tensors}
    own = keys_in_model(tables, saved, config) or {key: key for key in saved}
    table = choose_table(tables, own.values(), config, HYBRID)
    names = {hybrid_name(path): path for path in payloads}
    if twice := sorted(path for path in roots if path.startswith(WEIGHTS)):
        raise CheckpointError(
            f"{min(payloads)} and {twice[0]} both hold the parameters of ranks: they are of two saves; move those of "
            "one save elsewhere"
        )
    weights = {name: _state_dict(path, payloads[path], own, table, config) for name, path in names.items()}
    renamed = {path: size for path, size in sizes.items() if path not in payloads}
    renamed |= {name: sizes[path] for name, path in names.items()}
    checkpoint = read_hybrid(renamed, {**roots, **weights}, meta, config, RuleTables([table]), missing)
    catalog = checkpoint.catalog
    renamed_back = tuple(replace(file, path=names.get(file.path, file.path)) for file in catalog.files)
    return replace(
        checkpoint,
        catalog=replace(catalog, files=renamed_back),
        own_files=frozenset(names.get(path, path) for path in checkpoint.own_files),
    )


def _state_dict(
    path: str,
    payload: SafetensorsPayload,
    own: Mapping[str, str],
    table: RuleTable,
    config: Mapping[str, Any],
) -> FileEntries:
    """The arrays as ``model_state`` holds them: in model order, what is transposed in column-major order.

    ``own`` is the key of each in the model.
    """
    held: dict[str, Any] = {}
    stored: dict[str, str] = {}
    for key in payload.tensors:
        if (other := stored.setdefault(own[key], key)) != key:
            raise CheckpointError(
                f"{path}: {other} and {key} are both {own[key]} of the model, which its class saves under one of them"
            )
    for key in _in_model_order(stored, table, config):
        array = payload.tensors[stored[key]]
        dtype = dtype_of_tag(payload.tags[stored[key]], f"{path}: {stored[key]}")
        layout = payload.metadata.get("format")
        if is_transposed(key, array.shape, layout, path, table, config):
            array = replace(array, shape=array.shape[::-1], axes=(1, 0))
        held[key] = replace(array, dtype=dtype.code)
    return FileEntries(held)


def _in_model_order(keys: Iterable[str], table: RuleTable, config: Mapping[str, Any]) -> list[str]:
    """Sort keys, which safetensors files have in alphabetical order, into the order in which parameter names count."""
    sort_key, find = model_order(table), table.finder(config)

    def key_of(key: str) -> tuple[int, ...]:
        rule, layer = find(key)
        return sort_key(ModelTensor(key, rule, layer, (), dtype_of_tag("F32", key), (), False))

    return sorted(keys, key=key_of)
