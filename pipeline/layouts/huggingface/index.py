"""Read the metadata of a Hugging Face checkpoint's files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paddle_reshard.pipeline.core.catalog import Catalog
from paddle_reshard.pipeline.core.tensors import DType
from paddle_reshard.pipeline.layouts.checkpoint import Checkpoint
from paddle_reshard.pipeline.layouts.huggingface.names import INDEX
from paddle_reshard.pipeline.layouts.huggingface.parts import Part
from paddle_reshard.pipeline.layouts.huggingface.source import huggingface_checkpoint, read_huggingface
from paddle_reshard.pipeline.layouts.model import Model, ModelTensor
from paddle_reshard.pipeline.layouts.reading import SourceFiles
from paddle_reshard.pipeline.layouts.rules import RuleTable


def index_huggingface(files: SourceFiles, tables: Sequence[RuleTable]) -> Checkpoint:
    """A checkpoint of weights only, as its files say."""
    config = files.config()
    index = files.weight_index(INDEX)
    return huggingface_checkpoint(files.safetensors, files.headers, index, config, tables)


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
    return read_huggingface(model, files.safetensors, headers, files.weight_index(INDEX), planned)
