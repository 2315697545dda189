"""A job of two ranks: tensor parallelism of fleet, FlexCheckpoint's sharded weights, and sharding stage 3."""

import sys
from pathlib import Path
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 as stage3
from paddle.distributed import fleet
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import (
    ShardedWeight,
    make_replicated_sharded_weight,
    make_tp_sharded_weight_for_checkpoint,
)

import paddle_reshard
from tests import oracle
from tests.bfloat16 import to_bfloat16

TP_AXIS = {
    "embed_tokens": 0,
    "o_proj": 0,
    "down_proj": 0,
    "gate_up_fused_proj": 1,
    "qkv_proj": 1,
    "lm_head": 1,
}
SEGMENT_ELEMENTS = 512


def bits(tensor):
    array = tensor if isinstance(tensor, np.ndarray) else tensor.numpy()
    return array.view(f"u{array.dtype.itemsize}")


def blank(array):
    """A tensor of the same shape and dtype, with other values."""
    return paddle.full(list(array.shape), 7, "bfloat16" if array.dtype == np.uint16 else str(array.dtype))


def check(live, expected):
    assert live.keys() == expected.keys()
    for key, tensor in live.items():
        assert np.array_equal(bits(tensor), bits(expected[key])), key


def plain_tensors(source, own, rank):
    """A rank of tensor parallelism is filled to what the trainer had saved of it, from files of another topology."""
    params = oracle.load_with_paddle(own / f"model_state.tp0{rank}.pdparams")
    names = {name: key for key, name in params.pop(oracle.NAME_TABLE).items()}
    states = oracle.load_with_paddle(own / f"optimizer.tp0{rank}.pdopt")
    masters, schedule = states.pop("master_weights"), states.pop("LR_Scheduler")
    model = {key: blank(array) for key, array in params.items()}
    optimizer = {key: blank(array) for key, array in states.items()}
    weights = {key: blank(array) for key, array in masters.items()}
    state_dict = {
        "model": model,
        "optimizer": {**optimizer, "master_weights": weights, "LR_Scheduler": dict.fromkeys(schedule)},
    }
    paddle_reshard.load_into(state_dict, source, parameter_to_structured_name=names)
    check(model, params)
    check(optimizer, states)
    check(weights, masters)
    assert state_dict["optimizer"]["LR_Scheduler"] == schedule
    return params


def sharded_weights(source, params):
    """What FlexCheckpoint makes of a model, among it views of larger tensors."""
    live, tensors = {}, {key: blank(array) for key, array in params.items()}
    for key, tensor in tensors.items():
        axis = next((axis for part, axis in TP_AXIS.items() if part in key), None)
        if axis is None:
            live[key] = make_replicated_sharded_weight(key, tensor)
        else:
            live[key] = make_tp_sharded_weight_for_checkpoint(key, tensor, axis)
    norm = next(key for key in params if key.endswith("input_layernorm.weight"))
    padded = paddle.full([params[norm].size], 7, "float32")  # holds the last five elements, then padding
    whole = live[norm]
    live[f"{norm}.moment1_0"] = ShardedWeight(
        f"{norm}.moment1_0",
        paddle.slice(padded, [0], [0], [5]),
        whole.local_shape,
        whole.global_shape,
        whole.global_offset,
        is_flattened=True,
        flattened_range=slice(params[norm].size - 5, params[norm].size),
    )
    paddle_reshard.load_into(live, source, strict=False)
    check(tensors, params)
    moment = oracle.read_truth(source.parent / "truth.safetensors")[f"{norm}.moment1_0"]
    assert np.array_equal(bits(padded)[:5], bits(moment)[-5:])
    assert (padded.numpy()[5:] == 7).all()


def model_of(truth, keys):
    """A model that has nothing but parameters, by these keys."""
    root = paddle.nn.Layer()
    for key in keys:
        *path, leaf = key.split(".")
        layer = root
        for name in path:
            if name not in dict(layer.named_children()):
                layer.add_sublayer(name, paddle.nn.Layer())
            layer = dict(layer.named_children())[name]
        parameter = layer.create_parameter(list(truth[key].shape), dtype="float32")
        layer.add_parameter(leaf, parameter)
    to_bfloat16(root)
    return root


def slices_of_stage3(source, rank):
    """Parameters that stage 3 has cut have no memory; their slices are filled, and they are never made whole."""
    truth = oracle.read_truth(source.parent / "truth.safetensors")
    keys = [key for key in truth if not key.endswith((oracle.MASTER, *oracle.MOMENTS, *oracle.POWERS))]
    model = model_of(truth, keys)
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters(), multi_precision=True)
    with mock.patch.object(stage3.core, "is_compiled_with_cuda", lambda: True):
        wrapped = stage3.GroupShardedStage3(
            model,
            optimizer,
            dist.new_group([0, 1]),
            device="cpu",
            segment_size=SEGMENT_ELEMENTS,
            pretrain_sync_models=False,
        )
    wrapped.init_optimizer_for_slice_param()
    block = paddle.base.framework.default_main_program().global_block()
    optimizer._create_accumulators(block, optimizer._parameter_list)
    parameters = wrapped.state_dict()

    paddle_reshard.load_into(paddle_reshard.stage3_state_dict(wrapped), source)

    cut = {key for key, parameter in parameters.items() if hasattr(parameter, "fw_storage")}
    assert cut == {key for key in keys if truth[key].size > SEGMENT_ELEMENTS}
    for key, parameter in parameters.items():
        assert parameter._is_initialized() == (key not in cut), key
        held = {"": getattr(parameter, "fw_storage", parameter)}
        master = optimizer._master_weights[("slice@" if key in cut else "") + parameter.name]
        held[f".{oracle.MASTER}"] = master
        for state in (*oracle.MOMENTS, *oracle.POWERS):
            held[f".{state}"] = optimizer._accumulators[state.removesuffix("_0")][master.name]
        for state, tensor in held.items():
            wanted = bits(truth[key + state])
            if key in cut and state.removeprefix(".") not in oracle.POWERS:
                length = tensor.shape[0]
                wanted = np.concatenate([wanted.ravel(), np.zeros(2 * length, wanted.dtype)])
                wanted = wanted[rank * length :][:length]
            assert np.array_equal(bits(tensor), wanted), key + state


def main(source, own, bfloat16_cpu):
    paddle.amp.is_bfloat16_supported = lambda *_: bfloat16_cpu
    paddle.set_device("cpu")
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 2, "pp_degree": 1}
    fleet.init(is_collective=True, strategy=strategy)
    rank = dist.get_rank()
    params = plain_tensors(source, own, rank)
    sharded_weights(source, params)
    slices_of_stage3(source, rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "bfloat16_cpu")
