"""Where the tests find real checkpoints: ``tests/corpus``, unpacked case by case when a test asks for one."""

import contextlib
import fcntl
import gc
import hashlib
import os
import secrets
import shutil
import signal
import sys
import tarfile
import tempfile
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.storage.servers import Proxy, Store

REPO = Path(__file__).resolve().parents[1]
UNPACKED = REPO / ".corpus"
CORPUS = REPO / "tests" / "corpus"
GOLDEN = REPO / "tests" / "golden"
COMMITTED = GOLDEN / "cases"
"""The one case that lies unpacked in the repository, so that the tool can be pointed at it."""

if str(REPO) not in sys.path:
    sys.path.insert(0, str(REPO))

from tests.sampling import mark_full  # noqa: E402

pytest.register_assert_rewrite("tests.oracle")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in its background so, and the processes that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

MEMORY = Path("/dev/shm")
MEMORY_BYTES = 6_000_000_000
"""So much may lie there at once: what a few tests write that run beside each other, and objects of Ray."""
HYBRID_CASES = (
    "dp2",
    "mp2",
    "mp2_tied",
    "mp2pp2",
    "mp2pp2_sp",
    "mp2pp2sh2_s1v1_meta_ema",
    "mp2pp2sh2_s1v2_meta_ema",
    "mp2sh2_s1v1_meta",
    "mp2sh2_s1v2_meta_mid",
    "nlp_fused_mp2",
    "nlp_fused_single",
    "nlp_mp2",
    "nlp_single",
    "nlp_sp_mp2pp2",
    "pp2",
    "pp4vpp2",
    "sh2_s1v1",
    "sh2_s1v1_meta",
    "sh2_s1v1_meta_fp32",
    "sh2_s1v2",
    "sh2_s1v2_meta",
    "sh2_s2",
    "sh2_s3_seg512",
    "single",
    "single_fp32",
    "single_l8",
    "single_tied",
)
"""Hybrid-parallel checkpoints of llama, in the group ``dense``."""
FEW_CASES = (
    "mp2_tied",
    "mp2pp2sh2_s1v2_meta_ema",
    "mp2sh2_s1v2_meta_mid",
    "nlp_fused_mp2",
    "sh2_s1v1_meta_fp32",
)
"""Those of them that differ most, for tests that cannot look at all."""


def pytest_configure() -> None:
    """Let temporary files lie in memory: a conversion waits for a disk longer than it computes."""
    if "TMPDIR" not in os.environ and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > MEMORY_BYTES:
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage, and never look at what is alive then: millions of objects of Paddle, Ray and
    pytest, which cost a third of the collection and up to a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make full` runs."""
    tests = REPO / "tests"
    mark_full(
        [(item, item.path.relative_to(tests).as_posix()) for item in items if tests in item.path.parents]
    )


@contextlib.contextmanager
def _one_process_at_a_time(lock: Path) -> Iterator[None]:
    """Let the workers of pytest-xdist unpack one after the other; a killed one leaves no lock behind."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def case_names(group: str) -> tuple[str, ...]:
    """Return the names of all cases of a group, ``group/case`` each."""
    names = {path.name.removesuffix(".tar.xz") for path in (CORPUS / group).glob("*.tar.xz")}
    if group == "dense":
        names |= {path.name for path in COMMITTED.iterdir()}
    return tuple(f"{group}/{name}" for name in sorted(names))


def unpack(archive: Path, into: Path) -> None:
    """Write what an archive holds into a folder; ``extractall(filter="data")`` is only in 3.10.12, 3.11.4 and later."""
    with tarfile.open(archive) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(into)


@cache
def case_directory(name: str) -> Path:
    """Return the folder of a case, ``group/case`` or a case of ``dense``; it is not to be changed.

    It is unpacked on first use, below ``.corpus`` and under the digest of its archive.
    """
    group, _, case = name.rpartition("/")
    if not group and (COMMITTED / case).is_dir():
        return COMMITTED / case
    archive = CORPUS / (group or "dense") / f"{case}.tar.xz"
    if group == "dense" and not archive.exists():
        return case_directory(case)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:16]
    target = UNPACKED / (group or "dense") / digest / case
    with _one_process_at_a_time(target.parent.with_suffix(".lock")):
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            staged = Path(tempfile.mkdtemp(dir=target.parent))
            unpack(archive, staged)
            (staged / case).rename(target)
            shutil.rmtree(staged)
    return target


def checkpoint_of(case: str) -> Path:
    """Return the folder of the only checkpoint of a case; it is not to be changed."""
    (found,) = case_directory(case).glob("checkpoint-*")
    return found


def case_files(groups: tuple[str, ...], pattern: str) -> list[Path]:
    """Return all files of the cases of some groups whose path in the case matches."""
    names = [name for group in groups for name in case_names(group)]
    return sorted(path for name in names for path in case_directory(name).glob(pattern))


def hybrid_cases() -> tuple[str, ...]:
    """Return the names of all hybrid-parallel cases of llama."""
    return HYBRID_CASES


@pytest.fixture(scope="session")
def store() -> "Iterator[Store]":
    """One S3 server per test process, which takes a second of processor time to start."""
    from tests.storage.servers import running_store

    with running_store() as started:
        yield started


@pytest.fixture
def bucket(store: "Store") -> str:
    """One with nothing in it."""
    name = f"test-{secrets.token_hex(6)}"
    store.client.create_bucket(Bucket=name)
    return name


@pytest.fixture
def proxy(store: "Store") -> "Iterator[Proxy]":
    """What stands before the server and can fail."""
    from tests.storage.servers import running_proxy

    with running_proxy(store.url) as proxy:
        yield proxy
