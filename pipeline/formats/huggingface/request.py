"""The options of a Hugging Face checkpoint as a target."""

from __future__ import annotations

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.suggest import did_you_mean
from paddle_reshard.pipeline.core.tensors import dtype_named
from paddle_reshard.pipeline.core.units import parse_size
from paddle_reshard.pipeline.formats.huggingface.choices import EXPORTED_STATES, FLOATING, QUANTISATIONS
from paddle_reshard.pipeline.formats.huggingface.target import HuggingFaceTarget

_FLAGS = {None: False, False: False, True: True, "false": False, "true": True}
"""A flag, or its value after a ``--target``."""


def parse_huggingface(
    state: str | None,
    dtype: str | None,
    max_shard_size: str | int | None,
    card: bool | str | None,
    quantize: str | None,
) -> HuggingFaceTarget:
    """What goes out as a Hugging Face checkpoint; ``None``: the default of :class:`HuggingFaceTarget`."""
    defaults = HuggingFaceTarget()
    if state is not None and state not in EXPORTED_STATES:
        raise UsageError(
            f"unknown state {state!r}; known: {', '.join(EXPORTED_STATES)}{did_you_mean(state, EXPORTED_STATES)}"
        )
    if dtype is not None and dtype not in FLOATING:
        raise UsageError(
            f"unknown dtype {dtype!r}; known: {', '.join(FLOATING)}{did_you_mean(dtype, FLOATING)}"
        )
    if card not in _FLAGS:
        raise UsageError(f"card is {card!r}; known: true, false")
    if quantize is not None and quantize not in QUANTISATIONS:
        raise UsageError(
            f"unknown quantisation {quantize!r}; known: {', '.join(QUANTISATIONS)}"
            f"{did_you_mean(quantize, QUANTISATIONS)}"
        )
    if quantize is not None and dtype not in (None, "bfloat16"):
        raise UsageError(
            f"--quantize {quantize} needs the remaining tensors in bfloat16, not --dtype {dtype}"
        )
    shard_bytes = (
        defaults.max_shard_bytes if max_shard_size is None else parse_size(max_shard_size, "--max-shard-size")
    )
    if shard_bytes < 1:
        raise UsageError(f"--max-shard-size {max_shard_size} holds nothing")
    return HuggingFaceTarget(
        state or defaults.state,
        None if dtype is None else dtype_named(dtype),
        shard_bytes,
        _FLAGS[card],
        quantize,
    )
