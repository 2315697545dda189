"""One small Ray cluster for all tests of this folder, and conversions to run on it.

Two nodes on this machine: one with two CPUs and two GPUs that are only said to be there, one with one CPU and a label.
Workers that need no GPU are spread over both. It listens on 127.0.0.1 only and wants a token.
"""

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config
from ray.cluster_utils import Cluster

from paddle_reshard.clusters.engine import Batches, Engine
from paddle_reshard.clusters.inline import InlineEngine
from paddle_reshard.pipeline.convert.plan import ConversionPlan
from paddle_reshard.pipeline.convert.run import MoveReport, run_conversion
from paddle_reshard.pipeline.core.events import ignore_events
from paddle_reshard.storage.local.target import LocalTarget
from paddle_reshard.storage.outputs import Outputs
from tests.cluster.faults import Through
from tests.conftest import REPO, case_directory
from tests.sized import in_groups
from tests.storage.contents import in_folder

CASE = "mp2pp2sh2_s1v2_meta_ema"
GROUP_BYTES = 100_000
OBJECT_STORE_BYTES = 200_000_000
IMPORTS = os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))
"""Where workers and drivers of their own find these tests, and what the tests themselves import."""


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    Path(tempfile.gettempdir(), "ray").mkdir(
        exist_ok=True
    )  # Cluster writes its address there, wherever its folder is
    folder = tempfile.mkdtemp(prefix="ray")  # sockets want a short path
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", IMPORTS)  # workers import the faults below
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # Ray calls this machine 127.0.0.1 then, and listens nowhere else; nodes read one, this process has read it.
        patch.setenv(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, "0")
        patch.setattr(ray_constants, "ENABLE_RAY_CLUSTER", False)
        _read_authentication()
        nodes = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 2,
                "num_gpus": 2,
                "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False,
                "include_log_monitor": False,
                "temp_dir": folder,
            },
        )
        try:
            nodes.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
            ray.init(nodes.address, log_to_driver=False, logging_level="WARNING")
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
    _read_authentication()


def _read_authentication() -> None:
    """Ray reads mode and token from the environment once."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@dataclass(frozen=True)
class Conversion:
    """A real checkpoint, planned in many small groups, and what it becomes inline."""

    plan: ConversionPlan
    inline: MoveReport
    files: dict[str, bytes]
    folder: Path

    def run(self, engine: Engine | Callable[..., Batches]) -> MoveReport:
        """Run it with another engine; the result must not differ in any byte."""
        made = self.folder / "made"
        engine = engine if isinstance(engine, Engine) else Through(engine)
        report = run_conversion(self.plan, Outputs([LocalTarget(made)]), engine, ignore_events)
        assert in_folder(made) == self.files
        assert anywhere(report) == anywhere(self.inline)
        return report


def anywhere(report: MoveReport) -> MoveReport:
    """A report, without who ran it."""
    return replace(report, workers=())


Plan = Callable[..., Conversion]


@pytest.fixture(scope="package")
def made_inline() -> dict[object, tuple[MoveReport, dict[str, bytes]]]:
    """What every conversion becomes inline; each is run once."""
    return {}


@pytest.fixture
def plan(made_inline: dict[object, tuple[MoveReport, dict[str, bytes]]], tmp_path: Path) -> Plan:
    """Make a conversion of the case in groups of about ``group_bytes``."""

    def make(to: str = "tp=2,sharding=3", group_bytes: int = GROUP_BYTES, **options: object) -> Conversion:
        small = in_groups(group_bytes)
        there, source = tmp_path / "inline", case_directory(CASE) / "checkpoint-3"
        key = (to, group_bytes, *sorted(options.items()))
        if key not in made_inline:
            planned = small.plan(source, there, to=to, **options)
            target = Outputs([LocalTarget(there)])
            made_inline[key] = (
                run_conversion(planned, target, InlineEngine(), ignore_events),
                in_folder(there),
            )
        anew = small.plan(source, tmp_path / "made", to=to, **options)
        return Conversion(anew, *made_inline[key], tmp_path)

    return make


@pytest.fixture
def conversion(plan: Plan) -> Conversion:
    made = plan()
    assert made.inline.groups > 20
    return made


def is_running(pid: int) -> bool:
    """Whether a process is there and not only waiting to be collected."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip()[:1] not in ("", "Z")
