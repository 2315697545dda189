"""Read the metadata of a Hugging Face checkpoint's files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paddle_reshard.pipeline.checkpoint.checkpoint import DROPPED_MTP, Checkpoint
from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.errors import RuleError
from paddle_reshard.pipeline.core.file_names import MANIFEST, WEIGHT_INDEX
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
    headers, dropped = files.headers, list[str]()
    if drops_mtp:
        headers, index, dropped = without_mtp_layers(headers, index, config, tables)
    checkpoint = huggingface_checkpoint(files.safetensors, headers, index, config, tables)
    if MANIFEST not in files.sizes:
        _check_told(checkpoint.model)
    return replace(checkpoint, not_carried=tuple((key, DROPPED_MTP) for key in dropped))


def _check_told(model: Model) -> None:
    """Refuse a model of which the library's own exports hold something else than their headers say."""
    for tensor in model.tensors:
        form = tensor.rule.huggingface
        if form is not None and form.exported_as is not None:
            raise RuleError(
                tensor.key,
                f"{form.exported_as}, which nothing in the files tells; convert the training checkpoint with --format "
                f"huggingface (an export of this program is known by its {MANIFEST})",
            )


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
