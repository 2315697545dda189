"""Real checkpoints whose parameters and optimizer states do not belong together."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

import paddle_reshard
from tests.conftest import case_directory
from tests.ema.scaled import paddle, scale_master_weights

EMBEDDING = "model.embed_tokens.weight"


def one_card(folder: Path) -> Path:
    """A copy of a sound checkpoint."""
    source = folder / "source"
    shutil.copytree(
        case_directory("small-families/qwen2_single") / "checkpoint-3", source, copy_function=shutil.copyfile
    )
    return source


def _swap(one: Path, other: Path) -> None:
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)


def tensor_parallel_ranks_swapped(folder: Path) -> Path:
    """The optimizer files of two ranks have changed places."""
    source = folder / "source"
    shutil.copytree(case_directory("mp2_tied") / "checkpoint-3", source, copy_function=shutil.copyfile)
    _swap(source / "optimizer.tp00.pdopt", source / "optimizer.tp01.pdopt")
    return source


def of_another_step(folder: Path) -> Path:
    """All master weights are larger."""
    source = one_card(folder)
    scale_master_weights(source, 1.01)
    return source


def shards_swapped(folder: Path) -> Path:
    """The optimizer files of two ranks of sharding stage 3 have changed places."""
    source = folder / "source"
    paddle_reshard.convert(
        case_directory("small-families/qwen2_single") / "checkpoint-3",
        source,
        format="hybrid-plain",
        to="sharding=2",
        sharding_strategy="stage3",
        layout={"stage3_segment_size": 512},
    )
    _swap(source / "optimizer.shard00.pdopt", source / "optimizer.shard01.pdopt")
    return source


SPOILED = (tensor_parallel_ranks_swapped, of_another_step, shards_swapped)


def flip_one_bit(source: Path, at: int) -> None:
    """Change element ``at`` of the embedding of :func:`one_card` in place."""
    file = source / "model_state.pdparams"
    content = bytearray(file.read_bytes())
    values = paddle.load(str(file))[EMBEDDING].astype("float32").numpy()
    bits = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    content[content.index(bits) + 2 * at] ^= 1
    file.write_bytes(content)
