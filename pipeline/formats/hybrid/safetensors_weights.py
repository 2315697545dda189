"""Read hybrid-parallel checkpoints with weights in safetensors files.

PaddleFormers 1.2 writes them by default (``save_to_hf``) if the format is neither unified nor FlexCheckpoint: a
``model[.tpNN_ppNN].safetensors`` replaces every ``model_state[.tpNN_ppNN].pdparams``
(``transformers/model_utils.py``, ``save_pretrained``). It holds the same pieces of the same tensors under the same
keys, but linear layers are transposed, and parameter names are missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, MissingPolicy
from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.formats.hybrid.entries import FileEntries
from paddle_reshard.pipeline.formats.hybrid.format import HYBRID
from paddle_reshard.pipeline.formats.hybrid.names import WEIGHTS
from paddle_reshard.pipeline.formats.hybrid.source import read_hybrid
from paddle_reshard.pipeline.formats.model_meta import ModelMeta
from paddle_reshard.pipeline.model.model import ModelTensor, model_order
from paddle_reshard.pipeline.model.rules.choose import choose_table, keys_in_model
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import RuleTables
from paddle_reshard.pipeline.model.weights import dtype_of_tag, is_transposed
from paddle_reshard.storage.files.safetensors import SafetensorsPayload

WEIGHTS_OF_RANK = re.compile(r"model(\.[a-z0-9_]+)?\.safetensors")


def hybrid_name(path: str) -> str:
    """Name of the file of a hybrid checkpoint that would hold the same weights.

    >>> hybrid_name("model.tp00_pp01.safetensors")
    'model_state.tp00_pp01.pdparams'
    """
    match = WEIGHTS_OF_RANK.fullmatch(path)
    if match is None:
        raise CheckpointError(f"{path}: not the weights of a rank beside optimizer states (.pdopt) of one")
    return f"model_state{match[1] or ''}.pdparams"


def read_weights_and_states(
    files: SourceFiles,
    roots: Mapping[str, FileEntries],
    meta: ModelMeta | None,
    tables: RuleTables,
    missing: MissingPolicy | None,
) -> Checkpoint:
    """Interpret such a checkpoint like a hybrid checkpoint with the same contents.

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
