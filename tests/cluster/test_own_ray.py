"""A private Ray: closed to all others, independent of the working directory, and reported when it is lost.

Each runs the command line, or a conversion in a process of its own that is slow enough to be looked at.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import grpc
import pytest
from ray.cluster_utils import Cluster
from ray.core.generated import gcs_service_pb2 as gcs
from ray.core.generated import gcs_service_pb2_grpc as gcs_grpc

from tests.cluster.conftest import CASE, GROUP_BYTES, IMPORTS
from tests.conftest import case_directory
from tests.jobs.head import descendants
from tests.sized import in_groups
from tests.storage.contents import in_folder

SOURCE = case_directory(CASE) / "checkpoint-3"
T = TypeVar("T")
SOON_MISSED = {
    f"RAY_health_check_{name}": value for name, value in (("period_ms", "500"), ("failure_threshold", "2"))
}
"""How soon Ray calls a node dead that does not answer."""
SLOW = """
import signal, sys
from pathlib import Path
import paddle_reshard
from paddle_reshard.clusters.choose import choose_engine
from paddle_reshard.pipeline.convert.run import run_conversion
from paddle_reshard.pipeline.core.events import ignore_events
from paddle_reshard.storage.local.target import LocalTarget
from paddle_reshard.storage.outputs import Outputs
from tests.sized import in_groups

engine = choose_engine("ray", 1, 256 << 20)
from paddle_reshard.clusters.ray import calls
from tests.cluster.faults import Through, Watched

def end(number, frame):
    print("the program's own end", file=sys.stderr, flush=True)
    sys.exit(1)  # Ray, if it is in the middle of a wait, keeps the status and loses the message

signal.signal(signal.SIGTERM, end)
source, target, notes, seconds = *map(Path, sys.argv[1:4]), float(sys.argv[4])
calls.PATIENCE_SECONDS = 1.0
plan = in_groups(int(sys.argv[5])).plan(source, target, to="tp=2,sharding=3")
watched = Through(lambda works, source, writer: engine.run(works, Watched(source, notes, seconds), writer))
try:
    run_conversion(plan, Outputs([LocalTarget(target)]), watched, ignore_events)
