"""Real unified checkpoints are read as what the trainer had in memory, and written byte for byte as it writes them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors

import paddle_reshard
from paddle_reshard.pipeline.core.errors import DriftError, PlanError, UsageError
from tests import oracle
from tests.conftest import case_directory
from tests.golden.unified_cases import PACKED, read_unified, small_case, small_cases, truth_of

REFUSED = ("uc_sh2_s1v1_quant", "nlp_uc_mp2sh2_s1v2_ignoremerge")
MIXTURES = ("ep2_uc_sh2_s1v2", "moe_uc_single_tohf", "moe_single_tohf")
ONE_CARD = {
    "dense/single": "dense/uc_single",
    "moe/moe_single": "moe/moe_uc_single",
    "small-unified/uc_single_tied": "small-unified/uc_single_tied",
    "small-unified/uc_single_fp32": "small-unified/uc_single_fp32",
}
"""Two savings of one training, the hybrid one and the unified one; or one that is written again."""
TENSOR_FILES = ("model", "optimizer", "master_weights")


def _checkpoint(case: Path) -> Path:
    (path,) = case.glob("checkpoint-*")
    return path


def _expected(truth: oracle.Tensors, source: Path, name: str) -> oracle.Tensors:
    """What one card writes of the truth: states of tied weights under the last key."""
    expected = dict(truth)
    if name.endswith("removemw"):  # master weights are made of the weights, as the loader does
        for key in oracle.shapes_of(truth):
            expected[f"{key}.w_0"] = (truth[key].astype(np.uint32) << 16).view(np.float32)
    if json.loads((source / "config.json").read_text())["tie_word_embeddings"]:
        expected = {k: v for k, v in expected.items() if not k.startswith("model.embed_tokens.weight.")}
    return expected


# ------------------------------------------------------------------------------------------------ as a source


@pytest.mark.parametrize("name", [name for name in small_cases() if name not in REFUSED])
def test_a_real_checkpoint_is_the_truth(name: str, tmp_path: Path) -> None:
    source, truth = _checkpoint(small_case(name)), truth_of(name)
    paddle_reshard.convert(source, tmp_path / "unified", format="unified", drop=["ema"])
    oracle.assert_same_tensors(read_unified(tmp_path / "unified"), _expected(truth, source, name))
    assert paddle_reshard.verify(source, tmp_path / "unified").equal


@pytest.mark.parametrize("name", ["uc_sh2_s1v2", "nlp_uc_mp2pp2", "mp2pp2_tohf", "sh2_s1v1_meta_tohf"])
@pytest.mark.parametrize("to", ["tp=1", "tp=2,pp=2,sharding=2"])
def test_it_becomes_a_hybrid_checkpoint(name: str, to: str, tmp_path: Path) -> None:
    """With the learning-rate schedule of ``scheduler.pdparams`` in the optimizer files."""
    source, truth = _checkpoint(small_case(name)), truth_of(name)
    paddle_reshard.convert(
        source, tmp_path / "checkpoint-3", to=to, sharding_strategy="stage1v1" if "," in to else None
    )
    shapes = oracle.shapes_of(truth)
    oracle.assert_same_tensors(oracle.read_checkpoint(tmp_path / "checkpoint-3", shapes), truth)
    optimizer = oracle.load_with_paddle(next((tmp_path / "checkpoint-3").glob("optimizer*")))
    assert optimizer["LR_Scheduler"] == oracle.load_with_paddle(source / "scheduler.pdparams")


def test_padding_that_paddlenlp_took_for_a_tensor_is_found(tmp_path: Path) -> None:
    """Its gathering of slices takes one of padding only for whole, where that has as many elements as the tensor."""
    name = "nlp_uc_mp2sh2_s1v2_ignoremerge"
    source = _checkpoint(small_case(name))
    with pytest.raises(
        DriftError, match=r"layers\.1\.self_attn\.q_proj.*shard00.*shard01.*first copy"
    ) as caught:
        paddle_reshard.convert(source, tmp_path / "unified", format="unified", drop=["ema"])
    assert caught.value.replicas
    report = paddle_reshard.convert(
        source, tmp_path / "unified", format="unified", drop=["ema"], replicas="report"
    )
    assert report.moved.replica_drift
    oracle.assert_same_tensors(read_unified(tmp_path / "unified"), truth_of(name))


# ------------------------------------------------------------------------------------------------ as a target


def _same_tensor_files(made: Path, real: Path) -> None:
    names = sorted(path.name for path in real.iterdir() if path.name.startswith(TENSOR_FILES))
    assert names == sorted(path.name for path in made.iterdir() if path.name.startswith(TENSOR_FILES))
    for name in names:
        assert (made / name).read_bytes() == (real / name).read_bytes(), name


@pytest.mark.parametrize("kind", TENSOR_FILES)
def test_several_cards_are_written_as_paddlenlp_writes_them(kind: str, tmp_path: Path) -> None:
    """The same training with ``unified_checkpoint`` on two tensor-parallel ranks, which have half of a kind each."""
    source = _checkpoint(case_directory("nlp_fused_mp2"))
    paddle_reshard.convert(source, tmp_path / "one", format="unified", drop=["ema"])
    half = (tmp_path / "one" / f"{kind}-00001-of-00001.safetensors").stat().st_size * 51 // 100
    paddle_reshard.convert(source, tmp_path / "two", format="unified", drop=["ema"], max_shard_size=half)
    real = json.loads((PACKED / "nlp_fused_mp2.sha256.json").read_text())
    made = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (tmp_path / "two").iterdir()}
    expected = {name: digest for name, digest in real.items() if name.startswith(kind)}
    assert len(expected) == 3
    assert {name: digest for name, digest in made.items() if name.startswith(kind)} == expected


@pytest.mark.parametrize(("source", "unified"), ONE_CARD.items())
def test_one_card_is_written_as_paddleformers_writes_it(source: str, unified: str, tmp_path: Path) -> None:
    paddle_reshard.convert(
        _checkpoint(case_directory(source)), tmp_path / "unified", format="unified", drop=["ema"]
    )
    _same_tensor_files(tmp_path / "unified", _checkpoint(case_directory(unified)))


def test_files_are_filled_in_order_and_opened_by_safetensors(tmp_path: Path) -> None:
    source, limit = _checkpoint(case_directory("mp2_tied")), 100_000
    paddle_reshard.convert(
        source, tmp_path / "unified", format="unified", drop=["ema"], max_shard_size="100KB"
    )
    for kind in TENSOR_FILES:
        paths = sorted((tmp_path / "unified").glob(f"{kind}-*.safetensors"))
        assert len(paths) > 2
        held, sizes = {}, []
        for path in paths:
            assert path.name.endswith(f"-of-{len(paths):05d}.safetensors")
            with safetensors.safe_open(path, "np") as file:
                assert file.metadata() == {"format": "np"}
                held |= dict.fromkeys(file.keys(), path.name)
                sizes.append(
                    [(e["shape"], len(e["data"])) for _, e in safetensors.deserialize(path.read_bytes())]
                )
        index = json.loads((tmp_path / "unified" / f"{kind}.safetensors.index.json").read_text())
        assert index["weight_map"] == held
        totals = [sum(nbytes for _, nbytes in of_file) for of_file in sizes]
        assert index["metadata"]["total_size"] == sum(totals)
        assert all(total <= limit or len(of_file) == 1 for total, of_file in zip(totals, sizes, strict=True))
    assert index.keys() == {"metadata", "weight_map"}
    (facts,) = [json.loads(path.read_text()) for path in (tmp_path / "unified").glob("optimizer*.index.json")]
    assert (facts["master_weights"], facts["quant_ckpt_resume_times"]) == (True, 0)


@pytest.mark.parametrize(("size", "alone"), [("1GB", True), ("20KB", False)])
def test_a_size_that_everything_fits_into_changes_nothing(size: str, alone: bool, tmp_path: Path) -> None:
    """Files of one card have tied words' states once; else a kind in several files makes those of all for many."""
    source = _checkpoint(small_case("uc_single_tied"))
    planned = paddle_reshard.plan(source, tmp_path / "t", format="unified", max_shard_size=size)
    whole = paddle_reshard.plan(source, tmp_path / "t", format="unified")
    assert (planned.plan.plan_id == whole.plan.plan_id) is alone
    assert any("silently reads only the first" in said for said in planned.targets[0].remarks) is not alone


