"""Our conversion in a process of its own: ``convert.py SOURCE TARGET OPTIONS`` ends with a line of JSON."""

import json
import resource
import sys
import time

import paddle_reshard


def main(source: str, target: str, options: str) -> None:
    """Convert; tell the seconds and the peak of resident memory, or why not."""
    began = time.monotonic()
    told: dict[str, object] = {}
    try:
        paddle_reshard.convert(source, target, **json.loads(options))
    except paddle_reshard.ReshardError as error:
        told["refused"] = str(error)
    told["seconds"] = round(time.monotonic() - began, 2)
    told["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
