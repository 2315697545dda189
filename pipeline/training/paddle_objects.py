"""Determine the tensors of a training rank from Paddle's own objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from paddle_reshard.pipeline.core.errors import UnsupportedError, UsageError
from paddle_reshard.pipeline.formats.flex.boxes import Box
from paddle_reshard.pipeline.model.optimizer_keys import MASTER_WEIGHTS, SLICE_PREFIX
from paddle_reshard.pipeline.training.flex import RankBoxes
from paddle_reshard.pipeline.training.resume import Piece, RankPieces

MASTER_SUFFIX = ".w_0"
SHARDING_V2 = "DygraphShardingOptimizerV2"
NOT_CUTTING = (
    "HybridParallelOptimizer",
    "MoEHybridParallelOptimizer",
    "DygraphShardingOptimizer",
    "GroupShardedOptimizerStage2",
    "MixPrecisionOptimizer",
)
"""Wrappers of an optimizer that do not cut the tensors of a rank."""
_WRAPPED = ("_inner_opt", "_inner_optimizer", "_optim")


def rank_pieces(model: Any, optimizer: Any, *, tp: int = 1, tp_rank: int = 0) -> RankPieces:
    """The pieces of logical tensors that this rank's master weights are.

    Supports unsharded training, all stages of sharding, and distributed experts.

    Parameters
    ----------
    model
        The model, not wrapped for pipeline parallelism or sharding: its ``state_dict`` has structured keys.
    optimizer
        Paddle's optimizer with master weights, wrapped or not.
    tp, tp_rank
        Degree of tensor parallelism, and this rank in it.

    Raises
    ------
    UnsupportedError
        If parameters are cut in an unknown way, or the number of an expert cannot be determined.
    UsageError
        If a master weight belongs to no parameter of the model, or is a slice whose position the optimizer lacks.
    """
    parameters: dict[str, tuple[str, Any]] = {}
    for key, tensor in model.state_dict().items():
        parameters.setdefault(tensor.name, (key, tensor))
    slices, stage3, experts = _slices(optimizer), stage3_of(optimizer), _distributed_experts(model)
    pieces = {}
    for master in optimizer.state_dict().get(MASTER_WEIGHTS, {}):
        name = master.removeprefix(SLICE_PREFIX)
        if name not in parameters:
            raise _of_no_parameter(master)
        key, parameter = parameters[name]
        expert = bool(getattr(parameter, "no_sync", False))
        if expert and experts.get(name) != _expert_of(key):
            raise UnsupportedError(
                f"{key}: belongs to one rank of an expert-parallel group, but no list of all experts in "
                f"the model gives its expert number; pass your own RankPieces"
            )
        if name != master:
            flat = _slice_of_stage3(stage3, name)
        elif slices is None:
            flat = None
        elif name in slices:
            flat = slices[name]
        else:
            raise UnsupportedError(f"{name}: in none of the communication buffers of sharding stage 1 v2")
        pieces[master] = Piece(key, tuple(int(extent) for extent in parameter.shape), flat, whole=expert)
    return RankPieces(pieces, tp, tp_rank)


def _of_no_parameter(master: str) -> UsageError:
    return UsageError(f"{master}: this master weight belongs to no parameter in the model's state_dict")


def rank_boxes(model: Any, optimizer: Any) -> RankBoxes:
    """The boxes of this rank's master weights and float32 parameters, from Paddle's ``sharded_state_dict``.

    Takes the parameters of :func:`rank_pieces`.

    Raises
    ------
    UnsupportedError
        If FlexCheckpoint stores a tensor in a shape other than the model's.
    UsageError
        If a master weight belongs to no parameter of the model.
    """
    of_model = model.sharded_state_dict()
    stage3 = stage3_of(optimizer)
    if stage3 is None:
        masters = _boxes_from_optimizer(model, optimizer, of_model)
    else:
        masters = _boxes_of_stage3(stage3, optimizer, of_model)
    params = {
        key: _box(key, weight)
        for key, weight in of_model.items()
        if str(weight.local_tensor.dtype).endswith("float32")
    }
    return RankBoxes(masters, params)


def _boxes_from_optimizer(model: Any, optimizer: Any, of_model: Mapping[str, Any]) -> dict[str, Box]:
    """Boxes of the master weights, from the optimizer's ``sharded_state_dict``."""
    names = {key: tensor.name for key, tensor in model.state_dict().items()}
    masters = {}
    for key, weight in optimizer.sharded_state_dict(of_model).items():
        if key.endswith(MASTER_SUFFIX):
            name = names.get(key.removesuffix(MASTER_SUFFIX))
            if name is None:
                raise _of_no_parameter(key)
            masters[name] = _box(key, weight)
    return masters


