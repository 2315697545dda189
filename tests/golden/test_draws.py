"""Real jobs in configurations that chance drew: each comes out as its live memory was, or is refused for the reason.

``draws/`` holds the files of PaddleFormers 1.2.0 on CPUs, with the truth from memory.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import deserialize

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests.conftest import unpack
from tests.golden.compare_one_card import load, read_one_card
from tests.lab.draws.check import STRUCTURE, conversions, differences_from_target, draw_of

DRAWS = Path(__file__).with_name("draws")
DRAWN = sorted(path.name.removesuffix(".tar.xz") for path in DRAWS.glob("drawn_*.tar.xz"))
EXACT = (
    "tied_with_stages", "tied_on_one_card", "no_q_lora_rank", "qwen3_next_ep2", "qwen3_next_ep2tp2",
    "qwen3_next_bias", "qwen2_moe_ep2", "qwen2_moe_ep2_plain", "qwen2_moe_stacked", "llama_bias",
)  # fmt: skip
WOULD_BE_LOST = (
    r"lm_head\.weight: in a job without pipeline stages it is a tensor of its own, and "
    r"model\.embed_tokens\.weight in one with them \(tie_word_embeddings\).*--drop head"
)
NO_STATES = r"optimizer of the source keeps no states, as SGD does.*--format hybrid"
STACKED = "nor resumes from one.* flex is not supported for such models; save or convert them in another"
"""The job that saves or resumes from one stops: ``KeyError: 'qwen2_moe_experts_0.w_0'``."""
REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("tied_on_one_card", {"to": "pp=2"}, WOULD_BE_LOST),
    ("tied_on_one_card", {"to": "pp=2", "replicas": "report"}, WOULD_BE_LOST),
    ("tied_on_one_card", {"format": "flex"}, WOULD_BE_LOST),
    ("tied_on_one_card", {"format": "unified"}, WOULD_BE_LOST),
    ("mini_unified", {"to": "tp=1"}, r"AdamWMini, which keeps moment2 as one number per parameter"),
    ("sgd", {"format": "flex"}, NO_STATES),
    ("sgd", {"format": "unified"}, NO_STATES),
    ("qwen2_moe_stacked", {"format": "flex"}, STACKED),
    ("qwen2_moe_stacked", {"format": "flex", "to": "sharding=2"}, STACKED),
    ("sgd_sharding", {"to": "tp=1"}, r"keeps no states, as SGD does.*save with --save_checkpoint_format sharding_io"),
)  # fmt: skip


def unpacked(name: str, into: Path) -> Path:
    unpack(DRAWS / f"{name}.tar.xz", into)
    [checkpoint] = (into / name).rglob("checkpoint-*")
    return checkpoint


def truth_beside(checkpoint: Path) -> dict[str, bytes]:
    found = deserialize((checkpoint.parent / "truth.safetensors").read_bytes())
    return {name: bytes(entry["data"]) for name, entry in found}


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawn_job_comes_out_as_its_memory_was_and_as_the_job_of_the_target_writes(
    name: str, tmp_path: Path
) -> None:
    """The first of its two jobs converted to the second's topology, a third and back, as ``make draws`` does."""
    folder = unpacked(name, tmp_path).parent.parent
    draw = draw_of(json.loads((folder / "draw.json").read_text()))
    tensors, wrong = conversions(draw, folder)
    if (folder / STRUCTURE).exists():
        wrong += differences_from_target(draw, folder)
    assert tensors
    assert not wrong


@pytest.mark.parametrize("name", EXACT)
def test_one_card_holds_what_the_job_had(name: str, tmp_path: Path) -> None:
    source = unpacked(name, tmp_path)
    paddle_reshard.convert(
        source,
        tmp_path / "one",
        to="tp=1",
        format="hybrid-plain",
        replicas="report" if "tp2" in name else "compare",
    )
    assert read_one_card(tmp_path / "one") == truth_beside(source)


@pytest.mark.parametrize("over", ["tp=2", "flex"])
def test_a_config_that_leaves_tied_words_out_as_the_library_does_ties_them(over: str, tmp_path: Path) -> None:
    source, between = unpacked("glm4v_moe_tied", tmp_path), tmp_path / "between"
    paddle_reshard.convert(source, between, **({"format": over} if over == "flex" else {"to": over}))
    paddle_reshard.convert(between, tmp_path / "one", to="tp=1", format="hybrid-plain")
    assert read_one_card(tmp_path / "one") == read_one_card(source)
    paddle_reshard.convert(source, tmp_path / "hf", format="huggingface")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"] is True


