"""Folders as people have them: what others left beside the trainer's files, or put in their place.

The oracles are the same folder without that, the files of the hub's own library, and the truth of real checkpoints.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError, UsageError
from tests.conftest import case_directory
from tests.golden.unified_cases import write_safetensors

APPLE_DOUBLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(100)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 14000000000\n" % (b"4d" * 32)
PAGE = b'<!DOCTYPE html>\n<html class=""><head><title>Sign in</title></head></html>\n'
HYBRID = "mp2pp2_sp"
WITH_AVERAGE = "mp2pp2sh2_s1v2_meta_ema"
FLEX = "small-flex/fc_pp2sh2_s1v2_tied"
QWEN_VL = "families/qwen2_5_vl_single"


def copy_of(case: str, to: Path) -> Path:
    (source,) = case_directory(case).glob("checkpoint-*")
    shutil.copytree(source, to, copy_function=shutil.copyfile)
    if not (to / "config.json").exists():
        shutil.copyfile(source.parent / "config.json", to / "config.json")
    return to


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in several files, with an index."""
    folder = tmp_path_factory.mktemp("model")
    source = copy_of(HYBRID, folder / "source")
    paddle_reshard.convert(source, folder / "model", format="huggingface", max_shard_size="200KB")
    (folder / "model/paddle_reshard.json").unlink()
    assert len([*(folder / "model").glob("*.safetensors")]) > 1
    return folder / "model"


Tensors = dict[str, tuple[str, Sequence[int], bytes]]


def tensors_of(folder: Path, pattern: str = "*.safetensors") -> Tensors:
    """Key → dtype, shape and bytes, as the library reads them."""
    return {
        key: (entry["dtype"], entry["shape"], bytes(entry["data"]))
        for path in sorted(folder.glob(pattern))
        for key, entry in safetensors.deserialize(path.read_bytes())
    }


def leave_strays(folder: Path) -> Iterator[str]:
    """What macOS, NFS, a NAS and a notebook leave; the names of all."""
    inside = [folder, *(path for path in folder.iterdir() if path.is_dir())]
    for place in inside:
        prefix = "" if place is folder else f"{place.name}/"
        for path in [path for path in place.iterdir() if path.is_file()]:
            (place / f"._{path.name}").write_bytes(APPLE_DOUBLE)
            yield f"{prefix}._{path.name}"
        for name in (".DS_Store", ".nfs000000000a1b2c3d00000001"):
            (place / name).write_bytes(b"\x00\x00\x00\x01Bud1")
            yield prefix + name
        for name in ("@eaDir", ".ipynb_checkpoints"):
            (place / name).mkdir()
            (place / name / "model.safetensors").write_bytes(b"")
            yield prefix + name


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "paddle_reshard.json"
    }


@pytest.mark.parametrize("source", [FLEX, "model", HYBRID])
def test_what_a_system_left_beside_the_files_is_nobodys(model: Path, tmp_path: Path, source: str) -> None:
    clean = tmp_path / "clean"
    if source == "model":
        shutil.copytree(model, clean)
    else:
        copy_of(source, clean)
    littered = Path(shutil.copytree(clean, tmp_path / "littered"))
    strays = {*leave_strays(littered)}
    wanted = {"to": "tp=1"}
    paddle_reshard.convert(clean, tmp_path / "a", **wanted)
    result = paddle_reshard.convert(littered, tmp_path / "b", **wanted)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    left = {path: reason for path, reason in result.plan.targets[0].not_carried if path in strays}
    assert left.keys() == strays and len({*left.values()}) == 1
    assert strays <= {path for path, _ in paddle_reshard.inspect(littered).left_out}


def test_what_a_system_left_in_a_target_is_no_damage(model: Path, tmp_path: Path) -> None:
    paddle_reshard.convert(model, tmp_path / "out", to="tp=1")
    assert [*leave_strays(tmp_path / "out")]
    assert paddle_reshard.check(tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (POINTER, "is a Git LFS pointer to a file of 14000000000 bytes.*git lfs pull"),
        (PAGE, "is an HTML page.*download it again"),
        (b"Entry not found", "is the answer 'Entry not found' of a server"),
        (b"", "is empty; copy or download it again"),
        (bytes(70000), "begins with zeros only"),
    ],
    ids=["pointer", "page", "answer", "empty", "zeros"],
)
def test_what_lies_in_place_of_a_file_is_named(
    model: Path, tmp_path: Path, content: bytes, said: str
) -> None:
    hub, flex, hybrid = (tmp_path / name for name in ("hub", "flex", "hybrid"))
    shutil.copytree(model, hub)
    copy_of(FLEX, flex)
    copy_of(HYBRID, hybrid)
    replaced = (
        next(hub.glob("model-00001-of-*.safetensors")),
        hub / "model.safetensors.index.json",
        hub / "config.json",
        flex / "model_state/0.metadata",
        hybrid / "model_state.tp00_pp00.pdparams",
    )
    for path in replaced:
        sound = path.read_bytes()
        path.write_bytes(content)
        folder = flex if path.is_relative_to(flex) else path.parent
        with pytest.raises(ReshardError, match=rf"{path.name}: {said}"):
            paddle_reshard.plan(folder, to="tp=1")
        with suppress(ReshardError):  # where nothing else is left to describe
            assert re.match(
                said, dict(paddle_reshard.inspect(folder).left_out)[str(path.relative_to(folder))]
            )
        path.write_bytes(sound)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "README.md"])
