"""Checkpoints that lie, contradict themselves or are not whole are refused before a byte is written.

Each damage of `refusals.py` is done to a copy of a real checkpoint. The message must name the file or tensor and both
values; nothing may appear beside the target, and the source must stay as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import DriftError, ReshardError
from paddle_reshard.pipeline.core.events import StepStarted
from tests.hostile.damage import copied, holder, sound
from tests.hostile.messages import damaged, entry, recorded
from tests.hostile.refusals import DAMAGES, DEMO, FIRST, FOUR, NORM, PLAIN, Damage, of_another_file


def fingerprint(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_refused_before_a_byte_is_written(damage: Damage, tmp_path: Path) -> None:
    source = damaged(damage, tmp_path)
    before = fingerprint(source)
    with pytest.raises(damage.error) as caught:
        paddle_reshard.convert(source, tmp_path / "target", **damage.request)
    for fact in damage.facts:
        assert fact in str(caught.value)
    assert entry(damage, caught.value, tmp_path) in recorded()
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]
    assert fingerprint(source) == before


def test_a_tensor_in_two_files_is_compared(tmp_path: Path) -> None:
    """A copy is one; what has other values is none."""
    key, other = f"{NORM}/moment2_0", f"optimizer-{FIRST}"
    source = copied(FOUR, tmp_path / "source")
    of_another_file("optimizer", key, other, lambda values: values)(source)
    paddle_reshard.convert(source, tmp_path / "equal", format="unified")
    of_another_file("optimizer", key, other, lambda values: values * 2)(source)
    with pytest.raises(DriftError, match=rf"{NORM} \(moment2\).*{other}") as caught:
        paddle_reshard.convert(source, tmp_path / "target", format="unified")
    assert holder(source, "optimizer", key).name in str(caught.value)
    assert not (tmp_path / "target").exists()


def flip_bit(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(bytes(data))


def payload_of(path: Path, entry: str) -> int:
    """Byte offset of an array's payload, found by its own bytes."""
    with path.open("rb") as file:
        name_and_array = pickle.load(file)[entry]
    array = name_and_array[1] if isinstance(name_and_array, tuple) else name_and_array
    return path.read_bytes().index(array.tobytes())


def test_no_message_is_recorded_twice_or_of_nothing() -> None:
    assert [of.partition(" (")[0] for of in recorded()] == [damage.name for damage in DAMAGES]


@pytest.fixture
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a sound checkpoint, of ``DEMO`` if no other is asked for."""
    return copied(getattr(request, "param", DEMO), tmp_path / "source")


MOMENT = "create_parameter_0.w_0_fp32_master_0_moment1_0"


def test_drift_of_copies_is_refused_and_can_be_allowed_or_not_looked_for(
    source: Path, tmp_path: Path
) -> None:
    path = source / "optimizer.tp01_pp00_shard01.pdopt"
    flip_bit(path, payload_of(path, MOMENT))
    with pytest.raises(ReshardError) as caught:
        paddle_reshard.convert(source, tmp_path / "target", to="tp=1")
    named = "model.layers.0.input_layernorm.weight (moment1)"
    for fact in (named, "optimizer.tp00_pp00_shard01.pdopt", "optimizer.tp01_pp00_shard01.pdopt"):
        assert fact in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
    allowed = paddle_reshard.convert(source, tmp_path / "allowed", to="tp=1", replicas="report")
    (line,) = allowed.moved.replica_drift
    assert named in line
    manifest = json.loads((tmp_path / "allowed" / "paddle_reshard.json").read_text())
    assert line in manifest["source"]["replica_drift"]
    first = paddle_reshard.convert(source, tmp_path / "first", to="tp=1", replicas="first")
    assert first.moved.compared_elements == 0
    for target in ("allowed", "first"):
        # The copy that drifted was not the first one, so the target is what the undamaged source gives.
        assert paddle_reshard.verify(sound(DEMO), tmp_path / target).equal


@pytest.mark.parametrize("source", [PLAIN], indirect=True)
def test_a_stored_parameter_that_is_not_the_cast_of_its_master_weight_is_not_dropped(
    source: Path, tmp_path: Path
) -> None:
    path = source / "model_state.tp00.pdparams"
    flip_bit(path, payload_of(path, "model.layers.1.mlp.up_proj.weight"))
    for topology in ("pp=2", "sharding=2"):  # one that stores both, and one that stores master weights only
        for replicas in ("compare", "report"):  # it is never taken for drift
            with pytest.raises(ReshardError, match=r"model.layers.1.mlp.up_proj.weight \(param\)"):
                paddle_reshard.convert(source, tmp_path / "target", to=topology, replicas=replicas)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("rewritten", [True, False], ids=["rewritten", "replaced"])
@pytest.mark.parametrize("step", ["move", "verify"])
def test_a_source_that_changes_and_gets_back_its_size_and_time_is_refused(
    step: str, rewritten: bool, source: Path, tmp_path: Path
) -> None:
    path = source / "optimizer.tp01_pp00_shard01.pdopt"
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[payload_of(path, MOMENT)] ^= 1

    def change_late(event: object) -> None:
        if isinstance(event, StepStarted) and event.step == step:
            new = path if rewritten else path.with_name("new")
            new.write_bytes(bytes(data))
            new.rename(path)
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            now = path.stat()
            assert (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)

    with pytest.raises(ReshardError, match=rf"{path.name}: changed while it was read"):
        paddle_reshard.convert(source, tmp_path / "target", to="tp=1", observe=change_late, replicas="report")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]
