"""``paddle_reshard.resume``: every rank of a running job gets the folder of its node, or none goes on."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.core.errors import AgreementError, UsageError
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.training.launcher import Node
from paddle_reshard.pipeline.training.resume_point import Start
from paddle_reshard.pipeline.training.within_job import _Ranks, check_arguments, strategy_of, topology_of
from tests.conftest import case_directory

SOURCE = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"


def arguments(**given: Any) -> SimpleNamespace:
    """Those of a trainer that reads files of ranks, after they are parsed: axes that are not used are -1."""
    by_default = {
        "tensor_model_parallel_size": -1,
        "pipeline_model_parallel_size": -1,
        "sharding_parallel_size": -1,
        "virtual_pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": -1,
        "use_expert_parallel": False,
        "sharding": [],
        "split_param": True,
        "bf16": True,
        "fp16": False,
        "fp16_opt_level": "O2",
        "sequence_parallel": False,
        "load_checkpoint_format": "sharding_io",
        "load_sharded_model": False,
        "ignore_load_lr_and_optim": False,
    }
    return SimpleNamespace(**(by_default | given))


STAGE1 = SimpleNamespace(value="stage1")
"""A member of the library's ``ShardingOption``."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    shutil.copytree(SOURCE, tmp_path / "run/checkpoint-3")
    return tmp_path / "run"


class Job:
    """Ranks as threads, on nodes of two."""

    def __init__(
        self, run: Path, args: Any, ranks: int = 4, of_last_node: Mapping[str, Any] | None = None
    ) -> None:
        self.barrier, self.said = threading.Barrier(ranks), [("", "")] * ranks
        self.results: list[Any] = [None] * ranks
        self.threads = []
        for rank in range(ranks):
            node = Node(rank // 2, ranks // 2, 2)
            local = run.parent / f"local-{node.number}"
            start = Start(
                *(str(run), str(local), node, topology_of(args, ranks), None, {}),
                check=lambda found, *_: check_arguments(args, found),
                say=lambda _: None,
            )
            if node.number == ranks // 2 - 1:
                start = replace(start, **(of_last_node or {}))
            self.threads.append(threading.Thread(target=self.rank, args=(rank, start, args)))
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join()

    def rank(self, rank: int, start: Start, args: Any) -> None:
        def gather(value: tuple[str, str]) -> Sequence[tuple[str, str]]:
            self.said[rank] = value
            self.barrier.wait(300)
            said = list(self.said)
            self.barrier.wait(300)
            return said

        try:
            self.results[rank] = _Ranks(gather, start.node, rank % 2 == 0).agree(start, args)
        except Exception as error:  # noqa: BLE001
            self.results[rank] = error


def test_every_rank_gets_the_folder_of_its_node(run: Path) -> None:
    args = arguments(
        tensor_model_parallel_size=2, sharding=[STAGE1], sharding_parallel_size=2, load_sharded_model=True
    )
    expected = [str(run.parent / f"local-{n}/ranks-{2 * n}-{2 * n + 1}/checkpoint-3") for n in (0, 0, 1, 1)]
    assert Job(run, args).results == expected
    job = paddle_reshard.launch(expected[0]).arguments
    assert (job["tensor_model_parallel_size"], job["sharding_parallel_size"], job["split_param"]) == (
        2,
        2,
        True,
    )


def test_a_job_that_has_no_checkpoint_begins_on_all_ranks(run: Path) -> None:
    args = arguments(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert Job(run.parent / "empty", args).results == [None] * 4


def test_the_trainer_gets_the_format_that_it_reads(run: Path) -> None:
    args = arguments(pipeline_model_parallel_size=2, load_checkpoint_format="flex_checkpoint")
    (path, _) = Job(run, args, ranks=2).results
    assert paddle_reshard.inspect(run / "checkpoint-3").format == "hybrid"
    assert (Path(path) / "model_state").is_dir()
    assert paddle_reshard.launch(path).arguments["load_checkpoint_format"] == "flex_checkpoint"


def refuse(*_: object) -> None:
    raise UsageError("not here")


@pytest.mark.parametrize("at", ["looking", "planning"])
def test_what_one_node_cannot_do_ends_all(at: str, run: Path) -> None:
    args = arguments(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    wrong = {"check": refuse} if at == "planning" else {"run": str(run.parent / "empty")}
    first, second, third, fourth = Job(run, args, of_last_node=wrong).results
    assert all(isinstance(told, AgreementError) for told in (first, second, fourth))
    if at == "planning":
        assert str(first) == "node 1 has ended: not here" and isinstance(third, UsageError)
    else:
        assert "node 0 saw checkpoint-3 " in str(first) and "node 1 saw none" in str(third)


def test_arguments_with_which_a_trainer_reads_something_else_are_refused(run: Path) -> None:
    for given, name in (({"bf16": False}, "bf16"), ({"fp16_opt_level": "O1"}, "fp16_opt_level")):
        args = arguments(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, **given)
        assert all(f"{name} is" in str(error) for error in Job(run, args).results)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Paddle's, when it is imported
def test_one_process_needs_nobody(run: Path, tmp_path: Path) -> None:
    path = paddle_reshard.resume(arguments(), run, local=tmp_path / "local")
    assert path == str(tmp_path / "local/ranks-0/checkpoint-3")
    assert "pipeline_model_parallel_size" not in paddle_reshard.launch(path).arguments


def test_a_topology_is_that_of_the_arguments() -> None:
    args = arguments(tensor_model_parallel_size=2, sharding=[STAGE1], sharding_parallel_size=4)
    assert topology_of(args, 16) == Topology(tp=2, sharding=4, dp=2)
    experts = arguments(
        sharding=[STAGE1], sharding_parallel_size=4, use_expert_parallel=True, expert_model_parallel_size=4
    )
    assert topology_of(experts, 4) == Topology(sharding=4, ep=4)
    with pytest.raises(UsageError, match="6 ranks cannot be those of tp=2,sharding=4"):
        topology_of(args, 6)
    of_paddlenlp = SimpleNamespace(
        tensor_parallel_degree=2, pipeline_parallel_degree=-1, sharding="", use_expert_parallel=True
    )
    assert topology_of(of_paddlenlp, 4) == Topology(tp=2, dp=2, ep=2)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (arguments(), "none"),
        (arguments(sharding=[STAGE1]), "stage1v2"),
        (arguments(sharding=[STAGE1], split_param=False), "stage1v1"),
        (arguments(sharding="stage2 offload"), "stage2"),
        (
            SimpleNamespace(sharding=[STAGE1], sharding_parallel_config="split_param enable_overlap"),
            "stage1v2",
        ),
        (SimpleNamespace(sharding=[STAGE1], sharding_parallel_config=""), "stage1v1"),
    ],
)
def test_a_strategy_is_that_of_the_arguments(args: Any, expected: str) -> None:
    assert strategy_of(args) == expected
