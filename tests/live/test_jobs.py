"""Real jobs of several processes are filled from checkpoints of other topologies, bit for bit."""

import pytest

from tests.conftest import case_directory
from tests.live.processes import run_job

pytest.importorskip("paddle")

CASES = ("mp2pp2sh2_s1v2_meta_ema", "sh2_s1v1_meta_fp32", "nlp_fused_mp2")


def test_auto_parallel_training():
    """Sources of eight ranks with stage 1 v2, of two with stage 1 v1 in float32, of two with fused projections."""
    run_job(4, "tests.live.auto_parallel", *(str(case_directory(name) / "checkpoint-3") for name in CASES))
