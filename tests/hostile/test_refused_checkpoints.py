"""Checkpoints that lie, contradict themselves or are not whole are refused before a byte is written.

Each damage is done to a copy of a real checkpoint. The message must name the file or tensor and both values;
nothing may appear beside the target, and the source must stay as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import CoverageError, ReshardError
from paddle_reshard.pipeline.core.events import StepStarted
from tests.conftest import case_directory

DEMO = "mp2pp2sh2_s1v2_meta_ema"
V1 = "sh2_s1v1_meta_fp32"
PLAIN = "mp2_tied"


def fingerprint(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def edit_json(folder: Path, name: str, change: Callable[[dict], None]) -> None:
    data = json.loads((folder / name).read_text())
    change(data)
    (folder / name).write_text(json.dumps(data))


def edit_pickle(folder: Path, name: str, change: Callable[[dict], None]) -> None:
    """Load one file of a trusted test case, change it, write it back in the shape it had."""
    path = folder / name
    with path.open("rb") as file:
        data = pickle.load(file)
    change(data)
    with path.open("wb") as file:
        pickle.dump(data, file, protocol=4)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def copy(name: str, to: str) -> Callable[[Path], None]:
    return lambda folder: shutil.copy(folder / name, folder / to)


def truncate(name: str, nbytes: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:-nbytes])

    return change


def config(**values: object) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder, "config.json", lambda data: data.update(values))


def meta(change: Callable[[dict], None]) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder, "model_meta.json", change)


def optimizer(name: str, change: Callable[[dict], None]) -> Callable[[Path], None]:
    return lambda folder: edit_pickle(folder, name, change)


def in_cell(cell: str, change: Callable[[dict], None]) -> Callable[[Path], None]:
    return meta(lambda data: change(data["sharding_metas"][cell]))


def drop_slices(data: dict) -> None:
    """Remove every entry of one parameter from one rank's optimizer file."""
    for key in [k for k in data if k.startswith("linear_7.w_0_")]:
        del data[key]
    del data["master_weights"]["linear_7.w_0"]


def shorten(data: dict) -> None:
    name, array = data["linear_7.w_0_fp32_master_0_moment1_0"]
    data["linear_7.w_0_fp32_master_0_moment1_0"] = (name, array[:-8])


def rename_entry(old: str, new: str) -> Callable[[dict], None]:
    def change(data: dict) -> None:
        data[new] = data.pop(old)

    return change


