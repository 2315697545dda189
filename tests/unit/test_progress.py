"""What a log says while a conversion runs."""

import threading

from paddle_reshard.pipeline.progress import ProgressLines
from paddle_reshard.pipeline.workflow import Progress, StepEnded, StepStarted


def test_a_long_step_tells_from_time_to_time_how_far_it_is() -> None:
    told: list[str] = []
    now = [100.0]
    observe = ProgressLines(told.append, lambda: now[0])
    observe(StepStarted("plan"))
    observe(Progress(7))
    observe(StepEnded("plan", "3 groups"))
    observe(StepStarted("move", 100 << 20))
    for second in range(1, 26):
        now[0] = 100.0 + second
        observe(Progress(2 << 20))
    observe(StepEnded("move", "done"))
    assert told == [
        "plan: 3 groups",
        "move: 4.0 MiB of 100.0 MiB, 4 %, 2.0 MiB/s, 48 s left",
        "move: 24.0 MiB of 100.0 MiB, 24 %, 2.0 MiB/s, 38 s left",
        "move: 44.0 MiB of 100.0 MiB, 44 %, 2.0 MiB/s, 28 s left",
        "move: done; 25.0 s, 2.0 MiB/s",
    ]


def test_a_step_of_which_nothing_is_heard_is_told_of() -> None:
    """The first line comes when two seconds have passed, whatever the step does."""
    told: list[str] = []
    first = threading.Event()

    def tell(line: str) -> None:
        told.append(line)
        first.set()

    lines = ProgressLines(tell)
    with lines.ticking():
        lines(StepStarted("reading headers"))
        assert first.wait(60)
    assert told[0].startswith("reading headers: ")
    assert told[0].endswith(" s so far")
