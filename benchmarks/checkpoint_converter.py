"""PaddleNLP's CheckpointConverter on its own: a hybrid checkpoint into a single-card ``state_dict`` in memory.

Runs in an environment of its own, with Paddle 3.0 and PaddleNLP 3.0, and imports nothing of ours. The converter is
meant for a job on GPUs. To run it in one process on a CPU, ``.cuda()`` does nothing, and the function that gathers
objects over ranks returns its argument (upstream's single-process branch wraps it once too often). Nothing is written:
only the time of the load and the memory of the process are measured.

    PYTHON benchmarks/checkpoint_converter.py SRC        prints the seconds
"""

import json
import sys
import time
import types
from pathlib import Path

import paddle
from paddlenlp.trainer.utils.ckpt_converter import CheckpointConverter

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def global_shapes(source):
    """Structured key → shape of the whole tensor."""
    meta = json.loads((source / "model_meta.json").read_text())
    shapes = {}
    for cell in meta["sharding_metas"].values():
        for key, (local_shape, _, distributed, _) in cell["param_meta"].items():
            shapes[key] = list(local_shape)
            if distributed:
                shapes[key][1 if key.split(".")[-2] in COLUMNS else 0] *= meta["parallel_config"]["mp_degree"]
    return shapes


def main():
    source = Path(sys.argv[1])
    paddle.set_device("cpu")
    paddle.Tensor.cuda = lambda self, *args, **kwargs: self
    CheckpointConverter.gather_global_object = lambda self, value: value
    parameters = {}
    for key, shape in global_shapes(source).items():
        value = paddle.zeros(shape, "bfloat16")
        parameters[key] = paddle.base.framework.EagerParamBase.from_tensor(value, trainable=True)
        parameters[key].name = f"linear_{len(parameters)}.w_0"
    optimizer = paddle.optimizer.AdamW(
        learning_rate=1e-3, parameters=list(parameters.values()), multi_precision=True
    )
    block = paddle.base.framework.default_main_program().global_block()
    optimizer._create_accumulators(block, list(parameters.values()))
    states = optimizer.state_dict()
    states.pop("LR_Scheduler", None)
    start = time.perf_counter()
    CheckpointConverter(
        str(source),
        {"model": parameters, "optimizer": states},
        {parameter.name: key for key, parameter in parameters.items()},
        types.SimpleNamespace(ignore_load_lr_and_optim=False),
    ).load_from_hybrid_parallel_checkpoint()
    print(f"seconds {time.perf_counter() - start:.2f}")


if __name__ == "__main__":
    main()
