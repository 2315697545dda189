"""Real jobs of several processes are filled from checkpoints of other topologies, bit for bit."""

import json
import shutil
from pathlib import Path

import pytest

import paddle_reshard
from tests.conftest import case_directory
from tests.paddle_processes import run_ranks

pytest.importorskip("paddle")

CASES = ("mp2pp2sh2_s1v2_meta_ema", "sh2_s1v1_meta_fp32", "nlp_fused_mp2")


def test_auto_parallel_training():
    """Sources of eight ranks with stage 1 v2, of two with stage 1 v1 in float32, of two with fused projections."""
    run_ranks(
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
    run_ranks(2, "tests.live.fleet_job", str(source), str(own / "checkpoint-3"), cpu)


@pytest.mark.parametrize(("ranks", "who"), [(2, "works"), (4, "waits")])
def test_a_job_of_two_nodes_goes_on_from_one_checkpoint_or_not_at_all(
    tmp_path: Path, ranks: int, who: str
) -> None:
    """``paddle_reshard.resume`` through gloo: a node with another checkpoint, or a process that ends, stops all."""
    for run, steps in (("first", (3,)), ("second", (3, 6))):
        for step in steps:
            shutil.copytree(case_directory(CASES[0]) / "checkpoint-3", tmp_path / run / f"checkpoint-{step}")
    run_ranks(ranks, "tests.live.resuming_job", str(tmp_path), who)
    cards = ranks // 2
    rest = set(range(ranks)) - {ranks - cards if who == "works" else ranks - 1}
    got = {int(path.stem[5:]): json.loads(path.read_text()) for path in tmp_path.glob("rank-*.json")}
    assert got.keys() == rest
    for rank, (differing, path, ended) in got.items():
        assert differing.startswith(
            "AgreementError: the nodes of the job do not agree: node 0 saw checkpoint-3 "
        )
        first = rank // cards * cards
        of_node = f"ranks-{first}" if cards == 1 else f"ranks-{first}-{first + 1}"
        assert path == str(tmp_path / str(rank // cards) / of_node / "checkpoint-3")
        assert "rror: " in ended
    expected = tmp_path / "expected"
    paddle_reshard.convert(
        tmp_path / "first" / "checkpoint-3", expected, to=f"sharding={ranks}", ranks=tuple(range(cards))
    )
    made = Path(got[0][1])
    for file in expected.glob("*.pd*"):
        assert (made / file.name).read_bytes() == file.read_bytes()
