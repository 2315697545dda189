"""Real jobs of several processes are filled from checkpoints of other topologies, bit for bit."""

import pytest

import paddle_reshard
from tests.conftest import case_directory
from tests.live.processes import run_job

pytest.importorskip("paddle")

CASES = ("mp2pp2sh2_s1v2_meta_ema", "sh2_s1v1_meta_fp32", "nlp_fused_mp2")


def test_auto_parallel_training(tmp_path):
    """Sources of eight ranks with stage 1 v2, of two with stage 1 v1 in float32, of two with fused projections."""
    run_job(
        tmp_path,
        4,
        "tests.live.auto_parallel",
        *(str(case_directory(name) / "checkpoint-3") for name in CASES),
    )


@pytest.mark.parametrize("cpu", ["bfloat16_cpu", "other_cpu"])
def test_fleet_and_stage_3(tmp_path, cpu):
    """Two processes; the source is one rank's share of two, by stage 1 v2."""
    own = case_directory("nlp_fused_mp2")
    source = tmp_path / "checkpoint-3"
    paddle_reshard.convert(own / "checkpoint-3", source, to="sharding=2", sharding_strategy="stage1v2")
    (tmp_path / "truth.safetensors").symlink_to(own / "truth.safetensors")
    run_job(tmp_path, 2, "tests.live.fleet_job", str(source), str(own / "checkpoint-3"), cpu)
