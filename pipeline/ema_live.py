"""What are the tensors of a training rank? Asked of Paddle's own objects, which decide it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paddle_reshard.pipeline.ema_flex import Box, RankBoxes
from paddle_reshard.pipeline.ema_resume import Piece, RankPieces
from paddle_reshard.pipeline.errors import UnsupportedError, UsageError
from paddle_reshard.pipeline.layouts.hybrid.names import SLICE_PREFIX

MASTER_WEIGHTS = "master_weights"
MASTER_SUFFIX = ".w_0"
SHARDING_V2 = "DygraphShardingOptimizerV2"
WHOLE = (
    "HybridParallelOptimizer",
    "DygraphShardingOptimizer",
    "GroupShardedOptimizerStage2",
    "MixPrecisionOptimizer",
)
"""Wrapped around an optimizer, they leave every tensor that a rank holds whole."""
_WRAPPED = ("_inner_opt", "_inner_optimizer", "_optim")


def rank_pieces(model: Any, optimizer: Any, *, tp: int = 1, tp_rank: int = 0) -> RankPieces:
    """Which pieces of the logical tensors this rank's master weights are.

    For no sharding, and sharding stages 1 (both versions) and 2. Under stage 3 say it yourself, by
    :class:`~paddle_reshard.pipeline.ema_resume.RankPieces`.

    Parameters
    ----------
    model
        Its ``state_dict`` has structured keys: not wrapped for pipeline or sharding.
    optimizer
        Of Paddle, in whatever it is wrapped, with its master weights.
    tp, tp_rank
        Degree of tensor parallelism, and this rank's place in it.

    Raises
    ------
    UnsupportedError
        If the parameters are cut in another way.
    UsageError
        If a master weight belongs to no parameter of the model.
    """
    parameters: dict[str, tuple[str, Any]] = {}
    for key, tensor in model.state_dict().items():
        parameters.setdefault(tensor.name, (key, tensor))
    slices = _slices(optimizer)
    pieces = {}
    for name in optimizer.state_dict().get(MASTER_WEIGHTS, {}):
        if name.startswith(SLICE_PREFIX):
            raise UnsupportedError(f"{name}: a slice of sharding stage 3; pass RankPieces of your own")
        if name not in parameters:
            raise UsageError(f"{name}: a master weight of no parameter in the model's state_dict")
        key, parameter = parameters[name]
        if getattr(parameter, "no_sync", False):
            raise UnsupportedError(
                f"{key}: belongs to one rank of an expert-parallel group; an average can go on there only from the "
                "file of the same rank of the same job"
            )
        shape = tuple(int(extent) for extent in parameter.shape)
        if slices is not None and name not in slices:
            raise UnsupportedError(
                f"{name}: lies in none of the communication buffers of sharding stage 1 v2"
            )
        pieces[name] = Piece(key, shape, None if slices is None else slices[name])
    return RankPieces(pieces, tp, tp_rank)


def rank_boxes(model: Any, optimizer: Any) -> RankBoxes:
    """Where this rank's master weights and float32 parameters lie, as Paddle's ``sharded_state_dict`` says.

    Parameters are those of :func:`rank_pieces`.

    Raises
    ------
    UnsupportedError
        If FlexCheckpoint stores a tensor in another shape than the model has.
    UsageError
        If a master weight belongs to no parameter of the model.
    """
    names = {key: tensor.name for key, tensor in model.state_dict().items()}
    of_model = model.sharded_state_dict()
    masters = {}
    for key, weight in optimizer.sharded_state_dict(of_model).items():
        if key.endswith(MASTER_SUFFIX):
            name = names.get(key.removesuffix(MASTER_SUFFIX))
            if name is None:
                raise UsageError(f"{key}: a master weight of no parameter in the model's state_dict")
            masters[name] = _box(key, weight)
    params = {
        key: _box(key, weight)
        for key, weight in of_model.items()
        if str(weight.local_tensor.dtype).endswith("float32")
    }
    return RankBoxes(masters, params)


def _box(key: str, weight: Any) -> Box:
    if getattr(weight, "grouped_gemm_param", False):
        raise UnsupportedError(f"{key}: experts of a grouped product are stored in another shape")
    flat = weight.flattened_range if weight.is_flattened else None
    return Box(
        key,
        global_shape=tuple(int(extent) for extent in weight.global_shape),
        global_offset=tuple(int(start) for start in weight.global_offset),
        local_shape=tuple(int(extent) for extent in weight.local_shape),
        flattened_range=None if flat is None else (int(flat.start), int(flat.stop)),
    )


def _slices(optimizer: Any) -> dict[str, tuple[int, int]] | None:
    """Name of a parameter → ``[start, stop)`` of its flattening that this rank holds; ``None``: all are whole."""
    for wrapper in _chain(optimizer):
        name = type(wrapper).__name__
        if name == SHARDING_V2:
            wrapper._collect_comm_buffers()  # where pipeline parallelism has made them
            return {
                parameter: (view._param_begin - view._index, view._param_end - view._index)
                for buffer in wrapper._comm_buffer_list
                for parameter, view in buffer._sharding_param_grad_view.items()
            }
        if name not in WHOLE and any(wrapper.__dict__.get(attribute) for attribute in _WRAPPED):
            raise UnsupportedError(
                f"{name}: how it cuts parameters is not known; pass RankPieces of your own"
            )
    return None


def _chain(optimizer: Any) -> Iterator[Any]:
    """An optimizer and what it is wrapped around."""
    while optimizer is not None:
        yield optimizer
        inside = optimizer.__dict__
        optimizer = next((inside[name] for name in _WRAPPED if inside.get(name) is not None), None)
