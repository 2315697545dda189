"""Runs in the trainer's Python: the laboratory's script, which dumps the live state, with three gaps filled.

The script was written to look at a job that has trained. Right after loading, three things are in another
place: parameters that stage 3 cuts are slices until the model asks for them; with overlapped sharding
communication the buffers are still the pipeline's (the optimizer takes them over in its first step); and
states of parameters without a master weight wait in the optimizer's ``_accumulators_holder``. All are shown
to the script where it looks; nothing is computed or changed.
"""

import functools
import logging
import os
import runpy
import sys
import types
from pathlib import Path


def main() -> None:
    script = Path(sys.argv[1])
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.parent)

    # The order in which the script imports them: the shim patches what the rest then uses.
    import paddle

    answer_for_bfloat16(paddle, os.environ.get("CPU_HAS_BFLOAT16"))
    paddle.set_device("cpu")
    import cpu_gloo_shim  # noqa: F401
    import truth

    truth.gather = functools.partial(show_and_gather, truth, truth.gather)
    forget_correction_biases()
    check_names()
    runpy.run_path(str(script), run_name="__main__")


def answer_for_bfloat16(paddle, wanted: str | None) -> None:
    """Have Paddle take this CPU for one with ("yes") or without ("no") bfloat16, and say what it takes it for."""
    if wanted is not None:
        from paddle.base import core

        core.is_bfloat16_supported = paddle.amp.is_bfloat16_supported = lambda *_: wanted == "yes"
    print(f"CPU has bfloat16: {'yes' if paddle.amp.is_bfloat16_supported() else 'no'}", flush=True)


def forget_correction_biases() -> None:
    """Zero what the script sets to the same values in every job, and training leaves: it is equal only if loaded."""
    import paddle
    from paddleformers.trainer import Trainer

    train = Trainer.train

    def train_from_zero(trainer, *arguments, **options):
        for key, tensor in trainer.model.state_dict().items():
            if key.endswith(".e_score_correction_bias"):
                paddle.assign(paddle.zeros_like(tensor), tensor)
        return train(trainer, *arguments, **options)

    Trainer.train = train_from_zero


def check_names() -> None:
    """Have every rank compare its names with those of the checkpoint, where it stores states by them."""
    try:
        from paddle_reshard import names_callback
    except ImportError:  # a FlexCheckpoint: the row does not ask for it
        return
    from paddleformers.trainer import Trainer

    said = logging.getLogger("paddle_reshard")
    said.setLevel(logging.INFO)
    said.addHandler(logging.StreamHandler())
    train = Trainer.train

    def train_if_names_fit(trainer, resume_from_checkpoint=None, **options):
        # The script's own callback, which it has added before, ends the process.
        trainer.callback_handler.callbacks.insert(
            0, names_callback(trainer, checkpoint=resume_from_checkpoint)
        )
        return train(trainer, resume_from_checkpoint=resume_from_checkpoint, **options)

    Trainer.train = train_if_names_fit


def show_and_gather(truth, gather, trainer, asked, *arguments) -> None:
    if getattr(asked, "lora", ""):
        import state_patches

        # The adapters with their states, in the names of the model below them.
        of_base = types.SimpleNamespace(gather=functools.partial(_show_and_gather, truth, gather))
        state_patches.gather(of_base, trainer, asked, *arguments)
    else:
        _show_and_gather(truth, gather, trainer, asked, *arguments)


def _show_and_gather(truth, gather, trainer, *arguments) -> None:
    chain = truth._chain(trainer.optimizer)
    of_pipeline = getattr(trainer.model_wrapped, "_chunk_2_comm_buffers", None) or {}
    for optimizer in chain:
        if getattr(optimizer, "pp_overlap", False) and not optimizer._comm_buffer_list:
            optimizer._comm_buffer_list = [buffer for buffers in of_pipeline.values() for buffer in buffers]
    inner = chain[-1]
    if not inner._master_weights:
        for parameter in trainer.model.parameters():
            for accumulator in truth.KIND:
                waiting = inner._accumulators_holder.get(f"{parameter.name}_{accumulator}_0")
                if waiting is not None:
                    inner._accumulators[accumulator].setdefault(parameter.name, waiting)
    if hasattr(trainer.model_wrapped, "get_all_parameters"):
        trainer.model_wrapped.get_all_parameters(convert2cpu=True)
    gather(trainer, *arguments)


if __name__ == "__main__":
    main()
