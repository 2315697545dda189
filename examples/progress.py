"""Watch a conversion: an observer is called with a value for everything that happens.

::

    python examples/progress.py checkpoint-1000 one-card tp=1
"""

from __future__ import annotations

import sys

import paddle_reshard as pr


class Lines:
    """Writes a line for every step, and one for every tenth of the bytes that it moves."""

    def __init__(self) -> None:
        self.done_bytes = 0
        self.total_bytes: int | None = None
        self.tenths = 0

    def __call__(self, event: pr.Event) -> None:
        """Take one event."""
        match event:
            case pr.StepStarted(step, total_bytes):
                self.done_bytes, self.tenths, self.total_bytes = 0, 0, total_bytes
                print(f"{step} …")
            case pr.Progress(done_bytes):
                self.done_bytes += done_bytes
                if self.total_bytes and (tenths := 10 * self.done_bytes // self.total_bytes) > self.tenths:
                    self.tenths = tenths
                    print(f"  {tenths * 10} %")
            case pr.FilesRead(done, of):
                print(f"  {done} of {of} files")
            case pr.Planned() | pr.WorkerAssigned() | pr.GroupEnded():
                pass
            case pr.Waiting(what):
                print(f"  waiting for {what}")
            case pr.StepEnded(step, summary):
                print(f"{step}: {summary}")


if __name__ == "__main__":
    source, target, topology = sys.argv[1:]
    pr.convert(source, target, to=topology, observe=Lines())