OPT = "optimizer.tp00_pp00_shard01.pdopt"
DAMAGES: list[tuple[str, str, Callable[[Path], None], list[str]]] = [
    ("missing shard", DEMO, remove(OPT), [OPT, "missing"]),
    ("missing ema shard", DEMO, remove("ema.tp01_pp01_shard00.pdopt"), ["ema.tp01_pp01_shard00.pdopt"]),
    (
        "missing model_state",
        DEMO,
        remove("model_state.tp00_pp01_shard00.pdparams"),
        ["model_state.tp00_pp01_shard00"],
    ),
    ("missing config", DEMO, remove("config.json"), ["config.json is missing"]),
    ("truncated shard", DEMO, truncate(OPT, 100), [OPT]),
    ("empty file", DEMO, lambda folder: (folder / OPT).write_bytes(b""), [OPT]),
    ("duplicated shard", DEMO, copy(OPT, "optimizer.tp00_pp00_shard001.pdopt"), ["shard001", "same rank"]),
    ("extra shard", DEMO, copy(OPT, "optimizer.tp00_pp00_shard02.pdopt"), ["sharding_degree=2", "3"]),
    ("extra tensor file", DEMO, copy(OPT, "optimizer.old.pdopt"), ["optimizer.old.pdopt"]),
    ("unknown tensor file", DEMO, copy(OPT, "momentum.pdparams"), ["momentum.pdparams"]),
    ("unfinished save", DEMO, remove("saved_signal_3"), ["7 saved_signal_*", "8 ranks"]),
    (
        "degrees contradict",
        DEMO,
        meta(lambda data: data["parallel_config"].update(mp_degree=4)),
        ["mp_degree=4", "2"],
    ),
    (
        "expert parallel",
        DEMO,
        meta(lambda data: data["parallel_config"].update(ep_degree=2)),
        ["moe_sharding_degree=0", "ep=2"],
    ),
    (
        "unknown strategy",
        DEMO,
        meta(
            lambda data: [m.update(sharding_strategy="MuonSharding") for m in data["sharding_metas"].values()]
        ),
        ["MuonSharding"],
    ),
    (
        "strategy of another kind",
        DEMO,
        in_cell("tp00_pp00", lambda cell: cell.update(sharding_strategy=[])),
        ["tp00_pp00", "[]"],
    ),
    (
        "overlap of another kind",
        DEMO,
        in_cell("tp00_pp00", lambda cell: cell.update(enable_overlap="yes")),
        ["tp00_pp00", "'yes'"],
    ),
    (
        "an absurd shape",
        DEMO,
        in_cell(
            "tp00_pp00",
            lambda cell: cell["param_meta"]["model.embed_tokens.weight"].__setitem__(0, [2**63, 64]),
        ),
        ["model.embed_tokens.weight", "9223372036854775808"],
    ),
    (
        "strategies contradict",
        DEMO,
        in_cell("tp00_pp01", lambda cell: cell.update(sharding_strategy="ShardingV1")),
        ["stage1v2", "stage1v1"],
    ),
    (
        "wrong strategy",
        DEMO,
        meta(
            lambda data: [m.update(sharding_strategy="ShardingV1") for m in data["sharding_metas"].values()]
        ),
        ["stage1v1"],
    ),
    (
        "one cell too many",
        DEMO,
        meta(lambda data: data["sharding_metas"].update(tp02_pp00=data["sharding_metas"]["tp01_pp00"])),
        ["tp02_pp00"],
    ),
    (
        "owner contradicts",
        V1,
        meta(lambda data: data["sharding_metas"]["tp00_pp00"]["param2rank"].update({"linear_2.w_0": 0})),
        ["model.layers.0.self_attn.v_proj.weight", "param2rank says rank 0", "optimizer.shard01.pdopt"],
    ),
    (
        "no such cell",
        DEMO,
        meta(lambda data: data["sharding_metas"].pop("tp01_pp01")),
        ["tp01_pp01"],
    ),
    (
        "no param_meta under v2",
        DEMO,
        in_cell("tp00_pp00", lambda cell: cell.pop("param_meta")),
        ["model.embed_tokens.weight", "param_meta", "stage1v2"],
    ),
    (
        "tp ranks hold different tensors",
        DEMO,
        in_cell(
            "tp01_pp00", lambda cell: cell["structure_name_mapping"].update({"model.extra": "extra_0.w_0"})
        ),
        ["model.extra"],
    ),
    (
        "is_distributed contradicts the rule",
        DEMO,
        meta(
            lambda data: [
                m["param_meta"]["model.layers.0.self_attn.q_proj.weight"].__setitem__(2, False)
                for c, m in data["sharding_metas"].items()
                if c.endswith("pp00")
            ]
        ),
        ["model.layers.0.self_attn.q_proj.weight", "is_distributed=False", "dim 1"],
    ),
    (
        "shape contradicts the config",
        DEMO,
        config(intermediate_size=100),
        ["model.layers.0.mlp.gate_proj.weight", "(64, 100)", "(64, 96)"],
    ),
    ("layer count contradicts", DEMO, config(num_hidden_layers=5), ["5 decoder layers", "layer 4"]),
    ("unknown model", DEMO, config(model_type="mystery"), ["'mystery'", "--rules"]),
    (
        "tensor without a rule",
        PLAIN,
        lambda folder: [
            edit_pickle(folder, f"model_state.{tp}.pdparams", add_parameter) for tp in ("tp00", "tp01")
        ],
        ["model.layers.0.self_attn.gate.weight", "no row"],
    ),
    (
        "slice missing in one rank",
        DEMO,
        optimizer("optimizer.tp00_pp00_shard01.pdopt", drop_slices),
        ["q_proj"],
    ),
    ("slice too short", DEMO, optimizer(OPT, shorten), ["2040", "2048"]),
    (
        "unknown accumulator",
        DEMO,
        optimizer(
            OPT, rename_entry("linear_7.w_0_fp32_master_0_moment1_0", "linear_7.w_0_fp32_master_0_moment9_0")
        ),
        ["linear_7.w_0_fp32_master_0_moment9_0", "not a known accumulator"],
    ),
    (
        "accumulator of an unknown parameter",
        DEMO,
        optimizer(
            OPT, rename_entry("linear_7.w_0_fp32_master_0_moment1_0", "linear_77.w_0_fp32_master_0_moment1_0")
        ),
        ["linear_77.w_0_fp32_master_0_moment1_0"],
    ),
    (
        "learning rates contradict",
        DEMO,
        optimizer(OPT, lambda data: data["LR_Scheduler"].update(last_epoch=4)),
        ["LR_Scheduler"],
    ),
    (
        "several ranks hold a whole tensor",
        V1,
        lambda folder: edit_pickle(
            folder, "optimizer.shard00.pdopt", lambda data: data.update(stolen(folder))
        ),
        ["several ranks"],
    ),
    (
        "offloaded optimizer",
        DEMO,
        optimizer(OPT, lambda data: data.update(offload_buffer=("offload_buffer", np.zeros(4, np.float32)))),
        ["offload_buffer"],
    ),
    ("not a pickle", DEMO, lambda folder: (folder / OPT).write_bytes(b"\x80\x04not a pickle."), [OPT]),
    ("not json", DEMO, lambda folder: (folder / "model_meta.json").write_text("{"), ["model_meta.json"]),
    (
        "dtype that is not known",
        DEMO,
        in_cell("tp00_pp00", lambda cell: cell["param_meta"]["model.embed_tokens.weight"].__setitem__(1, 99)),
        ["model.embed_tokens.weight", "99"],
    ),
]


