"""A job starts from parameters, with master weights that are made from them and an optimizer of its own.

``make parity`` starts the real trainer from such checkpoints (rows ``cold-…``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import ReshardError
from tests import expert_oracle, oracle
from tests.conftest import case_directory
from tests.golden.compare_one_card import read_flex

MADE = {"master_weights": "from-parameters"}
DENSE, EXPERTS = "single", "moe/moe_single"


@pytest.fixture(scope="module", params=[DENSE, EXPERTS])
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Case → its Hugging Face checkpoint."""
    made = {}
    for name in (DENSE, EXPERTS):
        made[name] = tmp_path_factory.mktemp("models") / "model"
        (checkpoint,) = case_directory(name).glob("checkpoint-*")
        paddle_reshard.convert(checkpoint, made[name], format="huggingface")
    return made


def expected(case: str, masters: bool) -> dict[str, np.ndarray]:
    """The parameters of the truth, and their values as float32."""
    truth = oracle.read_truth(case_directory(case) / "truth.safetensors")
    parameters = {key: truth[key] for key in oracle.shapes_of(truth)}
    made = {
        f"{key}.w_0": (array.astype(np.uint32) << 16).view(np.float32)
        for key, array in parameters.items()
        if array.dtype == np.uint16
    }
    return parameters | (made if masters else {})


HYBRID = [
    (DENSE, "sharding=2", "stage1v2"),
    (DENSE, "tp=2,pp=2,sharding=2", "stage1v2"),
    (DENSE, "pp=2,sharding=3", "stage1v1"),
    (EXPERTS, "sharding=4,ep=2", "stage1v2"),
    (EXPERTS, "tp=2,sharding=2,ep=4", "stage1v2"),
]


@pytest.mark.parametrize(("case", "to", "strategy"), HYBRID)
def test_optimizer_files_hold_the_parameters_as_float32_and_no_states(
    case: str, to: str, strategy: str, models: dict[str, Path], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    paddle_reshard.convert(models[case], target, to=to, sharding_strategy=strategy, **MADE)
    truth = expected(case, masters=True)
    shapes = {key: array.shape for key, array in expected(case, masters=False).items()}
    if "ep=" in to:
        assert not list(expert_oracle.differing(expert_oracle.read_expert_parallel(target, shapes), truth))
    else:
        oracle.assert_same_tensors(oracle.read_checkpoint(target, shapes), truth)
    for path in target.glob("optimizer*.pdopt"):
        assert oracle.unpickle(path).keys() == {"master_weights"}


def test_a_flex_checkpoint_has_all_folders_and_no_states(
    case: str, models: dict[str, Path], tmp_path: Path
) -> None:
    plan = paddle_reshard.plan(models[case], tmp_path / "flex", format="flex", **MADE)
    arguments = dict(plan.facts())["optimizer"]
    assert "--load_checkpoint_format flex_checkpoint --ignore_load_lr_and_optim true" in arguments
    paddle_reshard.convert(models[case], tmp_path / "flex", format="flex", **MADE)
    for folder in ("model_state", "master_weight", "optimizer_state"):
        assert (tmp_path / "flex" / folder / "0.metadata").exists()
    written = {key: array.tobytes() for key, array in expected(case, masters=True).items()}
    assert read_flex(tmp_path / "flex") == written


@pytest.mark.parametrize("to", ["sharding=2", "tp=2,pp=2,sharding=2"])
def test_without_master_weights_the_ranks_of_a_sharding_group_share_their_files(
    to: str, models: dict[str, Path], tmp_path: Path
) -> None:
    names = []
    for topology in (to, to.replace(",sharding=2", "").replace("sharding=2", "tp=1")):
        target = tmp_path / topology
        paddle_reshard.convert(models[DENSE], target, to=topology, format="hybrid-plain")
        names.append({path.name: path.read_bytes() for path in target.glob("*.pd*")})
    assert names[0] == names[1]
    assert all(name.startswith("model_state") for name in names[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "pp=2"}, r"no sharding: the trainer only reads master weights .* together with model_meta\.json"),
        ({"to": "sharding=2", "format": "hybrid-plain"}, r"first step makes the same master weights"),
        ({"to": "sharding=2", "sharding_strategy": "stage2"}, r"the trainer only reads master weights"),
        ({"format": "unified"}, r"in the format unified; use --format hybrid, hybrid-plain or flex"),
        ({"format": "auto-parallel"}, r"in the format auto-parallel"),
        ({"format": "huggingface"}, r"in the format huggingface"),
    ],
)  # fmt: skip
def test_targets_of_which_no_job_reads_master_weights_alone(
    options: dict[str, Any], message: str, models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ReshardError, match=message):
        paddle_reshard.plan(models[DENSE], tmp_path / "target", **options, **MADE)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("single", r"holds optimizer states, such as those of model\.embed_tokens\.weight"),
        ("single_fp32", r"holds optimizer states"),
        ("states/lora_single", r"holds (LoRA|optimizer states)"),
    ],
)
def test_a_source_that_has_an_optimizer_keeps_it(name: str, message: str, tmp_path: Path) -> None:
    (source,) = case_directory(name).glob("checkpoint-*")
    with pytest.raises(ReshardError, match=message):
        paddle_reshard.plan(source, tmp_path / "target", to="sharding=2", **MADE)


def test_float32_parameters_have_no_master_weights(models: dict[str, Path], tmp_path: Path) -> None:
    paddle_reshard.convert(models[DENSE], tmp_path / "hybrid", to="tp=1")
    paddle_reshard.convert(tmp_path / "hybrid", tmp_path / "float32", format="huggingface", dtype="float32")
    with pytest.raises(ReshardError, match="no parameter is bfloat16 or float16"):
        paddle_reshard.plan(tmp_path / "float32", tmp_path / "target", to="sharding=2", **MADE)
