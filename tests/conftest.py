"""Where the tests find real checkpoints.

The whole corpus is unpacked once into ``.corpus`` where its archive is at hand. Without it the tests
run on the cases that are committed in ``tests/golden/cases``.
"""

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
UNPACK = REPO.parent / "shared" / "unpack"
UNPACKED = REPO / ".corpus"
GOLDEN = REPO / "tests" / "golden"
COMMITTED = GOLDEN / "cases"

if str(REPO) not in sys.path:
    sys.path.insert(0, str(REPO))

pytest.register_assert_rewrite("tests.oracle")

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


@contextlib.contextmanager
def _one_process_at_a_time() -> Iterator[None]:
    """Let the workers of pytest-xdist unpack one after the other; a killed one leaves no lock behind."""
    UNPACKED.mkdir(exist_ok=True)
    with (UNPACKED / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@cache
def corpus_root() -> Path | None:
    """Return the folder below which ``corpus/<case>`` lies, unpacked if need be; None without a corpus."""
    if UNPACK.exists():
        with _one_process_at_a_time():
            subprocess.run([UNPACK, UNPACKED], check=True)
    return UNPACKED if (UNPACKED / "corpus").is_dir() else None


def committed_cases() -> tuple[str, ...]:
    """Return the names of the cases in ``tests/golden/cases``."""
    names = {
        path.name.removesuffix(".tar.xz") for path in COMMITTED.iterdir() if not path.name.startswith(".")
    }
    return tuple(sorted(names))


@cache
def committed_case(name: str, kind: str = "cases") -> Path:
    """Return the folder of a case that is committed in ``tests/golden/<kind>``; it is not to be changed.

    One that is packed is unpacked on first use.
    """
    if (GOLDEN / kind / name).is_dir():
        return GOLDEN / kind / name
    archive = GOLDEN / kind / f"{name}.tar.xz"
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:16]
    target = UNPACKED / "golden" / f"{name}-{digest}"
    with _one_process_at_a_time():
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            staged = Path(tempfile.mkdtemp(dir=target.parent))
            with tarfile.open(archive, "r:xz") as packed:
                packed.extractall(staged, filter="data")
            (staged / name).rename(target)
            shutil.rmtree(staged)
    return target


def hybrid_cases() -> tuple[str, ...]:
    """Return the names of all hybrid cases that can be read here."""
    return HYBRID_CASES if corpus_root() else committed_cases()


def case_directory(name: str) -> Path:
    """Return the folder of a case: ``checkpoint-3/`` and ``truth.safetensors``."""
    root = corpus_root()
    return root / "corpus" / name if root else committed_case(name)