def test_a_pointer_in_place_of_a_small_file_is_no_tokenizer(model: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(model, tmp_path / "hub")
    (tmp_path / "hub" / name).write_bytes(POINTER)
    with pytest.raises(ReshardError, match=rf"{name}: is a Git LFS pointer.*or remove it"):
        paddle_reshard.plan(tmp_path / "hub", format="huggingface")


def test_the_folders_of_machines_are_known_and_brought_together_as_it_says(tmp_path: Path) -> None:
    whole = copy_of(HYBRID, tmp_path / "whole")
    for path in [*whole.iterdir()]:
        of_all = "_pp" not in path.name
        for stage in (0, 1):
            if of_all or f"_pp0{stage}" in path.name:
                (tmp_path / f"run/node{stage}").mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, tmp_path / f"run/node{stage}/{path.name}")
    with pytest.raises(ReshardError, match=r"folders of machines, node0 to node1.*cp -rnp node\*/\* whole/"):
        paddle_reshard.inspect(tmp_path / "run")
    together = tmp_path / "together"
    together.mkdir()
    for path in sorted((tmp_path / "run").glob("node*/*")):
        if not (together / path.name).exists():
            shutil.copy2(path, together / path.name)
    assert paddle_reshard.inspect(together).states == paddle_reshard.inspect(whole).states


def exported(source: Path, to: Path) -> Tensors:
    """The tensors of a Hugging Face checkpoint after a way through a trainer's files."""
    paddle_reshard.convert(source, to / "job", to="tp=1", convention="paddleformers")
    paddle_reshard.convert(to / "job", to / "again", format="huggingface")
    return tensors_of(to / "again")


def saved(folder: Path, tensors: Tensors, model: Path) -> Path:
    """A model in one file, with the config of another."""
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", tensors)
    shutil.copyfile(model / "config.json", folder / "config.json")
    return folder


