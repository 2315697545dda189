"""When an average is updated, what a lost worker means for it, where its tensors lie: pure functions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paddle_reshard.pipeline.core.errors import CheckpointError, UsageError
from paddle_reshard.pipeline.training.decisions import (
    Due,
    Recovery,
    Standing,
    UpdateRule,
    progress_of,
    recovery,
)
from paddle_reshard.pipeline.training.stretches import (
    Weights,
    check_same,
    find_arrays,
    rank_file,
    stretches_of,
)
from paddle_reshard.storage.files.paddle_pickle import ArrayRef, SplitArray
from paddle_reshard.tasks.ema import AverageProgress, Averaging


def weights(**shapes: tuple[int, ...]) -> Weights:
    tensors = {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}
    return Weights({"w": tensors.pop("w")}, tensors)


@pytest.mark.parametrize(
    ("step", "loss", "due"),
    [
        (8, 1.9, Due.YES),
        (8, 2.0, Due.LOSS_TOO_HIGH),
        (8, math.nan, Due.LOSS_TOO_HIGH),
        (9, 1.0, Due.BETWEEN),
        (9, None, Due.BETWEEN),
    ],
)
def test_a_step_is_due_by_its_number_and_its_loss(step: int, loss: float | None, due: Due) -> None:
    assert UpdateRule(4, 2.0).due(step, loss) is due


def test_an_interval_is_a_whole_step() -> None:
    assert UpdateRule(4).due(8, None) is Due.YES
    with pytest.raises(UsageError, match="interval 0 must be at least 1"):
        UpdateRule(0)


def test_only_an_interrupted_update_restarts_the_average() -> None:
    assert recovery(started=3, done=3, requested=3) is Recovery.CONTINUE
    assert recovery(started=3, done=3, requested=4) is Recovery.REPEAT
    assert recovery(started=4, done=3, requested=4) is Recovery.RESTART


SAVED = {"start": "zero", "updates": 3, "step": 30, "start_weight": 0.5}


def test_how_far_a_saved_average_has_come() -> None:
    assert progress_of(SAVED, Averaging(0.9, start="zero")) == AverageProgress(3, 30, 0.5)
    assert progress_of(None, Averaging(0.9)) == AverageProgress(updates=1, start_weight=0.0)


@pytest.mark.parametrize(
    ("saved", "start", "message"),
    [
        (None, "zero", "ema.json is missing"),
        ({**SAVED, "start": "weights"}, "zero", "started from 'weights'"),
        ({"start": "zero", "updates": 3, "step": 30}, "zero", "the progress of the average is missing"),
        ({**SAVED, "updates": []}, "zero", "the progress of the average is missing"),
    ],
)
def test_an_average_whose_progress_is_unknown_cannot_continue(
    saved: dict[str, object] | None, start: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        progress_of(saved, Averaging(0.9, start=start))


def test_a_changed_set_of_tensors_is_refused_naming_one() -> None:
    before = stretches_of(weights(w=(3, 4), b=(4,)))
    check_same(stretches_of(weights(w=(3, 4), b=(4,))), before)
    with pytest.raises(UsageError, match=r"b: is \(5,\) now and was \(4,\) at the last update"):
        check_same(stretches_of(weights(w=(3, 4), b=(5,))), before)
    with pytest.raises(UsageError, match=r"c: is \(4,\) now and was not there"):
        check_same(stretches_of(weights(w=(3, 4), b=(4,), c=(4,))), before)


def stored(shape: tuple[int, ...], dtype: str = "f4", axes: tuple[int, ...] | None = None) -> ArrayRef:
    return ArrayRef(100, dtype, shape, axes, None)


def test_a_file_holds_exactly_the_tensors_of_the_rank() -> None:
    stretches = stretches_of(weights(w=(3, 4), b=(4,)))
    root, elements = rank_file(stretches)
    assert set(root) == {"b", "master_weights"}
    assert elements == [(0, 12), (16, 20)]
    whole = {"master_weights": {"w": stored((3, 4))}, "b": stored((4,)), "StructuredToParameterName@@": {}}
    assert find_arrays(stretches, whole, "f").keys() == stretches.keys()
    for wrong in (
        {"b": stored((5,))},
        {"b": stored((4,), dtype="f2")},
        {"master_weights": {"w": stored((3, 4), axes=(1, 0))}},
        {"master_weights": {}},
        {"c": stored((4,))},
    ):
        with pytest.raises(CheckpointError, match="in the file and"):
            find_arrays(stretches, {**whole, **wrong}, "f")


def test_an_array_that_paddle_has_cut_is_read_piece_by_piece() -> None:
    """Pickle protocols 2 and 3 hold arrays above a GB in pieces."""
    stretches = stretches_of(weights(w=(3, 4)))
    pieces = stored((8,)), ArrayRef(200, "f4", (4,), None, None)
    root = {"master_weights": {"w": SplitArray(pieces, (3, 4))}}
    assert list(find_arrays(stretches, root, "f").values()) == [pieces]


def test_an_update_makes_up_for_those_that_were_skipped_before_it() -> None:
    averaging, standing = Averaging(0.5), Standing(AverageProgress(3, 30, 0.125), requested=3)
    skipped = standing.skipped(standing.decays(averaging))
    assert skipped == Standing(AverageProgress(3, 30, 0.125), (0.5,), 3)
    decays = skipped.decays(averaging)
    assert decays == (0.5, 0.5)
    assert skipped.handed_over(32, decays) == Standing(AverageProgress(5, 32, 0.125 / 4), (), 4)
