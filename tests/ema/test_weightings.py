"""The weights of a series are those of the average during training, or those that were asked for."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_reshard.pipeline.convert.series import Weighting

VALUES = np.float32([3.0, -1.25, 0.1, 7e-3])


def folded(weighting: Weighting) -> np.float32:
    """What the steps make of ``VALUES``, each product and sum rounded to float32."""
    average = np.float32(0)
    for (keep, take), value in zip(weighting.steps, VALUES, strict=True):
        average = np.float32(average * np.float32(keep)) + np.float32(value * np.float32(take))
    return np.float32(average)


def test_a_decay_weighs_as_the_average_during_training() -> None:
    average = VALUES[0]
    for value in VALUES[1:]:
        average = np.float32(0.9) * average + np.float32(1 - 0.9) * value
    assert folded(Weighting.by_decay(0.9, 4)) == average


def test_given_weights_belong_to_the_checkpoints_in_order() -> None:
    weights = (0.1, 0.2, 0.3, 0.4)
    assert folded(Weighting.by_weights(weights)) == pytest.approx(float(np.dot(VALUES, weights)), rel=1e-6)
