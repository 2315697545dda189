"""Runs in the trainer's Python: where the trainer would load a FlexCheckpoint, ``load_into`` fills what it holds.

The model and the optimizer are the trainer's, and it is the trainer that makes the optimizer's states and says, by
``sharded_state_dict``, which piece each of them is. Under stage 3 it would make every parameter whole to load it; that
is taken from it.
"""

import sys

import driver
from paddle.distributed.fleet.meta_parallel.sharding.group_sharded_stage3 import GroupShardedStage3
from paddleformers.trainer import Trainer
from paddleformers.trainer.trainer_utils import init_optimizer

HEAVY = ("pyarrow", "ray", "fsspec")


class AnyState:
    """Of what the checkpoint holds states: of everything."""

    def __contains__(self, _: str) -> bool:
        return True


def load(trainer, path: str) -> None:
    for name in HEAVY:
        sys.modules.pop(name, None)  # what the trainer's libraries have imported
    import paddle_reshard

    model = trainer.model.sharded_state_dict()
    init_optimizer(trainer.optimizer, model, AnyState())
    if hasattr(trainer.model_wrapped, "_param2buffer"):
        state_dict = paddle_reshard.stage3_state_dict(trainer.model_wrapped)
    else:
        state_dict = {"model": model, "optimizer": trainer.optimizer.sharded_state_dict(model)}
    report = paddle_reshard.load_into(state_dict, path)
    foreign = [name for name in HEAVY if name in sys.modules]
    print(f"LIVE filled {report.tensors} tensors, imported {foreign}", flush=True)  # noqa: T201
    trainer._load_scheduler(path)


if __name__ == "__main__":
    Trainer._load_flex_checkpoint = load
    GroupShardedStage3.init_slice_param = lambda self: None
    GroupShardedStage3.align_param_to_buffer_and_clear_slice_param = lambda self: None
    driver.main()
