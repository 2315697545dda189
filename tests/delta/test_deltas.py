"""What a delta makes of the old checkpoint is the new one, byte for byte, or nothing."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
import tracemalloc
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pytest
import safetensors.numpy

import paddle_reshard
from paddle_reshard.pipeline.cli.main import cli
from paddle_reshard.pipeline.core.errors import (
    CheckpointError,
    MemoryBudgetError,
    TargetError,
    UsageError,
)
from paddle_reshard.pipeline.core.events import Event, Progress, StepStarted
from paddle_reshard.pipeline.core.file_names import MANIFEST
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES
from tests.conftest import REPO, case_directory
from tests.storage.contents import in_memory

LLAMA = "dense/mp2sh2_s1v2_meta_mid"
PAIRS = (
    ("dense/single", "dense/single"),
    ("dense/single", "states/p5_single"),
    ("dense/sh2_s1v1_meta", "dense/sh2_s1v2_meta"),
    ("dense/mp2", "dense/mp2_tied"),
    ("dense/fc_single", "dense/fc_sh2_s1v2"),
    ("dense/uc_single", "dense/uc_sh2_s1v2"),
    ("moe/moe_single", "moe/moe_fused_single"),
    ("states/fp16_single", "states/opt_mini_single"),
)
"""Real checkpoints of one or of two jobs: most bytes differ, and so do shapes, keys, files and formats."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def assert_is(made: Path, wanted: Path) -> None:
    """The same files; only a checkpoint that had no manifest has got one."""
    found, files = contents(made), contents(wanted)
    if MANIFEST not in files:
        assert paddle_reshard.check(made).intact
        del found[MANIFEST]
    assert found.keys() == files.keys()
    assert [path for path in files if found[path] != files[path]] == []


def checkpoint(case: str) -> Path:
    return next(case_directory(case).glob("checkpoint-*"))


def step(export: Path, target: Path, share: float = 0.02) -> Path:
    """An export with a share of all elements one unit in the last place away, and without a manifest."""
    random = np.random.default_rng(7)
    shutil.copytree(export, target, copy_function=shutil.copyfile)
    (target / MANIFEST).unlink()
    for path in target.glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        elements = np.frombuffer(data, "<u2", offset=8 + int.from_bytes(data[:8], "little"))
        elements[random.random(len(elements)) < share] += 1
        path.write_bytes(data)
    return target


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports") / "old"
    paddle_reshard.convert(checkpoint(LLAMA), folder, format="huggingface", max_shard_size="300KB")
    return folder


@pytest.fixture(scope="module")
def stepped(export: Path) -> Path:
    return step(export, export.with_name("new"))


@pytest.fixture(scope="module")
def made(export: Path, stepped: Path) -> Path:
    """The delta between the two."""
    folder = export.with_name("delta")
    paddle_reshard.delta(export, stepped, folder)
    return folder


# ------------------------------------------------------------------------------------------------- what comes back


@pytest.mark.parametrize(("old", "new"), PAIRS, ids=lambda case: case.rpartition("/")[2])
def test_every_file_of_real_checkpoints_comes_back(old: str, new: str, tmp_path: Path) -> None:
    report = paddle_reshard.delta(checkpoint(old), checkpoint(new), tmp_path / "d")
    assert report.same_bytes + report.compared_bytes + report.whole_bytes == report.new_bytes
    assert report.same_bytes == report.new_bytes or old != new
    paddle_reshard.apply_delta(checkpoint(old), tmp_path / "d", tmp_path / "made")
    assert_is(tmp_path / "made", checkpoint(new))


def test_two_percent_of_an_export_take_two_hundredths_of_it(export: Path, stepped: Path, made: Path) -> None:
    report = paddle_reshard.delta(export, stepped, made.with_name("again"))
    assert report.whole_bytes == 0
    assert (made / "delta.bin").stat().st_size < 0.015 * report.new_bytes
    assert contents(made)["delta.json"] == contents(made.with_name("again"))["delta.json"]
    assert paddle_reshard.check(made).intact


def test_tensors_are_found_in_whatever_file_has_them(export: Path, tmp_path: Path) -> None:
    paddle_reshard.convert(checkpoint(LLAMA), tmp_path / "one", format="huggingface")
    new = step(tmp_path / "one", tmp_path / "new")
    paddle_reshard.delta(export, new, tmp_path / "d")
    assert (tmp_path / "d" / "delta.bin").stat().st_size < 0.02 * sum(map(len, contents(new).values()))
    paddle_reshard.apply_delta(export, tmp_path / "d", tmp_path / "made")
    assert_is(tmp_path / "made", new)


def test_arrays_that_moved_inside_a_pickle_are_found(tmp_path: Path) -> None:
    """A number that takes a byte more moves everything behind it."""
    weight = np.random.default_rng(1).integers(0, 2**32, 100_000, "u4").view("f4")
    for name, number, value in (("old", 255, weight), ("new", 256, weight)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "optimizer.pdopt").write_bytes(pickle.dumps({"step": number, "w": value}, 4))
    report = paddle_reshard.delta(tmp_path / "old", tmp_path / "new", tmp_path / "d")
    assert report.same_bytes > weight.nbytes
    assert (tmp_path / "d" / "delta.bin").stat().st_size < 300
    paddle_reshard.apply_delta(tmp_path / "old", tmp_path / "d", tmp_path / "made")
    assert_is(tmp_path / "made", tmp_path / "new")


