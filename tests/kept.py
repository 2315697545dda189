"""Which tensors a conversion keeps, by the fingerprints of what is read of its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle_reshard

BUFFERS = ("*e_score_correction_bias",)
"""Lost by sharded saving, so that no file holds them."""

Lines = dict[tuple[str, str], list[Any]]
"""Key and state of a tensor → dtype, shape and checksum."""


def lines_of(checkpoint: Path, **options: Any) -> Lines:
    found = paddle_reshard.fingerprint(checkpoint, allow_missing=BUFFERS, **options).fingerprints
    return {
        (tensor.key, tensor.state): [tensor.dtype.name, list(tensor.global_shape), f"{int(checksum):016x}"]
        for tensor, checksum in zip(found.tensors, found.checksums, strict=True)
    }


def check_kept(way: str, before: Lines, after: Lines) -> None:
    """What a conversion may change: a format for models has only parameters, unified files no averages."""
    for (key, state), line in after.items():
        if (key, state) not in before:  # in unified files, float32 parameters have master weights
            assert (way, state, line[0]) == ("unified", "master_weight", "float32"), key
            state = "param"
        assert line == before[key, state], (key, state)
    if way == "unified":
        assert {state for _, state in before.keys() - after.keys()} <= {"ema_master_weight", "ema_param"}
    else:
        assert before == after
