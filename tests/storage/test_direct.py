"""Writes without the kernel's cache: every byte is right wherever parts begin and end, whoever writes next to them, and
whatever the cache holds or the file system refuses."""

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import TargetError
from paddle_reshard.storage.aligned import SECTOR_BYTES, memory_for, memory_in_huge_pages
from paddle_reshard.storage.local import direct as direct_module
from paddle_reshard.storage.local.direct import (
    BLOCK_BYTES,
    CLONING,
    MOST_BLOCKS,
    SMALLEST_BYTES,
    Blocks,
    Direct,
    direct_writes,
)
from paddle_reshard.storage.local.source import LocalSource, file_system
from paddle_reshard.storage.local.target import LocalTarget, LocalWriter
from paddle_reshard.storage.store import CopyRange, Identity, NewFile
from tests import oracle
from tests.conftest import REPO
from tests.storage.contents import ONE_CARD, middle

PAGE = mmap.PAGESIZE
SIZE = 3 * SMALLEST_BYTES + 5 * PAGE + 77
CONTENT = random.Random(1).randbytes(SIZE)
BYPASSING = getattr(os, "O_DIRECT", 0)
MEMORY = Path("/dev/shm")


@pytest.fixture()
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder on the disk of the repository, unless ``--basetemp`` is on one with direct writes: memory has none."""
    if direct_writes(tmp_path) is not None:
        yield tmp_path
        return
    parent = REPO / ".disk"
    parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        yield Path(folder)


@pytest.fixture()
def writer(tmp_path: Path) -> LocalWriter:
    """Writes directly into two files, as far as the file system of the tests does it."""
    for name in ("a", "b"):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, SIZE)
    return LocalWriter(tmp_path, "t", Direct(tmp_path.stat().st_dev, PAGE, clones=False))


def _in_memory(byte_offset: int, content: bytes, shift: int = 0) -> memoryview:
    memory = memory_for(len(content) + shift, byte_offset)[shift:]
    memory[:] = content
    return memory


def _ranges(cuts: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *sorted(cuts), SIZE]))


def _cached(path: Path) -> list[bool]:
    """Which pages of a file are in the kernel's cache (``mincore(2)``)."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        size = len(mapped)
        found = (ctypes.c_ubyte * -(-size // PAGE))()
        view = np.frombuffer(mapped, dtype=np.uint8)
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), found) == 0
        del view
    return [bool(page & 1) for page in found]


def _check(path: Path, wanted: bytes) -> None:
    """The content as the cache has it, and as the disk has it."""
    assert path.read_bytes() == wanted
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    assert path.read_bytes() == wanted


CUTS = {
    "whole": [],
    "odd": [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 5, SMALLEST_BYTES + 3 * PAGE + 1, SIZE - 1],
    "pages": [PAGE, SMALLEST_BYTES, 2 * SMALLEST_BYTES],
    "tiny": [2 * SMALLEST_BYTES + 100 + i for i in range(40)],
    "one page": [SMALLEST_BYTES + 7, SMALLEST_BYTES + 11, SMALLEST_BYTES + PAGE - 2],
}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_parts_that_share_pages_are_written_at_the_same_time(
    cuts: list[int], writer: LocalWriter, tmp_path: Path
) -> None:
    ranges = _ranges(cuts)
    random.Random(len(cuts)).shuffle(ranges)
    copying = pickle.loads(pickle.dumps(writer))

    def write(part: tuple[int, int]) -> None:
        start, stop = part
        receipt = writer.write_part("a", start, _in_memory(start, CONTENT[start:stop]))
        assert (receipt.path, receipt.byte_offset, receipt.nbytes) == ("a", start, stop - start)

    def copy(part: tuple[int, int]) -> None:
        start, stop = part
        copying.copy_part(CopyRange("b", start, stop - start, "s", start + 5), source)

    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "s").write_bytes(b"-----" + CONTENT)
    source = LocalSource(tmp_path / "source")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda do: do[0](do[1]), itertools.product((write, copy), ranges)))
    _check(tmp_path / "a", CONTENT)
    _check(tmp_path / "b", CONTENT)


