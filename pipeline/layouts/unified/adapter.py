"""Read what LoRA training leaves when it ends: ``peft_model-*.safetensors``, the matrices and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from paddle_reshard.pipeline.core.catalog import Catalog, File, check_catalog
from paddle_reshard.pipeline.core.errors import CheckpointError, UnsupportedError
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import PARAM, Tensor
from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint
from paddle_reshard.pipeline.layouts.lora import check_matrices, with_base
from paddle_reshard.pipeline.layouts.model import read_model
from paddle_reshard.pipeline.layouts.placement import ArrayKind, Placements, TensorCut
from paddle_reshard.pipeline.layouts.reading import SourceFiles
from paddle_reshard.pipeline.layouts.rules import LORA, RuleTable, choose_table
from paddle_reshard.pipeline.layouts.unified.name import UNIFIED
from paddle_reshard.pipeline.layouts.unified.names import ADAPTER
from paddle_reshard.pipeline.layouts.weights import dtype_of_tag
from paddle_reshard.storage.formats.safetensors import SafetensorsPayload

_FILE: Final = re.compile(rf"{ADAPTER}-\d{{5}}-of-\d{{5}}\.safetensors")
_INDEX: Final = f"{ADAPTER}.safetensors.index.json"


def index_adapter(files: SourceFiles, tables: Sequence[RuleTable]) -> Checkpoint:
    """The matrices of LoRA, each whole and in Paddle's layout, as PaddleFormers 1.2 saves them after training.

    Raises
    ------
    CheckpointError, PlanError
        If the files are not one whole adapter, or hold something else.
    """
    held = _checked(files)
    keys = {key: path for path, payload in held.items() for key in payload.tensors}
    config, adapter = files.config(), files.adapter()
    table = choose_table(tables, keys, config, UNIFIED)
    sources = [File(path, files.sizes[path]) for path in sorted(held)]
    placements = Placements()
    tensors: list[Tensor] = []
    for number, file in enumerate(sources):
        payload = held[file.path]
        for key, array in payload.tensors.items():
            dtype = dtype_of_tag(payload.tags[key], f"{file.path}: {key}")
            kind = placements.kind(ArrayKind(array.shape, TensorCut(1, None), dtype.itemsize))
            placements.add(kind, 0, len(tensors), number, array.byte_offset, dtype, 0)
            tensors.append(Tensor(key, PARAM, dtype, array.shape))
    model = read_model(tensors, table, config)
    check_matrices(model, adapter)
    catalog = Catalog(Tensors(tensors), tuple(sources), placements.fragments(), {})
    check_catalog(catalog)
    return Checkpoint(
        format=UNIFIED,
        catalog=catalog,
        own_files=frozenset([*held, _INDEX]),
        model=with_base(model, adapter),
        topology=None,
        strategy=None,
        comm_overlap=False,
        sequence_parallel=None,
        names_predicted=None,
        lr_scheduler=None,
        has_ema=False,
        has_optimizer=False,
        adapter=adapter,
    )


def _checked(files: SourceFiles) -> Mapping[str, SafetensorsPayload]:
    """Path → header of every file; all are there that the index names, and hold matrices of LoRA alone."""
    for path in files.safetensors:
        if not _FILE.fullmatch(path):
            raise UnsupportedError(
                f"{path}: lies beside {ADAPTER} files; of LoRA in unified checkpoints only what training leaves at its "
                "end is supported, without optimizer states"
            )
    index = files.weight_index(_INDEX)
    if index is None:
        raise CheckpointError(f"{_INDEX} is missing")
    found = {key: path for path, payload in files.headers.items() for key in payload.tensors}
    if len(found) < sum(len(payload.tensors) for payload in files.headers.values()):
        raise CheckpointError(f"{_INDEX}: two of its files hold the same key")
    if odd := sorted(dict(index.weight_map).items() ^ found.items()):
        raise CheckpointError(f"{odd[0][0]}: {_INDEX} and the files disagree about where it lies")
    for key, path in sorted(found.items()):
        if key.rpartition(".")[2] not in LORA:
            raise UnsupportedError(
                f"{path}: {key} is no matrix of LoRA: in which layout these files hold other tensors is not known"
            )
    return files.headers
