"""Every entry of a live ``state_dict`` gets its own values of a checkpoint, or is refused by name."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy

import paddle_reshard
from paddle_reshard import CheckpointConverter, ReshardError, load_into
from tests import oracle
from tests.conftest import FEW_CASES, case_directory, hybrid_cases
from tests.live.pieces import Elsewhere, piece
from tests.properties.synthetic import LR_SCHEDULER, Model, write_checkpoint

MODEL = Model(layers=1)
KEY = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small checkpoint of one card, and its tensors."""
    path = tmp_path_factory.mktemp("live") / "checkpoint-3"
    return path, write_checkpoint(Model(layers=1, ema=True), path)


def blank(array):
    """Memory of the same shape and dtype, with other values."""
    return np.full(array.shape, 7, array.dtype)


def trained(truth):
    """The tensors that are loaded by their structured names; averages have a section of their own."""
    return {key: array for key, array in truth.items() if not key.endswith((".ema", ".ema_w_0"))}


MORE_CASES = ("pp4vpp2", "sh2_s1v1", "sh2_s1v2", "sh2_s2", "sh2_s3_seg512")


@pytest.mark.parametrize("name", [*FEW_CASES, *(name for name in MORE_CASES if name in hybrid_cases())])
def test_whole_tensors(name):
    truth = trained(oracle.read_truth(case_directory(name) / "truth.safetensors"))
    live = {key: blank(array) for key, array in truth.items()}
    report = load_into(live, case_directory(name) / "checkpoint-3")
    oracle.assert_same_tensors(live, truth)
    assert report.tensors == len(truth)
    assert report.filled_bytes == sum(array.nbytes for array in truth.values())


def test_names_as_the_optimizer_gives_them(checkpoint):
    """A flat dict by accumulator names, master weights by parameter name; some spelled as stage 3 spells them."""
    path, truth = checkpoint
    names = {name: key for key, name in MODEL.names.items()}
    optimizer = {
        f"{'slice@' if 'linear_1' in name else ''}{name}_fp32_master_0_{state}": blank(
            truth[f"{key}.{state}"]
        )
        for name, key in names.items()
        for state in (*oracle.MOMENTS, *oracle.POWERS)
    }
    masters = {name: blank(truth[f"{key}.w_0"]) for name, key in names.items()}
    averages = {name: blank(truth[f"{key}.ema_w_0"]) for name, key in names.items()}
    schedule = {"last_epoch": 0, "last_lr": 0.0}
    state_dict = {
        "model": {key: blank(truth[key]) for key in names.values()},
        "optimizer": {**optimizer, "master_weights": masters, "LR_Scheduler": schedule},
        "ema": {"master_weights": averages},
    }
    load_into(state_dict, path, parameter_to_structured_name=names)
    for name, key in names.items():
        assert state_dict["model"][key].tobytes() == truth[key].tobytes(), key
        assert masters[name].tobytes() == truth[f"{key}.w_0"].tobytes(), key
        assert averages[name].tobytes() == truth[f"{key}.ema_w_0"].tobytes(), key
        for state in (*oracle.MOMENTS, *oracle.POWERS):
            held = optimizer.get(f"{name}_fp32_master_0_{state}")
            held = optimizer[f"slice@{name}_fp32_master_0_{state}"] if held is None else held
            assert held.tobytes() == truth[f"{key}.{state}"].tobytes(), (key, state)
    assert schedule == LR_SCHEDULER


