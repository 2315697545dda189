"""Statements about a Hugging Face checkpoint are about the tensors in its files, as Paddle's loader reads them."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import paddle_reshard
from paddle_reshard.pipeline.core.errors import PlanError, RuleError, UsageError
from tests import facts, oracle
from tests.aoa.arrays import paddle
from tests.aoa.test_conversions import PROGRAMS
from tests.conftest import GOLDEN, case_directory
from tests.golden import test_fleet_only as fleet
from tests.golden.test_fleet import save_exported
from tests.lab.fleet import ONLY_VARIANTS as VARIANTS
from tests.sampling import exhaustive

from paddle.distributed.flex_checkpoint.dcp.sharded_weight import make_replicated_sharded_weight  # isort: skip

OF_ERNIE = json.loads((GOLDEN / "ernie4_5_moe_vl.json").read_text())
CASES = {
    "llama": "mp2sh2_s1v2_meta_mid", "llama_tied": "mp2_tied", "phi3": "families/phi3_single",
    "gpt_oss": "exports/gpt_oss", "qwen2": "families/qwen2_single", "qwen3": "families/qwen3_single",
    "deepseek_v3": "exports/deepseek_v3_yarn", "ernie4_5_moe": "exports/ernie4_5_moe",
    "glm4_moe": "exports/glm4_moe", "qwen2_moe": "exports/qwen2_moe", "qwen3_moe": "exports/qwen3_moe",
    "glm4v_moe": "families/glm4v_moe_single",
}  # fmt: skip
LIKE_THESE = (
    "ernie4_5", "ernie4_5_moe_vl", "gemma3_text", "glm_ocr", "paddleocr_vl", "qwen2_5_vl", "qwen3_vl",
    "qwen3_vl_moe",
)  # fmt: skip
FLEET = (("kimi_k2", "grouped"), ("minimax_m2", "mtp"))
"""Families that only PaddleFleet trains, and a variant of each."""
FLEET_LIKE_THESE = (
    ("deepseek_v32", "mtp_grouped"), ("glm_moe_dsa", "mtp"), ("granite", "bias"), ("olmo2", "plain")
)  # fmt: skip
# Paddle's loader cannot be asked here about the other families of PaddleFormers 1.2:
# - deepseek_v4: no rule table describes it, so its checkpoint is no source; its maps are in test_real_programs.py
# - qwen3_5, qwen3_5_moe (one map): it uses `fused_in_proj`, which Paddle 3.3.1 does not have; what else it makes is in
#   tests/golden/test_fleet_vision.py
# - kimi_k25, qwen3_omni_moe: the library has their processors, and neither a class nor a map
HEAD = "lm_head.weight"


def exported(case: str, to: Path) -> Path:
    """As the library itself exports it, where there is no checkpoint of a job."""
    checkpoint = case_directory(case) / "checkpoint-3"
    if not checkpoint.exists():
        return case_directory(case) / "hf-export"
    paddle_reshard.convert(checkpoint, to, format="huggingface")
    return to


def program(family: str, to: Path) -> Path:
    """PaddleFormers' own map for loading a Hugging Face checkpoint."""
    recorded = PROGRAMS / f"{family}.json"
    if recorded.exists():
        statements = json.loads(recorded.read_text())["forward"]["aoa_statements"]
    elif family == "ernie4_5_moe_vl":
        statements = OF_ERNIE["statements"]
    else:
        statements = facts.declared(family)
    if family == "glm4_moe":  # recorded with `attention_bias`, which the checkpoint does not have
        statements = [text for text in statements if "_proj.bias" not in text]
    to.write_text(json.dumps({"aoa_statements": statements}))
    return to


def loaded_by_paddle(
    source: Path, rules: Path, like: dict[str, np.ndarray], to: Path
) -> dict[str, np.ndarray]:
    """What Paddle's loader puts into tensors of these shapes and dtypes.

    A head is loaded again by itself: of two targets that one tensor feeds, Paddle 3.3.1 leaves one unloaded.
    """
    to.mkdir()
    for path in source.glob("*.safetensors"):
        shutil.copyfile(path, to / path.name)
    found = {}
    config = json.loads(rules.read_text())
    of_head = [text for text in config["aoa_statements"] if HEAD in text]
    for keys, statements in (
        (sorted(like), config["aoa_statements"]),
        (sorted({HEAD} & like.keys()), of_head),
    ):
        targets = {key: make_replicated_sharded_weight(key, zeros_like(like[key])) for key in keys}
        asked = {**config, "aoa_statements": statements}
        paddle.distributed.load_state_dict(targets, str(to), safetensors=True, aoa_config=asked)
        found |= {key: bits(made.local_tensor) for key, made in targets.items()}
    return found


def zeros_like(array: np.ndarray) -> paddle.Tensor:
    return paddle.zeros(list(array.shape), dtype="bfloat16" if array.dtype == np.uint16 else array.dtype.name)


