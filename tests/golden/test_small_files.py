"""What becomes of the files around the tensors: carried, written anew, or left with a reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import paddle_reshard
from tests.conftest import case_directory, hybrid_cases

DEMO = "mp2pp2sh2_s1v2_meta_ema"
CARRIED = ("scheduler.pdparams", "trainer_state.bin", "training_args.bin")


def _source(tmp_path: Path, name: str = DEMO) -> Path:
    source = tmp_path / "source"
    shutil.copytree(case_directory(name) / "checkpoint-3", source, copy_function=shutil.copyfile)
    return source


def test_opaque_files_are_carried_byte_for_byte(tmp_path: Path) -> None:
    source = _source(tmp_path)
    extra = ("tokenizer.json", "tokenizer_config.json", "qwen.tiktoken", "LICENSE")
    for name in extra:
        (source / name).write_bytes(b"anything at all, never opened \x80\x04")
    paddle_reshard.convert(source, tmp_path / "target", to="tp=1")
    for name in (*CARRIED, *extra):
        assert (tmp_path / "target" / name).read_bytes() == (source / name).read_bytes()


STRAY = {
    "adapter_config.json": b'{"base_model_name_or_path": "other", "peft_type": "LORA"}',
    "hf_quant_config.json": b"{}", "quantize_config.json": b"{}", "modeling_other.py": b"1 / 0",
    "pytorch_model.bin": b"other weights", "notes from the night shift.txt": b"mine",
}  # fmt: skip


@pytest.mark.parametrize(
    "asked", [{"to": "tp=2"}, {"format": "flex"}, {"format": "unified"}, {"format": "huggingface"}]
)
def test_a_target_holds_no_file_whose_role_is_unknown_there(asked: dict[str, str], tmp_path: Path) -> None:
    source = _source(tmp_path, "single")
    config = json.loads((source / "config.json").read_text())
    code = {"AutoModelForCausalLM": "modeling_other.Other"}
    (source / "config.json").write_text(json.dumps(config | {"auto_map": code}))
    for name, content in STRAY.items():
        (source / name).write_bytes(content)
    report = paddle_reshard.convert(source, tmp_path / "target", **asked)
    there = {path.name for path in (tmp_path / "target").iterdir()}
    left = dict(report.plan.targets[0].not_carried)
    assert there.isdisjoint(STRAY) and left.keys() >= STRAY.keys()
    assert "code" in left["modeling_other.py"]
    manifest = json.loads((tmp_path / "target" / "paddle_reshard.json").read_text())
    assert manifest["source"]["not_carried"].keys() >= STRAY.keys()
    export = asked.get("format") == "huggingface"
    assert ("auto_map" in json.loads((tmp_path / "target" / "config.json").read_text())) is not export
    assert any("auto_map" in remark for remark in report.plan.targets[0].remarks) is export
    states = {"states": ["param"]} if export else {}
    assert paddle_reshard.verify(source, tmp_path / "target", **states).equal


CODE = {
    "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["me/other--tokenization.Other", None]}},
    "processor_config.json": {"image_processor": {"auto_map": {"AutoImageProcessor": "images.Other"}}},
    "generation_config.json": {"custom_generate": "me/other"},
    "config.json": {
        "custom_pipelines": {"a": {"impl": "pipe.Other"}},
        "audio_config": {"auto_map": {"AutoModel": "other.Other"}},
    },
}
KEPT = {"model_max_length": 10**30, "chat_template": "{{ 'Ünïcode' }}", "image_processor": {"size": 1.5}}


def _naming_code(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    for name, entries in CODE.items():
        kept = config if name == "config.json" else KEPT
        merged = {
            key: {**kept.get(key, {}), **value} if key == "image_processor" else value
            for key, value in entries.items()
        }
        (folder / name).write_text(json.dumps(kept | merged))
    twice = '{"auto_map": {}, "auto_map": {"AutoImageProcessor": "a.B"}}'
    (folder / "preprocessor_config.json").write_text(twice)
    return folder


def test_no_small_file_of_an_export_names_code(tmp_path: Path) -> None:
    source = _naming_code(_source(tmp_path, "single"))
    report = paddle_reshard.convert(source, tmp_path / "model", format="huggingface")
    target = report.plan.targets[0]
    for name in CODE.keys() - {"config.json"}:
        assert json.loads((tmp_path / "model" / name).read_text()) == KEPT
    for path in (tmp_path / "model").glob("*.json"):
        assert path.name == "paddle_reshard.json" or not any(
            word in path.read_text() for word in ("auto_map", "custom_", "Other", "me/other")
        )
    assert all(any(name in remark for remark in target.remarks) for name in CODE)
    assert "names code" in dict(target.not_carried)["preprocessor_config.json"]
    assert paddle_reshard.verify(source, tmp_path / "model", states=["param"]).differences == ()

    paddle_reshard.convert(source, tmp_path / "job", to="tp=2")
    for name in (*CODE.keys() - {"config.json"}, "preprocessor_config.json"):
        assert (tmp_path / "job" / name).read_bytes() == (source / name).read_bytes()


def test_no_small_file_of_another_model_brings_code(tmp_path: Path) -> None:
    source = _source(tmp_path, "single")
    paddle_reshard.convert(source, tmp_path / "donor", format="huggingface")
    _naming_code(tmp_path / "donor")
    report = paddle_reshard.convert(source, tmp_path / "model", format="huggingface", like=tmp_path / "donor")
    assert json.loads((tmp_path / "model/tokenizer_config.json").read_text()) == KEPT
    assert "auto_map" not in (tmp_path / "model/config.json").read_text()
    assert not (tmp_path / "model/preprocessor_config.json").exists()
    assert any("tokenizer_config.json" in remark for remark in report.plan.targets[0].remarks)


@pytest.mark.parametrize("name", ["adapter_config.json", "pytorch_model.bin", "modeling_other.py"])
def test_verify_finds_a_file_that_leads_loaders_away_from_an_export(name: str, tmp_path: Path) -> None:
    source = _source(tmp_path, "single")
    paddle_reshard.convert(source, tmp_path / "one", format="huggingface")
    paddle_reshard.convert(tmp_path / "one", tmp_path / "two", format="huggingface")
    assert paddle_reshard.verify(tmp_path / "one", tmp_path / "two").equal
    (tmp_path / "two" / name).write_bytes(STRAY[name])
    found = paddle_reshard.verify(tmp_path / "one", tmp_path / "two")
    assert [difference.tensor for difference in found.differences] == [name]


def test_random_states_go_along_to_the_same_ranks_only(tmp_path: Path) -> None:
    source = _source(tmp_path)
    same = paddle_reshard.convert(
        source, tmp_path / "same", to="tp=2,pp=2,sharding=2", sharding_strategy="stage1v1"
    )
    for rank in range(8):
        name = f"rng_state_{rank}.pth"
        assert (tmp_path / "same" / name).read_bytes() == (source / name).read_bytes()
    assert same.plan.targets[0].not_carried == ()
    other = paddle_reshard.convert(source, tmp_path / "other", to="tp=2,sharding=4")
    assert not list((tmp_path / "other").glob("rng_state*"))
    assert [path for path, _ in other.plan.targets[0].not_carried] == [
        f"rng_state_{rank}.pth" for rank in range(8)
    ]
    assert all(
        "one rank of the source's topology" in reason for _, reason in other.plan.targets[0].not_carried
    )


def test_completion_markers_are_those_of_the_target(tmp_path: Path) -> None:
    source = _source(tmp_path)
    markers = (".model_done", ".optimizer_done", ".checkpoint_done", ".optimizer_weight.done.0")
    for name in (*markers, ".saving_info", "async_save_info.json"):
        (source / name).write_bytes(b"3")
    (source / "hf_checkpoint-3").mkdir()
    report = paddle_reshard.convert(source, tmp_path / "target", to="pp=2,sharding=3")
    signals = sorted(p.name for p in (tmp_path / "target").glob("saved_signal_*"))
    assert signals == [f"saved_signal_{rank}" for rank in range(6)]
    assert all((tmp_path / "target" / name).read_bytes() == b"1" for name in signals)
    left = dict(report.plan.targets[0].not_carried)
    assert all(
        "completion marker" in left[name] for name in (*markers, ".saving_info", "async_save_info.json")
    )
    assert "folder" in left["hf_checkpoint-3"]


@pytest.mark.parametrize(
    ("name", "field"), [(DEMO, "tensor_model_parallel_size"), ("nlp_fused_mp2", "tensor_parallel_degree")]
)
def test_the_config_follows_the_tensor_parallel_degree(name: str, field: str, tmp_path: Path) -> None:
    source = _source(tmp_path, name)
    before = json.loads((source / "config.json").read_text())
    assert before[field] == 2
    paddle_reshard.convert(source, tmp_path / "one", to="tp=1")
    paddle_reshard.convert(tmp_path / "one", tmp_path / "two", to="tp=2")
    one = json.loads((tmp_path / "one" / "config.json").read_text())
    assert one == {key: value for key, value in before.items() if key != field}
    assert (tmp_path / "two" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("name", [n for n in ("single", "mp2") if n in hybrid_cases()])
def test_the_config_of_a_real_sibling(name: str, tmp_path: Path) -> None:
    other = {"single": "mp2", "mp2": "single"}[name]
    to = {"single": "tp=1", "mp2": "tp=2"}[other]
    paddle_reshard.convert(case_directory(name) / "checkpoint-3", tmp_path / "target", to=to)
    real = case_directory(other) / "checkpoint-3" / "config.json"
    assert (tmp_path / "target" / "config.json").read_bytes() == real.read_bytes()


def test_the_manifest_says_what_was_made_and_from_what(tmp_path: Path) -> None:
    source = _source(tmp_path)
    paddle_reshard.convert(source, tmp_path / "target", to="tp=2,sharding=4")
    manifest = json.loads((tmp_path / "target" / "paddle_reshard.json").read_text())
    there = {
        p.name: p.stat().st_size for p in (tmp_path / "target").iterdir() if p.name != "paddle_reshard.json"
    }
    assert manifest["files"] == there
    assert manifest["source"]["files"] == {p.name: p.stat().st_size for p in source.iterdir()}
    assert manifest["topology"] == "tp=2,sharding=4"
    # A conversion of a conversion does not carry the first manifest along.
    paddle_reshard.convert(tmp_path / "target", tmp_path / "again", to="tp=1")
    again = json.loads((tmp_path / "again" / "paddle_reshard.json").read_text())
    assert again["topology"] == "tp=1"
