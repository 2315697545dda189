"""Runs in the trainer's Python: the laboratory's script, which goes on from a checkpoint and tells what it saw.

``TABLE_RESUME``: the checkpoint from which the trainer goes on. ``TABLE_TRUTH``: tensors with which everything
that the trainer then holds is overwritten before its first step. ``TABLE_TOLD``: a file for the losses.
Right after loading (and overwriting), the live state is gathered into the folder ``TABLE_LOADED``; after the
last step the script gathers it as it always does.
"""

import json
import os
import types
from pathlib import Path

import numpy as np
import paddle
import paddleformers
import train
import truth
from paddle import distributed
from paddleformers.trainer import Trainer, TrainerCallback
from reader import load


def main() -> None:
    start = Trainer.train

    def go_on(trainer, *_, **__):
        trainer.add_callback(_witness(trainer))
        return start(trainer, resume_from_checkpoint=os.environ.get("TABLE_RESUME"))

    Trainer.train = go_on
    train.run(train.asked_of_command_line())


def _witness(trainer):
    told = {"losses": {}, "learning_rates": {}}
    told["versions"] = {"paddle": paddle.__version__, "paddleformers": paddleformers.__version__}

    class Witness(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            if "TABLE_TRUTH" in os.environ:
                told["overwritten"] = _overwrite(trainer, args)
            if "TABLE_LOADED" in os.environ:
                where = types.SimpleNamespace(out=os.environ["TABLE_LOADED"])
                truth.gather(trainer, where, args)

        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in (logs or {}):
                told["losses"][state.global_step] = logs["loss"]
                told["learning_rates"][state.global_step] = float(logs["learning_rate"])

        def on_train_end(self, args, state, control, **_):
            if distributed.get_rank() == 0:
                Path(os.environ["TABLE_TOLD"]).write_text(json.dumps(told))

    return Witness()


class _Gathered(Exception):
    """What a rank would have written down: the places of its pieces."""


def _overwrite(trainer, args) -> int:
    """Run the laboratory's gathering backwards: it says what lies where, and the truth is written there.

    Every tensor is made NaN first and must hold the wanted value in the end, so that nothing of what the
    trainer had loaded is left in any place that the gathering knows.
    """
    wanted = {key: one.astype("float32") for key, one in load(os.environ["TABLE_TRUTH"]).items()}
    live, look = {}, truth._np

    def look_and_keep(tensor):
        array = look(tensor)
        live[id(array)] = (tensor, array)
        return array

    def stop(gathered, *_):
        raise _Gathered(gathered)

    # Stage 3 keeps slices between the steps; its whole parameters are only there to be looked at.
    whole = getattr(trainer.model_wrapped, "get_all_parameters", None)
    if whole is not None:
        whole(convert2cpu=True)
    pickle, truth._np = truth.pickle, look_and_keep
    truth.pickle = types.SimpleNamespace(dump=stop)
    try:
        truth.gather(trainer, types.SimpleNamespace(out=os.environ["TABLE_LOADED"]), args)
    except _Gathered as gathered:
        pieces, coordinate = gathered.args[0]["pieces"], gathered.args[0]["coord"]
    finally:
        truth.pickle, truth._np = pickle, look

    slices = getattr(trainer.model_wrapped, "_param2buffer", {})
    of_parameter = dict(trainer.model.state_dict())
    written = []
    for piece in pieces:
        tensor, _ = live[id(piece["arr"])]
        value = _value(wanted, piece, coordinate, truth.tpdeg(args))
        parameter = of_parameter[piece["struct"]]
        if (
            piece["kind"] == "param"
            and piece["name"] in slices
            and getattr(parameter, "status", "") == "part"
        ):
            start, stop_at = slices[piece["name"]][coordinate["sh"]]
            flat = np.zeros(max(value.size, stop_at), "float32")
            flat[: value.size] = value.reshape(-1)
            tensor, value = parameter.fw_storage, flat[start:stop_at]
        written.append((tensor, value))
    with paddle.no_grad():
        for tensor, value in written:
            paddle.assign(paddle.full(tensor.shape, float("nan"), "float32").astype(tensor.dtype), tensor)
            paddle.assign(paddle.to_tensor(value).reshape(tensor.shape).astype(tensor.dtype), tensor)
    for (tensor, value), piece in zip(written, pieces, strict=True):
        if not np.array_equal(look(tensor).reshape(-1), value.reshape(-1)):
            raise ValueError(f"{piece['struct']} {piece['kind']} does not hold what was written")
    return len(written)


def _value(wanted, piece, coordinate, degree):
    """Cut from a logical tensor what this rank holds of it: the reverse of the laboratory's ``merge``."""
    ending = "" if piece["kind"] == "param" else "." + piece["kind"]
    key = piece["struct"]
    if key + ending not in wanted:
        # A tied head is a tensor of its own on the last stage only.
        tied = {"lm_head.weight": "model.embed_tokens.weight", "model.embed_tokens.weight": "lm_head.weight"}
        key = tied[key]
    value = wanted[key + ending]
    if piece["tpd"] and "pow_acc" not in piece["kind"]:
        axis, rank = piece["axis"], coordinate["tp"]
        value = truth.cut(value, key, axis, degree, rank)
    if piece["flat"] is not None:
        start, stop = piece["flat"]
        flat = np.zeros(max(value.size, stop), "float32")
        flat[: value.size] = value.reshape(-1)
        value = flat[start:stop]
    return value


if __name__ == "__main__":
    main()
