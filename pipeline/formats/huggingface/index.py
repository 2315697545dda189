"""Read the metadata of a Hugging Face checkpoint's files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paddle_reshard.pipeline.checkpoint.checkpoint import DROPPED_MTP, Checkpoint
from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.file_names import WEIGHT_INDEX
from paddle_reshard.pipeline.core.tensors import DType
from paddle_reshard.pipeline.formats.huggingface.parts import Part
from paddle_reshard.pipeline.formats.huggingface.source import (
    huggingface_checkpoint,
    read_huggingface,
    without_mtp_layers,
)
from paddle_reshard.pipeline.model.model import Model, ModelTensor
from paddle_reshard.pipeline.model.rules.tables import RuleTables


def index_huggingface(files: SourceFiles, tables: RuleTables, drops_mtp: bool = False) -> Checkpoint:
    """A checkpoint of weights only, as its files say; with ``drops_mtp`` without multi-token prediction."""
    index = files.weight_index(WEIGHT_INDEX)
    config = files.config()
    if not drops_mtp:
        return huggingface_checkpoint(files.safetensors, files.headers, index, config, tables)
    headers, index, dropped = without_mtp_layers(files.headers, index, config, tables)
    checkpoint = huggingface_checkpoint(files.safetensors, headers, index, config, tables)
    return replace(checkpoint, not_carried=tuple((key, DROPPED_MTP) for key in dropped))


def index_parameters(
    files: SourceFiles, model: Model, planned: Callable[[ModelTensor, Part], DType] | None = None
) -> Catalog:
    """The parameters of ``model``, as a Hugging Face checkpoint holds them.

    Parameters
    ----------
    planned
        The dtype that a part of a tensor must have been stored with, where that is known.

    Raises
    ------
    CheckpointError
        If it holds another model, or is not whole; naming the tensor and the file.
    """
    headers = files.headers
    return read_huggingface(model, files.safetensors, headers, files.weight_index(WEIGHT_INDEX), planned)
