"""Runs in PaddleNLP's Python: its CheckpointConverter loads a checkpoint into one card's states, and they are compared.

``checkpoint_converter.py CHECKPOINT TRUTH [OUT]`` ends with a line ``PEER …``, or ``PEER_FAIL`` and where it stopped;
the states then are in the file OUT.
"""

import os
import resource
import sys
import time
import traceback
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))

import numpy as np
import paddle
from reader import load
from trainer.truth import write_safetensors

paddle.set_device("cpu")
paddle.Tensor.cuda = lambda tensor, *_, **__: tensor  # its only call of a GPU
import paddlenlp
from paddlenlp.trainer.utils.ckpt_converter import CheckpointConverter

VERSION = f"paddlenlp {paddlenlp.__version__} / paddle {paddle.__version__}"
STATES = ("w_0", "moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0", "ema_w_0")


class Model:
    """Parameters of one card with the keys of the checkpoint."""

    def __init__(self, shapes):
        self.of_key = {}
        start = paddle.nn.initializer.Constant(0.5)
        for number, (key, shape) in enumerate(shapes.items(), 1):
            made = paddle.create_parameter(list(shape), "float32", default_initializer=start)
            parameter = paddle.base.framework.EagerParamBase.from_tensor(
                made.astype("bfloat16"), trainable=True
            )
            parameter.name = f"linear_{number}.w_0"  # as Paddle names them: none is the beginning of another
            self.of_key[key] = parameter

    def parameters(self):
        return list(self.of_key.values())

    def state_dict(self):
        return dict(self.of_key)


def gather_global_object(_, mine):
    """In one process the converter's own version makes a list in a list."""
    if isinstance(mine, list | dict):
        return mine
    raise ValueError


def main(checkpoint, truth_file, out=""):
    truth, case = load(truth_file), Path(checkpoint).parent.name
    model = Model({key: one.shape for key, one in truth.items() if key.rsplit(".", 1)[1] not in STATES})
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters(), multi_precision=True)
    block = paddle.base.framework.default_main_program().global_block()
    optimizer._create_accumulators(block, model.parameters())
    CheckpointConverter.gather_global_object = gather_global_object
    states = optimizer.state_dict()
    states.pop("LR_Scheduler", None)
    keys = {parameter.name: key for key, parameter in model.of_key.items()}
    began = time.time()
    try:
        CheckpointConverter(
            checkpoint,
            {"model": model.state_dict(), "optimizer": states},
            keys,
            types.SimpleNamespace(ignore_load_lr_and_optim=False),
        ).load_from_hybrid_parallel_checkpoint()
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        words, at = str(error)[:160].replace("\n", " "), f"{os.path.basename(place.filename)}:{place.lineno}"
        print("PEER_FAIL", VERSION, case, type(error).__name__, words, f"@{at}")
        return
    seconds, held = round(time.time() - began, 2), dict(model.of_key)
    for key, parameter in model.of_key.items():
        master = held[f"{key}.w_0"] = optimizer._master_weights[parameter.name]
        for state in STATES[1:5]:
            held[f"{key}.{state}"] = optimizer._accumulators[state[:-2]][master.name]
    if out:
        write_safetensors(held, out)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    bad = [
        key
        for key, tensor in held.items()
        if key not in truth or not np.array_equal(tensor.astype("float32").numpy(), truth[key])
    ]
    print("PEER", VERSION, case, "sec", seconds, "compared", len(held), "bad", len(bad), bad[:3], "MiB", peak)


main(*sys.argv[1:])
