"""What a log says while a conversion runs."""

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
        "move: 20.0 MiB of 100.0 MiB, 20 %, 2.0 MiB/s, 40 s left",
        "move: 40.0 MiB of 100.0 MiB, 40 %, 2.0 MiB/s, 30 s left",
        "move: done",
    ]