@pytest.mark.parametrize(
    ("size", "told"), [(0, "0 holds nothing"), ("0.5", "0.5 holds nothing"), ("two", "'two' is not")]
)
@pytest.mark.parametrize("format", ["unified", "flex", "auto-parallel", "huggingface"])
def test_a_size_of_files(format: str, size: object, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"--max-shard-size {told}"):
        paddle_reshard.plan(
            _checkpoint(small_case("uc_single_tied")), tmp_path / "t", format=format, max_shard_size=size
        )


# ----------------------------------------------------------------------------------------------- weights only


def test_weights_alone(tmp_path: Path) -> None:
    """They are a checkpoint without states, from which a job starts with an optimizer of its own."""
    source, weights = _checkpoint(small_case("nlp_uc_mp2pp2")), tmp_path / "weights"
    shutil.copytree(
        source,
        weights,
        ignore=shutil.ignore_patterns("optimizer*", "master_weights*", "scheduler*"),
        copy_function=shutil.copyfile,
    )
    paddle_reshard.convert(weights, tmp_path / "unified", format="unified", max_shard_size="5KB")
    parameters = {key: truth_of("nlp_uc_mp2pp2")[key] for key in oracle.shapes_of(truth_of("nlp_uc_mp2pp2"))}
    oracle.assert_same_tensors(read_unified(tmp_path / "unified"), parameters)
    assert not list((tmp_path / "unified").glob("optimizer*"))
    assert paddle_reshard.verify(source, weights, subset=True).equal
    paddle_reshard.convert(source, tmp_path / "hf", format="huggingface")
    for holds_no_states in (weights, tmp_path / "hf"):
        plan = paddle_reshard.plan(holds_no_states, tmp_path / "hybrid", to="tp=1")
        assert "--ignore_load_lr_and_optim true" in dict(plan.facts())["optimizer"]
        with pytest.raises(PlanError, match="sharding=2: the source holds parameters only"):
            paddle_reshard.plan(holds_no_states, tmp_path / "hybrid", to="sharding=2")


def test_a_buffer_that_sharded_saving_lost_stays_away(tmp_path: Path) -> None:
    source = case_directory("moe/glm4moe_ep2_sh2_s1v2_meta_ema") / "checkpoint-3"
    lost = "*e_score_correction_bias"
    paddle_reshard.convert(source, tmp_path / "made", format="unified", allow_missing=[lost], drop=["ema"])
    assert paddle_reshard.verify(source, tmp_path / "made", allow_missing=[lost], subset=True).equal
    paddle_reshard.convert(source, tmp_path / "direct", to="tp=1", allow_missing=[lost], drop=["ema"])
    paddle_reshard.convert(tmp_path / "made", tmp_path / "back", to="tp=1", allow_missing=[lost])
    for name in ("model_state.pdparams", "optimizer.pdopt"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes(), name
