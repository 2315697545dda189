"""Which tensors of a Hugging Face checkpoint are quantised to FP8, and what else that makes.

Their scales are in a file of their own, the last. What is written for a weight is in
:mod:`~paddle_reshard.pipeline.checkpoint.quantising`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from paddle_reshard.pipeline.checkpoint.quantised import SCALES
from paddle_reshard.pipeline.checkpoint.quantising import BLOCK
from paddle_reshard.pipeline.core.errors import UnsupportedError
from paddle_reshard.pipeline.core.tensors import EMA_MASTER_WEIGHT, EMA_PARAM, MASTER_WEIGHT, PARAM, DType
from paddle_reshard.pipeline.formats.huggingface.parts import Part
from paddle_reshard.pipeline.model.weights import TAGS
from paddle_reshard.storage.files.safetensors import TensorSlot

QUANTIZE = "quantize"
"""The option, and its entry among the facts of a target."""
QUANTISED = re.compile(
    r"(?!.*(?:vision|visual|indexer))(?:\w+\.)*layers\.\d+\.(?:self_attn|linear_attn|mlp)\..*_proj(?:_with_mqa)?\.weight"
)
"""Keys of weights that are quantised, as in DeepSeek-V3 and Qwen3's FP8 models: the linear layers of a decoder without
routers. Embedding, head, ``eh_proj`` and vision keep their dtype."""
EXPERTS = ".experts."


def is_quantised(part: Part, dtype: DType, quantize: str) -> bool:
    """Whether a tensor, which would have ``dtype`` otherwise, is quantised.

    Refused if it should be, but its dtype is not bfloat16, or it holds several matrices.
    """
    if len(part.shape) == 3 and EXPERTS in part.key and not part.keep_float32:
        raise UnsupportedError(
            f"--quantize {quantize}: {part.key} holds all experts of a layer in one tensor, which is not supported: "
            "inference libraries do not agree on their scales. Export without --quantize"
        )
    if not QUANTISED.fullmatch(part.key) or len(part.shape) != 2 or not all(part.shape) or part.keep_float32:
        return False
    if dtype.name != "bfloat16":
        raise UnsupportedError(
            f"--quantize {quantize}: {part.key} was trained in {dtype.name}; quantised models are bfloat16 "
            "otherwise, add --dtype bfloat16"
        )
    return True


def scale_slots(quantised: Sequence[Part]) -> list[TensorSlot]:
    """The tensors in the file of scales: one scale for each block of each weight."""
    slots = []
    for number, part in enumerate(quantised):
        rows, columns = part.shape
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        slots.append(TensorSlot(number, part.key + SCALES, TAGS["float32"], blocks))
    return slots


def remarks(quantised: Sequence[Part], states: set[str], quantize: str) -> tuple[str, ...]:
    """What a user has to know; ``states`` are those of the source from which the values come."""
    if states <= {MASTER_WEIGHT, EMA_MASTER_WEIGHT}:
        origin = "master weights"
    elif states <= {PARAM, EMA_PARAM}:
        origin = "parameters, because the source holds no master weights of them"
    else:
        origin = "master weights, or parameters where the source holds no master weight"
    rounded = f"{len(quantised)} weights are quantised to {quantize}, from their {origin}"
    # Fp8Dequantize of transformers 5.23 divides the rows and columns of a weight evenly among its scales.
    ragged = [part for part in quantised if any(extent > BLOCK and extent % BLOCK for extent in part.shape)]
    if not ragged:
        return (rounded,)
    part = ragged[0]
    return (
        rounded,
        f"the rows or columns of {len(ragged)} quantised weights, such as {part.key} of shape {part.shape}, are not a "
        f"multiple of {BLOCK}: where transformers 5 dequantises, as on a CPU, it stops at them or takes other blocks "
        "and computes wrong values",
    )