def _boxes_of_stage3(stage3: Any, optimizer: Any, of_model: Mapping[str, Any]) -> dict[str, Box]:
    """The same under sharding stage 3, whose ``sharded_state_dict`` would gather all parameters.

    Tied parameters have the alphabetically first key, as in Paddle 3.3 (``group_sharded_stage3.py:990``).
    """
    keys: dict[str, str] = {}
    for key in sorted(of_model):
        keys.setdefault(of_model[key].local_tensor.name, key)
    masters = {}
    for master in optimizer.state_dict().get(MASTER_WEIGHTS, {}):
        name = master.removeprefix(SLICE_PREFIX)
        if name not in keys:
            raise _of_no_parameter(master)
        box = _box(f"{keys[name]}{MASTER_SUFFIX}", of_model[keys[name]])
        if name != master:
            start, stop = (min(end, prod(box.local_shape)) for end in _slice_of_stage3(stage3, name))
            box = replace(box, flattened_range=(start, stop))
        masters[master] = box
    return masters


def _box(key: str, weight: Any) -> Box:
    if getattr(weight, "grouped_gemm_param", False):
        raise UnsupportedError(
            f"{key}: experts of a grouped matrix product are stored in a different shape, which is not supported"
        )
    flat = weight.flattened_range if weight.is_flattened else None
    return Box(
        key,
        global_shape=tuple(int(extent) for extent in weight.global_shape),
        global_offset=tuple(int(start) for start in weight.global_offset),
        local_shape=tuple(int(extent) for extent in weight.local_shape),
        flattened_range=None if flat is None else (int(flat.start), int(flat.stop)),
    )


def _slices(optimizer: Any) -> dict[str, tuple[int, int]] | None:
    """Parameter name → ``[start, stop)`` of its flattening that this rank holds; ``None`` if all are whole.

    Slices of stage 3 are not included; their names mark them as slices.
    """
    while optimizer is not None:
        name, inner = type(optimizer).__name__, _inner(optimizer)
        if name == SHARDING_V2:
            optimizer._collect_comm_buffers()  # includes those that pipeline parallelism created
            return {
                parameter: (view._param_begin - view._index, view._param_end - view._index)
                for buffer in optimizer._comm_buffer_list
                for parameter, view in buffer._sharding_param_grad_view.items()
            }
        if inner is not None and name not in NOT_CUTTING:
            raise UnsupportedError(
                f"{name}: this optimizer is not supported, because it may cut parameters in an unknown way; pass "
                f"your own RankPieces"
            )
        optimizer = inner
    return None


def _inner(optimizer: Any) -> Any:
    """The optimizer inside a wrapper; ``None`` if it is not wrapped.

    Under sharding stage 3 an optimizer is its own ``_optim``.
    """
    attributes = (optimizer.__dict__.get(name) for name in _WRAPPED)
    return next((inner for inner in attributes if inner is not None and inner is not optimizer), None)


def stage3_of(optimizer: Any) -> Any:
    """The ``GroupShardedStage3`` that cuts an optimizer's parameters; ``None`` without sharding stage 3.

    It sets a method of its own as an attribute of the optimizer (Paddle 3.3 ``group_sharded_stage3.py:1415``).
    """
    while optimizer is not None:
        update = optimizer.__dict__.get("update_slice")
        if update is not None:
            return update.__self__
        optimizer = _inner(optimizer)
    return None


def _slice_of_stage3(stage3: Any, name: str) -> tuple[int, int]:
    """``[start, stop)`` of a flattened parameter that this rank holds, padding included."""
    if stage3 is None or name not in stage3._param2buffer:
        raise UsageError(
            f"{SLICE_PREFIX}{name}: a slice of sharding stage 3, whose position this optimizer does "
            f"not know; pass the optimizer that group_sharded_parallel returned"
        )
    start, stop = stage3._param2buffer[name][stage3._rank]
    return int(start), int(stop)


def _distributed_experts(model: Any) -> dict[str, int]:
    """Parameter name → number of its expert among the experts of all ranks.

    A rank's list of experts has an item for every expert, which is ``None`` for those of other ranks (PaddleFormers 1.2
    ``modular_moe_layer.py:141``, PaddleNLP 3.0 ``moe_layer.py:184``).
    """
    numbers: dict[str, int] = {}
    for layer in model.sublayers():
        items = layer._sub_layers
        if None in items.values():
            for number, expert in items.items():
                if expert is not None and number.isdigit():
                    numbers |= {parameter.name: int(number) for parameter in expert.parameters()}
    return numbers


def _expert_of(key: str) -> int:
    """The last number in a key, or -1, which is not a list index."""
    numbers = [int(part) for part in key.split(".") if part.isdigit()]
    return numbers[-1] if numbers else -1
