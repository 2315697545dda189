"""Memory for ranges of files begins where the processor copies fast, in both directions."""

import numpy as np
import pytest

from paddle_reshard.storage.aligned import LINE_BYTES
from paddle_reshard.tasks.workspace import Workspaces


def _start(memory: object) -> int:
    return np.frombuffer(memory, dtype=np.uint8).ctypes.data  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("peak", [3000, 8 << 20], ids=["small", "a whole multiple"])
def test_parts_and_bands_of_a_group(peak: int) -> None:
    space = Workspaces(1 << 30).take(peak, "a")
    assert space is not None
    for _ in range(2):  # the workspace is used again
        part = space.zeros(1000, 7)
        for _ in range(3):  # passes
            bands = [space.allocate(1000, offset) for offset in (5, 69)]
            assert all(
                (_start(a) - o) % LINE_BYTES == 0 for a, o in zip((part, *bands), (7, 5, 69), strict=True)
            )
            space.release()
        space.clear(peak)


def test_without_room_buffers_lie_side_by_side() -> None:
    """A group takes no more than its peak, if the budget has no more."""
    space = Workspaces(2001).take(2001, "a")
    assert space is not None
    first, second, last = space.zeros(1, 7), space.allocate(1000, 5), space.allocate(1000, 5)
    assert _start(second) == _start(first) + 1
    assert _start(last) == _start(second) + 1000
