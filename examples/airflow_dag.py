"""An Airflow DAG that converts the finished checkpoints of a training run.

Put this file into Airflow's folder of DAGs, on workers that have ``pip install "paddle-reshard[s3]"``, and set
``RESHARD_RUN`` and ``RESHARD_TARGET``. ``watch --once`` keeps its state next to the targets and counts its own retries,
so the task has none, and may run as often as you like.
"""

from __future__ import annotations

import os
from datetime import datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

RUN = os.environ.get("RESHARD_RUN", "s3://training/run-7")
TARGET = os.environ.get("RESHARD_TARGET", "s3://training/run-7-one-card")

with DAG(
    "convert_finished_checkpoints",
    schedule=timedelta(minutes=10),
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
) as dag:
    BashOperator(
        task_id="watch_once",
        bash_command='paddle-reshard watch "$RUN" "$TARGET" --to tp=1 --once',
        env={"RUN": RUN, "TARGET": TARGET},
        append_env=True,
        retries=0,
    )
