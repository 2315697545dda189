"""How are tensors called in a dist checkpoint?

PaddleFormers spreads a checkpoint over folders, each with data files and one ``.metadata`` file (:data:`PLACES`).
Auto-parallel training writes one folder of nested dicts, flattened with dots; the metadata tell the paths::

    dist_ckpt/        model.<key>
                      optimizer.<parameter name>[.dist][_fp32_master_0]_moment1_0 ...
                      optimizer.master_weights.<parameter name>[.dist]

Parameter names there are those of a program of one rank. ``.dist`` is what Paddle adds to the name of a parameter
when it becomes a dist tensor (``base/framework.py``, ``EagerParamBase.from_tensor``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from paddle_reshard.pipeline.core.tensors import (
    EMA_MASTER_WEIGHT,
    EMA_PARAM,
    MASTER_WEIGHT,
    PARAM,
    WRITTEN_NAMES,
)

LIBRARY: Final = "paddleformers"
"""Which writes FlexCheckpoints."""
MODEL_STATE: Final = "model_state"
MASTER_WEIGHTS: Final = "master_weight"
OPTIMIZER_STATE: Final = "optimizer_state"
EMA_STATE: Final = "ema_state"
FOLDERS: Final = (MODEL_STATE, MASTER_WEIGHTS, OPTIMIZER_STATE, EMA_STATE)
"""Folders of PaddleFormers (``paddleformers/utils/env.py:166-169``)."""
AUTO_FOLDER: Final = "dist_ckpt"
"""Folder of PaddleNLP's auto-parallel trainer (``trainer/auto_trainer.py``, ``DIST_CKPT_PATH``)."""
METADATA: Final = ".metadata"
DATA_FILES: Final = (".distcp", ".safetensors")
PLACES: Final = {
    PARAM: (MODEL_STATE, ""),
    MASTER_WEIGHT: (MASTER_WEIGHTS, ".w_0"),
    **{state: (OPTIMIZER_STATE, f".{state}_0") for state in WRITTEN_NAMES},
    EMA_MASTER_WEIGHT: (EMA_STATE, ".w_0"),
    EMA_PARAM: (EMA_STATE, ""),  # of parameters without a master weight
}
"""State → its folder of PaddleFormers, and what its keys there have behind that of the parameter."""

_STATES: Final = "|".join(sorted(WRITTEN_NAMES, key=len, reverse=True))
_AUTO_ACCUMULATOR: Final = rf"(?P<key>.+?)(?:\.dist)?(?:_fp32_master_\d+)?_(?P<state>{_STATES})_\d+"
_AUTO_MASTER: Final = r"(?P<key>.+?)(?:\.dist)?_fp32_master_\d+"
DATA_FILE: Final = re.compile(rf"(?P<rank>\d+)_\d+(?:{'|'.join(map(re.escape, DATA_FILES))})")
_LAYER: Final = re.compile(r"((?:.*\.)?layers\.)(\d+)\.")

_VERSION: Final = re.compile(rf"(?:\d+_)?(\d{{1,9}})(?:{'|'.join(map(re.escape, (METADATA, *DATA_FILES)))})")

Name = tuple[str, str]
"""``(key, state)`` of a tensor."""


def folder_of(path: str) -> str:
    """The folder of a file, empty for the checkpoint's own."""
    return path.rpartition("/")[0]


def is_paddleformers_folder(path: str) -> bool:
    """Whether a file lies in a folder of PaddleFormers; auto-parallel training has another, or none.

    >>> is_paddleformers_folder("model_state/0_0.distcp"), is_paddleformers_folder("dist_ckpt/0_0.distcp")
    (True, False)
    """
    return folder_of(path).rpartition("/")[2] in FOLDERS


def is_dist_file(path: str) -> bool:
    """Whether a file belongs to a dist checkpoint, by its folder and name.

    >>> is_dist_file("model_state/0_0.safetensors"), is_dist_file("model.safetensors"), is_dist_file("0_0.safetensors")
    (True, False, True)
    """
    if is_paddleformers_folder(path) or folder_of(path).rpartition("/")[2] == AUTO_FOLDER:
        return path.endswith((METADATA, *DATA_FILES))
    # Paddle makes such a file of a Hugging Face folder, for itself.
    made_by_itself = path.endswith(".auto_generated.metadata")
    of_rank = DATA_FILE.fullmatch(path) is not None
    return of_rank or (path.endswith((METADATA, DATA_FILES[0])) and not made_by_itself)


