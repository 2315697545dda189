"""One rank of a pre-training recipe: its own entry function, of a mixture of experts, with arguments on a command line.

The environment is that of ``tests/parity/command_line_rank.py``, and
``RUN_MODEL`` are the sizes of the model, in JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]


def main() -> None:
    sys.path[:0] = [str(TESTS / folder) for folder in ("lab/trainer", "parity")]
    # The order matters: the shim patches what the rest then uses.
    import paddle

    paddle.set_device("cpu")
    import cpu_gloo_shim  # noqa: F401
    import train
    from command_line_rank import dump_state, tell_loss
    from paddleformers.trainer import Trainer

    names, values = sys.argv[1::2], sys.argv[2::2]
    given = {name.removeprefix("--"): _value(value) for name, value in zip(names, values, strict=True)}
    out, steps = given.pop("output_dir"), given.pop("max_steps")
    model = json.loads(os.environ["RUN_MODEL"])
    asked = train.Asked(out, os.environ["RUN_NAME"], given, model, "ernie_pretrain", steps=steps)
    dump_state()
    own_train = Trainer.train

    def tell_and_train(trainer, *arguments, **options):
        told: set[int] = set()
        finish_step = trainer._maybe_log_save_evaluate

        def tell_and_finish(sum_of_losses, *of_step, **more):
            # The recipe's own lines need a GPU, whose memory they show. After the last step it is called once more.
            if trainer.state.global_step not in told:
                paddle.distributed.all_reduce(sum_of_losses)
                tell_loss(
                    trainer.state.global_step, sum_of_losses.item() / paddle.distributed.get_world_size()
                )
                sum_of_losses.zero_()
                told.add(trainer.state.global_step)
            return finish_step(sum_of_losses, *of_step, **more)

        trainer._maybe_log_save_evaluate = tell_and_finish
        return own_train(trainer, *arguments, **options)

    Trainer.train = tell_and_train
    train.run(asked)


def _value(word: str) -> Any:
    """An argument of the trainer as the type that the trainer's own parser makes of it."""
    try:
        return json.loads(word)
    except ValueError:
        return word


if __name__ == "__main__":
    main()