def test_an_index_says_which_files_are_the_model(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    held = tensors_of(folder)
    write_safetensors(folder / "consolidated.safetensors", held)
    (folder / "model-00009-of-00009.safetensors").write_bytes(b"a shard of an older save, half written")
    assert exported(folder, tmp_path) == held
    found = paddle_reshard.inspect(folder)
    assert {path for path, _ in found.left_out} == {
        "consolidated.safetensors",
        "model-00009-of-00009.safetensors",
    }
    assert found.tensor_files == len([*model.glob("*.safetensors")])


def test_a_tensor_in_two_of_the_files_that_an_index_names_is_refused(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    held = tensors_of(folder, second.name)
    key, tensor = next(iter(tensors_of(folder, first.name).items()))
    write_safetensors(second, {**held, key: tensor})
    with pytest.raises(ReshardError, match=rf"{key}: two files hold it; the index says that {first.name}"):
        paddle_reshard.inspect(folder)


def test_a_single_file_beside_an_index_must_be_the_same_model(model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    held = tensors_of(folder)
    single = folder / "model.safetensors"
    write_safetensors(single, held)
    assert exported(folder, tmp_path / "a") == held
    content = bytearray(single.read_bytes())
    content[-1] ^= 1
    single.write_bytes(content)
    with pytest.raises(ReshardError, match=r"model-0.* and model.safetensors differ"):
        paddle_reshard.convert(folder, tmp_path / "b", to="tp=1")
    write_safetensors(single, dict([*held.items()][1:]))
    with pytest.raises(ReshardError, match="transformers loads the former, PaddleFormers the latter"):
        paddle_reshard.convert(folder, tmp_path / "b", to="tp=1")


def test_buffers_of_older_classes_are_left_out_and_named(model: Path, tmp_path: Path) -> None:
    held = tensors_of(model)
    buffers = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": ("F32", [8], bytes(32)) for n in range(3)}
    folder = saved(tmp_path / "model", {**held, **buffers}, model)
    assert exported(folder, tmp_path) == held
    assert {key for key, _ in paddle_reshard.inspect(folder).left_out} == buffers.keys()


@pytest.mark.parametrize("prefix", ["module.", "_layers.", "_orig_mod.", "model.", "language_model."])
def test_a_prefix_that_all_keys_have_is_recognised_and_said(model: Path, tmp_path: Path, prefix: str) -> None:
    held = tensors_of(model)
    folder = saved(tmp_path / "model", {prefix + key: tensor for key, tensor in held.items()}, model)
    assert exported(folder, tmp_path) == held
    assert f"read without {prefix}," in dict(paddle_reshard.inspect(folder).facts())["keys"]
    mixed = {(prefix if n else "other.") + key: tensor for n, (key, tensor) in enumerate(held.items())}
    with pytest.raises(ReshardError, match="are none of llama"):
        paddle_reshard.inspect(saved(tmp_path / "mixed", mixed, model))


def test_a_language_model_out_of_files_for_images_and_text_is_read(model: Path, tmp_path: Path) -> None:
    held = tensors_of(model)
    inside = {key.replace("model.", "model.language_model.", 1): tensor for key, tensor in held.items()}
    folder = saved(tmp_path / "model", inside, model)
    assert exported(folder, tmp_path) == held
    assert "out of files for images and text" in dict(paddle_reshard.inspect(folder).facts())["keys"]
    tower = {"model.vision_tower.norm.weight": held["model.norm.weight"]}
    with pytest.raises(ReshardError, match="are none of llama"):
        paddle_reshard.inspect(saved(tmp_path / "with a tower", {**inside, **tower}, model))


def test_tied_words_may_lie_under_the_key_of_the_head(tmp_path: Path) -> None:
    source = copy_of(FLEX, tmp_path / "source")
    paddle_reshard.convert(source, tmp_path / "model", format="huggingface")
    held = tensors_of(tmp_path / "model")
    assert "lm_head.weight" not in held
    words = held.pop("model.embed_tokens.weight")
    folder = saved(tmp_path / "head", {**held, "lm_head.weight": words}, tmp_path / "model")
    assert exported(folder, tmp_path) == {**held, "model.embed_tokens.weight": words}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ReshardError, match=r"embed_tokens"):
        paddle_reshard.plan(folder, to="tp=1")


@pytest.mark.parametrize(
    ("case", "layouts"),
    [
        ("families/paddleocr_vl_sh2_s1v2_meta", {"visual.": "model.visual.", "mlp_AR.": "model.projector."}),
        (QWEN_VL, {"visual.": "model.visual."}),
    ],
)
def test_both_layouts_of_a_published_model_are_read(
    tmp_path: Path, case: str, layouts: Mapping[str, str]
) -> None:
    """The layout of transformers from 4.52: what its classes' ``_checkpoint_conversion_mapping`` made of the other."""
    source = copy_of(case, tmp_path / "source")
    paddle_reshard.convert(source, tmp_path / "model", format="huggingface")
    held = tensors_of(tmp_path / "model")
    newer = {**layouts, "model.": "model.language_model."}
    renamed = {
        next(
            (there + key.removeprefix(here) for here, there in newer.items() if key.startswith(here)), key
        ): tensor
        for key, tensor in held.items()
    }
    assert len(renamed) == len(held) and renamed != held
    folder = saved(tmp_path / "newer", renamed, tmp_path / "model")
    assert exported(folder, tmp_path) == held
    alone = {key.removeprefix("model."): tensor for key, tensor in renamed.items()}  # as AutoModel saves it
    assert exported(saved(tmp_path / "alone", alone, tmp_path / "model"), tmp_path / "of it") == held


def as_kept(held: Tensors) -> Tensors:
    """Experts as ``transformers`` 5 keeps them: gate above up, all of a layer as one tensor."""
    experts: dict[str, dict[int, dict[str, Any]]] = {}
    kept = {}
    for key, (dtype, shape, data) in held.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", key)
        if match is None:
            kept[key] = dtype, shape, data
            continue
        of_layer = experts.setdefault(match[1], {}).setdefault(int(match[2]), {})
        of_layer[match[3]] = np.frombuffer(data, np.uint16).reshape(shape)
    for layer, found in experts.items():
        of_all = [found[number] for number in range(len(found))]
        both = np.stack([np.concatenate([expert["gate"], expert["up"]]) for expert in of_all])
        for name, words in (("gate_up", both), ("down", np.stack([expert["down"] for expert in of_all]))):
            kept[f"{layer}.{name}_proj"] = "BF16", list(words.shape), words.tobytes()
    return kept


def the_other_way_round(held: Tensors) -> Tensors:
    """The last two dims of experts that are one tensor, exchanged."""
    turned = {}
    for key, (dtype, shape, data) in held.items():
        if re.fullmatch(r".*\.experts\.(gate_up|down)_proj", key):
            words = np.frombuffer(data, np.uint16).reshape(shape).swapaxes(1, 2)
            shape, data = list(words.shape), words.tobytes()
        turned[key] = dtype, shape, data
    return turned


@pytest.mark.parametrize(
    ("case", "other", "said"),
    [
        ("moe/qwen2moe_single", as_kept, "out of the tensor of all"),
        ("families/qwen3_vl_moe_single", the_other_way_round, "the other way round"),
    ],
)
def test_experts_as_the_library_keeps_them_are_read(
    tmp_path: Path, case: str, other: Callable[[Tensors], Tensors], said: str
) -> None:
    paddle_reshard.convert(copy_of(case, tmp_path / "source"), tmp_path / "model", format="huggingface")
    held = tensors_of(tmp_path / "model")
    changed = other(held)
    assert changed != held
    folder = saved(tmp_path / "other", changed, tmp_path / "model")
    assert exported(folder, tmp_path) == held
    assert said in dict(paddle_reshard.inspect(folder, convention="paddleformers").facts())["keys"]
    key = min(key for key in changed if key.endswith("experts.down_proj"))
    dtype, (experts, rows, columns), data = changed[key]
    half = dtype, [experts, rows // 2, columns], data[: len(data) // 2]
    with pytest.raises(ReshardError, match=r"experts.*(shape|expects)"):
        paddle_reshard.plan(
            saved(tmp_path / "half", {**changed, key: half}, tmp_path / "model"),
            to="tp=1",
            convention="paddleformers",
        )


def renamed_in(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content and len(old) == len(new)
    path.write_bytes(content.replace(old, new))


@pytest.mark.parametrize(
    "harm", ["unknown", "truncated", "deleted", "one deleted", "pointer", "scheduler alone"]
)
def test_an_optimizer_that_cannot_be_read_is_no_obstacle_to_an_export(tmp_path: Path, harm: str) -> None:
    source = copy_of(HYBRID, tmp_path / "source")
    paddle_reshard.convert(source, tmp_path / "whole", format="huggingface")
    first, *others = sorted(source.glob("optimizer.*"))
    for path in source.glob("saved_signal_*"):
        path.touch()
    if harm == "unknown":
        for path in (first, *others):
            renamed_in(path, b"moment2_0", b"squared_0")
    elif harm == "truncated":
        first.write_bytes(first.read_bytes()[:1000])
    elif harm == "pointer":
        first.write_bytes(POINTER)
    else:
        for path in (first, *(others if harm != "one deleted" else ())):
            path.unlink()
    if harm == "scheduler alone":
        for path in source.glob("saved_signal_*"):
            path.unlink()
    result = paddle_reshard.convert(source, tmp_path / "model", format="huggingface")
    assert tensors_of(tmp_path / "model") == tensors_of(tmp_path / "whole")
    said = dict(result.plan.targets[0].not_carried)
    assert said["scheduler.pdparams"].startswith("not read, and parameters do not need it: ")
    assert "scheduler.pdparams" in dict(paddle_reshard.inspect(source).left_out)
    way = "optimizer" if harm in ("truncated", "pointer") else "optimizer.*: --format huggingface"
    for needing in ({"to": "tp=1"}, {"format": "huggingface", "dtype": "float32"}):
        with pytest.raises(ReshardError, match=way):
            paddle_reshard.plan(source, **needing)


def test_inspect_describes_all_but_a_damaged_average(tmp_path: Path) -> None:
    source = copy_of(WITH_AVERAGE, tmp_path / "source")
    whole = paddle_reshard.inspect(source)
    first, *others = sorted(source.glob("ema.*"))
    first.write_bytes(first.read_bytes()[:1000])
    described = paddle_reshard.inspect(source)
    assert not described.has_ema and described.topology == whole.topology
    assert described.states == tuple(s for s in whole.states if not s.state.startswith("ema"))
    said = dict(described.left_out)
    assert "truncated" in said[first.name]
    assert said.keys() - dict(whole.left_out).keys() == {path.name for path in (first, *others)}
    with pytest.raises(ReshardError, match="truncated"):  # no job starts from a part
        paddle_reshard.launch(source)


def test_inspect_lists_the_arrays_of_the_files_beside_damaged_ones(tmp_path: Path) -> None:
    source = copy_of(WITH_AVERAGE, tmp_path / "source")
    harmed = sorted(source.glob("optimizer.*"))[:2]
    for path in harmed:
        path.write_bytes(path.read_bytes() + b"abc")
    described = paddle_reshard.inspect(source)
    listed = {tensor.file for tensor in described.stored}
    others = {path.name for path in [*source.glob("optimizer.*"), *source.glob("ema.*")]}
    assert listed >= others - {path.name for path in harmed} and listed.isdisjoint(p.name for p in harmed)
    assert {path.name for path in harmed} <= dict(described.left_out).keys()
    with pytest.raises(ReshardError, match="3 bytes after the end"):
        paddle_reshard.plan(source, to="tp=1")


def test_parameters_that_are_not_whole_are_refused_with_and_without_an_optimizer(tmp_path: Path) -> None:
    source = copy_of(HYBRID, tmp_path / "source")
    next(source.glob("optimizer.*")).unlink()
    next(source.glob("model_state.*")).unlink()
    with pytest.raises(ReshardError, match="files for tp=2 pp=2 sharding=1 are missing"):
        paddle_reshard.plan(source, format="huggingface")


def test_a_state_dict_that_paddle_saved_lies_in_the_folder_itself(tmp_path: Path) -> None:
    """``dist.save_state_dict(model.state_dict(), path)``, with the files of every rank of a real job."""
    source = copy_of(FLEX, tmp_path / "source")
    paddle_reshard.convert(source, tmp_path / "whole", format="huggingface")
    flat = Path(shutil.copytree(source / "model_state", tmp_path / "my-model"))
    shutil.copyfile(source / "config.json", flat / "config.json")
    paddle_reshard.convert(flat, tmp_path / "model", format="huggingface")
    assert tensors_of(tmp_path / "model") == tensors_of(tmp_path / "whole")


def paddles() -> tuple[Any, Any]:
    """Paddle, and its distributed part."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import of Paddle warns about a missing ccache
        import paddle
        import paddle.distributed
    return paddle, paddle.distributed


def loaded_by_paddle(folder: Path, like: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """The tensors that Paddle's loader finds under the keys of these, as NumPy arrays."""
    paddle, dist = paddles()
    found = {key: paddle.zeros(tensor.shape, tensor.dtype) for key, tensor in like.items()}
    dist.load_state_dict(found, str(folder), **options)
    return {key: tensor.numpy() for key, tensor in found.items()}


def test_the_newest_version_of_tensors_without_a_model_is_read_or_that_which_is_asked_for(
    tmp_path: Path,
) -> None:
    paddle, dist = paddles()
    source, states = tmp_path / "source", {}
    for version in (0, 1, 10):
        states[version] = {"a.weight": paddle.rand([7, 3]) + version, "steps": paddle.arange(5) + version}
        dist.save_state_dict(states[version], str(source), unique_id=version)
    left = dict(paddle_reshard.inspect(source).left_out)
    assert left.keys() == {"0.metadata", "0_0.distcp", "1.metadata", "0_1.distcp"}
    command = left["0_1.distcp"].partition("alone: ")[2]
    subprocess.run(command, shell=True, check=True, cwd=source)
    for folder, version in ((source, 10), (source / "v1", 1)):
        to = tmp_path / str(version)
        paddle_reshard.convert(folder, to, format="flex", max_shard_size="200KB")
        found = loaded_by_paddle(to / "model_state", states[version])
        assert all((found[key] == tensor.numpy()).all() for key, tensor in states[version].items())


def test_versions_in_safetensors_files_are_read_one_at_a_time(tmp_path: Path) -> None:
    """Of them Paddle's loader takes version 0, as it counts ``.distcp`` files only."""
    paddle, dist = paddles()
    state, source = {"a.weight": paddle.rand([7, 3])}, tmp_path / "source"
    dist.save_state_dict(state, str(source), unique_id=0, safetensors=True)
    paddle_reshard.convert(source, tmp_path / "out", format="flex")
    found = loaded_by_paddle(tmp_path / "out/model_state", state)
    assert (found["a.weight"] == state["a.weight"].numpy()).all()
    dist.save_state_dict({"a.weight": state["a.weight"] + 1}, str(source), unique_id=1, safetensors=True)
    taken = loaded_by_paddle(source, state, safetensors=True)
    assert (taken["a.weight"] == state["a.weight"].numpy()).all()
    with pytest.raises(ReshardError, match=r"takes version 0.*mkdir v1 && cp -p 1.metadata \*_1.\* v1/"):
        paddle_reshard.plan(source, format="flex")


Piece = tuple[Any, tuple[int, ...], tuple[int, ...]]
"""The tensor that a rank holds, the shape that Paddle writes down for it, and its offset."""


def save_pieces(folder: Path, key: str, whole: tuple[int, ...], pieces: Sequence[Piece]) -> None:
    """The files of a tensor that ranks cut, one a rank (``dcp/save_state_dict.py``)."""
    paddle, _ = paddles()
    from paddle.distributed.flex_checkpoint.dcp.metadata import (
        LocalTensorIndex,
        LocalTensorMetadata,
        Metadata,
    )

    folder.mkdir(parents=True)
    described, places = [], {}
    for rank, (tensor, local, offset) in enumerate(pieces):
        described.append(LocalTensorMetadata(offset, local, "float32", whole, False, None))
        places[LocalTensorIndex(key, offset, False, None, None, local)] = f"{rank}_0.distcp"
        paddle.save({key: tensor}, str(folder / f"{rank}_0.distcp"))
    paddle.save(Metadata({key: described}, places, {key: (key,)}), str(folder / "0.metadata"))


def test_pieces_are_joined_as_paddle_joins_them(tmp_path: Path) -> None:
    """5 columns on 4 ranks: Paddle writes down two columns for the third, whose file has one; also an empty piece."""
    paddle, _ = paddles()
    whole = paddle.rand([7, 5])
    folder, held = tmp_path / "source", {"a.weight": whole}
    pieces: list[Piece] = [
        (whole[:, :2], (7, 2), (0, 0)),
        (whole[:, 2:4], (7, 2), (0, 2)),
        (whole[:, 4:], (7, 2), (0, 4)),
        (whole[:, 5:], (7, 0), (0, 5)),
    ]
    save_pieces(folder, "a.weight", (7, 5), pieces)
    assert (loaded_by_paddle(folder, held)["a.weight"] == whole.numpy()).all()
    result = paddle_reshard.convert(folder, tmp_path / "out", format="flex")
    assert (loaded_by_paddle(tmp_path / "out/model_state", held)["a.weight"] == whole.numpy()).all()
    assert "as paddle.distributed.load_state_dict joins them" in dict(result.plan.facts())["not proven"]
    fused = "model.layers.0.self_attn.qkv_proj.weight"
    save_pieces(tmp_path / "fused", fused, (7, 5), pieces)
    with pytest.raises(ReshardError, match="what is fused in a tensor that was cut is not known"):
        paddle_reshard.plan(tmp_path / "fused", format="flex")


@pytest.mark.parametrize("third", [(7, 2), (6, 1)])
def test_a_piece_that_ends_with_its_tensor_must_be_stored_so(tmp_path: Path, third: tuple[int, int]) -> None:
    paddle, _ = paddles()
    pieces: list[Piece] = [(paddle.rand([7, 4]), (7, 4), (0, 0)), (paddle.rand(third), (7, 2), (0, 4))]
    save_pieces(tmp_path / "source", "a.weight", (7, 5), pieces)
    with pytest.raises(ReshardError, match=r"a\.weight.*its metadata say \(7, 1\)"):
        paddle_reshard.plan(tmp_path / "source", format="flex")


def cut(source: Path, to: Path, pieces: int) -> None:
    """Cut the parameters of one rank as ``save_pretrained`` does above ``max_shard_size``, with an index."""
    to.mkdir()
    shutil.copyfile(source / "config.json", to / "config.json")
    with (source / "model_state.pdparams").open("rb") as file:
        state = pickle.load(file)
    names = state.pop("StructuredToParameterName@@", None)
    index: dict[str, dict[str, str]] = {"metadata": {}, "weight_map": {}}
    for number in range(pieces):
        piece = dict([*state.items()][number::pieces])
        name = f"model_state-{number + 1:05d}-of-{pieces:05d}.pdparams"
        index["weight_map"].update(dict.fromkeys(piece, name))
        if names is not None:
            piece["StructuredToParameterName@@"] = {key: names[key] for key in piece}
        with (to / name).open("wb") as file:
            pickle.dump(piece, file, protocol=4)
    (to / "model_state.pdparams.index.json").write_text(json.dumps(index))


def test_parameters_in_several_pieces_are_those_of_one_file(tmp_path: Path) -> None:
    source = copy_of("dense/single", tmp_path / "source")
    paddle_reshard.convert(source, tmp_path / "whole", format="huggingface")
    cut(source, tmp_path / "cut", 3)
    paddle_reshard.convert(tmp_path / "cut", tmp_path / "model", format="huggingface")
    assert tensors_of(tmp_path / "model") == tensors_of(tmp_path / "whole")
    last = tmp_path / "cut/model_state-00003-of-00003.pdparams"
    content = last.read_bytes()
    last.unlink()
    with pytest.raises(ReshardError, match=r"model_state-00003-of-00003.pdparams is missing"):
        paddle_reshard.inspect(tmp_path / "cut")
    last.write_bytes((tmp_path / "cut/model_state-00002-of-00003.pdparams").read_bytes())
    with pytest.raises(ReshardError, match="two files hold it"):
        paddle_reshard.inspect(tmp_path / "cut")
    last.write_bytes(content)
    index = tmp_path / "cut/model_state.pdparams.index.json"
    index.write_text(index.read_text().replace("00001-of", "00002-of"))
    with pytest.raises(ReshardError, match=r"says that model_state-00002-of-00003.pdparams holds it, but"):
        paddle_reshard.inspect(tmp_path / "cut")


def test_a_unified_checkpoint_in_paddles_own_files_gives_its_parameters(tmp_path: Path) -> None:
    """``unified_checkpoint`` without safetensors: the optimizer too is cut, under keys of its own.

    PaddleNLP's loader reads such parameters, and fails at such states (``unified_checkpoint/load_local.py``).
    """
    source = copy_of("dense/single", tmp_path / "source")
    paddle_reshard.convert(source, tmp_path / "whole", format="huggingface")
    cut(source, tmp_path / "cut", 2)
    for number in (1, 2):
        for name in ("optimizer-{}.pdopt", "master_weights-{}.pdparams"):
            shutil.copyfile(
                source / "optimizer.pdopt", tmp_path / "cut" / name.format(f"0000{number}-of-00002")
            )
    for name in ("optimizer.pdopt.index.json", "master_weights.pdparams.index.json"):
        (tmp_path / "cut" / name).write_text("{}")
    paddle_reshard.convert(tmp_path / "cut", tmp_path / "model", format="huggingface")
    assert tensors_of(tmp_path / "model") == tensors_of(tmp_path / "whole")
    with pytest.raises(ReshardError, match=r"of-00002\.pdparams: states of a unified.*--format huggingface"):
        paddle_reshard.plan(tmp_path / "cut", to="tp=1")


def test_a_model_of_no_library_needs_the_config_that_the_message_gives(tmp_path: Path) -> None:
    paddle, _ = paddles()
    layer = paddle.nn.Sequential(paddle.nn.Linear(4, 6), paddle.nn.Linear(6, 2))
    optimizer = paddle.optimizer.AdamW(parameters=layer.parameters())
    layer(paddle.rand([3, 4])).sum().backward()
    optimizer.step()
    source, config = tmp_path / "source", tmp_path / "config.json"
    paddle.save(layer.state_dict(), str(source / "model_state.pdparams"))
    paddle.save(optimizer.state_dict(), str(source / "optimizer.pdopt"))
    with pytest.raises(ReshardError, match=r"nn\.Layer of your own") as refused:
        paddle_reshard.plan(source, to="tp=1,sharding=2")
    (smallest,) = re.findall(r"\{.*\}", str(refused.value))
    config.write_text(smallest)
    with pytest.raises(ReshardError, match="--format hybrid-plain"):
        paddle_reshard.plan(source, to="tp=1,sharding=2", config=config)
    wanted: dict[str, Any] = {"format": "hybrid-plain", "config": config}
    paddle_reshard.convert(source, tmp_path / "two", to="tp=1,sharding=2", **wanted)
    paddle_reshard.convert(tmp_path / "two", tmp_path / "one", to="tp=1", **wanted)
    for name, held in (("model_state.pdparams", layer), ("optimizer.pdopt", optimizer)):
        found = paddle.load(str(tmp_path / "one" / name))
        assert all((found[key] == tensor).all() for key, tensor in held.state_dict().items() if key in found)
        assert {key for key in held.state_dict() if key not in found} <= {"LR_Scheduler"}


def count_on(folder: Path, word: str) -> None:
    """Names of parameters as a process gives them that has built 40 layers of the classes of this name before."""

    def on(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(on, value))
        if isinstance(value, dict):
            return {on(key): on(of_key) for key, of_key in value.items()}
        if isinstance(value, str):
            return re.sub(rf"\b({word})_(\d+)(?=\.\w_0)", lambda m: f"{m[1]}_{int(m[2]) + 40}", value)
        return value

    for path in folder.glob("*.pd*"):
        path.write_bytes(pickle.dumps(on(pickle.loads(path.read_bytes())), protocol=4))
    for path in folder.glob("saved_signal_*"):
        path.touch()


def test_names_that_begin_elsewhere_begin_at_0_in_the_target(tmp_path: Path) -> None:
    """A second model in the process counts the layers of every class on; the target's job builds one alone."""
    for name, word in (("alone", "none"), ("second", r"[a-z_]+"), ("one class", "embedding")):
        count_on(copy_of(HYBRID, tmp_path / name), word)
    wanted = {"to": "tp=1,sharding=2"}
    paddle_reshard.convert(tmp_path / "alone", tmp_path / "a", **wanted)
    result = paddle_reshard.convert(tmp_path / "second", tmp_path / "b", **wanted)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert "such as embedding_40.w_0 tell; those of the target, embedding_0.w_0" in str(result.plan.facts())
    with pytest.raises(ReshardError, match=r"embedding_40\.w_0 .* --layout model_meta\.json"):
        paddle_reshard.plan(tmp_path / "one class", **wanted)


@pytest.mark.parametrize("name", ["LlamaModel", "LlamaSentenceEmbedding"])
def test_a_model_of_a_class_without_a_head_need_not_have_one(model: Path, tmp_path: Path, name: str) -> None:
    """What ``AutoModel`` saves, and an embedding model: the trainer's classes of both have no head."""
    held = tensors_of(model)
    del held["lm_head.weight"]
    folder = saved(tmp_path / "model", held, model)
    with pytest.raises(ReshardError, match=r"lm_head\.weight: no file holds it"):
        paddle_reshard.plan(folder, to="tp=1")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [name]}))
    assert exported(folder, tmp_path) == held
    paddle_reshard.convert(folder, tmp_path / "two", to="tp=2", convention="paddleformers")
    paddle_reshard.convert(tmp_path / "two", tmp_path / "flex", format="flex")
    paddle_reshard.convert(tmp_path / "flex", tmp_path / "unified", format="unified")
    paddle_reshard.convert(tmp_path / "unified", tmp_path / "back", format="huggingface")
    assert tensors_of(tmp_path / "back") == held
    with pytest.raises(ReshardError, match="no pipeline class"):
        paddle_reshard.plan(folder, to="pp=2", convention="paddleformers")


@pytest.mark.parametrize("of", ["Sequence", "Token"])
def test_a_score_in_place_of_the_head_is_whole_on_every_rank(model: Path, tmp_path: Path, of: str) -> None:
    """A classifier or reward model: ``[labels, hidden]`` in transformers, ``[hidden, labels]`` in Paddle."""
    held = tensors_of(model)
    _, (_, hidden), _ = held.pop("lm_head.weight")
    score = np.arange(3 * hidden, dtype=np.uint16).reshape(3, hidden)
    held["score.weight"] = ("BF16", [3, hidden], score.tobytes())
    folder = saved(tmp_path / "model", held, model)
    config = json.loads((folder / "config.json").read_text())
    of_class = {**config, "architectures": [f"LlamaFor{of}Classification"]}
    (folder / "config.json").write_text(json.dumps(of_class))
    with pytest.raises(
        ReshardError, match=rf"score\.weight: .* num_labels 2\) .* \({hidden}, 2\), .* \({hidden}, 3\)"
    ):
        paddle_reshard.plan(folder, to="tp=2", convention="paddleformers")
    of_class["id2label"] = {str(n): f"LABEL_{n}" for n in range(3)}
    (folder / "config.json").write_text(json.dumps(of_class))
    assert exported(folder, tmp_path) == held
    paddle_reshard.convert(folder, tmp_path / "two", to="tp=2", convention="paddleformers")
    ranks = sorted((tmp_path / "two").glob("model_state.*"))
    assert len(ranks) == 2
    for rank in ranks:
        with rank.open("rb") as file:
            stored = pickle.load(file)["score.weight"]
        assert (np.asarray(stored) == score.T).all()
    paddle_reshard.convert(tmp_path / "two", tmp_path / "back", format="huggingface")
    assert tensors_of(tmp_path / "back") == held
    for there, back in (("flex", "two"), ("unified", "flex"), ("hybrid", "unified")):
        cut = {} if there == "unified" else {"to": "tp=2"}
        paddle_reshard.convert(tmp_path / back, tmp_path / there, format=there, **cut)
    paddle_reshard.convert(tmp_path / "hybrid", tmp_path / "last", format="huggingface")
    assert tensors_of(tmp_path / "last") == held
    with pytest.raises(ReshardError, match=f"no pipeline class of LlamaFor{of}Classification"):
        paddle_reshard.plan(folder, to="pp=2", convention="paddleformers")
    # as PaddleFormers exports it, whose maps say nothing of a score
    held["score.weight"] = ("BF16", [hidden, 3], score.T.tobytes())
    saved(tmp_path / "its own", held, folder)
    (tmp_path / "its own/config.json").write_text(json.dumps(of_class))
    paddle_reshard.convert(tmp_path / "its own", tmp_path / "read", to="tp=2", convention="paddleformers")
    assert files_of(tmp_path / "read") == files_of(tmp_path / "two")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReshardError, match=r"score\.weight: only classifiers .* architectures"):
        paddle_reshard.plan(folder, to="tp=2")


