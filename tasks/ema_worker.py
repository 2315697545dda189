"""The companion process that averages the weights of a training rank: ``python -m … FD NBYTES``.

The shared memory holds a header, the values last handed over, and the average::

    [ updates begun, updates done : int64 ] [ values : float32 × n ] [ average : float32 × n ]

If this process ends, the average stays valid unless an update was begun and not done.
"""

from __future__ import annotations

import base64
import json
import mmap
import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from paddle_reshard.tasks.ema import BLOCK_ELEMENTS, Floats, blend

HEADER_BYTES = 64
POLITENESS = 10
"""Niceness: training comes first."""


class Shared:
    """Memory shared by a training rank and its companion."""

    def __init__(self, memory: mmap.mmap, nbytes: int) -> None:
        elements = elements_in(nbytes)
        self.counts = np.frombuffer(memory, dtype=np.int64, count=2)
        self.values: Floats = np.frombuffer(memory, dtype=np.float32, count=elements, offset=HEADER_BYTES)
        self.average: Floats = np.frombuffer(
            memory, dtype=np.float32, count=elements, offset=HEADER_BYTES + 4 * elements
        )


def shared_bytes(elements: int) -> int:
    """Size of the shared memory for a number of elements."""
    return HEADER_BYTES + 2 * 4 * elements


def elements_in(nbytes: int) -> int:
    """The reverse of :func:`shared_bytes`."""
    return (nbytes - HEADER_BYTES) // 8


class EmaWorker:
    """Handles requests, one at a time."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.scratch: Floats = np.empty(BLOCK_ELEMENTS, dtype=np.float32)
        os.nice(POLITENESS)

    def do(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out a request; the answer has an ``error`` if that failed."""
        answer = {"done": request["do"]}
        try:
            if request["do"] == "blend":
                self._blend(request["decay"])
            else:
                _save(self.shared, request)
        except OSError as error:
            answer["error"] = f"{request.get('path', '')}: cannot be written: {error.strerror or error}"
        return answer

    def _blend(self, decay: float) -> None:
        self.shared.counts[0] += 1
        blend(self.shared.average, self.shared.values, decay, self.scratch)
        self.shared.counts[1] += 1


def main(descriptor: int, nbytes: int) -> None:
    """Answer requests, one JSON object per line, until the input ends."""
    worker = EmaWorker(Shared(mmap.mmap(descriptor, nbytes), nbytes))
    for line in sys.stdin.buffer:
        asked = json.loads(line)  # noqa: TID251 (from a process of ours)
        sys.stdout.write(json.dumps(worker.do(asked)) + "\n")
        sys.stdout.flush()


def _save(shared: Shared, request: Mapping[str, Any]) -> None:
    """Write a file of literal bytes and slices of the average, atomically."""
    path = request["path"]
    unfinished = f"{path}.unfinished"
    with open(unfinished, "wb") as file:
        for byte_offset, literal in request["literals"]:
            file.seek(byte_offset)
            file.write(base64.b64decode(literal))
        for byte_offset, start, stop in request["slots"]:
            file.seek(byte_offset)
            file.write(shared.average[start:stop].data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