def test_the_reader_of_the_documentation_makes_the_same(
    export: Path, stepped: Path, made: Path, tmp_path: Path
) -> None:
    page = (REPO / "docs" / "deltas.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    mixed = tmp_path / "mixed"
    paddle_reshard.delta(checkpoint("dense/fc_single"), checkpoint("dense/fc_sh2_s1v2"), mixed)
    for old, delta, new in (
        (export, made, stepped),
        (checkpoint("dense/fc_single"), mixed, checkpoint("dense/fc_sh2_s1v2")),
    ):
        target = tmp_path / old.name
        subprocess.run([sys.executable, "-c", program, old, delta, target], check=True, timeout=60)
        assert contents(target) == contents(new)


def test_object_stores(export: Path, stepped: Path) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    memory = fsspec.filesystem("memory")
    memory.put(f"{export}/", f"{root}/old/", recursive=True)
    paddle_reshard.delta(f"{root}/old", stepped, f"{root}/delta")
    paddle_reshard.apply_delta(f"{root}/old", f"{root}/delta", f"{root}/new")
    assert {**in_memory(f"{root}/new"), **contents(stepped)} == in_memory(f"{root}/new")
    assert in_memory(f"{root}/new").keys() == contents(stepped).keys() | {MANIFEST}
    with pytest.raises(TargetError, match="is not empty"):
        paddle_reshard.apply_delta(f"{root}/old", f"{root}/delta", f"{root}/new")


def test_folders_that_are_no_checkpoints_own_are_reported(export: Path, tmp_path: Path) -> None:
    new = step(export, tmp_path / "new")
    (new / "logs").mkdir()
    assert paddle_reshard.delta(export, new, tmp_path / "d").folders_left == ("logs",)


# --------------------------------------------------------------------------------------------------- what is refused


def test_another_old_checkpoint_is_refused(export: Path, stepped: Path, made: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="are not those that the delta was made from") as refused:
        paddle_reshard.apply_delta(stepped, made, tmp_path / "made")
    assert str(export) in str(refused.value)
    with pytest.raises(CheckpointError, match="has 825 bytes; the delta was made from 768 bytes"):
        paddle_reshard.apply_delta(checkpoint(LLAMA), made, tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


def test_a_delta_is_not_taken_for_a_checkpoint(made: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a delta, not a checkpoint; .* apply OLD DELTA DST"):
        paddle_reshard.convert(made, tmp_path / "x", to="tp=1")


def test_one_changed_bit_of_the_old_checkpoint_is_seen(export: Path, made: Path, tmp_path: Path) -> None:
    compared = [export / name for name in json.loads((made / "delta.json").read_text())["old"]["files"]]
    assert {path.name for path in export.iterdir()} - {path.name for path in compared} == {MANIFEST}
    for path in compared:
        old = tmp_path / path.name
        shutil.copytree(export, old, copy_function=shutil.copyfile)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        (old / path.name).write_bytes(data)
        with pytest.raises(CheckpointError, match=re.escape(path.name)):
            paddle_reshard.apply_delta(old, made, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def damage_data(delta: Path) -> None:
    data = bytearray((delta / "delta.bin").read_bytes())
    data[len(data) // 2] ^= 16
    (delta / "delta.bin").write_bytes(data)


def cut_data(delta: Path) -> None:
    (delta / "delta.bin").write_bytes((delta / "delta.bin").read_bytes()[:-1])


def damage_document(delta: Path) -> None:
    text = (delta / "delta.json").read_text()
    (delta / "delta.json").write_text(text.replace('"sparse",', '"dense", ', 1))


def damage_manifest(delta: Path) -> None:
    text = (delta / MANIFEST).read_text()
    (delta / MANIFEST).write_text(text.replace('"plan_id": "', '"plan_id": "0', 1))


def lose_document(delta: Path) -> None:
    (delta / "delta.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_data, r"delta\.bin: is damaged in bytes"),
        (cut_data, r"delta\.bin has \d+ bytes, the blocks take"),
        (damage_document, r"delta\.json: is damaged"),
        (damage_manifest, r"was changed after it was written"),
        (lose_document, r"has no delta\.json"),
    ],
)
def test_a_damaged_delta_is_refused(
    damage: Callable[[Path], None], words: str, export: Path, made: Path, tmp_path: Path
) -> None:
    shutil.copytree(made, tmp_path / "d", copy_function=shutil.copyfile)
    damage(tmp_path / "d")
    with pytest.raises(CheckpointError, match=words):
        paddle_reshard.apply_delta(export, tmp_path / "d", tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_places_that_overlap_and_names_that_are_no_options_are_refused(export: Path, made: Path) -> None:
    with pytest.raises(UsageError, match="same folder"):
        paddle_reshard.delta(export, made, export)
    with pytest.raises(UsageError, match="inside each other"):
        paddle_reshard.apply_delta(export, made, made / "new")
    with pytest.raises(TypeError, match="overwrit"):
        paddle_reshard.apply_delta(export, made, made, overwritten=True)  # type: ignore[call-arg]


# -------------------------------------------------------------------------------------- stopped, resumed, replaced


class Stop(Exception):
    """Whatever may end a run."""


def stopping(after: int) -> Callable[[Event], None]:
    """An observer that ends a run when so many parts are written."""
    parts: list[Progress] = []
    step = []

    def observe(event: Event) -> None:
        if isinstance(event, StepStarted):
            step.append(event.step)
        elif isinstance(event, Progress) and step[-1] == "write" and not event.before:
            parts.append(event)
            if len(parts) == after:
                raise Stop

    return observe


def test_a_stopped_run_publishes_nothing_and_is_resumed(
    export: Path, stepped: Path, made: Path, tmp_path: Path
) -> None:
    again: dict[str, Callable[..., Any]] = {
        "d": lambda **options: paddle_reshard.delta(export, stepped, tmp_path / "d", **options),
        "made": lambda **options: paddle_reshard.apply_delta(export, made, tmp_path / "made", **options),
    }
    for name, act in again.items():
        with pytest.raises(Stop):
            act(observe=stopping(after=1))
        assert not (tmp_path / name).exists()
        with pytest.raises(TargetError, match="unfinished conversion"):
            act()
        resumed = act(resume=True).resumed_bytes
        assert resumed > 0
        finished = act(resume=True)
        assert finished.resumed_bytes == sum(p.stat().st_size for p in (tmp_path / name).iterdir()) - (
            (tmp_path / name / MANIFEST).stat().st_size
        )
    assert contents(tmp_path / "d")["delta.bin"] == contents(made)["delta.bin"]
    assert_is(tmp_path / "made", stepped)


def test_what_is_there_is_replaced_only_on_request(
    export: Path, stepped: Path, made: Path, tmp_path: Path
) -> None:
    target = tmp_path / "serving"
    shutil.copytree(export, target, copy_function=shutil.copyfile)
    with pytest.raises(TargetError, match="is not empty"):
        paddle_reshard.apply_delta(export, made, target)
    paddle_reshard.apply_delta(export, made, target, overwrite=True)
    assert_is(target, stepped)
    (target / "notes.txt").write_text("mine")
    with pytest.raises(TargetError, match=r"notes\.txt"):
        paddle_reshard.apply_delta(export, made, target, overwrite=True)
    paddle_reshard.delta(stepped, export, tmp_path / "back")
    paddle_reshard.delta(stepped, export, tmp_path / "back", overwrite=True)
    paddle_reshard.apply_delta(stepped, tmp_path / "back", tmp_path / "old")
    assert_is(tmp_path / "old", export)


# ----------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(("dtype", "share"), [("u1", 0.12), ("f4", 1.0)])
def test_memory_stays_below_what_the_budget_leaves(dtype: str, share: float, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    old = np.frombuffer(random.bytes(18 << 20), dtype)
    new = old.copy()
    hit = np.frombuffer(random.bytes(len(old)), "u1") < share * 256
    new.view(f"u{new.itemsize}")[hit] += 1
    for name, value in (("old", old), ("new", new)):
        (tmp_path / name).mkdir()
        safetensors.numpy.save_file({"w": value}, tmp_path / name / "model.safetensors")
    with pytest.raises(MemoryBudgetError), pytest.MonkeyPatch.context() as patch:
        patch.setattr("paddle_reshard.pipeline.core.units.SMALLEST_BUDGET_BYTES", 0)
        paddle_reshard.delta(tmp_path / "old", tmp_path / "new", tmp_path / "d", memory="200MiB")
    most_bytes = (256 << 20) - FOOTPRINT_BYTES
    for act in (
        lambda: paddle_reshard.delta(tmp_path / "old", tmp_path / "new", tmp_path / "d", memory="256MiB"),
        lambda: paddle_reshard.apply_delta(tmp_path / "old", tmp_path / "d", tmp_path / "m", memory="256MiB"),
    ):
        peak = held_bytes(act)
        assert most_bytes / 5 < peak < most_bytes
    assert_is(tmp_path / "m", tmp_path / "new")


def held_bytes(act: Callable[[], object]) -> int:
    """The most bytes that Python and NumPy held at a time, and the most that Arrow held."""
    before = pyarrow.default_memory_pool().max_memory()
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1] + pyarrow.default_memory_pool().max_memory() - before
    finally:
        tracemalloc.stop()


# ----------------------------------------------------------------------------------------------------- command line


def test_commands_say_what_they_made(export: Path, stepped: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner

    delta = CliRunner().invoke(cli, ["delta", str(export), str(stepped), str(tmp_path / "d")])
    assert "of the new checkpoint" in delta.output
    apply = CliRunner().invoke(
        cli, ["apply", str(export), str(tmp_path / "d"), str(tmp_path / "m"), "--quiet"]
    )
    assert (delta.exit_code, apply.exit_code, apply.output) == (0, 0, "")
    assert_is(tmp_path / "m", stepped)
