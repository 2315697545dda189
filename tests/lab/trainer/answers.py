"""What the trained models of cases answer: ``answers.py OUT GROUP/CASE…``, folders with the files of each.

The model of a case, in float32 with the parameters of ``truth.safetensors``, is given fixed tokens, and a model of
images also those with an image; ``OUT/<case>.npz`` holds what was given and the logits.
"""

import os
import sys
from pathlib import Path

LAB = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(LAB / "trainer"), str(LAB)]

import numpy as np
import paddle

paddle.set_device("cpu")
import cpu_gloo_shim  # noqa: F401
import models
from job import described
from paddleformers.trainer import TrainingArguments
from reader import load

SEQUENCE = 16


def answers(name, folder, out):
    """Write the answers of a case, ``group/case``, whose files lie in a folder."""
    job = described()[name]
    args = TrainingArguments(
        output_dir=str(out / "trainer"), bf16=True, fp16_opt_level="O2", device="cpu", save_tokenizer=False,
        report_to="none", split_param=False, sharding="",
    )  # fmt: skip
    _, config, model = models.build(job.family, dict(job.model), args, SEQUENCE, job.tied, dtype="float32")
    truth = load(folder / "truth.safetensors")
    with paddle.no_grad():
        for key, tensor in model.state_dict().items():
            if key in truth:
                assert list(truth[key].shape) == list(tensor.shape), key
                paddle.assign(paddle.to_tensor(truth[key].astype("float32")), tensor)
    # The library's experts of gpt_oss are wrong in evaluation: a transposition there does nothing.
    model.train() if job.family == "gpt_oss" else model.eval()
    # Small families have fewer words.
    tokens = np.random.RandomState(11).randint(3, 128, (2, SEQUENCE)).astype("int64") % getattr(
        config, "vocab_size", 128
    )
    found = {"ids": tokens, "logits": _logits(model, tokens)}
    if job.family in models.VISION:
        with_images = np.stack([models.with_image(one.copy() % 112) for one in tokens])
        images = models.images(job.family, with_images)
        found |= {"image_ids": with_images, "image_logits": _logits(model, with_images, **images)}
        found |= {key: one.numpy() for key, one in images.items()}
    np.savez(out / f"{folder.name}.npz", **found)


def _logits(model, tokens, **images):
    with paddle.no_grad():
        told = model(input_ids=paddle.to_tensor(tokens), **images)
    told = told[0] if isinstance(told, tuple | list) else getattr(told, "logits", told)
    return told.astype("float32").numpy()


def main(out, *folders):
    Path(out).mkdir(parents=True, exist_ok=True)
    for folder in map(Path, folders):
        answers(f"{folder.parent.name}/{folder.name}", folder, Path(out))
    os._exit(0)  # gloo sometimes aborts as it takes itself down


main(*sys.argv[1:])
