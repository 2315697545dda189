"""Runs in the trainer's Python: the laboratory's script, which dumps the live state, with three gaps filled.

The script was written to look at a job that has trained. Right after loading, three things are in another
place: parameters that stage 3 cuts are slices until the model asks for them; with overlapped sharding
communication the buffers are still the pipeline's (the optimizer takes them over in its first step); and
states of parameters without a master weight wait in the optimizer's ``_accumulators_holder``. All are shown
to the script where it looks; nothing is computed or changed.
"""

import functools
import json
import logging
import os
import runpy
import sys
import time
import types
from pathlib import Path

RECIPES = "recipes"
"""The folder of the scripts that run a pre-training recipe's own entry function."""


def main() -> None:
    script = Path(sys.argv[1])
    node = int(os.environ.get("PADDLE_TRAINER_ID", "0")) // int(os.environ.get("RANKS_OF_A_NODE", "1"))
    sys.argv = [argument.replace("{node}", str(node)) for argument in sys.argv[1:]]
    sys.path[0] = str(script.parent)
    if script.parent.name == RECIPES:
        sys.path.insert(1, str(script.parent.with_name("models")))  # whose shim they share

    # The order in which the script imports them: the shim patches what the rest then uses.
    import paddle

    answer_for_bfloat16(paddle, os.environ.get("CPU_HAS_BFLOAT16"))
    paddle.set_device("cpu")
    import cpu_gloo_shim  # noqa: F401

    if script.parent.name == RECIPES:
        resume_recipe()
        runpy.run_path(str(script), run_name="__main__")
        return
    import truth

    truth.gather = functools.partial(show_and_gather, truth, truth.gather)
    join_sinks(truth)
    forget_correction_biases()
    copy_to_host()
    check_names()
    if os.environ.get("TRAIN_ON"):
        train_on(truth, sys.argv)
    runpy.run_path(str(script), run_name="__main__")


def resume_recipe() -> None:
    """Let a recipe's own entry function resume, from zeros instead of its script's start values, and stop there."""
    import paddle
    import truth_recipe
    from paddleformers.trainer import Trainer, TrainerCallback

    place = sys.argv.index("--resume")
    asked, sys.argv[place : place + 2] = sys.argv[place + 1], []
    values = sys.argv.index("--args") + 1
    sys.argv[values] = json.dumps({**json.loads(sys.argv[values]), "resume_from_checkpoint": asked})
    name, out = (sys.argv[sys.argv.index(option) + 1] for option in ("--case", "--out"))

    start = truth_recipe.start_values

    def start_from_zero(model, *given) -> None:
        start(model, *given)
        for tensor in model.state_dict().values():
            paddle.assign(paddle.zeros_like(tensor), tensor)

    class AfterLoading(TrainerCallback):
        def on_train_begin(self, *_, **__) -> None:
            (trainer,) = trainers
            place = types.SimpleNamespace(out=out)
            _show_and_gather(truth_recipe, truth_recipe.gather, trainer, place, trainer.args)
            print(f"CASE_OK {name}", flush=True)
            if paddle.distributed.get_world_size() > 1:
                paddle.distributed.barrier()
                time.sleep(1 if paddle.distributed.get_rank() == 0 else 0)
            os._exit(0)

    trainers = []
    train = Trainer.train

    def train_until_loaded(trainer, *arguments, **options):
        trainers.append(trainer)
        trainer.add_callback(AfterLoading())
        return train(trainer, *arguments, **options)

    Trainer.train = train_until_loaded
    truth_recipe.start_values = start_from_zero
    check_names()


def answer_for_bfloat16(paddle, wanted: str | None) -> None:
    """Have Paddle take this CPU for one with ("yes") or without ("no") bfloat16, and say what it takes it for."""
    if wanted is not None:
        from paddle.base import core

        core.is_bfloat16_supported = paddle.amp.is_bfloat16_supported = lambda *_: wanted == "yes"
    print(f"CPU has bfloat16: {'yes' if paddle.amp.is_bfloat16_supported() else 'no'}", flush=True)


def copy_to_host() -> None:
    """Have a loaded average survive: the trainer copies it to the host and clears the card's; here both are one."""
    import paddle
    from paddleformers.trainer.utils.zero_cost_checkpoint import EMABufferFcBased

    convert, to_host = EMABufferFcBased._fc_to_buffer_format, paddle.Tensor.cpu

    def convert_copies(buffer, loaded):
        paddle.Tensor.cpu = lambda tensor: tensor.clone()
        try:
            convert(buffer, loaded)
        finally:
            paddle.Tensor.cpu = to_host

    EMABufferFcBased._fc_to_buffer_format = convert_copies


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


def join_sinks(truth) -> None:
    """Have the script join the attention sinks of gpt_oss, which tp cuts and the library does not mark as cut."""
    if not hasattr(truth, "tp_axis"):  # that of Llama alone
        return
    axis, is_cut = truth.tp_axis, truth.is_tp

    def is_sink(key: str) -> bool:
        return key.endswith(".self_attn.sinks")

    truth.tp_axis = lambda key, parameter: 0 if is_sink(key) else axis(key, parameter)
    truth.is_tp = lambda key, parameter, arguments: (
        (is_sink(key) and truth.tpdeg(arguments) > 1) or is_cut(key, parameter, arguments)
    )


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


def train_on(truth, arguments: list[str]) -> None:
    """Have the script, which ends after loading, dump the state there and then train another step and save."""
    from paddleformers.trainer import Trainer, TrainerCallback

    place = arguments.index("--resume")
    checkpoint = arguments[place + 1]
    out = arguments[arguments.index("--out") + 1]
    arguments[place : place + 2] = ["--steps", "4", "--truth", "0"]
    train = Trainer.train

    def train_from_checkpoint(trainer, **options):
        class Dump(TrainerCallback):
            def on_train_begin(self, *_, **__):
                truth.gather(trainer, types.SimpleNamespace(out=out), trainer.args)

        trainer.add_callback(Dump())
        return train(trainer, **{**options, "resume_from_checkpoint": checkpoint})

    Trainer.train = train_from_checkpoint


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
