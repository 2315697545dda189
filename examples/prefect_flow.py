"""A Prefect flow that converts the finished checkpoints of a training run.

::

    pip install prefect "paddle-reshard[s3]"
    python prefect_flow.py s3://training/run-7 s3://training/run-7-one-card tp=1

``watch --once`` keeps its state next to the targets, so the flow itself is stateless: run it as often as you like,
also from several workers. Serve it on a schedule with ``convert_finished.serve(cron="*/10 * * * *", …)``.
"""

from __future__ import annotations

import subprocess
import sys

from prefect import flow, get_run_logger, task


@task(task_run_name="watch {run_dir}")
def watch_once(run_dir: str, target_root: str, topology: str, *options: str) -> None:
    """Look once; every line that ``watch`` logs becomes a line of the task's log."""
    logger = get_run_logger()
    command = [
        sys.executable,
        "-m",
        "paddle_reshard",
        "watch",
        run_dir,
        target_root,
        "--to",
        topology,
        "--once",
    ]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr or ():
            logger.info(line.rstrip())
    if process.returncode != 0:
        raise RuntimeError(f"watch ended with exit status {process.returncode}; see its log above")


@flow(name="convert finished checkpoints")
def convert_finished(run_dir: str, target_root: str, topology: str, ray_address: str | None = None) -> None:
    """Convert every finished checkpoint once: here, or as jobs of a Ray cluster."""
    options = () if ray_address is None else ("--submit", ray_address)
    watch_once(run_dir, target_root, topology, *options)


if __name__ == "__main__":
    convert_finished(*sys.argv[1:])