def bits(tensor: paddle.Tensor) -> np.ndarray:
    return (tensor.view("uint16") if tensor.dtype == paddle.bfloat16 else tensor).numpy()


def made_of(source: Path, rules: Path, to: Path) -> dict[str, np.ndarray]:
    """What a FlexCheckpoint holds that was made of a source by statements, read by Paddle."""
    paddle_reshard.convert(source, to, format="flex", aoa=rules)
    (path,) = (to / "model_state").glob("*.distcp")
    return {
        key: np.asarray(value)
        for key, value in oracle.load_with_paddle(path).items()
        if key != "StructuredToParameterName@@"
    }


def assert_as_paddle_loads(source: Path, rules: Path, folder: Path) -> None:
    made = made_of(source, rules, folder / "made")
    theirs = loaded_by_paddle(source, rules, made, folder / "copy")
    assert {key: (a.shape, a.tobytes()) for key, a in made.items()} == {
        key: (a.shape, a.tobytes()) for key, a in theirs.items()
    }
    assert elements_of(source) <= sum(array.size for array in made.values())
    for name in ("embed_tokens.weight", HEAD):
        assert any(key.endswith(name) for key in made), name


def elements_of(source: Path) -> int:
    total = 0
    for path in source.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            total += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
    return total


@pytest.mark.parametrize("family", [*CASES, *map(exhaustive, LIKE_THESE)])
def test_as_paddle_loads_the_files(family: str, tmp_path: Path) -> None:
    case = CASES.get(family) or f"families/{family}_{'saved' if family == 'ernie4_5_moe_vl' else 'single'}"
    source, rules = exported(case, tmp_path / "source"), program(family, tmp_path / "rules.json")
    assert_as_paddle_loads(source, rules, tmp_path)


@pytest.mark.parametrize(("family", "variant"), [*FLEET, *(exhaustive(*way) for way in FLEET_LIKE_THESE)])
def test_as_paddle_loads_what_no_class_here_trains(family: str, variant: str, tmp_path: Path) -> None:
    of_family = fleet.DECLARED[family]
    save_exported(
        tmp_path / "source", fleet.published(family, variant), of_family["config"] | VARIANTS[variant]
    )
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"aoa_statements": of_family["statements"][variant]}))
    assert_as_paddle_loads(tmp_path / "source", rules, tmp_path)


def test_heads_that_differ_in_width_are_not_fused(tmp_path: Path) -> None:
    """The map of qwen3_next fuses q, whose heads have gates, with k and v."""
    source = exported("families/qwen3_next_single", tmp_path / "source")
    with pytest.raises(PlanError, match=r"found \[32, 16, 16\] elements along axis 1.*concatenate"):
        paddle_reshard.plan(
            source, tmp_path / "made", format="flex", aoa=program("qwen3_next", tmp_path / "rules.json")
        )


@pytest.mark.parametrize("family", ["llama", "llama_tied", "phi3", "gpt_oss"])
def test_a_job_gets_what_the_rule_table_gives(family: str, tmp_path: Path) -> None:
    """Maps of other mixtures of experts leave routers in float32, as the file has them; the trainer has bfloat16."""
    source, rules = exported(CASES[family], tmp_path / "source"), program(family, tmp_path / "rules.json")
    paddle_reshard.convert(source, tmp_path / "built in", to="tp=1")
    paddle_reshard.convert(source, tmp_path / "aoa", to="tp=1", aoa=rules)
    assert paddle_reshard.verify(tmp_path / "built in", tmp_path / "aoa").equal


def test_convention_says_whose_table_a_downloaded_model_has(tmp_path: Path) -> None:
    """Its config.json has no entry of a library, and two libraries train the family."""
    source, rules = exported(CASES["llama"], tmp_path / "source"), program("llama", tmp_path / "rules.json")
    (source / "paddle_reshard.json").unlink()
    config = json.loads((source / "config.json").read_text())
    del config["paddleformers_version"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(RuleError, match="say which with --convention paddleformers or"):
        paddle_reshard.plan(source, to="tp=1", aoa=rules)
    asked = {"to": "tp=1", "convention": "paddleformers"}
    paddle_reshard.convert(source, tmp_path / "built in", **asked)
    paddle_reshard.convert(source, tmp_path / "aoa", aoa=rules, **asked)
    assert paddle_reshard.verify(tmp_path / "built in", tmp_path / "aoa").equal
    with pytest.raises(RuleError, match=r"are none of llama \(paddlenlp\)"):
        paddle_reshard.plan(source, to="tp=1", aoa=rules, convention="paddlenlp")
    (source / "config.json").write_text(json.dumps({**config, "paddleformers_version": "1.2.0"}))
    with pytest.raises(UsageError, match="the rule table that fits the source is paddleformers's"):
        paddle_reshard.plan(source, to="tp=1", aoa=rules, convention="paddlenlp")
