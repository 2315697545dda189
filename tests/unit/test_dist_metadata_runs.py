"""Entries of a ``.metadata`` file that are taken in runs say what they say opcode by opcode, and what ``pickle`` finds.

Windows are small here, and every layout makes a stencil, so that small files have what large ones have.
"""

from __future__ import annotations

import numpy as np
import pytest

from paddle_reshard.pipeline.core.errors import FormatError
from paddle_reshard.storage.files import dist_metadata, dist_metadata_rows, dist_metadata_stencils
from paddle_reshard.storage.files.dist_metadata import DistMetadata, parse_dist_metadata
from tests.conftest import case_files
from tests.dist_metadata_oracle import classes_of, dumped, entries, expected, flattened, loaded, replicated

CLASSES = classes_of("3.3")


def parse(data: bytes) -> DistMetadata:
    return parse_dist_metadata(lambda at, nbytes: data[at : at + nbytes], len(data), "0.metadata")


@pytest.fixture
def fitted(monkeypatch) -> list[int]:
    """Small windows; and how many entries fitted a stencil, per comparison."""
    monkeypatch.setattr(dist_metadata, "READ_AHEAD_BYTES", 1 << 13)
    monkeypatch.setattr(dist_metadata_rows, "_FEWEST_ENTRIES", 1)
    counts: list[int] = []
    fitting = dist_metadata_stencils.Stencil.fitting

    def counted(stencil, rows):
        fits = fitting(stencil, rows)
        counts.append(int(np.count_nonzero(fits)))
        return fits

    monkeypatch.setattr(dist_metadata_stencils.Stencil, "fitting", counted)
    return counts


def one_by_one(data: bytes) -> DistMetadata:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dist_metadata_rows._EntryRuns, "_ready", lambda rows: False)
        return parse(data)


def content(found: DistMetadata) -> tuple[object, ...]:
    return (
        found.keys, found.dtypes, found.shapes, found.files, dict(found.flat_mapping), found.remarks,
        found.pieces.tobytes(), found.locations.tobytes(),
    )  # fmt: skip


def answer(read, data: bytes) -> object:
    """What the file says; an error counts as none."""
    try:
        return content(read(data))
    except FormatError:
        return None


def real_files():
    return case_files(("dense", "moe"), "checkpoint-*/*/*.metadata")


def test_real_files_say_the_same_in_runs_and_one_by_one(fitted):
    files = real_files()
    for path in files:
        data = path.read_bytes()
        assert content(parse(data)) == content(one_by_one(data)), path
    assert len(files) >= 28
    assert sum(fitted) > 1000


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("python", [False, True], ids=["C", "Python"])
def test_real_files_say_the_same_in_every_protocol(protocol, python, fitted):
    """Protocols 2 and 3 number what they store in the memo (BINPUT, LONG_BINPUT) and have no runs."""
    data = max((path.read_bytes() for path in real_files()), key=len)
    again = dumped(loaded(data, CLASSES), CLASSES, protocol, python)
    found = content(parse(again))
    assert (sum(fitted) > 200) == (protocol >= 4)
    assert found == content(one_by_one(again)) == content(parse(data))


def mutable():
    """Files with few entries: of one layout, and with numpy numbers and texts."""
    return [dumped(replicated(CLASSES, 1, 24), CLASSES), dumped(flattened(CLASSES, 1, 12), CLASSES)]


@pytest.mark.parametrize("base", mutable(), ids=["replicated", "flattened"])
def test_other_bytes_change_what_both_say_in_the_same_way(base, fitted):
    """Bytes in turn, with another bit: every byte of an entry in one entry or another, its opcodes included."""
    read = 0
    for at in range(len(base) // 2, len(base) - 512, 11):
        data = base[:at] + bytes([base[at] ^ 1 << at % 8]) + base[at + 1 :]
        found = answer(parse, data)
        assert found == answer(one_by_one, data), at
        read += found is not None
        if found is not None:
            assert entries(parse(data)) == expected(loaded(data, CLASSES)), at
    assert read > 1
    assert sum(fitted) > 200
