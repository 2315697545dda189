"""Hugging Face checkpoints: the parameters of a model as ``transformers`` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from paddle_reshard.pipeline.checkpoint.format import MAX_SHARD_SIZE, Format, FormatOption, Request
from paddle_reshard.pipeline.core.choices import Dtype, ModelState
from paddle_reshard.pipeline.formats.huggingface import EMA, HUGGINGFACE

if TYPE_CHECKING:
    from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint, Donor, MissingPolicy
    from paddle_reshard.pipeline.checkpoint.reading import SourceFiles
    from paddle_reshard.pipeline.core.catalog import Catalog
    from paddle_reshard.pipeline.model.model import Model
    from paddle_reshard.pipeline.model.rules.tables import RuleTables


def _index(files: SourceFiles, tables: RuleTables, missing: MissingPolicy) -> Checkpoint:
    """The model is found by the rule tables."""
    from paddle_reshard.pipeline.formats.huggingface.source import index_huggingface

    return index_huggingface(files, tables, missing)


def _index_as(files: SourceFiles, model: Model) -> Catalog:
    from paddle_reshard.pipeline.core.file_names import WEIGHT_INDEX
    from paddle_reshard.pipeline.formats.huggingface.source import BUFFERS, read_huggingface, stored_tensors

    stored = stored_tensors(files.headers, files.weight_index(WEIGHT_INDEX), BUFFERS)
    return read_huggingface(model, files.safetensors, stored)


def _read_donor(files: SourceFiles) -> Donor:
    from paddle_reshard.pipeline.formats.huggingface.donor import read_donor

    return read_donor(files)


def _request(asked: Mapping[str, Any]) -> Request:
    """State, dtype and size of files; nothing of it depends on the source."""
    from paddle_reshard.pipeline.core.tensors import dtype_named
    from paddle_reshard.pipeline.formats.huggingface.target import HuggingFaceTarget

    given = {"state": asked["state"]} if asked.get("state") else {}
    if dtype := asked.get("dtype"):
        given["dtype"] = dtype_named(dtype)
    if size := asked.get("max_shard_size"):
        given["max_shard_bytes"] = size.nbytes
    return HuggingFaceTarget(**given)


FORMAT = Format(  # weights in safetensors files, and nothing of a training job
    name=HUGGINGFACE,
    help="the model for transformers, LoRA for peft",
    # Those in Paddle's own layout are of another format, which comes later in the table.
    recognises=lambda files: bool(files.safetensors) and not files.pickles,
    index=_index,
    request=_request,
    index_as=_index_as,
    read_donor=_read_donor,
    options={
        "state": FormatOption(
            "the parameters, or their moving average, which is stored in float32 and rounded to the "
            "dtype of the parameters. Default: param.",
            get_args(ModelState),
        ),
        "dtype": FormatOption(
            "output dtype of floating-point tensors (except those that the model keeps in float32), "
            "rounded once, from the master weight if there is one. Default: as trained, bit for bit.",
            get_args(Dtype),
        ),
        "max_shard_size": MAX_SHARD_SIZE._replace(default="5GB"),
    },
    average_options={"state": EMA},
    model_only=True,
    holds_lora=True,
)
