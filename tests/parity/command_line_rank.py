"""One rank of ``paddleformers-cli train``: the command line's own function, and before it only what a CPU needs.

Environment: ``RUN_NAME`` is said at the end; ``RUN_OUT`` is where the state is dumped, after step ``DUMP_AFTER``, or
right after loading if that is 0.
"""

import logging
import os
import sys
import time
import types
from pathlib import Path

NODE = "{node}"
"""Stands for the rank in an argument, where every rank is a node of its own."""


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab" / "models"))
    # The order matters: the shim patches what the rest then uses.
    import paddle

    paddle.set_device("cpu")
    import cpu_gloo_shim  # noqa: F401
    import new_models

    new_models._patch()
    dump_state(os.environ["RUN_OUT"], int(os.environ["DUMP_AFTER"]))
    rank = os.environ.get("PADDLE_TRAINER_ID", "0")
    sys.argv = ["paddleformers-cli", "train", *(word.replace(NODE, rank) for word in sys.argv[1:])]
    from paddleformers.cli.train.tuner import run_tuner

    run_tuner()


def dump_state(out: str, after: int) -> None:
    """Have the job dump what its ranks hold, in whole tensors, once, and end when it has trained."""
    import driver
    import paddle.distributed as dist
    import truth
    from paddleformers.trainer import Trainer, TrainerCallback

    from paddle_reshard import names_callback

    said = logging.getLogger("paddle_reshard")
    said.setLevel(logging.INFO)
    said.addHandler(logging.StreamHandler())
    train = Trainer.train

    def train_and_dump(trainer, *arguments, **options):
        class Dump(TrainerCallback):
            def on_train_begin(self, *_, **__) -> None:
                if not after:
                    self.dump()

            def on_step_end(self, args, state, control, **_) -> None:
                if state.global_step == after:
                    self.dump()

            def dump(self) -> None:
                lora = "lora" if type(trainer.model).__name__.startswith("LoRA") else ""
                place = types.SimpleNamespace(out=out, lora=lora, patch="")
                driver.show_and_gather(truth, truth.gather, trainer, place, trainer.args)

        trainer.add_callback(Dump())
        if trainer.args.resume_from_checkpoint:
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


main()
