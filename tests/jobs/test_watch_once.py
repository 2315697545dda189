"""What a watcher must never get wrong: converted when whole, taken back when it changes, kept when it is another's."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.request.parse import parse_request
from paddle_reshard.pipeline.watch.decisions import Policy
from paddle_reshard.pipeline.watch.notices import Result
from paddle_reshard.pipeline.watch.records import conversion_id
from paddle_reshard.pipeline.watch.runners import Conversion, convert_inline
from paddle_reshard.pipeline.watch.watcher import Watcher
from tests.jobs.command import GOLDEN, copy_checkpoint, snapshot
from tests.jobs.training import Run


def trainer_order() -> Iterator[Path]:
    """The files of a checkpoint in the order in which a trainer writes them."""
    order = (
        "config",
        "training_args",
        "model_state",
        "model_meta",
        "ema",
        "rng",
        "optimizer",
        "saved_signal",
        "sch",
    )
    for prefix in (*order, "trainer_state"):
        yield from sorted(path for path in GOLDEN.iterdir() if path.name.startswith(prefix))


def test_a_growing_checkpoint_is_converted_when_its_last_file_is_there(
    training: Run, one_card: dict[str, bytes]
) -> None:

    def identify(source: str, target: str) -> str:
        return conversion_id({"source": source, "target": target})

    conversion = Conversion(parse_request({"to": "tp=1"}), identify)
    watcher = Watcher(str(training.run), str(training.out), conversion, Policy())
    assert watcher.once() == {}
    folder = training.run / "checkpoint-3"
    folder.mkdir()
    files = list(trainer_order())
    assert {path.name for path in files} == {path.name for path in GOLDEN.iterdir()}
    for path in files:
        assert watcher.once() == {"checkpoint-3": Result.WAITING}, path.name
        data = path.read_bytes()
        (folder / path.name).write_bytes(data[: len(data) // 2])  # half-written
        if path.name.startswith(("model_state", "optimizer", "ema", "model_meta")):
            assert watcher.once() == {"checkpoint-3": Result.WAITING}, path.name
        (folder / path.name).write_bytes(data)
    assert training.states() == ["seen"]
    assert watcher.once() == {"checkpoint-3": Result.CONVERTED}
    assert watcher.once() == {"checkpoint-3": Result.DONE}
    assert snapshot(training.out / "checkpoint-3") == one_card
    assert training.states() == ["done"]


def test_a_file_that_appears_during_the_conversion_takes_it_back(training: Run) -> None:

    folder = copy_checkpoint(training.run / "checkpoint-3")
    conversion = Conversion(parse_request({"to": "tp=1"}), lambda source, target: "id")
    plain, late = convert_inline(conversion), [folder / "special_tokens_map.json"]

    def convert(source: str, target: str, begin, check) -> None:
        def at_the_end() -> None:
            while late:
                late.pop().write_text("{}")
            check()

        plain(source, target, begin, at_the_end)

    watcher = Watcher(str(training.run), str(training.out), conversion, Policy(), convert)
    assert watcher.once() == {"checkpoint-3": Result.WAITING}
    assert (training.converted(), training.states()) == ([], ["seen"])
    assert watcher.once() == {"checkpoint-3": Result.CONVERTED}
    assert training.states() == ["done"]
    assert (training.out / "checkpoint-3" / "special_tokens_map.json").exists()


def test_keep_does_not_touch_a_conversion_that_was_replaced_or_adopted(training: Run) -> None:
    copy_checkpoint(training.run / "checkpoint-3")
    copy_checkpoint(training.run / "checkpoint-6")
    paddle_reshard.convert(training.run / "checkpoint-3", training.out / "checkpoint-3", to="tp=1")
    assert "checkpoint-3: converted already; recorded" in training.watch().stderr
    manifest = training.out / "checkpoint-6" / "paddle_reshard.json"
    manifest.write_text(manifest.read_text().replace('"plan_id": "', '"plan_id": "x'))
    copy_checkpoint(training.run / "checkpoint-9")
    training.watch("--keep", 1)
    assert training.converted() == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]
    assert training.states() == ["adopted", "done", "done"]


@pytest.mark.parametrize("harm", ["truncated", "missing"])
def test_a_finished_checkpoint_that_is_not_whole_is_damaged_once_it_has_settled(
    harm: str, training: Run
) -> None:
    folder = copy_checkpoint(training.run / "checkpoint-3")
    spoiled = folder / "optimizer.tp00_pp00_shard00.pdopt"
    whole = spoiled.read_bytes()
    if harm == "missing":
        spoiled.unlink()
    else:
        os.truncate(spoiled, 5000)
    waiting = training.watch()
    assert (waiting.returncode, "checkpoint-3: waiting: " in waiting.stderr) == (0, True)
    training.change_record(since=time.time() - 61)
    damaged = training.watch()
    assert damaged.returncode == 1
    assert "checkpoint-3: damaged: it is marked as finished, and has not changed since 20" in damaged.stderr
    assert spoiled.name in damaged.stderr and "1 failed" in damaged.stderr
    (folder / "saved_signal_5").unlink()  # the trainer may not have finished
    training.watch()
    training.change_record(since=time.time() - 61)
    assert training.watch().returncode == 0
    (folder / "saved_signal_5").write_bytes(b"1")
    spoiled.write_bytes(whole)
    for path in folder.glob("saved_signal_*"):
        path.touch()
    assert "checkpoint-3: converted in " in training.watch().stderr
