"""``--ranks``: each node of a job makes the files that its ranks read, and together they are the whole target."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paddle_reshard
from paddle_reshard import (
    CheckpointError,
    DriftError,
    MasterDriftError,
    PlanError,
    ReshardError,
    UsageError,
    convert,
    launch,
    plan,
    verify,
)
from tests import oracle, spoiled
from tests.conftest import COMMITTED, case_directory
from tests.golden.test_flex import by_folder
from tests.golden.test_flex_by_rank import RESUME, SHARDING_V1, TP_SHARDING
from tests.jobs.command import run_here
from tests.paddle_processes import run_ranks
from tests.resume.conftest import SIZED, begin
from tests.sampling import exhaustive

ALL_AXES = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
MANIFEST = "paddle_reshard.json"
WHOLES: dict[str, dict[str, Any]] = {
    "flex-v2": {"format": "flex", "to": "tp=2,sharding=2", "sharding_strategy": "stage1v2"},
    "flex-v1": {"format": "flex", "to": "pp=2,sharding=2", "sharding_strategy": "stage1v1"},
    "hybrid-v2": {"to": "tp=2,sharding=2", "sharding_strategy": "stage1v2"},
    "hybrid-v1": {"to": "pp=2,sharding=2", "sharding_strategy": "stage1v1"},
    "hybrid": {"to": "tp=2,dp=2"},
    "plain": {"format": "hybrid-plain", "to": "pp=2,sharding=2", "sharding_strategy": "stage1v2"},
    "stage3": {"to": "sharding=4", "sharding_strategy": "stage3"},
}


def files_in(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del found[MANIFEST]
    return found


def manifest_of(folder: Path) -> Any:
    return json.loads((folder / MANIFEST).read_text())


@pytest.mark.parametrize("options", WHOLES.values(), ids=WHOLES)
def test_the_portions_of_all_nodes_are_the_whole(options: dict[str, Any], tmp_path: Path) -> None:
    whole = convert(ALL_AXES, tmp_path / "whole", **options)
    nodes = [convert(ALL_AXES, tmp_path / ranks, ranks=ranks, **options) for ranks in ("0-1", "2-3")]
    wanted, made = files_in(tmp_path / "whole"), [files_in(tmp_path / ranks) for ranks in ("0-1", "2-3")]
    assert made[0] | made[1] == wanted  # no file differs between the nodes
    assert all(portion.items() <= wanted.items() for portion in made)
    assert {node.plan.plan_id for node in nodes} == {whole.plan.plan_id}
    assert len({manifest_of(tmp_path / ranks)["portion"]["whole"] for ranks in ("0-1", "2-3")}) == 1
    for ranks, node in zip(("0-1", "2-3"), nodes, strict=True):
        found = manifest_of(tmp_path / ranks)
        assert (found["plan_id"], found["portion"]["ranks"]) == (whole.plan.plan_id, ranks)
        assert found["portion"]["whole"] == dict(node.facts())["whole"]


@pytest.mark.parametrize("of", [exhaustive("flex"), "hybrid"])
def test_experts_go_to_the_ranks_that_hold_them(of: str, tmp_path: Path) -> None:
    """ep=2 over two neighbours of the sharding group: each has its own experts, in files of its own name."""
    source = case_directory("states/dsv3_mtp_pp2") / "checkpoint-3"
    options: Any = {"to": "ep=2,sharding=2", "sharding_strategy": "stage1v2", "format": of}
    convert(source, tmp_path / "whole", **options)
    portions = [convert(source, tmp_path / str(rank), ranks=[rank], **options) for rank in (0, 1)]
    made = [files_in(tmp_path / str(rank)) for rank in (0, 1)]
    assert made[0] | made[1] == files_in(tmp_path / "whole")
    assert not any(name.endswith((".distcp", ".pdopt")) for name in made[0].keys() & made[1].keys())
    assert portions[0].plan.portion is not None and portions[1].plan.portion is not None
    assert portions[0].plan.portion.digest == portions[1].plan.portion.digest


def test_the_whole_has_another_digest_if_anything_of_it_differs(tmp_path: Path) -> None:
    """The state of the source counts too: nodes that see two saves of one job do not make portions of one thing."""
    later = tmp_path / "later"
    shutil.copytree(ALL_AXES, later)
    os.utime(later / "trainer_state.bin", ns=(0, 0))

    def digest(source: Path, **options: Any) -> str:
        return dict(plan(source, **(WHOLES["flex-v2"] | {"ranks": "1"} | options)).facts())["whole"]

    found = [
        digest(ALL_AXES),
        digest(later),
        digest(ALL_AXES, to="tp=2,sharding=4"),
        digest(ALL_AXES, sharding_strategy="stage1v1"),
        digest(ALL_AXES, drop=["ema"]),
    ]
    assert len(set(found)) == len(found)
    assert digest(ALL_AXES, memory="2GiB", ranks="0,3") == found[0]


def test_nodes_read_what_their_files_are_made_of() -> None:
    """Pieces of tp ranks lie in one range of the source; of pipeline stages each node reads its own layers."""
    options: Any = {"to": "pp=2", "drop": ["ema"], "replicas": "first"}
    whole = plan(ALL_AXES, **options).plan
    portions = [plan(ALL_AXES, ranks=[rank], **options).plan for rank in (0, 1)]
    assert all(portion.read_bytes < 0.7 * whole.read_bytes for portion in portions)
    assert sum(portion.read_bytes for portion in portions) <= 1.05 * whole.read_bytes


@pytest.mark.full
def test_the_job_resumes_with_a_folder_for_every_node(tmp_path: Path) -> None:
    """Paddle's whole loader, two processes, each with the folder of a node of its own: nothing is resharded."""
    needs = case_directory(SHARDING_V1.name) / "needs"
    for rank in (0, 1):
        SHARDING_V1.convert(TP_SHARDING.checkpoint, tmp_path / f"node{rank}", ranks=[rank])
        assert not (tmp_path / f"node{rank}" / "model_state" / f"{1 - rank}_0.distcp").exists()
    truth = oracle.read_truth(TP_SHARDING.checkpoint.parent / "truth.safetensors")
    for folder, tensors in by_folder(truth).items():
        np.savez(tmp_path / f"{folder}.npz", **tensors)
    of_node = RESUME.replace(
        "checkpoint, needs", "sys.argv[1] += str(paddle.distributed.get_rank())\ncheckpoint, needs"
    )
    told = run_ranks(2, of_node, tmp_path / "node", needs, tmp_path)
    assert [text.count("resumable locally, skipping reshard") for text in told] == [3, 3], told