def test_expert_ranks_that_all_have_all_experts_have_copies(tmp_path: Path) -> None:
    """As the trainer names them without ``model_meta.json``, where more ranks hold experts than tp cuts tensors."""
    source = unpacked("qwen2_moe_ep2", tmp_path)
    plain = tmp_path / "plain"
    paddle_reshard.convert(source, plain, to="sharding=2", format="hybrid-plain")
    weights = (plain / "model_state.pdparams").read_bytes()
    (plain / "model_state.pdparams").rename(plain / "model_state.moe_sharding00.pdparams")
    (plain / "model_state.moe_sharding01.pdparams").write_bytes(weights)
    for signal in plain.glob("saved_signal*"):
        signal.touch()

    paddle_reshard.convert(plain, tmp_path / "one", to="tp=1")
    assert read_one_card(tmp_path / "one") == truth_beside(source)

    position = weights.rindex(truth_beside(source)["lm_head.weight"])
    other = bytearray(weights)
    other[position] ^= 1
    (plain / "model_state.moe_sharding01.pdparams").write_bytes(other)
    for signal in plain.glob("saved_signal*"):
        signal.touch()
    with pytest.raises(ReshardError, match=r"lm_head\.weight"):
        paddle_reshard.convert(plain, tmp_path / "other", to="tp=1")


@pytest.mark.parametrize(("name", "options", "reason"), REFUSED)
def test_what_would_lose_something_is_refused_before_anything_is_published(
    name: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    source = unpacked(name, tmp_path)
    with pytest.raises(ReshardError, match=reason):
        paddle_reshard.convert(source, tmp_path / "t", **options)
    assert not (tmp_path / "t").exists()


def test_the_head_of_a_job_without_stages_is_another_parameter_with_the_states_of_the_words(
    tmp_path: Path,
) -> None:
    """As the real job of one card has it, which resumes with all of its 102 entries and 23 master weights."""
    source = unpacked("tied_with_stages", tmp_path)
    real = load(unpacked("tied_on_one_card", tmp_path) / "optimizer.pdopt")
    paddle_reshard.convert(source, tmp_path / "one", to="tp=1")
    written = load(tmp_path / "one" / "optimizer.pdopt")
    assert set(written) == set(real)
    assert set(written["master_weights"]) == set(real["master_weights"])


def test_with_stages_again_an_equal_head_is_the_words(tmp_path: Path) -> None:
    source = unpacked("tied_with_stages", tmp_path)
    paddle_reshard.convert(source, tmp_path / "one", to="tp=1")
    paddle_reshard.convert(tmp_path / "one", tmp_path / "two", to="pp=2")
    assert paddle_reshard.verify(source, tmp_path / "two").equal


def test_an_export_keeps_a_head_that_was_trained_apart(tmp_path: Path) -> None:
    source = unpacked("tied_on_one_card", tmp_path)
    truth = truth_beside(source)
    paddle_reshard.convert(source, tmp_path / "export", format="huggingface")
    assert json.loads((tmp_path / "export/config.json").read_text())["tie_word_embeddings"] is False
    exported = {
        name: bytes(entry["data"])
        for name, entry in deserialize((tmp_path / "export/model.safetensors").read_bytes())
    }
    for key in ("lm_head.weight", "model.embed_tokens.weight"):
        assert exported[key] == truth[key]


def test_biases_of_columns_are_cut_and_those_of_rows_are_whole(tmp_path: Path) -> None:
    source = unpacked("llama_bias", tmp_path)
    paddle_reshard.convert(source, tmp_path / "two", to="tp=2")
    ranks = [load(tmp_path / f"two/model_state.tp0{rank}.pdparams") for rank in range(2)]
    truth = truth_beside(source)
    sizes = {key: len(value) for key, value in truth.items() if key.endswith(".bias")}
    assert sizes
    for key, size in sizes.items():
        parts = [rank[key].tobytes() for rank in ranks]
        if "o_proj" in key:
            assert parts == [truth[key], truth[key]]
        else:
            assert [len(part) for part in parts] == [size // 2, size // 2]
            assert b"".join(parts) == truth[key]


def test_a_save_that_may_have_died_is_said(tmp_path: Path) -> None:
    """A job that saves parameters alone leaves the same files, so nothing can be refused."""
    source = unpacked("save_that_died", tmp_path)
    words = "no saved_signal file marks it as finished"
    assert words in dict(paddle_reshard.inspect(source).facts())["not proven"]
    assert words in dict(paddle_reshard.plan(source, format="flex").facts())["not proven"]
    (source / "saved_signal_0").write_text("1")
    assert "not proven" not in dict(paddle_reshard.inspect(source).facts())
