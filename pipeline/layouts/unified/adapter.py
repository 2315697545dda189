"""Read LoRA as saved at the end of training: ``peft_model-*.safetensors`` with matrices only."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
from paddle_reshard.pipeline.layouts.rules.choose import choose_table
from paddle_reshard.pipeline.layouts.rules.rule import LORA
from paddle_reshard.pipeline.layouts.rules.tables import RuleTables
from paddle_reshard.pipeline.layouts.unified.name import UNIFIED
from paddle_reshard.pipeline.layouts.unified.names import ADAPTER
from paddle_reshard.pipeline.layouts.weights import dtype_of_tag
from paddle_reshard.storage.formats.safetensors import SafetensorsPayload

_FILE: Final = re.compile(rf"{ADAPTER}-\d{{5}}-of-\d{{5}}\.safetensors")
_INDEX: Final = f"{ADAPTER}.safetensors.index.json"


def index_adapter(files: SourceFiles, tables: RuleTables) -> Checkpoint:
    """Read the matrices of LoRA, whole and in Paddle's layout, as PaddleFormers 1.2 saves them after training.

    Raises
    ------
    CheckpointError, PlanError
        If the files are not one complete adapter, or hold something else.
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
    """Path → header of every file. The files must be those of the index and hold only matrices of LoRA."""
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
    found = {key: path for path, payload in files.headers.items() for key in payload.tensors}
    if len(found) < sum(len(payload.tensors) for payload in files.headers.values()):
        raise CheckpointError(f"{_INDEX}: two of its files hold the same key")
    if differing := sorted(dict(index.weight_map).items() ^ found.items()):
        raise CheckpointError(
            f"{differing[0][0]}: {_INDEX} and the files disagree about the file that holds it"
        )
    for key, path in sorted(found.items()):
        if key.rpartition(".")[2] not in LORA:
            raise UnsupportedError(
                f"{path}: {key} is not a matrix of LoRA, and the layout of other tensors in these files is not known"
            )
    return files.headers