def test_a_portion_that_was_interrupted_is_resumed(tmp_path: Path) -> None:
    """Its session knows whose portion it is; another's is refused there."""
    options: Any = {"to": "tp=2,pp=2", "ranks": "2-3"}
    begin(ALL_AXES, tmp_path / "t", **options)
    with pytest.raises(ReshardError, match="started with --ranks 2-3"):
        SIZED.convert(ALL_AXES, tmp_path / "t", resume=True, **(options | {"ranks": "0-1"}))
    report = SIZED.convert(ALL_AXES, tmp_path / "t", resume=True)
    assert report.moved.resumed_groups > 0
    SIZED.convert(ALL_AXES, tmp_path / "whole", to="tp=2,pp=2")
    assert files_in(tmp_path / "t").items() < files_in(tmp_path / "whole").items()
    again = SIZED.convert(ALL_AXES, tmp_path / "t", resume=True, **options)
    assert again.moved.written_bytes == 0


def test_a_portion_says_that_it_is_one(tmp_path: Path) -> None:
    portion = tmp_path / "t"
    convert(ALL_AXES, portion, ranks="1", **WHOLES["flex-v2"])
    assert "ranks 1 of 4, of sha256:" in paddle_reshard.check(portion).verdict
    for read in (paddle_reshard.inspect, lambda path: verify(ALL_AXES, path)):
        with pytest.raises(CheckpointError, match="holds only the files that ranks 1 of 4 read"):
            read(portion)
    data = next(portion.glob("master_weight/1_0.distcp"))
    data.write_bytes(data.read_bytes()[:-9] + bytes(9))
    assert not paddle_reshard.check(portion)


