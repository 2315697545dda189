"""Tensors of a running job that are no plain arrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def piece(
    tensor: Any,
    whole: tuple[int, ...],
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    flat: tuple[int, int] | None = None,
) -> SimpleNamespace:
    """What FlexCheckpoint calls a ShardedWeight."""
    return SimpleNamespace(
        local_tensor=tensor,
        local_shape=shape,
        global_shape=whole,
        global_offset=offset,
        is_flattened=flat is not None,
        flattened_range=None if flat is None else slice(*flat),
    )


class Elsewhere:
    """A tensor of the CPU that says it lies on a device."""

    place = SimpleNamespace(is_cpu_place=lambda: False, is_cuda_pinned_place=lambda: False)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)