def paddleformers_name(folder: str, key: str) -> Name | None:
    """What a key in a folder of PaddleFormers is; ``None``: nothing known.

    >>> paddleformers_name("optimizer_state", "model.norm.weight.beta1_pow_acc_0")
    ('model.norm.weight', 'beta1_pow_acc')
    >>> paddleformers_name("ema_state", "model.norm.weight.w_0")
    ('model.norm.weight', 'ema_master_weight')
    """
    for state, (of_state, ending) in PLACES.items():
        if folder == of_state and key.endswith(ending) and key != ending:
            return key.removesuffix(ending), state
    return None


def is_state_dict(path: str, paths_in_dict: Iterable[tuple[str, ...]]) -> bool:
    """Whether a metadata file describes one state dict, saved as Paddle documents it: files directly in the folder.

    ``paddle.distributed.save_state_dict(model.state_dict(), path)``. Auto-parallel training saves nested dicts.

    >>> is_state_dict("0.metadata", [("model.norm.weight",)]), is_state_dict("0.metadata", [("model", "norm.weight")])
    (True, False)
    """
    return folder_of(path) == "" and all(len(nested) == 1 for nested in paths_in_dict)


def version_of(path: str) -> int | None:
    """The version of a file directly in the folder, Paddle's ``unique_id``; ``None`` for other files.

    >>> version_of("2.metadata"), version_of("0_2.distcp"), version_of("model_state/0_2.distcp")
    (2, 2, None)
    """
    match = _VERSION.fullmatch(path)
    return int(match[1]) if match else None


def layer_number(key: str) -> int | None:
    """The number of the decoder layer in a key, if any."""
    match = _LAYER.match(key)
    return None if match is None else int(match[2])


def renumbered(key: str, by: int) -> str:
    """A key with another number of its decoder layer.

    >>> renumbered("model.layers.3.norm.weight", 2), renumbered("model.norm.weight", 2)
    ('model.layers.5.norm.weight', 'model.norm.weight')
    """
    return _LAYER.sub(lambda match: f"{match[1]}{int(match[2]) + by}.", key) if by else key


def auto_parallel_name(path: tuple[str, ...]) -> Name | None:
    """What a path in the nested dict of auto-parallel training is; ``None``: nothing known.

    The key of a state is a parameter name.

    >>> auto_parallel_name(("optimizer", "linear_0.w_0.dist_moment1_0"))
    ('linear_0.w_0', 'moment1')
    >>> auto_parallel_name(("optimizer", "linear_0.w_0_fp32_master_0_moment1_0"))
    ('linear_0.w_0', 'moment1')
    >>> auto_parallel_name(("optimizer", "master_weights", "linear_0.w_0.dist"))
    ('linear_0.w_0', 'master_weight')
    """
    if len(path) == 2 and path[0] == "model":
        return path[1], PARAM
    if len(path) == 3 and path[:2] == ("optimizer", "master_weights"):
        return path[2].removesuffix(".dist"), MASTER_WEIGHT
    if len(path) == 2 and path[0] == "optimizer":
        accumulator = re.fullmatch(_AUTO_ACCUMULATOR, path[1])
        if accumulator:
            return accumulator["key"], accumulator["state"]
        master = re.fullmatch(_AUTO_MASTER, path[1])
        return (master["key"], MASTER_WEIGHT) if master else None
    return None


def auto_parallel_path(key: str, parameter_name: str, state: str, master: bool) -> tuple[str, ...]:
    """Path in the nested dict of auto-parallel training; ``master``: whether the parameter has a master weight.

    >>> auto_parallel_path("norm.weight", "layer_norm_0.w_0", "moment1", True)
    ('optimizer', 'layer_norm_0.w_0.dist_fp32_master_0_moment1_0')
    """
    if state == PARAM:
        return "model", key
    if state == MASTER_WEIGHT:
        return "optimizer", "master_weights", f"{parameter_name}.dist"
    return "optimizer", f"{parameter_name}.dist{'_fp32_master_0' if master else ''}_{state}_0"