@pytest.mark.parametrize("name", WHOLES)
def test_a_node_starts_its_ranks_from_a_portion_as_from_the_whole(name: str, tmp_path: Path) -> None:
    convert(ALL_AXES, tmp_path / "whole", **WHOLES[name])
    convert(ALL_AXES, tmp_path / "t", ranks="0", **WHOLES[name])
    whole, portion = launch(tmp_path / "whole", to=WHOLES[name]["to"]), launch(tmp_path / "t")
    assert portion.ranks == whole.ranks
    assert portion.arguments == {**whole.arguments, "resume_from_checkpoint": str(tmp_path / "t")}
    assert any("ranks 0 of" in remark for remark in portion.remarks)
    with pytest.raises(UsageError, match="not of tp=8"):
        launch(tmp_path / "t", to="tp=8")


def test_copies_that_drifted_apart_are_found_by_the_node_that_reads_them(tmp_path: Path) -> None:
    """model.norm is stored by both tp ranks, and goes to the last of two stages."""
    source = tmp_path / "drifted"
    shutil.copytree(case_directory("mp2_tied") / "checkpoint-3", source, copy_function=shutil.copyfile)
    copy = source / "model_state.tp01.pdparams"
    norm = oracle.load_with_paddle(copy)["model.norm.weight"].tobytes()
    content = copy.read_bytes()
    assert content.count(norm) == 1
    copy.write_bytes(content.replace(norm, norm[:-1] + bytes([norm[-1] ^ 1])))
    convert(source, tmp_path / "first", to="pp=2", ranks=[0])
    with pytest.raises(DriftError, match=r"model\.norm\.weight"):
        convert(source, tmp_path / "last", to="pp=2", ranks=[1])


@pytest.mark.parametrize("format", ["flex", "hybrid"])
def test_parameters_of_another_step_are_found_by_a_node(format: str, tmp_path: Path) -> None:
    source = spoiled.of_another_step(tmp_path)
    with pytest.raises(MasterDriftError):
        convert(source, tmp_path / "portion", format=format, to="tp=2", ranks=[1])


@pytest.mark.parametrize(
    ("told", "options"),
    [
        ("has no files of ranks; give --to", {"format": "flex"}),
        ("has no files of ranks; give --to", {"format": "unified", "drop": ["ema"]}),
        ("tp=2 has the ranks 0-1", {"to": "tp=2", "ranks": "1-2"}),
        ("'1-x' are no ranks; write 8-15", {"to": "tp=2", "ranks": "1-x"}),
        ("'3-1' are no ranks", {"to": "tp=4", "ranks": "3-1"}),
    ],
)
def test_what_is_not_the_portion_of_a_job_is_refused(told: str, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=told):
        plan(ALL_AXES, **({"ranks": "0"} | options))


def test_several_targets_and_proofs_are_those_of_a_whole(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="several targets"):
        plan(ALL_AXES, {"a": {"to": "tp=2"}, "b": {"to": "pp=2"}}, ranks="0")
    with pytest.raises(UsageError, match="--ranks are those of one"):
        plan(ALL_AXES, cards=2, ranks="0")
    with pytest.raises(PlanError, match="prove the plan of the whole"):
        paddle_reshard.prove(plan(ALL_AXES, to="tp=2", ranks="0"))


def test_a_node_is_told_what_to_run(tmp_path: Path) -> None:
    """The command as a shell of the second of two nodes understands it."""
    flex = tmp_path / "checkpoint-3"
    convert(ALL_AXES, flex, format="flex")
    told = launch(flex, to="tp=2,sharding=2").node_command.partition(" && ")[0]
    where = {
        "PADDLE_RANK": "1",
        "PADDLE_NPROC_PER_NODE": "2",
        "LOCAL": str(tmp_path / "local"),
        "PATH": "/usr/bin:/bin",
    }
    words = subprocess.run(
        ["bash", "-c", f'printf "%s\\n" {told}'], env=where, capture_output=True, text=True, check=True
    )
    done = run_here(*words.stdout.splitlines()[1:])
    assert done.returncode == 0, done.stderr
    local = tmp_path / "local" / "checkpoint-3"
    assert manifest_of(local)["portion"]["ranks"] == "2-3"
    assert done.stdout.endswith(f"paddle-reshard launch {local}\n")
    assert launch(local).arguments["resume_from_checkpoint"] == str(local)
    convert(flex, tmp_path / "ranks", format="flex", to="tp=2,sharding=2")
    assert launch(tmp_path / "ranks").node_command == ""
