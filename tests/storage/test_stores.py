"""What every store promises, on a disk, where fsspec reaches, and on S3: one suite, and each test runs on all of them.

What is special to one of them is in modules of its own: direct writes and renames of a disk, S3's requests and uploads.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CheckpointError, OccupiedError, TargetError
from paddle_reshard.pipeline.core.events import Event, StepEnded
from paddle_reshard.storage.store import Identity, NewFile, Read, Receipt, Record, TargetStore, WritePart
from tests.conftest import case_directory
from tests.storage.contents import ONE_CARD, SMALL, TARGET, assert_same_checkpoint, in_folder
from tests.storage.places import Place, in_memory_of_fsspec, on_disk, on_s3

PART = 5 << 20
LARGE = "q?versionId=1 größe 50%25+a&b#c.pdparams"
"""Its name means something in a URL."""
FILES = (
    NewFile(LARGE, 2 * PART + 7, (0, PART, 2 * PART)),
    NewFile("empty", 0, ()),
    NewFile("empty too", 0, (0,)),
    NewFile("saved_signal_0", 1, (0,)),
    NewFile("config.json", 2, (0,)),
)
CONTENTS = {
    LARGE: b"abcde" * (2 << 20) + b"1234567",
    "empty": b"",
    "empty too": b"",
    "saved_signal_0": b"1",
    "config.json": b"{}",
}
assert [len(CONTENTS[new.path]) for new in FILES] == [new.size_bytes for new in FILES]
MANIFEST, SAID = "paddle_reshard.json", b"{manifest}"
ASKED = Identity("plan", "version", "source", {})
NAMES = ("plain.bin", "two words", "x+y=1", "50%", "50%25", "größe", "a&b", "~tilde", "q?versionId=1", "a#b")
"""Some mean something in a URL."""


@pytest.fixture(params=["s3", "disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "s3":
        return on_s3(request.getfixturevalue("store"), request.getfixturevalue("bucket"))
    return {"disk": on_disk, "memory": in_memory_of_fsspec}[request.param](tmp_path)


# ------------------------------------------------------------------------------------------------- reading


def test_ranges_of_files_of_any_name_are_read_alone_and_together(place: Place) -> None:
    contents = {name: random.Random(name).randbytes(10_000) for name in NAMES}
    place.fill(contents)
    source = pickle.loads(pickle.dumps(place.open_source()))
    assert source.sizes() == {name: 10_000 for name in NAMES}
    wanted = [(name, start, 1 + start % 700) for name in NAMES for start in range(9, 9_000, 2_200)]
    reads = [Read(name, start, memoryview(bytearray(nbytes))) for name, start, nbytes in wanted]
    source.read_many(reads)
    for (name, start, nbytes), read in zip(wanted, reads, strict=True):
        assert read.buffer == contents[name][start : start + nbytes]
    for name, content in contents.items():
        assert source.read(name, 777, 9_000) == content[777:9_777]
    with source.kept_open() as files:
        assert files.read(NAMES[0], 9_999, 1) == contents[NAMES[0]][-1:]


def test_only_what_was_listed_is_read(place: Place) -> None:
    place.fill({"a": b"1"})
    source = place.open_source()
    place.fill({"b": b"2"})
    for path in ("b", "../a", "none", "c/../../secret", "/etc/hostname"):
        with pytest.raises(CheckpointError, match="did not exist"):
            source.read(path, 0, 1)
    with pytest.raises(CheckpointError, match="ends at byte 1"):
        source.read("a", 0, 2)
    assert source.read("a", 1, 0) == b""


def test_a_source_that_changes_is_noticed(place: Place) -> None:
    place.fill({"a": b"one", "b": b"two"})
    source = place.open_source()
    source.check_unchanged()
    place.fill({"b": b"two, and more"})
    with pytest.raises(CheckpointError, match="b: changed while it was read"):
        source.check_unchanged()


def test_there_is_no_checkpoint(place: Place) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        paddle_reshard.inspect(place.url, storage_options=place.options)


# ------------------------------------------------------------------------------------------- the moves of a target


def begin(target: TargetStore) -> WritePart:
    return target.begin(FILES, ASKED)[0]


def write(writer: WritePart) -> list[Receipt]:
    """The last part first."""
    receipts = []
    for new in FILES:
        for start, stop in pairwise((*new.part_starts, new.size_bytes) if new.size_bytes else ()):
            receipts.append(writer.write_part(new.path, start, memoryview(CONTENTS[new.path])[start:stop]))
    return receipts[::-1]


def test_nothing_appears_before_its_time(place: Place) -> None:
    with place.open_target() as target:
        writer = begin(target)
        receipts = write(pickle.loads(pickle.dumps(writer)))
        again = writer.write_part("config.json", 0, memoryview(b"{}"))
        assert again in receipts  # a part that is written again replaces itself
        assert place.files == {}
        staged = target.finish([*receipts, again])
        sizes = {path: len(content) for path, content in CONTENTS.items()}
        assert {**staged.sizes(), "saved_signal_0": 1} == sizes
        assert staged.read(LARGE, PART - 3, 6) == CONTENTS[LARGE][PART - 3 :][:6]
        assert not place.files.keys() & {MANIFEST, "saved_signal_0"}
        target.publish(MANIFEST, SAID)
    assert place.files == {**CONTENTS, MANIFEST: SAID}
    assert not place.begun() and place.held().keys() == {f"c/{path}" for path in place.files}
    assert place.open_source().read("config.json", 0, 2) == b"{}"


def _without(receipts: Sequence[Receipt], path: str, byte_offset: int) -> list[Receipt]:
    return [r for r in receipts if (r.path, r.byte_offset) != (path, byte_offset)]


def test_receipts_that_do_not_cover_every_file_are_refused(place: Place) -> None:
    with pytest.raises(TargetError, match="never written"), place.open_target() as target:
        target.finish(_without(write(begin(target)), LARGE, PART))
    for wrong in (
        Receipt(LARGE, PART, 3),
        Receipt(LARGE, PART + 1, PART),
        Receipt("other", 0, 1),
        Receipt("config.json", 0, 2, "another tag"),
    ):
        with pytest.raises(TargetError, match="not a part of it"), place.open_target() as target:
            target.finish([*write(begin(target)), wrong])
    assert place.held() == {} and not place.begun()


def test_a_neighbour_whose_name_begins_alike_does_not_occupy(place: Place) -> None:
    place.put("c-2/theirs", b"theirs")
    if place.room.startswith("s3"):
        place.put("c/", b"")  # the folder, as consoles make one
    with place.open_target() as target:
        target.finish(write(begin(target)))
        target.publish(MANIFEST, SAID)
    assert place.held() == {"c-2/theirs": b"theirs"} | {
        f"c/{path}": data for path, data in place.files.items()
    }


@pytest.mark.parametrize("theirs", ["notes.txt", "deep/notes.txt"])
def test_what_others_have_there_is_kept(theirs: str, place: Place) -> None:
    place.fill({theirs: b"theirs"})
    with pytest.raises(TargetError, match="not empty"), place.open_target() as target:
        begin(target)
    with (
        pytest.raises(TargetError, match=f"there is {theirs.partition('/')[0]}"),
        place.open_target(overwrite=True),
    ):
        pass
    assert place.held() == {f"c/{theirs}": b"theirs"} and not place.begun()


def test_what_others_put_there_meanwhile_is_kept(place: Place) -> None:
    with pytest.raises(TargetError), place.open_target() as target:
        receipts = write(begin(target))
        target.note([Record(0, tuple(receipts))])
        place.fill({"theirs": b"theirs"})
        target.finish(receipts)
        target.publish(MANIFEST, SAID)
    assert place.files == {"theirs": b"theirs"}
    paddle_reshard.clean(place.url, storage_options=place.options)
    assert place.held() == {"c/theirs": b"theirs"} and not place.begun()


def test_finished_work_is_resumed_by_the_same_conversion_alone(place: Place) -> None:
    with pytest.raises(InterruptedError), place.open_target() as target:
        *_, first = write(begin(target))
        target.note([Record(0, (first,))])
        raise InterruptedError
    assert place.files == {}
    with pytest.raises(CheckpointError, match=r"no such folder|an unfinished conversion, not a checkpoint"):
        place.open_source()
    with pytest.raises(TargetError), place.open_target(resume=True) as target:
        target.begin(FILES, Identity("another plan", "version", "source", {}))
    with place.open_target(resume=True) as target:
        writer, records = target.begin(FILES, ASKED)
        assert [record.receipts for record in records] == [(first,)]
        target.finish([first, *_without(write(writer), first.path, first.byte_offset)])
        target.publish(MANIFEST, SAID)
    assert place.files == {**CONTENTS, MANIFEST: SAID} and not place.begun()


def test_a_failure_leaves_the_conversion_that_was_to_be_replaced(
    place: Place, for_four: dict[str, bytes]
) -> None:
    """Where files appear one by one, between the first and the last neither could be read: there it is refused."""
    place.fill(for_four)
    before = place.held()
    if place.room.startswith("memory"):
        with pytest.raises(TargetError, match=r"no complete checkpoint.*choose another target, or remove"):
            place.open_target(overwrite=True)
        assert place.held() == before
        return
    with pytest.raises(InterruptedError), place.open_target(overwrite=True) as target:
        target.note([Record(0, tuple(write(begin(target))))])
        raise InterruptedError
    assert place.files == for_four and place.begun()
    assert paddle_reshard.clean(place.url, storage_options=place.options)
    assert place.held() == before and not place.begun()


def test_a_leftover_probe_is_ignored(place: Place) -> None:
    if place.room.startswith(("s3", "memory")):  # no disk is probed
        place.fill({".paddle_reshard_probe-1": b""})
    with place.open_target() as target:
        target.finish(write(begin(target)))
        target.publish(MANIFEST, SAID)
    assert place.held().keys() == {f"c/{path}" for path in (*CONTENTS, MANIFEST)}


# --------------------------------------------------------------------------------------------------- conversions


def test_conversions_there_and_back_give_the_bytes_that_they_give_on_a_disk(
    place: Place, for_four: dict[str, bytes], for_one_card: dict[str, bytes]
) -> None:
    there, options = f"{place.room}/run/checkpoint-3", {"storage_options": place.options}
    paddle_reshard.convert(SMALL, there, **options, **TARGET)
    made = {path.removeprefix("run/checkpoint-3/"): content for path, content in place.held().items()}
    assert_same_checkpoint(made, for_four)
    paddle_reshard.convert(f"{there}/", place.url, **options, **ONE_CARD)
    assert_same_checkpoint(place.files, for_one_card)
    assert paddle_reshard.verify(SMALL, place.url, storage_options={"target": place.options}).equal


def _fail(event: Event) -> None:
    if isinstance(event, StepEnded) and event.step == "verify":
        raise CheckpointError("not what was planned")


def test_a_refusal_takes_back_what_has_appeared(place: Place) -> None:
    request = {"storage_options": place.options, **ONE_CARD}
    with pytest.raises(CheckpointError, match="planned"):
        paddle_reshard.convert(SMALL, place.url, observe=_fail, **request)
    assert place.held() == {} and not place.begun()
    paddle_reshard.plan(SMALL, place.url, **request)


def test_the_checkpoint_of_a_trainer_is_never_replaced(place: Place) -> None:
    """Whoever exchanges the two is told what the target is."""
    trained = in_folder(case_directory("dense/single") / "checkpoint-3")
    place.fill(trained)
    for options in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(OccupiedError, match="are SRC and DST exchanged"):
            paddle_reshard.convert(SMALL, place.url, storage_options=place.options, **options, **ONE_CARD)
    assert place.files == trained


@pytest.mark.parametrize(
    "theirs", ["optimizer.py", "notes.txt", "checkpoint-100/config.json", "model_state/diary.txt"]
)
def test_a_conversion_with_something_of_others_is_not_replaced(
    theirs: str, place: Place, for_four: dict[str, bytes]
) -> None:
    place.fill({**for_four, theirs: b"theirs"})
    with pytest.raises(OccupiedError, match=f"there is also {theirs.partition('/')[0]}.*move that away"):
        place.open_target(overwrite=True)
    assert place.files == {**for_four, theirs: b"theirs"}
