"""A job of auto-parallel training on a mesh of 2 × 2 processes, filled from checkpoints of other jobs.

What each process must hold afterwards, Paddle says itself: the shard that it makes of the whole tensor of the truth.
"""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.auto_parallel.api import dtensor_from_local

import paddle_reshard
from tests import oracle

R, S = dist.Replicate(), dist.Shard
REPLICATED = {1: ([R, S(0)], [R, R]), 2: ([R, S(1)], [R, S(0)], [R, R])}
"""Over the first axis, along which the optimizer is sharded then."""
ANYHOW = {
    1: ([R, S(0)], [R, R], [S(0), S(0)]),
    2: ([R, S(1)], [S(0), S(1)], [S(1), S(0)], [S(0), S(0)], [S(1), R], [R, R]),
}
DTYPES = {"uint16": "bfloat16", "float32": "float32"}
STATES = (oracle.MASTER, *oracle.MOMENTS, *oracle.POWERS)


def shard_of_truth(array, mesh, placements):
    """The bits that this process shall hold; Paddle cuts no bfloat16, so integers are cut."""
    bits = array.astype(np.int32) if array.dtype == np.uint16 else array.view(np.int32)
    # Where two axes cut one dim, a tensor gives placements back that Paddle does not take again.
    again = [p if p.is_replicated() else S(int(str(p).split("dim=")[1][0])) for p in placements]
    whole = dist.shard_tensor(paddle.to_tensor(bits), mesh, again)
    return (
        whole._local_value().numpy().astype(f"u{array.dtype.itemsize}") if whole._is_initialized() else None
    )


def blank(shape, dtype, mesh, placements):
    """A DistTensor with other values."""
    cut = dist.shard_tensor(paddle.zeros(shape, dtype="int32"), mesh, placements)
    if not cut._is_initialized():
        return cut
    return dtensor_from_local(paddle.full(cut._local_value().shape, 7, dtype), mesh, placements)


def bits_of(tensor):
    local = tensor._local_value().numpy()
    return local.view(f"u{local.dtype.itemsize}")


def live_job(truth, mesh, sharded):
    """Parameters under placements of all kinds, and what Paddle's optimizer makes of them."""
    kinds = {dims: itertools.cycle(of_dims) for dims, of_dims in (REPLICATED if sharded else ANYHOW).items()}
    keys = [key for key in truth if not key.endswith((*STATES, "ema_w_0"))]
    model = {}
    for key in keys:
        array = truth[key]
        tensor = blank(list(array.shape), DTYPES[str(array.dtype)], mesh, next(kinds[array.ndim]))
        model[key] = paddle.base.framework.EagerParamBase.from_tensor(tensor, trainable=True)
    parameters = list(model.values())
    optimizer = paddle.optimizer.AdamW(parameters=parameters, multi_precision=True)
    optimizer = dist.shard_optimizer(optimizer, dist.ShardingStage1("dp", mesh) if sharded else None)
    block = paddle.base.framework.default_main_program().global_block()
    optimizer._create_accumulators(block, parameters)
    states = optimizer.state_dict()
    states.pop("LR_Scheduler", None)
    return model, states


def expected_of(truth, model, states):
    """Live tensor → key in the truth, for all of them."""
    found = {key: (tensor, key) for key, tensor in model.items()}
    masters = states.get("master_weights", {})
    for key, parameter in model.items():
        if parameter.name in masters:
            found[f"{key}.w_0"] = (masters[parameter.name], f"{key}.w_0")
        for state in (*oracle.MOMENTS, *oracle.POWERS):
            named = [
                name for name in states if name in (f"{parameter.name}_{state}", _of_master(parameter, state))
            ]
            assert len(named) == 1, (key, state, list(states)[:4])
            found[f"{key}.{state}"] = (states[named[0]], f"{key}.{state}")
    assert len(found) == len(model) + len(masters) + len(states) - bool(masters)
    return found


def _of_master(parameter, state):
    return f"{parameter.name}_fp32_master_0_{state}"


def check(truth, live):
    for name, (tensor, key) in live.items():
        wanted = shard_of_truth(truth[key], tensor.process_mesh, tensor.placements)
        assert (wanted is None) == (not tensor._is_initialized()), name
        if wanted is not None:
            assert np.array_equal(bits_of(tensor), wanted), (name, tensor.placements)


def main(paths):
    paddle.set_device("cpu")
    dist.init_parallel_env()
    mesh = dist.ProcessMesh([[0, 1], [2, 3]], dim_names=["dp", "mp"])
    for number, path in enumerate(paths):
        truth = oracle.read_truth(path.parent / "truth.safetensors")
        model, states = live_job(truth, mesh, sharded=number % 2 == 0)
        live = expected_of(truth, model, states)
        report = paddle_reshard.load_into({"model": model, "optimizer": states}, path)
        check(truth, live)
        held = sum(bits_of(tensor).nbytes for tensor, _ in live.values())
        assert report.filled_bytes == held

    # As the trainer calls upstream's converter; a pipeline stage has no place for the other stage's tensors.
    stages = [dist.ProcessMesh(ranks, dim_names=["mp"]) for ranks in ([0, 1], [2, 3])]
    model = {}
    for number, (key, array) in enumerate(truth.items()):
        if not key.endswith((*STATES, "ema_w_0")):
            placements = [S(array.ndim - 1)]
            model[key] = blank(list(array.shape), DTYPES[str(array.dtype)], stages[number % 2], placements)
    arguments = SimpleNamespace(ignore_load_lr_and_optim=True)
    converter = paddle_reshard.CheckpointConverter(path, {"model": model, "optimizer": {}}, {}, arguments)
    report = converter.load_from_hybrid_parallel_checkpoint()
    check(truth, {key: (tensor, key) for key, tensor in model.items()})
    assert report.tensors == sum(tensor._is_initialized() for tensor in model.values()) < len(model)


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