@pytest.mark.parametrize("name", [name for name in FEW_CASES if name != "nlp_fused_mp2"])
def test_pieces_and_flattened_ranges(name):
    """Random boxes, ranges of the flattening of boxes, and padding beyond them."""
    random = np.random.default_rng(0)
    truth = trained(oracle.read_truth(case_directory(name) / "truth.safetensors"))
    live, expected = {}, {}
    for key, whole in truth.items():
        offset = tuple(int(random.integers(n)) for n in whole.shape)
        shape = tuple(int(random.integers(1, n - o + 1)) for n, o in zip(whole.shape, offset, strict=True))
        box = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
        padded = np.concatenate([box.ravel(), np.zeros(9, whole.dtype)])
        start, stop = sorted(random.integers(padded.size + 1, size=2).tolist())
        flat = (start, stop) if whole.size > 1 and random.integers(2) else None
        expected[key] = padded[start:stop] if flat else box
        live[key] = piece(blank(expected[key]), whole.shape, offset, shape, flat)
    load_into(live, case_directory(name) / "checkpoint-3")
    oracle.assert_same_tensors({key: held.local_tensor for key, held in live.items()}, expected)


def test_pieces_of_fused_projections():
    """A rank's piece of ``[gate | up]`` is ``[gate_r | up_r]``, though it says that it lies where rank r's does."""
    truth = trained(oracle.read_truth(case_directory("nlp_fused_mp2") / "truth.safetensors"))
    live, expected = {}, {}
    for key, whole in truth.items():
        if "gate_up_fused_proj" not in key or whole.size == 1:
            continue
        hidden, width = whole.shape
        gate, up = np.split(whole, 2, 1)
        mine = np.concatenate([gate[:, width // 4 :], up[:, width // 4 :]], 1)
        expected[key] = mine
        live[key] = piece(blank(mine), whole.shape, (0, width // 2), (hidden, width // 2))
    assert len(live) == 4 * 4
    load_into(live, case_directory("nlp_fused_mp2") / "checkpoint-3", strict=False)
    oracle.assert_same_tensors({key: held.local_tensor for key, held in live.items()}, expected)


# ----------------------------------------------------------------------------------------------- bytes read


def _characters_read():
    return int(Path("/proc/self/io").read_text().split()[1])


def test_only_the_bytes_that_are_needed_are_read(tmp_path):
    """A column of a matrix is read as such: not the rows that it runs through."""
    model = Model(layers=1, intermediate=1 << 17)
    path = tmp_path / "checkpoint-3"
    truth = write_checkpoint(model, path)
    width = model.intermediate // 8
    live = {}
    for key in (KEY, *(f"{KEY}.{state}" for state in ("w_0", "moment1_0", "moment2_0"))):
        cut = blank(truth[key][:, :width])
        live[key] = piece(cut, truth[KEY].shape, (0, 3 * width), cut.shape)
    before = _characters_read()
    paddle_reshard.inspect(path)
    metadata = _characters_read() - before
    report = load_into(live, path, strict=False)
    read = _characters_read() - before - metadata
    needed = sum(held.local_tensor.nbytes for held in live.values())
    for key, held in live.items():
        assert held.local_tensor.tobytes() == truth[key][:, 3 * width : 4 * width].tobytes()
    assert report.read_bytes == needed
    assert read < needed + 2 * metadata


@pytest.mark.parametrize(("loaded", "beside"), [(KEY, "<f4"), (f"{KEY}.w_0", "<u2")])
def test_what_is_stored_beside_it_is_looked_at(tmp_path, loaded, beside):
    """A job that takes only parameters, or only master weights, reads 512 elements of the others for every array."""
    model = Model(layers=1, intermediate=1 << 17)
    path = tmp_path / "checkpoint-3"
    truth = write_checkpoint(model, path)
    cut = blank(truth[loaded][:, : model.intermediate // 8])
    live = {loaded: piece(cut, truth[KEY].shape, (0, model.intermediate // 2), cut.shape)}
    assert load_into(live, path, strict=False).read_bytes == cut.nbytes + 512 * np.dtype(beside).itemsize


def test_a_rank_of_sharding_reads_nothing_of_what_others_load(tmp_path):
    """Parameters whole, master weights of some: these are compared, no run of the others is."""
    path = tmp_path / "checkpoint-3"
    truth = write_checkpoint(Model(layers=1, intermediate=1 << 17), path)
    up = "model.layers.0.mlp.up_proj.weight"
    live = {key: blank(truth[key]) for key in (KEY, up, f"{KEY}.w_0")}
    report = load_into(live, path, strict=False)
    oracle.assert_same_tensors(live, {key: truth[key] for key in live})
    assert report.read_bytes - report.filled_bytes < 512


def test_a_parameter_and_its_master_weight_are_read_once(checkpoint):
    """Where no file holds the parameter, both come from the same bytes."""
    path = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
    truth = oracle.read_truth(path.parent / "truth.safetensors")
    live = {key: blank(truth[key]) for key in (KEY, f"{KEY}.w_0")}
    report = load_into(live, path, strict=False)
    oracle.assert_same_tensors(live, {key: truth[key] for key in live})
    assert report.read_bytes == live[f"{KEY}.w_0"].nbytes


@pytest.mark.parametrize("name", ("defaults_2ranks", "fc_sh2_s3_seg512", "uc_sh2_s1v2", "single_tohf"))
def test_other_formats(name):
    """FlexCheckpoint (which has no config.json), unified checkpoints, weights in Hugging Face layout."""
    truth = trained(oracle.read_truth(case_directory(name) / "truth.safetensors"))
    live = {key: blank(array) for key, array in truth.items()}
    config = json.loads((case_directory("single") / "checkpoint-3" / "config.json").read_text())
    load_into(live, case_directory(name) / "checkpoint-3", config=config)
    oracle.assert_same_tensors(live, truth)


def test_experts_of_several_ranks(tmp_path):
    """What no file holds comes from another file, or keeps its values."""
    path = case_directory("moe/dsv3_ep2_sh2_s1v2_meta_ema") / "checkpoint-3"
    truth = trained(oracle.read_truth(path.parent / "truth.safetensors"))
    lost = {key: array for key, array in truth.items() if key.endswith("e_score_correction_bias")}
    assert lost
    safetensors.numpy.save_file(lost, tmp_path / "lost.safetensors")
    live = {key: blank(array) for key, array in truth.items()}
    load_into(live, path, fill=tmp_path / "lost.safetensors")
    oracle.assert_same_tensors(live, truth)
    kept = {key: blank(array) for key, array in truth.items()}
    report = load_into(kept, path, allow_missing=["*.e_score_correction_bias"])
    assert set(report.kept) == set(lost)
    oracle.assert_same_tensors(kept, truth | {key: blank(array) for key, array in lost.items()})


def test_from_an_object_store(checkpoint):
    fsspec = pytest.importorskip("fsspec")
    path, truth = checkpoint
    store = fsspec.filesystem("memory")
    store.put(f"{path}/", "/live/checkpoint-3/", recursive=True)
    live = {key: blank(array) for key, array in trained(truth).items()}
    load_into(live, "memory://live/checkpoint-3")
    oracle.assert_same_tensors(live, trained(truth))


# --------------------------------------------------------------------------------------------------- refusals


def _refusals():
    whole = Model(layers=1).shapes[KEY]
    f4 = np.zeros(whole, np.float32)
    masters = {"master_weights": {"linear_4.w_0": f4}}
    return {
        "unknown key": ({"model.layers.9.mlp.gate_proj.weight": f4}, "layers.9.mlp.gate_proj"),
        "unknown keys": (
            {"model.a": f4, "model.b": f4},
            r"parameter_to_structured_name \(and 1 more\); list",
        ),
        "unknown parameter name": (masters, "linear_4.w_0: is neither"),
        "state that is not there": ({f"{KEY}.velocity_0": f4}, "no velocity of"),
        "another shape": ({f"{KEY}.w_0": np.zeros(whole[::-1], np.float32)}, rf"\({whole[1]}, {whole[0]}\)"),
        "a part of a tensor": (
            {f"{KEY}.w_0": np.zeros((whole[0], whole[1] // 2), np.float32)},
            "ShardedWeight",
        ),
        "another dtype": ({KEY: f4}, "has dtype float32, the checkpoint's .* has bfloat16"),
        "no tensor": ({KEY: 3}, "a int is not a tensor"),
        "an array in another order": ({f"{KEY}.w_0": np.asfortranarray(f4)}, "C order"),
        "a piece outside": ({f"{KEY}.w_0": piece(f4, whole, (1, 0), whole)}, "exceeds a tensor"),
        "another whole shape": ({f"{KEY}.w_0": piece(f4, (99, 99), (0, 0), whole)}, r"\(99, 99\)"),
        "a range of another length": ({f"{KEY}.w_0": piece(f4, whole, (0, 0), whole, (0, 3))}, r"\[0, 3\)"),
        "not all states": ({f"{KEY}.w_0": f4}, r"which has \S+ \(and \d more\); let"),
        "an empty section": (
            {KEY: np.zeros(whole, np.uint16), "optimizer": {}},
            "optimizer: contains no tensor",
        ),
        "nothing": ({}, "the state_dict: contains no tensor"),
        "no schedule": ({KEY: np.zeros(whole, np.uint16), "LR_Scheduler": {}}, "LR_Scheduler"),
        "another schedule": ({KEY: np.zeros(whole, np.uint16), "LR_Scheduler": {"step": 1}}, "LR_Scheduler"),
    }


@pytest.mark.parametrize("wrong", _refusals())
def test_refusals(checkpoint, wrong):
    """Named, and before anything is filled."""
    state_dict, message = _refusals()[wrong]
    good = blank(checkpoint[1]["model.norm.weight"])
    if state_dict:
        state_dict["model.norm.weight"] = good
    with pytest.raises(ReshardError, match=message):
        load_into(state_dict, checkpoint[0])
    assert (good == 7).all()


def test_a_model_is_no_state_dict(checkpoint):
    with pytest.raises(ReshardError, match="state_dict: a mapping is expected, not SimpleNamespace"):
        load_into(SimpleNamespace(), checkpoint[0])


def test_two_entries_of_one_name(checkpoint):
    array = blank(checkpoint[1]["model.norm.weight"])
    twice = {"a": {"b": {"model.norm.weight": array}}, "a.b": {"model.norm.weight": array}}
    with pytest.raises(ReshardError, match="two entries"):
        load_into(twice, checkpoint[0])


def test_what_may_be_missing_keeps_its_values(checkpoint):
    path, truth = checkpoint
    live = {"model.norm.weight": blank(truth["model.norm.weight"]), "model.rotary.inv_freq": np.full(3, 7.0)}
    report = load_into({"model": live}, path, allow_missing=["*.inv_freq", "model.model.norm.*"])
    assert report.kept == ("model.model.rotary.inv_freq",)
    assert (live["model.rotary.inv_freq"] == 7).all()
    assert live["model.norm.weight"].tobytes() == truth["model.norm.weight"].tobytes()


def test_a_device_is_written_in_pieces(checkpoint):
    """Tensors that the processor cannot address are written through Paddle; here they only say that they are such."""
    paddle = pytest.importorskip("paddle")
    path, truth = checkpoint

    keys = [KEY, f"{KEY}.w_0", f"{KEY}.beta1_pow_acc_0"]
    live = {key: Elsewhere(paddle.to_tensor(blank(truth[key]))) for key in keys}
    load_into(live, path, strict=False)
    bits = {key: np.ascontiguousarray(held.tensor.numpy()) for key, held in live.items()}
    oracle.assert_same_tensors(bits, {key: truth[key] for key in keys})


# ------------------------------------------------------------------------------------------------ the drop-in


def test_converter_of_upstream(checkpoint):
    """The same arguments, the same method: names of this job are patched, what is ignored is taken out."""
    path, truth = checkpoint
    names = {name: f"my.{key}" for key, name in MODEL.names.items()}
    patches = {f"my.{key}": key for key in MODEL.names}
    model = {f"my.{key}": blank(truth[key]) for key in MODEL.names}
    optimizer = {
        f"{name}_fp32_master_0_{state}": blank(truth[f"{key}.{state}"])
        for key, name in MODEL.names.items()
        for state in (*oracle.MOMENTS, *oracle.POWERS)
    }
    masters = {name: blank(truth[f"{key}.w_0"]) for key, name in MODEL.names.items()}
    state_dict = {"model": model, "optimizer": {**optimizer, "master_weights": masters}}
    arguments = SimpleNamespace(ignore_load_lr_and_optim=False)
    CheckpointConverter(path, state_dict, names, arguments, patches).load_from_hybrid_parallel_checkpoint()
    for key, name in MODEL.names.items():
        assert model[f"my.{key}"].tobytes() == truth[key].tobytes()
        assert masters[name].tobytes() == truth[f"{key}.w_0"].tobytes()
        assert optimizer[f"{name}_fp32_master_0_moment2_0"].tobytes() == truth[f"{key}.moment2_0"].tobytes()


def test_converter_without_the_optimizer(checkpoint):
    path, truth = checkpoint
    state_dict = {"model": {KEY: blank(truth[KEY])}, "optimizer": {"anything": 3}}
    arguments = SimpleNamespace(ignore_load_lr_and_optim=True)
    CheckpointConverter(path, state_dict, {}, arguments).load_from_hybrid_parallel_checkpoint()
    assert state_dict["model"][KEY].tobytes() == truth[KEY].tobytes()
    assert "optimizer" not in state_dict


def test_converter_refuses_local_experts(checkpoint):
    with pytest.raises(ReshardError, match="local view"):
        CheckpointConverter(checkpoint[0], {}, {}, SimpleNamespace(moe_group="mp"))


# -------------------------------------------------------------------------------------------- the environment


def test_a_training_environment_needs_numpy_only(checkpoint, tmp_path):
    """Libraries of the converter that a training job may lack, or cannot import, are not imported."""
    program = """
        import sys
        from types import SimpleNamespace

        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {missing}:
                    raise ImportError(name)

        sys.meta_path.insert(0, Missing())
        import numpy as np
        import paddle_reshard
        from paddle_reshard.pipeline.training.async_ema import Weights

        key, shape, path = "model.norm.weight", {shape}, {path!r}
        norm = np.zeros(shape, np.uint16)
        paddle_reshard.load_into({{key: norm}}, path)
        assert norm.tobytes() == bytes.fromhex({expected!r})

        kind = {{"stop_gradient": False, "dtype": "paddle.bfloat16"}}
        live = {{key: SimpleNamespace(name=name, shape=shape, **kind) for key, (name, shape) in {job}.items()}}
        assert paddle_reshard.check_names(SimpleNamespace(state_dict=lambda: live), path) == len(live)

        with paddle_reshard.AsyncEma(lambda: Weights({{"w": np.ones(shape, np.float32)}}), decay=0.5) as ema:
            ema.load(path, paddle_reshard.RankPieces({{"w": paddle_reshard.Piece(key, shape)}}))
            ema.save({made!r}, "ema.pdopt")
    """
    path, truth = checkpoint
    norm = truth["model.norm.weight"]
    missing = "pyarrow ray fsspec s3fs aiobotocore awscrt tenacity click rich paddle"
    source = textwrap.dedent(program).format(
        missing=missing.split(),
        shape=norm.shape,
        path=str(path),
        expected=norm.tobytes().hex(),
        job={key: (name, list(MODEL.shapes[key])) for key, name in MODEL.names.items()},
        made=str(tmp_path),
    )
    subprocess.run([sys.executable, "-W", "error", "-c", source], check=True)
    (average,) = oracle.load_with_paddle(tmp_path / "ema.pdopt")["master_weights"].values()
    assert np.asarray(average).tobytes() == truth["model.norm.weight.ema_w_0"].tobytes()
