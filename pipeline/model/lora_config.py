"""Read and write ``lora_config.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from paddle_reshard.pipeline.core.errors import CheckpointError, UnsupportedError
from paddle_reshard.pipeline.core.file_names import LORA_CONFIG
from paddle_reshard.pipeline.core.topology import Topology

_TP_ENTRY: Final = "tensor_model_parallel_size"
_KNOWN: Final = frozenset(
    (
        *(
            "base_model_name_or_path",
            "do_qat",
            "dtype",
            "enable_lora_list",
            "head_dim",
            "lora_alpha",
            "lora_dropout",
        ),
        *(
            "lora_plus_scale",
            "loraga",
            "merge_weights",
            "r",
            "rslora",
            "scaling",
            "target_modules",
            _TP_ENTRY,
        ),
        *("tensor_parallel_degree", "trainable_bias", "trainable_modules", "use_quick_lora"),
    )
)
"""Entries of ``LoRAConfig`` in PaddleFormers 1.2 and PaddleNLP 3.0 (the last is about speed)."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Contents of ``lora_config.json``."""

    entries: Mapping[str, Any]
    """All entries, as read."""
    rank: int
    alpha: float
    rslora: bool
    base: str | None
    """Name or path of the base model, as passed to the job."""

    @property
    def scaling(self) -> float:
        """Factor of the product of the two matrices."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def trains_more(self) -> bool:
        """Whether the job trained tensors of the base in full too."""
        return any(self.entries.get(entry) for entry in ("trainable_bias", "trainable_modules"))

    @property
    def tp(self) -> int:
        """Degree of tensor parallelism of the job; on one card the trainer writes -1."""
        written = self.entries.get(_TP_ENTRY)
        return written if isinstance(written, int) and written > 1 else 1

    def fits(self, topology: Topology) -> bool:
        """Whether a job with this topology would write it."""
        return self.entries.get(_TP_ENTRY) == topology.tp

    def for_topology(self, topology: Topology) -> bytes:
        """``lora_config.json`` as the trainer writes it in a job with this topology."""
        entries = {**self.entries, _TP_ENTRY: topology.tp}
        return json.dumps(entries, indent=2, sort_keys=True).encode()


def parse_adapter(entries: Mapping[str, Any], where: str = LORA_CONFIG) -> Adapter:
    """Read ``lora_config.json``.

    Raises
    ------
    CheckpointError
        If an entry is missing or invalid, or the scaling contradicts ``lora_alpha`` and ``r``.
    UnsupportedError
        If the matrices have another meaning (LoRA-GA), or may have (an entry that is not known), or are quantised.
    """
    rank, alpha, rslora = entries.get("r"), entries.get("lora_alpha"), entries.get("rslora", False)
    base = entries.get("base_model_name_or_path")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise CheckpointError(f"{where}: r is {rank!r}; a rank of 1 or more is expected")
    if (
        not _is_number(alpha)
        or alpha is None
        or not isinstance(rslora, bool)
        or not isinstance(base, str | None)
    ):
        raise CheckpointError(
            f"{where}: lora_alpha is {alpha!r}, rslora {rslora!r}, base_model_name_or_path {base!r}: a number, true or "
            "false, and a name are expected"
        )
    if entries.get("loraga"):
        raise UnsupportedError(
            f"{where}: loraga is set: the matrices are differences from the start of LoRA-GA, with twice the rank, "
            "which is not supported"
        )
    if entries.get("do_qat"):
        raise UnsupportedError(f"{where}: do_qat is set: scales of quantisation are not supported")
    if strange := sorted(name for name in entries.keys() - _KNOWN if entries[name]):
        raise UnsupportedError(
            f"{where}: {strange[0]} is set: whether it gives the matrices another meaning, as pissa does "
            "(they are taken out of the base model), is not known; if it does not, remove the entry"
        )
    adapter = Adapter(entries, rank, float(alpha), rslora, base)
    written = entries.get("scaling", adapter.scaling)
    if not _is_number(written) or not math.isclose(written, adapter.scaling, rel_tol=1e-9):
        raise CheckpointError(
            f"{where}: scaling is {written!r}, but lora_alpha={alpha} and r={rank}{' with rslora' if rslora else ''} "
            f"give {adapter.scaling}"
        )
    return adapter


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
