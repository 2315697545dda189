"""``--aoa FILE`` from end to end: real checkpoints, read back by the libraries of the formats."""

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import paddle_reshard
from paddle_reshard.pipeline.core.errors import PlanError, RuleError, UsageError
from tests import oracle
from tests.aoa.arrays import paddle
from tests.conftest import GOLDEN, case_directory
from tests.jobs.command import run_here

from paddle.distributed.flex_checkpoint.dcp.sharded_weight import make_replicated_sharded_weight  # isort: skip

PROGRAMS = Path(__file__).parent / "programs"
SOURCE = case_directory("mp2sh2_s1v2_meta_mid") / "checkpoint-3"


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """By the safetensors library, bit for bit."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            for key in file.keys():  # noqa: SIM118
                piece = file.get_slice(key)
                found[key] = (piece.get_dtype(), tuple(piece.get_shape()))
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        start = 8 + int.from_bytes(raw[:8], "little")
        for key, entry in header.items():
            if key != "__metadata__":
                begin, end = entry["data_offsets"]
                found[key] = (*found[key], raw[start + begin : start + end])
    return found


EXPORTED = {
    "mp2sh2_s1v2_meta_mid": "llama",  # of tp 2 and sharding 2; parameters are left out
    "mp2_tied": "llama_tied",
    "small-families/qwen2_single": "qwen2",
    "small-families/qwen3_single": "qwen3",
    "moe/dsv3_single": "deepseek_v3",  # routers are cast to bfloat16
}


@pytest.mark.parametrize("case", EXPORTED)
def test_as_the_real_export(case: str, tmp_path: Path) -> None:
    """By the program of its model, every tensor is what the real ``save_to_hf`` wrote."""
    program = json.loads((PROGRAMS / f"{EXPORTED[case]}.json").read_text())["inverse"]
    (tmp_path / "rules.json").write_text(json.dumps(program))
    source, made = case_directory(case) / "checkpoint-3", tmp_path / "made"
    paddle_reshard.convert(source, made, format="huggingface", aoa=tmp_path / "rules.json")
    found = {
        key: [dtype, [*shape], sha256(held).hexdigest()]
        for key, (dtype, shape, held) in tensors(made).items()
    }
    assert found == json.loads((GOLDEN / "exports" / f"{case.rpartition('/')[2]}.json").read_text())


def load_pickled(folder: Path, key: str) -> np.ndarray:
    """By Paddle."""
    (path,) = folder.glob("*.distcp")
    return np.asarray(oracle.load_with_paddle(path)[key])


def test_statements_without_effect_are_reported(tmp_path: Path) -> None:
    program = tmp_path / "rules.aoa"
    program.write_text(
        "model.norm.weight -> norm.weight\nmodel.layers.$LAYER_ID.qq.weight -> q.$LAYER_ID\nno.such -> _\n"
    )
    planned = run_here("plan", SOURCE, tmp_path / "x", "--format", "flex", "--aoa", program, "--json")
    told = [
        e["path"] for e in json.loads(planned.stdout)["not_carried"] if "matches no tensor" in e["reason"]
    ]
    assert told == [f"{program}, line 2", f"{program}, line 3"]


def test_a_dropped_tensor_is_named(tmp_path: Path) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text("lm_head.weight -> _   # not wanted\nmodel.norm.weight -> final.weight\n")
    answer = run_here("convert", SOURCE, tmp_path / "made", "--format=huggingface", "--aoa", rules, "--json")
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)["plan"]
    assert {"path": "lm_head.weight", "reason": f"dropped by {rules}"} in report["not_carried"]
    made = tensors(tmp_path / "made")
    assert "final.weight" in made
    assert not {"lm_head.weight", "model.norm.weight"} & made.keys()


@pytest.mark.parametrize("case", ["mp2_tied", "mp2sh2_s1v2_meta_mid"])
def test_every_name_is_written(case: str, tmp_path: Path) -> None:
    """Also where the model ties other tensors."""
    rules = tmp_path / "rules.txt"
    rules.write_text("model.norm.weight -> a.weight\nmodel.norm.weight -> b.weight")
    source = case_directory(case) / "checkpoint-3"
    paddle_reshard.convert(source, tmp_path / "made", format="huggingface", aoa=rules)
    made = tensors(tmp_path / "made")
    assert made["a.weight"] == made["b.weight"]
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= made.keys()
    paddle_reshard.convert(source, tmp_path / "flex", format="flex", aoa=rules)
    for key in ("a.weight", "b.weight"):
        assert load_pickled(tmp_path / "flex" / "model_state", key).tobytes() == made["a.weight"][2]
        load_pickled(tmp_path / "flex" / "optimizer_state", f"{key}.moment1_0")


@pytest.mark.parametrize(
    ("rules", "options", "error", "told"),
    [
        ("a -> b ->", {"format": "huggingface"}, UsageError, "rules.txt, line 1"),
        ("nothing.weight -> b", {"format": "huggingface"}, PlanError, "nothing.weight"),
        ("model.norm.weight -> final.weight", {"to": "tp=1"}, PlanError, "final.weight"),
    ],
)
def test_refused(
    rules: str, options: dict[str, str], error: type[Exception], told: str, tmp_path: Path
) -> None:
    (tmp_path / "rules.txt").write_text(rules)
    with pytest.raises(error, match=told):
        paddle_reshard.plan(SOURCE, tmp_path / "made", aoa=tmp_path / "rules.txt", **options)  # type: ignore[typeddict-item]


def test_targets_of_one_program_hold_one_model(tmp_path: Path) -> None:
    (tmp_path / "rules.txt").write_text("model.norm.weight -> final.weight")
    with pytest.raises(UsageError, match="use separate conversions"):
        paddle_reshard.plan(
            SOURCE,
            {tmp_path / "a": {"to": "tp=1"}, tmp_path / "b": {"format": "flex"}},
            aoa=tmp_path / "rules.txt",
        )


def test_gpt_as_gpt2(tmp_path: Path) -> None:
    """A family that no rule table exports: three projections become one, as ``transformers`` names them."""
    source = case_directory("small-families/nlp_gpt_single") / "checkpoint-3"
    with pytest.raises(RuleError, match="--aoa FILE"):
        paddle_reshard.plan(source, tmp_path / "made", format="huggingface")
    paddle_reshard.convert(source, tmp_path / "made", format="huggingface", aoa=PROGRAMS / "gpt.txt")
    model = oracle.load_with_paddle(source / "model_state.pdparams")
    made = tensors(tmp_path / "made")
    parts = [model[f"gpt.decoder.layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    wanted = np.concatenate(parts, axis=1)
    assert made["transformer.h.0.attn.c_attn.weight"] == ("BF16", wanted.shape, wanted.tobytes())
    assert made["transformer.wte.weight"][1] == model["gpt.embeddings.word_embeddings.weight"].shape
    assert not any(key.startswith(("gpt.", "lm_head")) for key in made)


@pytest.mark.parametrize("keys", [("a", "b"), ("a",)])
@pytest.mark.parametrize(("rules", "made"), [(None, ("a", (0, 4))), ("a^T -> c", ("c", (4, 0)))])
def test_a_tensor_without_elements_is_held(
    keys: tuple[str, ...], rules: str | None, made: tuple[str, tuple[int, int]], tmp_path: Path
) -> None:
    shapes = {"a": [0, 4], "b": [2]}
    state = {key: make_replicated_sharded_weight(key, paddle.ones(shapes[key])) for key in keys}
    paddle.distributed.save_state_dict(state, str(tmp_path / "source" / "model_state"))
    asked = {}
    if rules is not None:
        (tmp_path / "rules.txt").write_text(rules)
        asked = {"aoa": tmp_path / "rules.txt"}
    paddle_reshard.convert(tmp_path / "source", tmp_path / "made", format="flex", **asked)  # type: ignore[arg-type]
    assert load_pickled(tmp_path / "made" / "model_state", made[0]).shape == made[1]