def test_a_model_that_fits_several_libraries_is_described_and_the_choice_is_named(
    model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    del config["paddleformers_version"]
    (folder / "config.json").write_text(json.dumps(config))
    found = paddle_reshard.inspect(folder)
    assert {array.key for array in found.stored} == tensors_of(model).keys()
    assert "--convention paddleformers or --convention paddlenlp" in (found.rules or "")
    agreed = {tensor.key: (tensor.global_shape, tensor.rule.split) for tensor in found.tensors}
    assert agreed["model.layers.0.self_attn.o_proj.weight"] == ((64, 64), 0)
    assert agreed["model.layers.0.mlp.down_proj.weight"] == ((96, 64), 0)
    roots = set()
    for library in ("paddleformers", "paddlenlp"):
        assert paddle_reshard.plan(folder, to="tp=1", convention=library)
        described = paddle_reshard.inspect(folder, convention=library)
        assert described.convention == library and described.rules is None and not described.stored
        roots.add(paddle_reshard.fingerprint(folder, convention=library).root)
    assert len(roots) == 2  # their keys are not the same
    with pytest.raises(ReshardError, match=r"several rule tables fit"):
        paddle_reshard.fingerprint(folder)
    trained = case_directory(HYBRID) / "checkpoint-3"
    with pytest.raises(ReshardError, match=r"--convention paddlenlp: .* is paddleformers's llama"):
        paddle_reshard.inspect(trained, convention="paddlenlp")


def test_an_adapter_of_peft_is_no_source_and_the_sentence_says_what_to_do(
    model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    matrices = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": ("F32", [1, 2], bytes(8))}
    write_safetensors(folder / "adapter_model.safetensors", matrices)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(ReshardError, match=r"an adapter as PEFT saves it.*merge_and_unload"):
        paddle_reshard.plan(folder, to="tp=1")


def test_a_config_that_is_given_does_not_contradict_the_checkpoints_own(tmp_path: Path) -> None:
    checkpoint = case_directory("dense/single") / "checkpoint-3"
    own = json.loads((checkpoint / "config.json").read_text())
    given = tmp_path / "config.json"
    given.write_text(json.dumps(own | {"vocab_size": 7}))
    calls: list[Callable[..., object]] = [
        partial(paddle_reshard.plan, to="tp=2"),
        paddle_reshard.inspect,
        paddle_reshard.verify,
        partial(paddle_reshard.verify, b=checkpoint),
        partial(paddle_reshard.diff, b=checkpoint),
        paddle_reshard.fingerprint,
    ]
    for call in calls:
        with pytest.raises(UsageError, match=rf"has {own['vocab_size']} for vocab_size, that of --config 7"):
            call(checkpoint, config=given)
    as_saved_elsewhere = {"dtype": "float32", "tensor_model_parallel_size": 8, "paddleformers_version": "0.9"}
    as_saved_elsewhere |= {"use_expert_parallel": True, "sequence_parallel": True}
    given.write_text(json.dumps(own | as_saved_elsewhere))
    assert (
        paddle_reshard.inspect(checkpoint, config=given).tensors == paddle_reshard.inspect(checkpoint).tensors
    )
    given.write_text(json.dumps(own | {"paddlenlp_version": "3.0"}))
    with pytest.raises(UsageError, match="for paddlenlp_version"):
        paddle_reshard.plan(checkpoint, to="tp=2", config=given)