@pytest.mark.parametrize("ahead", [0, 1, 31, 32, 513, PAGE - 1])
def test_copies_from_any_byte_to_any_byte(ahead: int, writer: LocalWriter, tmp_path: Path) -> None:
    """The target is ``ahead`` bytes further in its page than the source; more than a block is copied."""
    content = random.Random(2).randbytes(BLOCK_BYTES + SMALLEST_BYTES + 99)
    os.truncate(tmp_path / "a", len(content) + ahead + 3)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "s").write_bytes(content)
    writer.copy_part(CopyRange("a", ahead, len(content), "s", 0), LocalSource(tmp_path / "source"))
    assert (tmp_path / "a").read_bytes() == bytes(ahead) + content + bytes(3)


def test_only_pages_that_lie_wholly_in_a_part_bypass_the_cache(tmp_path: Path) -> None:
    """As it is on disks of which it is known."""
    found = direct_writes(tmp_path)
    if found is None:
        pytest.skip(f"{tmp_path} is on {file_system(tmp_path.stat().st_dev)}")
    unit = found.unit_bytes // PAGE
    with LocalTarget(tmp_path / "t") as target:
        writer, _ = target.begin(
            [NewFile("a", SIZE, (0, 3)), NewFile("b", SIZE, (0,))], Identity("plan", "version", "source", {})
        )
        assert writer.direct == found
        first = SIZE // found.unit_bytes * unit
        for name, start in (("a", 3), ("b", 0)):
            writer.write_part(name, start, _in_memory(start, CONTENT[start:]))
            cached = _cached(tmp_path / ".t.reshard" / "files" / name)
            assert not any(cached[unit if start else 0 : first])
            assert any(cached) or not start
        (tmp_path / "s").write_bytes(CONTENT)
        writer.copy_part(CopyRange("a", 3, SIZE - 3, "s", 3), LocalSource(tmp_path, names=["s"]))
        assert not any(_cached(tmp_path / ".t.reshard" / "files" / "a")[unit:first])


def test_a_conversion_to_a_disk_is_the_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if direct_writes(tmp_path) is None:
        pytest.skip(f"{tmp_path} is on {file_system(tmp_path.stat().st_dev)}")
    pwrite, written = os.pwrite, {True: 0, False: 0}

    def counted(descriptor: int, buffer: memoryview, byte_offset: int) -> int:
        count = pwrite(descriptor, buffer, byte_offset)
        written[bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & BYPASSING)] += count
        return count

    monkeypatch.setattr(os, "pwrite", counted)
    paddle_reshard.convert(middle(), tmp_path / "one", **ONE_CARD)
    assert written[True] > written[False] > 0
    truth = oracle.read_truth(middle().parent / "truth.safetensors")
    oracle.assert_same_tensors(oracle.read_checkpoint(tmp_path / "one", oracle.shapes_of(truth)), truth)


def test_what_the_cache_holds_of_a_half_written_file_is_replaced(writer: LocalWriter, tmp_path: Path) -> None:
    """A resumed run has read the file, in large stretches; an earlier one may still have pages to write back."""
    path = tmp_path / "a"
    with open(path, "r+b") as file:
        file.write(bytes(255 - byte for byte in CONTENT))
        os.fsync(file.fileno())
        assert len(path.read_bytes()) == SIZE
        file.seek(SMALLEST_BYTES)
        file.write(b"dirty" * PAGE)
    ranges = _ranges([SMALLEST_BYTES + 3, 2 * SMALLEST_BYTES + 9 * PAGE + 1])
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda r: writer.write_part("a", r[0], _in_memory(r[0], CONTENT[r[0] : r[1]])), ranges))
    _check(path, CONTENT)


