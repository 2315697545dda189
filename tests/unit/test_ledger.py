"""What counts as done of a conversion, and who may go on with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paddle_reshard.pipeline.core.errors import BusyError, StaleSessionError, TargetError
from paddle_reshard.storage.checksum import checksum
from paddle_reshard.storage.local.target import LocalTarget
from paddle_reshard.storage.outputs import Outputs
from paddle_reshard.storage.session.ledger import check_receipts
from paddle_reshard.storage.store import Identity, NewFile, Openness, Permission, Receipt, Record, TargetStore

FILES = (NewFile("a", 10, (0, 4)), NewFile("b", 3, (0,)), NewFile("empty", 0, ()))
PARTS = (Receipt("a", 0, 4), Receipt("a", 4, 6), Receipt("b", 0, 3))
IDENTITY = Identity("plan", "version", "source", {"model.pdparams": "10 bytes, v1"})
RESUMING = Permission(resume=True)


def test_every_part_has_one_receipt() -> None:
    assert check_receipts("there", FILES, PARTS).keys() == {("a", 0), ("a", 4), ("b", 0)}
    check_receipts("there", FILES, (*PARTS, PARTS[1]))  # written again, with the same bytes
    with pytest.raises(TargetError, match=r"there/a: the part at byte 4 was never written \(1 are missing\)"):
        check_receipts("there", FILES, (PARTS[0], PARTS[2]))


@pytest.mark.parametrize(
    "other",
    [
        Receipt("a", 4, 5),
        Receipt("a", 4, 7),
        Receipt("a", 5, 5),
        Receipt("c", 0, 3),
        Receipt("b", 0, 3, checksum="1"),
    ],
    ids=["shorter", "longer", "elsewhere", "another file", "other bytes"],
)
def test_what_is_no_part_is_refused(other: Receipt) -> None:
    with pytest.raises(TargetError, match=f"{other.path}: {other.nbytes} bytes were written at byte"):
        check_receipts("there", FILES, (*PARTS, other))
    if other.path == "a":
        with pytest.raises(TargetError, match="at byte"):
            check_receipts("there", FILES, (PARTS[0], other, PARTS[2]))


def unfinished(root: Path) -> Path:
    """A target of which one unit of work is recorded; its session."""
    target = LocalTarget(root)
    writer, _ = target.begin(FILES, IDENTITY)
    target.note([Record(0, (writer.write_part("a", 0, memoryview(b"1234")),))])
    assert target.session is not None
    target.session.release()
    return root.parent / f".{root.name}.reshard"


def resumed(root: Path, identity: Identity = IDENTITY) -> list[int]:
    """The units that a run which resumes a target need not do again."""
    target = LocalTarget(root, RESUMING)
    records = target.begin(FILES, identity)[1]
    assert target.session is not None
    target.session.release()
    return [record.unit for record in records]


def test_only_the_same_conversion_goes_on(tmp_path: Path) -> None:
    unfinished(tmp_path / "target")
    for other, told in (
        (
            Identity("other", "version", "source", IDENTITY.files),
            "it was started with plan plan, this is plan other",
        ),
        (Identity("plan", "other", "source", IDENTITY.files), "by version version of this package"),
        (
            Identity("plan", "version", "source", {"model.pdparams": "10 bytes, v2"}),
            "model.pdparams of the source",
        ),
    ):
        with pytest.raises(StaleSessionError, match=told):
            resumed(tmp_path / "target", other)
    assert resumed(tmp_path / "target") == [0]


def test_nobody_goes_on_with_what_a_run_is_doing(tmp_path: Path) -> None:
    with LocalTarget(tmp_path / "target") as target:
        target.begin(FILES, IDENTITY)
        with pytest.raises(BusyError, match="another conversion is writing it"):
            LocalTarget(tmp_path / "target", RESUMING)


@pytest.mark.parametrize("boot", ["the same", "another"])
def test_after_a_reboot_what_is_not_on_the_disk_is_written_again(boot: str, tmp_path: Path) -> None:
    """Without one the kernel still has what was written. What its record says, and its checksum, decide."""
    staging = unfinished(tmp_path / "target")
    assert resumed(tmp_path / "target") == [0]
    if boot == "another":
        record = (staging / "session.json").read_text()
        now = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert now in record
        (staging / "session.json").write_text(record.replace(now, "another boot"))
        assert resumed(tmp_path / "target") == [0]
        (staging / "session.json").write_text(record.replace(now, "another boot"))
    part = staging / "files" / "a"
    part.write_bytes(b"\0" * len(part.read_bytes()))
    assert resumed(tmp_path / "target") == ([0] if boot == "the same" else [])


def test_what_one_of_two_targets_lacks_is_done_again(tmp_path: Path) -> None:
    def begun() -> tuple[Outputs, list[int]]:
        outputs = Outputs([LocalTarget(tmp_path / name, RESUMING) for name in ("one", "two")])
        files = [replace(new, path=prefix + new.path) for prefix in outputs.targets for new in FILES]
        return outputs, [record.unit for record in outputs.begin(files, IDENTITY, Openness())[1]]

    def record(target: TargetStore, unit: int) -> None:
        target.note([Record(unit, (Receipt("b", 0, 3, checksum=checksum(b"\0\0\0")),))])

    outputs, units = begun()
    assert units == []
    one, two = outputs.targets.values()
    for target, unit in ((one, 0), (two, 1), (one, 2), (two, 2)):
        record(target, unit)
    for target in (one, two):
        assert isinstance(target, LocalTarget) and target.session is not None
        target.session.release()
    outputs, units = begun()
    assert units == [2]
    for target in outputs.targets.values():
        assert isinstance(target, LocalTarget) and target.session is not None
        target.session.release()
