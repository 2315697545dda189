"""Dtypes and layouts of weights in safetensors files, in any format."""

from __future__ import annotations

from paddle_reshard.pipeline.core.errors import CheckpointError, RuleError
from paddle_reshard.pipeline.core.geometry import Shape
from paddle_reshard.pipeline.core.tensors import DType, dtype_named
from paddle_reshard.pipeline.model.rules.entries import Config
from paddle_reshard.pipeline.model.rules.table import RuleTable

PADDLE_LAYOUTS = ("np", "pd")
"""Values of ``format`` in the metadata of safetensors files in Paddle's own layout."""
TRANSFORMERS_LAYOUT = "pt"
TAGS = {
    "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_DTYPES = {tag: dtype_named(name) for name, tag in TAGS.items()} | {"U16": dtype_named("bfloat16")}


def dtype_of_tag(tag: str, where: str) -> DType:
    """The dtype of a tag; files written from NumPy have ``U16`` for bfloat16."""
    if tag not in _DTYPES:
        raise CheckpointError(f"{where}: dtype {tag} is not supported")
    return _DTYPES[tag]


def is_transposed(
    key: str, shape: Shape, layout: str | None, path: str, table: RuleTable, config: Config
) -> bool:
    """Whether PaddleFormers has transposed a weight in this file.

    ``layout`` is the file's ``format`` in its metadata: ``np`` is Paddle's own layout, ``pt`` that of ``save_to_hf``.
    The latter keeps Paddle's keys and fused tensors, but transposes the linear layers in ``transpose_weight_keys`` of
    the model class (PaddleFormers 1.2 ``transformers/conversion_utils.py:1272``). Unless the row says otherwise, these
    are the tensors that are a single transposed tensor in a Hugging Face checkpoint, too.

    Raises
    ------
    CheckpointError
        If the file does not give its layout.
    RuleError
        If the rule table does not give the form of the tensor.
    """
    if layout in PADDLE_LAYOUTS:
        return False
    if layout != TRANSFORMERS_LAYOUT:
        raise CheckpointError(f"{path}: its metadata say format={layout!r}; np, pd or pt is expected")
    if len(shape) != 2:
        return False
    form = table.find(key, config)[0].huggingface
    if form is None:
        raise RuleError(
            key,
            f"{path} has the layout of Hugging Face checkpoints, and the {table.convention} rule table "
            f"{table.family!r} does not give the tensor's form there; add 'huggingface' to its row in a copy of the "
            "table, and pass that with --rules FILE",
        )
    return form.transposed_as_saved
