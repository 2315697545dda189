"""What a container, a pod or a slice of systemd leaves of the memory, and that a run refuses to exceed it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.clusters import container
from paddle_reshard.clusters.container import MemoryLimit, tightest_limit
from paddle_reshard.clusters.ray import join
from paddle_reshard.clusters.ray.worker import ReshardWorker
from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from tests.conftest import case_directory

MIB = 1 << 20
ROOT = "/sys/fs/cgroup"
STAT_V2 = """\
anon 50331648
file 209715200
kernel 9437184
shmem 20971520
inactive_file 125829120
active_file 62914560
unevictable 0
slab_reclaimable 4194304
slab_unreclaimable 2097152
workingset_refault_file 0
"""
"""Of 260 MiB in use, 184 can be dropped. Files in memory (shmem) are part of ``file`` and can't be."""
STAT_V1 = """\
cache 12582912
rss 33554432
inactive_file 4194304
active_file 4194304
hierarchical_memory_limit 536870912
total_cache 104857600
total_rss 268435456
total_shmem 0
total_inactive_file 62914560
total_active_file 41943040
"""
"""Entries without ``total_`` lack the groups below."""
V1_LINES = "12:pids:/docker/4f1c\n9:memory:/docker/4f1c\n1:name=systemd:/docker/4f1c\n0::/system.slice/docker.service\n"


def v2(folder: str, limit: str, current: int = 260 * MIB, stat: str = STAT_V2) -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{current}\n",
        f"{folder}/memory.stat": stat,
    }


def v1(folder: str, limit: int, usage: int = 360 * MIB) -> dict[str, str]:
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": STAT_V1,
    }


POD = f"{ROOT}/kubepods.slice/kubepods-pod1.slice"
CASES: Mapping[str, tuple[str, dict[str, str], tuple[str, int, int] | None]] = {
    "a container with its own root": ("0::/\n", v2(ROOT, "536870912"), (f"{ROOT}/memory.max", 512, 76)),
    "no limit": ("0::/\n", v2(ROOT, "max"), None),
    "a pod's limit binds its container": (
        "0::/kubepods.slice/kubepods-pod1.slice/cri-9a.scope\n",
        v2(f"{POD}/cri-9a.scope", "max") | v2(POD, "1073741824", 900 * MIB) | v2(f"{ROOT}/kubepods.slice", "max"),
        (f"{POD}/memory.max", 1024, 716),
    ),
    "the group that leaves least, not the lowest limit": (
        "0::/a.slice/b.scope\n",
        v2(f"{ROOT}/a.slice/b.scope", str(512 * MIB)) | v2(f"{ROOT}/a.slice", str(1024 * MIB), 1100 * MIB),
        (f"{ROOT}/a.slice/memory.max", 1024, 916),
    ),
    "a group outside the namespace": ("0::/../../b.scope\n", v2(ROOT, "536870912"), (f"{ROOT}/memory.max", 512, 76)),
    "version 1, with the host's path": (
        V1_LINES, v1(f"{ROOT}/memory", 512 * MIB), (f"{ROOT}/memory/memory.limit_in_bytes", 512, 260)
    ),
    "version 1 beside version 2, nested": (
        "4:memory:/process/5276\n0::/\n",
        v1(f"{ROOT}/memory/process/5276", 9223372036854771712) | v1(f"{ROOT}/memory/process", 400 * MIB),
        (f"{ROOT}/memory/process/memory.limit_in_bytes", 400, 260),
    ),
    "version 1 without a limit": (V1_LINES, v1(f"{ROOT}/memory", 9223372036854771712), None),
    "no statistics": (
        "0::/\n",
        {f"{ROOT}/memory.max": "536870912\n", f"{ROOT}/memory.current": "1048576\n"},
        (f"{ROOT}/memory.max", 512, 1),
    ),
    "more in use than the limit, which was lowered": ("0::/\n", v2(ROOT, "1048576"), (f"{ROOT}/memory.max", 1, 76)),
    "no control groups are mounted": ("0::/\n", {}, None),
    "nothing that can be read": ("not a line\n9:memory\n:::\n", v2(ROOT, "1"), None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_limit_that_leaves_least(name: str) -> None:
    groups, files, expected = CASES[name]
    found = tightest_limit(groups, files.get)
    if expected is None:
        assert found is None
        return
    path, limit, used = expected
    assert found == MemoryLimit(path, limit * MIB, used * MIB)
    assert found.left_bytes == max(0, limit - used) * MIB


def test_a_system_without_control_groups_has_no_limit() -> None:
    assert tightest_limit(None, {}.get) is None


@pytest.fixture
def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of a container that leaves 4 MiB."""
    folder = tmp_path / "cgroup"
    folder.mkdir()
    for path, text in v2(str(folder), str(80 * MIB)).items():
        Path(path).write_text(text)
    (tmp_path / "self").write_text("0::/\n")
    monkeypatch.setattr(container, "PROCESS", str(tmp_path / "self"))
    monkeypatch.setattr(container, "MOUNT", str(folder))
    return folder


def test_a_run_that_would_be_killed_moves_nothing(limited: Path, tmp_path: Path) -> None:
    source = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
    (limited / "memory.max").write_text(f"{80 * MIB}\n")
    with pytest.raises(UsageError) as refused:
        paddle_reshard.convert(source, tmp_path / "T", to="tp=1")
    assert f"{limited}/memory.max leaves {4 * MIB} bytes ({80 * MIB} less {76 * MIB} in use)" in str(
        refused.value
    )
    assert "raise the memory limit" in str(refused.value)
    assert {path.name for path in tmp_path.iterdir()} == {"cgroup", "self"}
    # The same work fits where more is left, although the default budget of 1 GiB does not.
    (limited / "memory.max").write_text(f"{600 * MIB}\n")
    paddle_reshard.convert(source, tmp_path / "T", to="tp=1")
    assert paddle_reshard.verify(source, tmp_path / "T").equal


def test_a_worker_that_could_not_use_its_memory_says_so(limited: Path) -> None:
    (limited / "memory.max").write_text(f"{500 * MIB}\n")
    left = 500 - 76
    refused = ReshardWorker(None, None, None, 0, 1024 * MIB, {}).prepare()
    assert isinstance(refused, UsageError)
    assert f"use --memory {left + FOOTPRINT_BYTES // MIB}MiB, or raise" in str(refused)
    ready = ReshardWorker(None, None, None, 0, left * MIB + FOOTPRINT_BYTES, {}).prepare()
    assert isinstance(ready, tuple)


def test_a_private_ray_stays_within_a_limit_that_ray_does_not_see(limited: Path) -> None:
    """Ray reads only the limit at the root of the control groups; this one is of a group below it."""
    left = (2048 - 76) * MIB
    (limited / "memory.max").write_text(f"{2048 * MIB}\n")
    settings = join.memory_settings(system_bytes=8192 * MIB)
    assert settings == {"object_store_memory": left * 3 // 10, "_memory": left - left * 3 // 10}
    assert join.memory_settings(system_bytes=2048 * MIB) == {}, "Ray sees it, and reckons with it"
    (limited / "memory.max").write_text("max\n")
    assert join.memory_settings(system_bytes=8192 * MIB) == {}
