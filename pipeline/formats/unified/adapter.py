"""Read LoRA as saved at the end of training: ``peft_model-*.safetensors`` with its matrices.

A job of qwen2_5_vl on one card writes most of its base into them too. Under tp the pieces of ``lora_B`` are joined as
they are, so that a fused one is ``[gate_0 | up_0 | gate_1 | up_1]``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.lora import check_matrices, marked_base, with_base
from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
from paddle_reshard.pipeline.core.catalog import File, check_catalog
from paddle_reshard.pipeline.core.errors import CheckpointError, UnsupportedError
from paddle_reshard.pipeline.core.file_names import LORA_CONFIG
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensors import PARAM
from paddle_reshard.pipeline.formats.reading import TensorCollector
from paddle_reshard.pipeline.formats.unified import UNIFIED
from paddle_reshard.pipeline.formats.unified.names import ADAPTER
from paddle_reshard.pipeline.formats.writing import UNCUT
from paddle_reshard.pipeline.model.lora_config import Adapter
from paddle_reshard.pipeline.model.model import read_model
from paddle_reshard.pipeline.model.placement import ArrayKind, JoinedCut, TensorCut
from paddle_reshard.pipeline.model.rules.choose import choose_table, keys_in_model
from paddle_reshard.pipeline.model.rules.rule import LORA
from paddle_reshard.pipeline.model.rules.table import RuleTable
from paddle_reshard.pipeline.model.rules.tables import RuleTables
from paddle_reshard.pipeline.model.weights import dtype_of_tag
from paddle_reshard.storage.files.safetensors import SafetensorsPayload

_FILE: Final = re.compile(rf"{ADAPTER}-\d{{5}}-of-\d{{5}}\.safetensors")
_INDEX: Final = f"{ADAPTER}.safetensors.index.json"


def index_adapter(files: SourceFiles, tables: RuleTables) -> Checkpoint:
    """Read the matrices of LoRA, whole and in Paddle's layout, as PaddleFormers 1.2 saves them after training.

    Raises
    ------
    CheckpointError, PlanError
        If the files are not one complete adapter, or hold something else.
    """
    adapter = files.adapter()
    held = _checked(files, adapter)
    keys = {key: path for path, payload in held.items() for key in payload.tensors}
    config = files.config()
    in_model = keys_in_model(tables, keys, config)
    table = choose_table(tables, [in_model.get(key, key) for key in keys], config, UNIFIED)
    stored = TensorCollector(File(path, files.sizes[path]) for path in sorted(held))
    for file in stored.files:
        payload = held[file.path]
        for saved, array in payload.tensors.items():
            key = in_model.get(saved, saved)
            dtype = dtype_of_tag(payload.tags[saved], f"{file.path}: {saved}")
            kind = ArrayKind(array.shape, _cut(key, array.shape, table, config, adapter), dtype.itemsize)
            index = stored.tensor(key, PARAM, dtype, array.shape, file.path)
            stored.place(index, kind, dtype, 0, 0, file.path, array.byte_offset)
    model = marked_base(read_model(stored.tensors, table, config))
    check_matrices(model, adapter)
    catalog = stored.catalog()
    check_catalog(catalog)
    return Checkpoint(
        format=UNIFIED,
        catalog=catalog,
        own_files=frozenset([*held, _INDEX]),
        model=with_base(model, adapter),
        has_optimizer=False,
        adapter=adapter,
    )


def _cut(
    key: str, shape: Shape, table: RuleTable, config: Mapping[str, Any], adapter: Adapter | None
) -> TensorCut:
    """How the pieces of a tensor lie in the files."""
    rule, _ = table.find(key, config)
    if rule.fused_parts == 1 or key.rpartition(".")[2] not in LORA:
        return UNCUT
    if adapter is None:
        raise CheckpointError(
            f"{key}: has fused parts, whose order under tp follows from {LORA_CONFIG}, which is missing"
        )
    cut = JoinedCut(adapter.tp, rule.split_dim(config, adapter.tp, key), rule.shares(config))
    cut.local_shape(key, shape)
    return cut if adapter.tp > 1 else UNCUT


def _checked(files: SourceFiles, adapter: Adapter | None) -> Mapping[str, SafetensorsPayload]:
    """Path → header of every file. The files must be those of the index and hold nothing that was trained but LoRA."""
    adapters = [path for path in files.safetensors if _FILE.fullmatch(path)]
    for path in files.safetensors:
        if path not in adapters:
            raise UnsupportedError(
                f"{path}: in one folder with {min(adapters, default=ADAPTER)}; LoRA in unified checkpoints is only "
                "supported as saved at the end of training, without optimizer states"
            )
    index = files.weight_index(_INDEX)
    if index is None:
        raise CheckpointError(f"{_INDEX} is missing")
    path_of_key = {key: path for path, payload in files.headers.items() for key in payload.tensors}
    if len(path_of_key) < sum(len(payload.tensors) for payload in files.headers.values()):
        raise CheckpointError(f"{_INDEX}: two of its files hold the same key")
    if differing := sorted(dict(index.weight_map).items() ^ path_of_key.items()):
        raise CheckpointError(
            f"{differing[0][0]}: {_INDEX} and the files disagree about the file that holds it"
        )
    for key, path in sorted(path_of_key.items()):
        if key.rpartition(".")[2] not in LORA and (adapter is None or adapter.trains_more):
            raise UnsupportedError(
                f"{path}: {key} is not a matrix of LoRA, and nothing tells whether it was trained too or belongs to "
                "the base; give the checkpoint of the job instead"
            )
    return files.headers
