"""The average in the files of a FlexCheckpoint: Paddle's own loader puts them together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.formats.flex.boxes import Box
from paddle_reshard.pipeline.training.async_ema import AsyncEma
from paddle_reshard.pipeline.training.flex import FlexRank, RankBoxes
from paddle_reshard.pipeline.training.stretches import Weights

RANDOM = np.random.default_rng(3)
WHOLE = {
    "up_proj.weight.w_0": RANDOM.standard_normal((4, 6), dtype=np.float32),
    "down_proj.weight.w_0": RANDOM.standard_normal((6, 4), dtype=np.float32),
    "norm.weight.w_0": RANDOM.standard_normal(6, dtype=np.float32),
    "gate.weight": RANDOM.standard_normal((6, 2), dtype=np.float32),
}


def piece(
    key: str, columns: slice | None = None, flat: tuple[int, int] | None = None
) -> tuple[Box, np.ndarray]:
    """A part of the columns of a tensor, or all, or a slice of that."""
    whole = WHOLE[key]
    offset = (0,) * whole.ndim
    local = whole
    if columns is not None:
        local, offset = whole[:, columns], (0, columns.start)
    values = local if flat is None else local.ravel()[slice(*flat)]
    return Box(key, whole.shape, offset, local.shape, flat), values


def padded(values: np.ndarray, padding: int) -> np.ndarray:
    return np.pad(values, (0, padding))


# Two ranks of tensor parallelism hold columns of up_proj, slices of down_proj with padding, and the rest both.
UP = [piece("up_proj.weight.w_0", slice(0, 3)), piece("up_proj.weight.w_0", slice(3, 6))]
DOWN = [piece("down_proj.weight.w_0", flat=(0, 14)), piece("down_proj.weight.w_0", flat=(14, 24))]
NORM, GATE = piece("norm.weight.w_0"), piece("gate.weight")
BOXES = tuple(
    RankBoxes(
        {"linear_0.w_0": UP[r][0], "linear_1.w_0": DOWN[r][0], "norm_0.w_0": NORM[0]},
        {"gate.weight": GATE[0]},
    )
    for r in range(2)
)


def weights(rank: int) -> Weights:
    masters = {
        "linear_0.w_0": UP[rank][1],
        "linear_1.w_0": padded(DOWN[rank][1], 5 * rank),
        "norm_0.w_0": NORM[1],
    }
    if rank == 0:
        masters["embedding_0.w_0"] = np.zeros(0, np.float32)  # a slice of nothing
    return Weights(masters, {"gate.weight": GATE[1]})


def test_paddle_puts_the_files_of_all_ranks_together(tmp_path: Path) -> None:
    for rank in (1, 0):
        with AsyncEma(lambda rank=rank: weights(rank), decay=0.9) as ema:
            ema.update(1)
            ema.save(tmp_path, FlexRank(rank, BOXES))
    folder = tmp_path / "ema_state"
    assert sorted(p.name for p in folder.iterdir()) == ["0.metadata", "0_0.distcp", "1_0.distcp"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ema.json", "ema_state"]
    assert "norm.weight.w_0" not in paddle.load(str(folder / "1_0.distcp"))
    loaded = {key: paddle.zeros(value.shape) for key, value in WHOLE.items()}
    dist.load_state_dict(loaded, str(folder))
    for key, value in WHOLE.items():
        assert loaded[key].numpy().tobytes() == value.tobytes(), key


def test_boxes_that_are_not_the_ranks_tensors_are_refused(tmp_path: Path) -> None:
    mine = BOXES[0]
    wrong = (
        RankBoxes({**mine.master_weights, "linear_1.w_0": DOWN[1][0], "norm_0.w_0": GATE[0]}, mine.params),
        RankBoxes({**mine.master_weights, "linear_9.w_0": NORM[0]}, mine.params),
        RankBoxes(mine.master_weights, {}),
    )
    with AsyncEma(lambda: weights(0), decay=0.9) as ema:
        ema.update(1)
        for boxes, message in zip(
            wrong,
            ("norm_0.w_0: is", "linear_9.w_0: is not a tensor of this rank", "gate.weight: is"),
            strict=True,
        ):
            with pytest.raises(UsageError, match=message):
                ema.save(tmp_path, FlexRank(0, (boxes,)))
    assert not (tmp_path / "ema_state").exists()
