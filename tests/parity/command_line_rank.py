"""One rank of ``paddleformers-cli train``: the command line's own function, and before it only what a CPU needs.

Environment: ``RUN_NAME`` is said at the end. The state is dumped in ``RUN_OUT``, in a folder of the step: right after
loading, and when a step of ``DUMP_AFTER`` is saved. Losses are added to the file ``RUN_LOSSES``, a line each, up to
the step ``RUN_KILLED``, after which the job waits to be killed.
``RUN_WITHOUT=moments`` loses the moments after loading: what a check of losses must see.
"""

import json
import logging
import os
import sys
import time
import types
from pathlib import Path

NODE = "{node}"
"""Stands for the rank in an argument, where every rank is a node of its own."""


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab" / "trainer"))
    # The order matters: the shim patches what the rest then uses.
    import paddle

    paddle.set_device("cpu")
    import cpu_gloo_shim  # noqa: F401

    dump_state()
    rank = os.environ.get("PADDLE_TRAINER_ID", "0")
    sys.argv = ["paddleformers-cli", "train", *(word.replace(NODE, rank) for word in sys.argv[1:])]
    from paddleformers.cli.train.tuner import run_tuner

    run_tuner()


def dump_state() -> None:
    """Have the job dump what its ranks hold, in whole tensors, tell its losses, and end when it has trained."""
    import paddle.distributed as dist
    from paddleformers.trainer import Trainer

    from paddle_reshard import names_callback

    said = logging.getLogger("paddle_reshard")
    said.setLevel(logging.INFO)
    said.addHandler(logging.StreamHandler())
    train = Trainer.train

    def train_and_dump(trainer, *arguments, **options):
        trainer.add_callback(_witness(trainer))
        by_names = trainer.args.load_checkpoint_format != "unified_checkpoint"
        if trainer.args.resume_from_checkpoint and by_names:
            names = names_callback(trainer)
            names.check()
            trainer.add_callback(names)
        train(trainer, *arguments, **options)
        # The command line now exports the model, which the library cannot under tp without a FlexCheckpoint.
        sys.stdout.write(f"CASE_OK {os.environ['RUN_NAME']}\n")
        sys.stdout.flush()
        if dist.get_world_size() > 1:
            dist.barrier()
            time.sleep(1 if dist.get_rank() == 0 else 0)  # the others leave before their meeting point goes
        os._exit(0)  # gloo sometimes aborts at exit after a clean run

    Trainer.train = train_and_dump


def _witness(trainer):
    import truth
    from paddleformers.trainer import TrainerCallback

    after = {int(step) for step in os.environ["DUMP_AFTER"].split()}

    class Witness(TrainerCallback):
        def on_train_begin(self, args, state, control, **_) -> None:
            if args.resume_from_checkpoint:
                self.dump(state.global_step)
            if os.environ.get("RUN_WITHOUT") == "moments":
                lose_moments(truth._chain(trainer.optimizer)[-1])

        def on_save(self, args, state, control, **_) -> None:
            # The trainer's average, whose callback comes after this one, counts the step by now.
            if state.global_step in after:
                self.dump(state.global_step)

        def on_log(self, args, state, control, logs=None, **_) -> None:
            if "loss" in (logs or {}):
                tell_loss(state.global_step, logs["loss"])

        def dump(self, step: int) -> None:
            lora = "lora" if type(trainer.model).__name__.startswith("LoRA") else ""
            place = types.SimpleNamespace(out=f"{os.environ['RUN_OUT']}/{step}", lora=lora, patch="")
            truth.gather(trainer, place, trainer.args)

    return Witness()


def lose_moments(optimizer) -> None:
    """What is left if a checkpoint's moments are not loaded."""
    import paddle

    # Until the first step, states that were loaded wait in the holder.
    waiting = optimizer._accumulators_holder.items()
    moments = [tensor for name, tensor in waiting if "_moment1_" in name or "_moment2_" in name]
    for kind in ("moment1", "moment2"):
        moments += optimizer._accumulators[kind].values()
    assert moments
    for moment in moments:
        paddle.assign(paddle.zeros_like(moment), moment)


def tell_loss(step: int, loss: float) -> None:
    """Add the loss of a step to what the first rank tells, in all its digits; after ``RUN_KILLED``, wait for that."""
    if "RUN_LOSSES" in os.environ and os.environ.get("PADDLE_TRAINER_ID", "0") == "0":
        with Path(os.environ["RUN_LOSSES"]).open("a") as told:
            told.write(json.dumps([step, loss]) + "\n")
        if os.environ["RUN_KILLED"] == str(step):
            time.sleep(600)


if __name__ == "__main__":
    main()
