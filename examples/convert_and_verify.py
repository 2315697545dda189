"""Convert a checkpoint, compare the two, and act on what went wrong.

::

    python examples/convert_and_verify.py checkpoint-1000 one-card tp=1
"""

from __future__ import annotations

import sys

import paddle_reshard as pr


def convert_and_verify(source: str, target: str, topology: str) -> int:
    """Exit status: 0 if the target is there and holds the same values, 75 if trying again later may help."""
    try:
        report = pr.convert(source, target, to=topology, resume=True, memory="512MiB")
        compared = pr.verify(source, target)
    except pr.MemoryBudgetError as error:
        print(f"{error.tensor} needs {error.needed_bytes:,} bytes at once")
        return 1
    except pr.ReshardError as error:
        print(error)
        return 75 if error.retryable else error.exit_status
    print(
        f"{report.moved.written_bytes:,} bytes written in {report.seconds:.1f} s by plan {report.plan.plan.plan_id}"
    )
    for difference in compared.differences:
        print(f"{difference.tensor}: {difference.detail}")
    return 0 if compared else 1


if __name__ == "__main__":
    sys.exit(convert_and_verify(*sys.argv[1:]))
