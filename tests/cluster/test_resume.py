"""A driver that is killed while Ray's workers move groups; a second run resumes, on Ray or without."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.cluster.conftest import CASE, GROUP_BYTES
from tests.conftest import REPO, case_directory
from tests.sampling import on_cluster
from tests.sized import in_groups
from tests.storage.contents import in_folder

KILLED_AFTER = 4
DRIVER = """
import json, os, signal, sys
import paddle_reshard
from paddle_reshard.pipeline.core.events import Progress
from tests.sized import in_groups

request, group_bytes, left = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

def observe(event):
    global left
    if isinstance(event, Progress) and event.done_bytes:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

in_groups(group_bytes).convert(**request, observe=observe)
"""


@pytest.mark.parametrize("then", [on_cluster("ray"), "inline"])
def test_a_killed_driver_is_resumed(then: str, cluster: Cluster, tmp_path: Path) -> None:
    small = in_groups(GROUP_BYTES)
    source, whole, made = case_directory(CASE) / "checkpoint-3", tmp_path / "whole", tmp_path / "made"
    options = {"to": "tp=2,sharding=3", "memory": "256MiB"}
    small.convert(source, whole, **options)
    request = {"source": str(source), "target": str(made), "cluster": f"ray:{cluster.address}", "workers": 2}
    killed = subprocess.run(
        [
            sys.executable,
            "-c",
            DRIVER,
            json.dumps({**request, **options}),
            str(GROUP_BYTES),
            str(KILLED_AFTER),
        ],
        cwd=REPO,
        timeout=120,
    )
    assert killed.returncode == -9
    assert not made.exists()
    moved = small.convert(
        source, made, resume=True, cluster=f"ray:{cluster.address}" if then == "ray" else "inline", **options
    ).moved
    assert moved.resumed_groups >= KILLED_AFTER
    assert moved.groups > 0
    assert in_folder(made) == in_folder(whole)
    assert (made / "paddle_reshard.json").read_bytes() == (whole / "paddle_reshard.json").read_bytes()
