"""A drop-in replacement for PaddleNLP's checkpoint converter.

PaddleNLP's ``paddlenlp/trainer/utils/ckpt_converter.py`` (3.0) loads a hybrid-parallel checkpoint into the
``state_dict`` of an auto-parallel job. A job only needs to change the import.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from paddle_reshard.pipeline.core.errors import UnsupportedError
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.training.load import LoadReport, load_into


class CheckpointConverter:
    """Loads a checkpoint into a ``state_dict`` in place; see :func:`~paddle_reshard.load_into`.

    Unlike upstream's converter, every process works alone and never holds a whole checkpoint, fused projections are cut
    as tensor parallelism cuts them, and an entry that the checkpoint lacks is an error.

    Parameters
    ----------
    hybrid_parallel_ckpt_path
        The checkpoint.
    state_dict
        ``{"model": …, "optimizer": …}``.
    parameter_to_structured_name
        Parameter name → structured name.
    trainging_args
        If its ``ignore_load_lr_and_optim`` is true, ``"optimizer"`` is removed from ``state_dict``.
    patch_dict
        Structured name in this job → structured name in the checkpoint, if they differ.
    local_view_pattern
        ``False`` if experts have global numbers even with ``trainging_args.moe_group``. Local numbers are not
        supported.
    """

    def __init__(
        self,
        hybrid_parallel_ckpt_path: PathLike,
        state_dict: MutableMapping[str, Any],
        parameter_to_structured_name: Mapping[str, str],
        trainging_args: Any = None,
        patch_dict: Mapping[str, str] | None = None,
        local_view_pattern: Sequence[str] | bool | None = None,
    ) -> None:
        if getattr(trainging_args, "moe_group", None) and local_view_pattern is not False:
            raise UnsupportedError(
                "experts with local numbers (local view) are not supported; pass local_view_pattern=False "
                "if their names contain global numbers"
            )
        if getattr(trainging_args, "ignore_load_lr_and_optim", False):
            state_dict.pop("optimizer", None)
        patches = patch_dict or {}
        self.path = hybrid_parallel_ckpt_path
        self.state_dict = _renamed(state_dict, patches)
        self.parameter_to_structured_name = {
            name: patches.get(key, key) for name, key in parameter_to_structured_name.items()
        }

    def load_from_hybrid_parallel_checkpoint(self) -> LoadReport:
        """Fill every tensor of the ``state_dict``."""
        return load_into(
            self.state_dict, self.path, parameter_to_structured_name=self.parameter_to_structured_name
        )


def _renamed(state_dict: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The same tensors under the checkpoint's names. The state of a schedule stays the same object."""
    return {
        names.get(key, key): _renamed(value, names) if key in ("model", "optimizer") else value
        for key, value in state_dict.items()
    }
