"""The powers of the betas tell after how many steps the optimizer was saved. Checkpoints of two steps: ``refusals.py``.

The oracle is Paddle: its optimizers make the powers, of parameters that begin at different steps.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError
from paddle_reshard.pipeline.indexing.optimizer_steps import Powers, check_powers, find_steps
from tests.hostile.damage import copied, edit_pickle
from tests.hostile.refusals import V1, powers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the import of Paddle warns about a missing ccache
    import paddle


def of_paddle(
    optimizer: str, beta1: float, beta2: float, steps: int, late: int
) -> dict[str, tuple[Any, Any]]:
    """Parameter → its powers after ``steps``; the second layer has its first gradient after ``late`` of them."""
    with paddle.utils.unique_name.guard():  # other tests may have made a linear_0
        first, second = paddle.nn.Linear(1, 1), paddle.nn.Linear(1, 1)
        one = getattr(paddle.optimizer, optimizer)(
            learning_rate=0.1, parameters=first.parameters() + second.parameters(), beta1=beta1, beta2=beta2
        )
        for step in range(steps):
            out = first(paddle.ones([1, 1])).sum()
            if step >= late:
                out = out + second(paddle.ones([1, 1])).sum()
            out.backward()
            one.step()
            one.clear_grad()
        states = {
            key: value.numpy().reshape(-1)[0] for key, value in one.state_dict().items() if "_pow_acc" in key
        }
        names = [p.name for p in first.parameters() + second.parameters()]
        return {n: (states[f"{n}_beta1_pow_acc_0"], states[f"{n}_beta2_pow_acc_0"]) for n in names}


@pytest.mark.parametrize(
    ("optimizer", "beta1", "beta2"),
    [("AdamW", 0.9, 0.95), ("Adam", 0.9, 0.999), ("Lamb", 0.85, 0.9985), ("AdamW", 0.9375, 0.98)],
)
def test_what_paddle_stores_tells_its_step_and_late_parameters_are_no_contradiction(
    optimizer: str, beta1: float, beta2: float
) -> None:
    made = of_paddle(optimizer, beta1, beta2, steps=12, late=5)
    assert len(set(made.values())) == 2
    powers = [Powers(name, "optimizer.pdopt", *values) for name, values in made.items()]
    for found in made.values():
        known = find_steps(*found, None)
        assert known is not None and (known.beta1, known.beta2) == (beta1, beta2)
    assert {known.step for v in made.values() if (known := find_steps(*v, None))} == {12, 7}
    check_powers(powers, 12)
    check_powers(powers, None)
    for other in (0, 7, 11, 13, 3000, -1):
        with pytest.raises(
            CheckpointError, match=f"after 12 steps, but the learning-rate schedule is at step {other}"
        ):
            check_powers(powers, other)


def test_an_optimizer_with_a_scaler_may_be_behind_its_schedule_but_not_ahead() -> None:
    one, two = (np.multiply.accumulate(np.full(13, beta, np.float32))[-1] for beta in (0.9, 0.95))
    powers = [Powers("a", "optimizer.pdopt", one, two)]
    for scheduled in (12, 13, 3000):
        check_powers(powers, scheduled, skips=True)
    with pytest.raises(CheckpointError, match="after 12 steps, but the learning-rate schedule is at step 11"):
        check_powers(powers, 11, skips=True)


def test_what_tells_nothing_is_not_refused() -> None:
    def of(beta1: float, beta2: float, steps: int) -> list[Powers]:
        one, two = (np.multiply.accumulate(np.full(steps + 1, b, np.float32))[-1] for b in (beta1, beta2))
        return [Powers("a", "x", one, two)]

    check_powers(of(0.9, 0.95, 20_000), 7)  # both too small
    check_powers(of(1 / 3, 2 / 3, 5), 7)  # no decimals
    check_powers([], 7)
    with pytest.raises(
        CheckpointError, match=r"0\.999 after 20000 steps"
    ):  # the first is too small, the second tells
        check_powers(of(0.9, 0.999, 20_000), 20_001)
    check_powers(of(0.9, 0.999, 20_000), 20_000)


def test_a_parameter_that_began_late_is_converted(tmp_path: Path) -> None:
    source = copied(V1, tmp_path / "source")
    for path in source.glob("optimizer.*"):
        edit_pickle(source, path.name, powers(1, "linear_9.w_0_"))
    paddle_reshard.convert(source, tmp_path / "x", to="tp=1")
    assert paddle_reshard.verify(source, tmp_path / "x")
