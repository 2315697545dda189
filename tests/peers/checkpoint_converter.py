"""Runs in PaddleNLP's Python: its CheckpointConverter loads a hybrid checkpoint into the states of one card.

``checkpoint_converter.py CHECKPOINT TRUTH OUT`` puts the states into the file OUT and ends with a line of JSON;
TRUTH is a file with tensors of the same shapes. With CHECKPOINT alone, whose ``model_meta.json`` tells the shapes, it
says the seconds and nothing else (``benchmarks/disk.py``).

The converter is meant for a job on GPUs. In one process on a CPU ``.cuda()`` does nothing, and the function that
gathers objects over ranks returns its argument, which upstream's branch for one process wraps once too often.
"""

import json
import resource
import sys
import time
import traceback
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))

import paddle
from paddlenlp.trainer.utils.ckpt_converter import CheckpointConverter
from reader import load
from trainer.truth import write_safetensors

STATES = ("w_0", "moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0", "ema_w_0")
COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def main(checkpoint, truth="", out=""):
    """Load, and tell how long it took, or where it stopped."""
    paddle.set_device("cpu")
    paddle.Tensor.cuda = lambda tensor, *_, **__: tensor
    CheckpointConverter.gather_global_object = lambda _, mine: mine
    model = {key: parameter_of(n, shape) for n, (key, shape) in enumerate(shapes_of(checkpoint, truth), 1)}
    parameters = list(model.values())
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=parameters, multi_precision=True)
    block = paddle.base.framework.default_main_program().global_block()
    optimizer._create_accumulators(block, parameters)
    states = optimizer.state_dict()
    states.pop("LR_Scheduler", None)
    began = time.monotonic()
    try:
        CheckpointConverter(
            checkpoint,
            {"model": model, "optimizer": states},
            {parameter.name: key for key, parameter in model.items()},
            types.SimpleNamespace(ignore_load_lr_and_optim=False),
        ).load_from_hybrid_parallel_checkpoint()
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        words = f"{type(error).__name__} {error}"[:180].replace("\n", " ")
        print(json.dumps({"refused": f"{words} @{Path(place.filename).name}:{place.lineno}"}))
        return
    seconds = round(time.monotonic() - began, 2)
    if not out:
        print(f"seconds {seconds}")
        return
    held = dict(model)
    for key, parameter in model.items():
        master = held[f"{key}.w_0"] = optimizer._master_weights[parameter.name]
        for state in STATES[1:5]:
            held[f"{key}.{state}"] = optimizer._accumulators[state[:-2]][master.name]
    write_safetensors(held, out)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(json.dumps({"seconds": seconds, "peak_mib": peak}))


def parameter_of(number, shape):
    value = paddle.full(shape, 0.5, "bfloat16")
    parameter = paddle.base.framework.EagerParamBase.from_tensor(value, trainable=True)
    parameter.name = f"linear_{number}.w_0"  # as Paddle names them: none is the beginning of another
    return parameter


def shapes_of(checkpoint, truth):
    if truth:
        whole = ((key, one.shape) for key, one in load(truth).items())
        return [(key, list(shape)) for key, shape in whole if key.rsplit(".", 1)[1] not in STATES]
    meta, shapes = json.loads(Path(checkpoint, "model_meta.json").read_text()), {}
    for cell in meta["sharding_metas"].values():
        for key, (shape, _, distributed, _) in cell["param_meta"].items():
            shapes[key] = list(shape)
            if distributed:
                shapes[key][key.split(".")[-2] in COLUMNS] *= meta["parallel_config"]["mp_degree"]
    return list(shapes.items())


main(*sys.argv[1:])