def add_parameter(data: dict) -> None:
    data["model.layers.0.self_attn.gate.weight"] = np.zeros((64,), np.uint16)
    data["StructuredToParameterName@@"]["model.layers.0.self_attn.gate.weight"] = "linear_99.w_0"


def stolen(folder: Path) -> dict:
    """A tensor that another rank owns too."""
    with (folder / "optimizer.shard01.pdopt").open("rb") as file:
        other = pickle.load(file)
    return {"linear_2.w_0_moment1_0": other["linear_2.w_0_moment1_0"]}


@pytest.mark.parametrize(("case", "damage", "facts"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_refused_before_a_byte_is_written(
    case: str, damage: Callable[[Path], None], facts: list[str], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(next(case_directory(case).glob("checkpoint-*")), source, copy_function=shutil.copyfile)
    damage(source)
    before = fingerprint(source)
    with pytest.raises(ReshardError) as caught:
        paddle_reshard.convert(source, tmp_path / "target", to="tp=1")
    for fact in facts:
        assert fact in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]
    assert fingerprint(source) == before


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


def test_copies_that_drifted_apart_are_found_while_moving_and_nothing_is_published(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(case_directory(DEMO) / "checkpoint-3", source, copy_function=shutil.copyfile)
    path = source / "optimizer.tp01_pp00_shard01.pdopt"
    flip_bit(path, payload_of(path, "create_parameter_0.w_0_fp32_master_0_moment1_0"))
    with pytest.raises(paddle_reshard.ReshardError) as caught:
        paddle_reshard.convert(source, tmp_path / "target", to="tp=1")
    message = str(caught.value)
    assert "model.layers.0.input_layernorm.weight (moment1)" in message
    assert "optimizer.tp00_pp00_shard01.pdopt" in message
    assert "optimizer.tp01_pp00_shard01.pdopt" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_a_stored_parameter_that_is_not_the_cast_of_its_master_weight_is_not_dropped(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(next(case_directory(PLAIN).glob("checkpoint-*")), source, copy_function=shutil.copyfile)
    path = source / "model_state.tp00.pdparams"
    flip_bit(path, payload_of(path, "model.layers.1.mlp.up_proj.weight"))
    for topology in ("pp=2", "sharding=2"):  # one that stores both, and one that stores master weights only
        with pytest.raises(ReshardError, match=r"model.layers.1.mlp.up_proj.weight \(param\)"):
            paddle_reshard.convert(source, tmp_path / "target", to=topology)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(case_directory(DEMO) / "checkpoint-3", source, copy_function=shutil.copyfile)

    def change_late(event: object) -> None:
        if getattr(event, "step", "") == "verify":
            (source / "scheduler.pdparams").write_bytes(b"another")

    with pytest.raises(ReshardError, match=r"scheduler\.pdparams: changed while it was read"):
        paddle_reshard.convert(source, tmp_path / "target", to="tp=1", observe=change_late)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def _rewrite(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _replace(path: Path, data: bytes) -> None:
    path.with_name("new").write_bytes(data)
    path.with_name("new").rename(path)


@pytest.mark.parametrize("change", [_rewrite, _replace])
@pytest.mark.parametrize("step", ["move", "verify"])
def test_a_source_that_changes_and_gets_back_its_size_and_time_is_refused(
    step: str, change: Callable[[Path, bytes], None], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(case_directory(DEMO) / "checkpoint-3", source, copy_function=shutil.copyfile)
    path = source / "optimizer.tp01_pp00_shard01.pdopt"
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[payload_of(path, "create_parameter_0.w_0_fp32_master_0_moment1_0")] ^= 1

    def change_late(event: object) -> None:
        if isinstance(event, StepStarted) and event.step == step:
            change(path, bytes(data))
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            now = path.stat()
            assert (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)

    with pytest.raises(ReshardError, match=rf"{path.name}: changed while it was read"):
        paddle_reshard.convert(source, tmp_path / "target", to="tp=1", observe=change_late, replicas="report")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_drift_can_be_allowed_or_not_looked_for_and_is_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(case_directory(DEMO) / "checkpoint-3", source, copy_function=shutil.copyfile)
    path = source / "optimizer.tp01_pp00_shard01.pdopt"
    flip_bit(path, payload_of(path, "create_parameter_0.w_0_fp32_master_0_moment1_0"))
    allowed = paddle_reshard.convert(source, tmp_path / "allowed", to="tp=1", replicas="report")
    (line,) = allowed.moved.replica_drift
    assert "model.layers.0.input_layernorm.weight (moment1)" in line
    assert (
        line
        in json.loads((tmp_path / "allowed" / "paddle_reshard.json").read_text())["source"]["replica_drift"]
    )
    first = paddle_reshard.convert(source, tmp_path / "first", to="tp=1", replicas="first")
    assert first.moved.compared_elements == 0
    real = case_directory(DEMO) / "checkpoint-3"
    for target in ("allowed", "first"):
        assert paddle_reshard.verify(tmp_path / target, tmp_path / "first").equal
        # The copy that drifted was not the first one, so the target is what the undamaged source gives.
        assert paddle_reshard.verify(real, tmp_path / target).equal


def test_an_edited_parameter_is_never_taken_for_drift(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(next(case_directory(PLAIN).glob("checkpoint-*")), source, copy_function=shutil.copyfile)
    path = source / "model_state.tp00.pdparams"
    flip_bit(path, payload_of(path, "model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ReshardError, match="the target would keep the master weight only"):
        paddle_reshard.convert(source, tmp_path / "target", to="sharding=2", replicas="report")


@pytest.mark.parametrize(
    "key", ["model.norm.weight", "lm_head.weight", "model.layers.2.input_layernorm.weight"]
)
def test_a_plain_checkpoint_without_a_tensor_of_its_model_is_refused(key: str, tmp_path: Path) -> None:
    """Nothing in these files says which tensors there are: only the model does."""
    source = tmp_path / "source"
    shutil.copytree(case_directory("dense/single") / "checkpoint-3", source)
    weights = pickle.loads((source / "model_state.pdparams").read_bytes())
    name = weights["StructuredToParameterName@@"].pop(key)
    del weights[key]
    states = pickle.loads((source / "optimizer.pdopt").read_bytes())
    del states["master_weights"][name]
    states = {entry: value for entry, value in states.items() if not entry.startswith(f"{name}_")}
    for file, content in (("model_state.pdparams", weights), ("optimizer.pdopt", states)):
        times = (source / file).stat()
        (source / file).write_bytes(pickle.dumps(content, protocol=4))
        os.utime(source / file, ns=(times.st_atime_ns, times.st_mtime_ns))
    for options in ({"to": "tp=2"}, {"to": "pp=2,sharding=2"}, {"format": "huggingface"}):
        with pytest.raises(CoverageError, match=f"{key}: no file holds it"):
            paddle_reshard.convert(source, tmp_path / "made", **options)
    assert not (tmp_path / "made").exists()
