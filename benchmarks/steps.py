"""Time the steps of one conversion through the Python API. A process of its own, to be measured from outside.

python -m benchmarks.steps SRC DST '{"to": "tp=4"}'        prints one JSON object

In addition to the arguments of ``paddle_reshard.convert``, ``cores`` is the number of processors it may use, and
``warm`` the number of bytes of memory to touch before the clock starts. With ``"verify": true`` DST
exists and is compared with SRC.
"""

from __future__ import annotations

import json
import os
import sys
import time

start = time.perf_counter()

from paddle_reshard.pipeline.cli.main import spare_processor  # noqa: E402

spare_processor()

import paddle_reshard  # noqa: E402
from benchmarks.measure import warm_memory  # noqa: E402
from paddle_reshard.pipeline.cli.json_output import conversion_data  # noqa: E402
from paddle_reshard.pipeline.core.events import Event, Progress, StepEnded, StepStarted  # noqa: E402

RAY_START_SECONDS = 5.0
"""Ray answers before its helper processes have started."""


def main() -> None:
    source, target, text = sys.argv[1:]
    arguments = json.loads(text)
    if cores := arguments.pop("cores", None):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    seconds = {"import": time.perf_counter() - start}
    if arguments.get("cluster") == "ray":
        import ray  # a conversion joins the cluster of its process

        ray.init("local", num_cpus=arguments["workers"], include_dashboard=False, log_to_driver=False)
        time.sleep(RAY_START_SECONDS)
    if warm := arguments.pop("warm", 0):
        warm_memory(warm)
    started = 0.0

    def observe(event: Event) -> None:
        nonlocal started
        if isinstance(event, StepStarted):
            started = time.perf_counter()
        elif isinstance(event, Progress) and event.done_bytes:
            seconds.setdefault("first group", time.perf_counter() - started)
        elif isinstance(event, StepEnded):
            seconds[event.step] = time.perf_counter() - started

    if arguments.pop("verify", False):
        if not paddle_reshard.verify(source, target, observe=observe, **arguments):
            sys.exit(f"{source} and {target} differ")
        print(json.dumps({"seconds": {**seconds, "move": time.perf_counter() - started}}))
        return
    report = paddle_reshard.convert(source, target, observe=observe, **arguments)
    print(json.dumps({"seconds": seconds, **conversion_data(report)}))


if __name__ == "__main__":
    main()
