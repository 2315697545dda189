"""Models in bfloat16 on any CPU.

Whether Paddle takes a CPU for one with bfloat16 depends on AVX-512. Where it does not, ``Layer.bfloat16()`` warns and
leaves float32; casts and master weights work all the same. Tests run under both answers, each forced.
"""

from __future__ import annotations

import paddle
import pytest


@pytest.fixture(params=[True, False], ids=["bfloat16_cpu", "other_cpu"])
def bfloat16_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """What Paddle says of the CPU during the test."""
    monkeypatch.setattr(paddle.amp, "is_bfloat16_supported", lambda *_: request.param)
    return request.param


def to_bfloat16(layer: paddle.nn.Layer) -> None:
    """Cast every parameter, whatever Paddle says of the CPU."""
    layer.to(dtype="bfloat16")
    assert {parameter.dtype for parameter in layer.parameters()} == {paddle.bfloat16}