except paddle_reshard.ReshardError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@contextmanager
def slow_conversion(
    folder: Path, seconds: float = 100, group_bytes: int = 64 << 20
) -> Iterator[subprocess.Popen[str]]:
    """A conversion whose worker on a Ray of its own has begun to read, and takes ``seconds`` for each read."""
    notes = folder / "notes"
    script = folder / "slow.py"
    script.write_text(SLOW)
    process = subprocess.Popen(
        [
            sys.executable,
            "-W",
            "ignore",
            script,
            SOURCE,
            folder / "made",
            notes,
            str(seconds),
            str(group_bytes),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        | {"PYTHONPATH": IMPORTS, **SOON_MISSED},
    )
    try:
        await_true(lambda: notes.exists() or process.poll() is not None)
        yield process
    finally:
        started = descendants(process.pid)
        process.kill()
        process.communicate()
        for pid in started:
            if any(name in command_line(pid) for name in ("ray", "slow.py")):
                os.kill(pid, signal.SIGKILL)


def await_true(there: Callable[[], T], seconds: float = 120) -> T:
    deadline = time.monotonic() + seconds
    while not (found := there()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def listening(pid: int) -> list[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    """Where a process listens, by the kernel's tables."""
    inodes = set()
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
        tables = [Path(f"/proc/{pid}/net/{table}").read_text() for table in ("tcp", "tcp6")]
    except OSError:  # it has ended
        return []
    for link in links:
        try:
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    found = []
    for table in tables:
        for line in table.splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                host, port = fields[1].split(":")
                words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
                address = ipaddress.ip_address(b"".join(words))
                found.append((getattr(address, "ipv4_mapped", None) or address, int(port, 16)))
    return found


@pytest.mark.cluster
def test_it_listens_to_this_machine_only_and_wants_its_token(tmp_path: Path) -> None:
    with slow_conversion(tmp_path) as process:
        started = [process.pid, *descendants(process.pid)]
        (gcs_pid,) = (pid for pid in started if "/gcs_server" in command_line(pid))
        assert any("/raylet/raylet" in command_line(pid) for pid in started)
        places = {pid: listening(pid) for pid in started}
        outside = {
            command_line(pid)[:80]: place
            for pid, found in places.items()
            for place in found
            if not place[0].is_loopback
        }
        assert sum(map(len, places.values())) > 3
        assert not outside
        environment = Path(f"/proc/{gcs_pid}/environ").read_bytes().split(b"\0")
        (token,) = (v.partition(b"=")[2] for v in environment if v.startswith(b"RAY_AUTH_TOKEN="))
        assert len(token) == 64
        ((host, port),) = places[gcs_pid]
        with grpc.insecure_channel(f"{host}:{port}") as channel:
            ask = gcs_grpc.NodeInfoGcsServiceStub(channel).GetAllNodeInfo
            request = gcs.GetAllNodeInfoRequest()
            known = ask(request, metadata=[("authorization", f"Bearer {token.decode()}")], timeout=60)
            assert len(known.node_info_list) == 1
            for metadata in ([], [("authorization", f"Bearer {'0' * 64}")]):
                with pytest.raises(grpc.RpcError) as refused:
                    ask(request, metadata=metadata, timeout=60)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        process.terminate()  # Ray would have its driver end with status 15 and no word
        _, said = process.communicate(timeout=120)
        assert said.splitlines()[-1] == "the program's own end"


def test_that_of_the_tests_listens_to_this_machine_only(cluster: Cluster) -> None:
    assert cluster.address.startswith("127.0.0.1:")
    places = [place for pid in descendants(os.getpid()) for place in listening(pid)]
    assert len(places) > 3
    assert [place for place in places if not place[0].is_loopback] == []


@pytest.mark.cluster
@pytest.mark.parametrize(
    ("part", "said"),
    [("/raylet/raylet", "node 127.0.0.1: "), ("/gcs_server", "its head at 127.0.0.1:")],
)
def test_one_that_is_lost_ends_the_conversion_with_a_sentence(part: str, said: str, tmp_path: Path) -> None:
    with slow_conversion(tmp_path) as process:
        (lost,) = (pid for pid in descendants(process.pid) if part in command_line(pid))
        os.kill(lost, signal.SIGKILL)
        _, errors = process.communicate(timeout=240)
    # Ray's own log may write lines behind it.
    (last,) = (line for line in errors.splitlines() if line.startswith("ClusterError: "))
    assert last.startswith(f"ClusterError: Ray was lost while groups were being moved ({said}")
    assert last.endswith("; finished work is kept: run the same command with --resume")


@pytest.mark.cluster
def test_one_that_is_lost_before_it_has_started_is_named(tmp_path: Path) -> None:
    """Ray itself says, after half a minute, that the current node timed out during startup."""
    arguments = ["convert", str(SOURCE), str(tmp_path / "out"), "--to", "tp=1", "--cluster", "ray"]
    command = [sys.executable, "-m", "paddle_reshard", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        raylets = await_true(
            lambda: [p for p in descendants(process.pid) if command_line(p).split(" ")[0].endswith("/raylet")]
        )
        os.kill(raylets[0], signal.SIGKILL)
        _, told = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "was lost" in told
    assert "bug in paddle-reshard" not in told


@pytest.mark.cluster
def test_a_lost_head_ends_it_while_workers_go_on_and_another_cluster_resumes_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    small, ledger = in_groups(GROUP_BYTES), tmp_path / ".made.reshard" / "ledger"
    with slow_conversion(tmp_path, seconds=0.3, group_bytes=GROUP_BYTES) as process:
        (head,) = (pid for pid in descendants(process.pid) if "/gcs_server" in command_line(pid))
        await_true(lambda: ledger.exists() and len(ledger.read_bytes().splitlines()) > 1)
        os.kill(head, signal.SIGKILL)
        _, errors = process.communicate(timeout=120)
    lines = errors.splitlines()
    assert [
        line for line in lines if line.startswith("ClusterError: Ray was lost while groups were being moved")
    ]
    assert not (tmp_path / "made").exists()
    done = len(ledger.read_bytes().splitlines())
    options = {"to": "tp=2,sharding=3", "cluster": f"ray:{cluster.address}", "workers": 2}
    moved = small.convert(SOURCE, tmp_path / "made", resume=True, **options).moved
    assert moved.resumed_groups >= done - 1  # a line may be that of a carried file
    assert moved.groups > 0
    small.convert(SOURCE, tmp_path / "whole", to="tp=2,sharding=3")
    assert in_folder(tmp_path / "made") == in_folder(tmp_path / "whole")


HOSTILE = (
    "numpy",
    "ray",
    "click",
    "rich",
    "fsspec",
    "pyarrow",
    "psutil",
    "setproctitle",
    "dataclasses",
    "hashlib",
)
"""What we and Ray import, and is not imported by every Python before it runs anything."""
SHADOWS = (
    *HOSTILE,
    "paddle_reshard",
    "sitecustomize",
    "usercustomize",
    "json",
    "logging",
    "contextlib",
    "typing",
)


def hostile_checkpoint(folder: Path, modules: tuple[str, ...]) -> Path:
    """A copy of a checkpoint in which modules lie that note that they were imported; where they note it."""
    shutil.copytree(SOURCE, folder, copy_function=shutil.copyfile)
    notes = folder.parent / f"imported from {folder.name}"
    notes.mkdir()
    for name in modules:
        note = str(notes / name)
        (folder / f"{name}.py").write_text(
            f"import sys\nopen({note!r}, 'a').write(repr(sys.argv))\nraise ImportError({name!r})\n"
        )
    return notes


def convert_from_there(
    folder: Path, command: list[str], *options: object, removed: tuple[str, ...] = ("RAY_", "PYTHON")
) -> None:
    words = [*command, "convert", ".", folder.parent / "out", "--to", "tp=1", "--memory", "256MiB", *options]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(removed)}
    done = subprocess.run(
        [str(w) for w in words], cwd=folder, capture_output=True, text=True, timeout=300, env=clean
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.cluster
def test_no_process_of_ray_imports_what_lies_in_the_working_directory(tmp_path: Path) -> None:
    notes = hostile_checkpoint(tmp_path / "checkpoint-3", SHADOWS)
    command = [str(Path(sys.executable).parent / "paddle-reshard")]
    convert_from_there(tmp_path / "checkpoint-3", command, "--cluster", "ray", "--workers", 2)
    assert list(notes.iterdir()) == []


def test_nor_does_a_worker_of_a_cluster_that_was_there(cluster: Cluster, tmp_path: Path) -> None:
    notes = hostile_checkpoint(tmp_path / "checkpoint-3", SHADOWS)
    command = [str(Path(sys.executable).parent / "paddle-reshard")]
    there = ("--cluster", f"ray:{cluster.address}", "--workers", 2)
    convert_from_there(tmp_path / "checkpoint-3", command, *there, removed=("PYTHON",))
    assert list(notes.iterdir()) == []


def test_run_as_a_module_it_leaves_the_working_directory_alone(tmp_path: Path) -> None:
    notes = hostile_checkpoint(tmp_path / "checkpoint-3", HOSTILE)
    convert_from_there(tmp_path / "checkpoint-3", [sys.executable, "-m", "paddle_reshard"])
    assert list(notes.iterdir()) == []