@pytest.mark.parametrize("shift", [SECTOR_BYTES, 1], ids=["sector", "byte"])
def test_memory_that_begins_elsewhere(shift: int, writer: LocalWriter, tmp_path: Path) -> None:
    writer.write_part("a", 7, _in_memory(7, CONTENT[7:], shift))
    _check(tmp_path / "a", bytes(7) + CONTENT[7:])


@pytest.mark.skipif(not MEMORY.is_dir(), reason="no file system in memory")
def test_file_systems_of_which_it_is_not_known(writer: LocalWriter, tmp_path: Path) -> None:
    assert file_system(MEMORY.stat().st_dev) == "tmpfs"
    assert file_system(Path("/proc").stat().st_dev) == "proc"
    assert file_system(os.makedev(4094, 1)) == ""
    assert direct_writes(MEMORY) is None
    assert "tmpfs" not in CLONING
    # A file on another device than the one that was looked at.
    elsewhere = LocalWriter(tmp_path, "t", Direct(MEMORY.stat().st_dev, PAGE, clones=False))
    elsewhere.write_part("a", 0, _in_memory(0, CONTENT))
    assert all(_cached(tmp_path / "a")[:-1])  # the last page may be known in part
    assert (tmp_path / "a").read_bytes() == CONTENT


def _refusing(code: int, whole: int) -> Callable[..., int]:
    """``os.pwrite`` for which direct writes fail after ``whole`` bytes were written."""
    pwrite, written = os.pwrite, 0

    def refuse(descriptor: int, buffer: memoryview, byte_offset: int) -> int:
        nonlocal written
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & BYPASSING:
            if written >= whole:
                raise OSError(code, os.strerror(code))
            buffer = buffer[: whole - written]
            written += len(buffer)
            if len(buffer) % PAGE:  # what only the file system itself could do
                fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_RDWR)
        return pwrite(descriptor, buffer, byte_offset)

    return refuse


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("whole", [0, 3 * PAGE, 3 * PAGE + 100], ids=["nothing", "pages", "part of a page"])
def test_a_file_system_that_refuses(
    code: int, whole: int, writer: LocalWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", _refusing(code, whole))
    writer.write_part("a", 5, _in_memory(5, CONTENT[5:]))
    monkeypatch.undo()
    _check(tmp_path / "a", bytes(5) + CONTENT[5:])


def test_a_file_system_that_refuses_to_be_asked(
    writer: LocalWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = fcntl.fcntl

    def refuse(descriptor: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & BYPASSING:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really(descriptor, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    writer.write_part("a", 5, _in_memory(5, CONTENT[5:]))
    _check(tmp_path / "a", bytes(5) + CONTENT[5:])


@pytest.mark.skipif(not BYPASSING, reason="the system has no direct writes")
def test_a_disk_that_is_full_is_not_worked_around(
    writer: LocalWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", _refusing(errno.ENOSPC, 3 * PAGE))
    told = rf"^t: no space left on the disk \({tmp_path}/a\)"
    with pytest.raises(TargetError, match=told) as failed:
        writer.write_part("a", 5, _in_memory(5, CONTENT[5:]))
    assert failed.value.retryable


def test_files_may_share_blocks_where_both_sides_begin_with_one() -> None:
    cloning = Direct(0, PAGE, clones=True)
    assert cloning.may_share(PAGE, 0)
    assert not cloning.may_share(PAGE, 7)
    assert not cloning.may_share(7, 7)
    assert not Direct(0, PAGE, clones=False).may_share(0, 0)


def test_copies_take_turns_with_a_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(nbytes: int) -> memoryview:
        made.append(nbytes)
        return memory_in_huge_pages(nbytes)

    monkeypatch.setattr(direct_module, "memory_in_huge_pages", counted)
    blocks = Blocks()

    def use(number: int) -> bool:
        with blocks.block() as block:
            block[:8] = number.to_bytes(8, "little")
            return bytes(block[:8]) == number.to_bytes(8, "little")

    with ThreadPoolExecutor(4 * MOST_BLOCKS) as pool:
        assert all(pool.map(use, range(500)))
    assert 1 <= len(made) <= MOST_BLOCKS
