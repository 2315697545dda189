"""Words among which a user chooses, here or in a trainer; those of a format stand with the format."""

from __future__ import annotations

from typing import Literal, get_args

from paddle_reshard.pipeline.core.errors import UsageError

Replicas = Literal["compare", "report", "first"]
ReadReplicas = Literal["compare", "first"]
"""Where nothing is made of them."""
MasterWeights = Literal["compare", "report", "from-parameters"]
ReadMasterWeights = Literal["compare", "report"]
"""Where none are made."""
Convention = Literal["paddleformers", "paddlenlp", "paddlefleet"]
"""Libraries whose names and layouts are known."""
Device = Literal["cpu", "gpu"]
Dtype = Literal["bfloat16", "float16", "float32"]
ModelState = Literal["param", "ema"]
Dropped = Literal["ema", "mtp", "head"]
REPLICAS: tuple[Replicas, ...] = get_args(Replicas)
READ_REPLICAS: tuple[ReadReplicas, ...] = get_args(ReadReplicas)
MASTER_WEIGHTS: tuple[MasterWeights, ...] = get_args(MasterWeights)
READ_MASTER_WEIGHTS: tuple[ReadMasterWeights, ...] = get_args(ReadMasterWeights)
EXCHANGES = ("auto", "always", "never")
CONVENTIONS: tuple[Convention, ...] = get_args(Convention)
DEVICES: tuple[Device, ...] = get_args(Device)
UPLOADS = ("always", "never")
MUON, ADAMW_MINI = "Muon", "AdamWMini"
"""Optimizers that trainers can save only in some formats."""


def parse_choice(value: str, choices: tuple[str, ...], what: str) -> bool:
    """Whether ``value`` is the first of several choices; an unknown value is an error."""
    if value not in choices:
        raise UsageError(f"unknown {what} {value!r}; known: {', '.join(choices)}")
    return value == choices[0]
