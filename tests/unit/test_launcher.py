"""Which node this is, and what is appended to the command that starts a trainer."""

from __future__ import annotations

import shlex

import pytest

from paddle_reshard.pipeline.core.errors import UsageError
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.training.launcher import Node, TrainerCommand, node_of

LAUNCH = "python -u -m paddle.distributed.launch"
HYBRID = {
    "resume_from_checkpoint": "/local/c", "tensor_model_parallel_size": 2, "sharding": "stage1",
    "sharding_parallel_size": 4, "split_param": True, "save_checkpoint_format": "sharding_io",
    "load_checkpoint_format": "sharding_io", "bf16": True, "fp16_opt_level": "O2",
}  # fmt: skip
FLEX = {"resume_from_checkpoint": "/local/c", "load_checkpoint_format": "flex_checkpoint"}
JOB = Topology(tp=2, sharding=4)


@pytest.mark.parametrize(
    ("variables", "command", "expected"),
    [
        ({}, "python train.py --rank 3 --nnodes 7", Node(0, 1)),  # the trainer's own
        ({}, f"{LAUNCH} --nnodes 2 --rank=1 --nproc-per-node 4 train.py --nnodes 9", Node(1, 2, 4)),
        ({"PADDLE_NNODES": "2", "PADDLE_RANK": "0"}, f"{LAUNCH} --gpus 0,1,2 train.py", Node(0, 2, 3)),
        (
            {"NNODES": "3", "RANK": "2", "CUDA_VISIBLE_DEVICES": "0,1"},
            "paddleformers-cli train a.yaml",
            Node(2, 3, 2),
        ),
        ({"NNODES": "3", "RANK": "2"}, "python train.py", Node(0, 1)),  # of another launcher
        ({"PADDLE_RANK": "-1"}, "python train.py", Node(0, 1)),
    ],
)
def test_a_node_is_what_its_launcher_takes_it_for(
    variables: dict[str, str], command: str, expected: Node
) -> None:
    assert node_of(variables, shlex.split(command), None, None) == expected


@pytest.mark.parametrize(
    ("variables", "command", "options", "message"),
    [
        ({"PADDLE_NNODES": "4"}, f"{LAUNCH} --nnodes 2 t.py", (None, None), "PADDLE_NNODES 4, --nnodes of COMMAND 2"),
        ({"PADDLE_NNODES": "4"}, "t.py", (None, None), "which this is: give --node I"),
        ({"PADDLE_NNODES": "2:4"}, "t.py", (None, 0), "is '2:4', no number; give --nodes"),
        ({"PADDLE_RANK": "1"}, "t.py", (2, 0), "--node 0, PADDLE_RANK 1"),
        ({}, "t.py", (2, 2), "numbered from 0 to 1"),
    ],
)  # fmt: skip
def test_what_does_not_say_which_node_this_is_is_refused(
    variables: dict[str, str], command: str, options: tuple[int | None, int | None], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        node_of(variables, shlex.split(command), *options)


def test_the_number_of_nodes_that_came_is_within_the_range_of_those_that_may() -> None:
    assert node_of({"PADDLE_NNODES": "2:4"}, ["t.py"], 3, 1) == Node(1, 3)


def test_nodes_have_consecutive_ranks() -> None:
    assert Node(1, 2).ranks_of(JOB) == range(4, 8)
    for node in (Node(0, 3), Node(0, 2, 8)):
        with pytest.raises(UsageError, match="tp=2,sharding=4 has 8 ranks"):
            node.ranks_of(JOB)


@pytest.mark.parametrize(
    "given",
    [
        "--pipeline_model_parallel_size 2",  # which the arguments leave out, as 1 is the default
        "--tensor-model-parallel-size=4",
        "--sequence_parallel",
        "--split_param false",
        "--load_sharded_model true",  # of files without model_meta.json, which it would look for
        "--fp16_opt_level O1",
        "--resume_from_checkpoint /local/c",
    ],
)
def test_arguments_that_contradict_are_refused(given: str) -> None:
    name = given.lstrip("-").replace("=", " ").split()[0].replace("-", "_")
    with pytest.raises(UsageError, match=f"job of tp=2,sharding=4: --{name}"):
        TrainerCommand(("train.py", *given.split())).check(HYBRID, JOB, "paddleformers")


@pytest.mark.parametrize(
    "given",
    [
        "--tensor_model_parallel_size 2 --bf16 --split_param True --sharding_parallel_size -1",
        "--save_checkpoint_format flex_checkpoint --pipeline_model_parallel_size=1 --seed 7",
    ],
)
def test_what_a_command_says_alike_is_not_said_again(given: str) -> None:
    command = TrainerCommand(("train.py", *given.split()), frozenset({"fp16_opt_level"}))
    command.check(HYBRID, JOB, "paddleformers")
    words = command.starting_from(HYBRID, JOB, "paddleformers")
    assert words[: len(command.words)] == command.words
    added = dict(zip(words[len(command.words) :: 2], words[len(command.words) + 1 :: 2], strict=True))
    said = {f"--{name}" for name in ("fp16_opt_level", *command.given())}
    assert added == {
        f"--{name}": str(value).lower() if value is True else str(value)
        for name, value in HYBRID.items()
        if f"--{name}" not in said
    }


def test_files_that_every_topology_reads_go_with_any_names() -> None:
    TrainerCommand(("train.py", "--sequence_parallel", "true")).check(FLEX, Topology(tp=2), "paddleformers")


def test_a_configuration_is_overridden_also_where_it_could_differ_from_a_default() -> None:
    command = TrainerCommand(("paddleformers-cli", "train", "job.yaml", "seed=3"))
    words = command.starting_from(
        {**FLEX, "resume_from_checkpoint": "/a b: c"}, Topology(tp=2), "paddleformers"
    )
    assert words[:4] == command.words
    assert dict(word.split("=", 1) for word in words[4:]) == {
        "resume_from_checkpoint": '"/a b: c"', "load_checkpoint_format": "flex_checkpoint",
        "tensor_model_parallel_size": "2", "pipeline_model_parallel_size": "1",
        "virtual_pipeline_model_parallel_size": "1", "expert_model_parallel_size": "1",
        "sharding_parallel_size": "1", "sharding": '""',
    }  # fmt: skip
    with pytest.raises(UsageError, match="--tensor_model_parallel_size 4"):
        TrainerCommand((*command.words, "tensor_model_parallel_size=4")).check(
            FLEX, Topology(tp=2), "paddleformers"
        )
