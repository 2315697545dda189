"""What documents speak of that no copy of a checkpoint is: models and optimizers of Paddle, unfinished conversions."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import paddle_reshard
from paddle_reshard.pipeline.core.events import Event, Progress
from tests import oracle
from tests.conftest import GOLDEN, case_directory
from tests.documents.pages import LLAMA
from tests.golden.lora_base import write_base


class Stop(Exception):
    """Ends a conversion that has begun to move bytes."""


def begin(source: Path, target: Path, to: str) -> None:
    """A conversion that is interrupted."""

    def observe(event: Event) -> None:
        if isinstance(event, Progress) and event.done_bytes:
            raise Stop

    try:
        paddle_reshard.convert(source, target, to=to, observe=observe)
    except Stop:
        return
    raise AssertionError("the conversion has ended")


def imported_paddle() -> Any:
    """Paddle, whose import warns about a missing ccache."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import paddle
        import paddle.distributed.fleet
    return paddle


def paddle_job(with_states: bool = True) -> dict[str, Any]:
    """A model in bfloat16 and its AdamW, as they are before the first step."""
    paddle = imported_paddle()
    from tests.live.fleet_job import model_of

    truth = oracle.read_truth(case_directory(LLAMA) / "truth.safetensors")
    model = model_of(truth, list(oracle.shapes_of(truth)))
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters(), multi_precision=True)
    if with_states:
        create_states(paddle, optimizer)
    return {"paddle": paddle, "paddle_reshard": paddle_reshard, "model": model, "optimizer": optimizer}


def create_states(paddle: Any, optimizer: Any) -> None:
    block = paddle.base.framework.default_main_program().global_block()
    optimizer._create_accumulators(block, optimizer._parameter_list)


def of_averages(folder: Path) -> dict[str, Any]:
    """A loop of 1,000 batches, and an average that the session closes."""
    return {**paddle_job(), "batches": range(1000), "loss": 2.5}


def of_live(folder: Path) -> dict[str, Any]:
    """What a job knows of itself, for the converter of PaddleNLP; and how Paddle wraps models for stage 3."""
    job = paddle_job()
    names = {parameter.name: key for key, parameter in job["model"].state_dict().items()}
    return {
        **job,
        "path": "checkpoint-1000",
        "parameter_to_structured_name": names,
        "args": SimpleNamespace(ignore_load_lr_and_optim=False),
        "group_sharded_parallel": wrapped_for_stage3,
    }


def wrapped_for_stage3(_model: Any, _optimizer: Any, level: str) -> tuple[Any, Any, None]:
    """As ``group_sharded_parallel``, which takes GPUs and a group of processes only; this is the first of two.

    The model and the optimizer are new, as they are when a job calls it.
    """
    from paddle.distributed.fleet.meta_parallel.sharding import group_sharded_stage3

    assert level == "p_g_os"
    job = paddle_job(with_states=False)
    with mock.patch.object(group_sharded_stage3.core, "is_compiled_with_cuda", lambda: True):
        wrapped = group_sharded_stage3.GroupShardedStage3(
            job["model"],
            job["optimizer"],
            SimpleNamespace(nranks=2, rank=0, ranks=[0, 1]),
            device="cpu",
            segment_size=512,
            pretrain_sync_models=False,
        )
    wrapped.init_optimizer_for_slice_param()
    create_states(job["paddle"], job["optimizer"])
    return wrapped, job["optimizer"], None


def of_adapters(folder: Path) -> dict[str, Any]:
    """The base model of the adapters."""
    write_base("lora_pp2", folder / "base", "pt")
    return {}


def of_maps(folder: Path) -> dict[str, Any]:
    """The map that PaddleFormers' class declares."""
    declared = json.loads((GOLDEN / "ernie4_5_moe_vl.json").read_text("utf-8"))
    (folder / "map.json").write_text(json.dumps({"aoa_statements": declared["inverse"]}))
    return {}


def of_operations(folder: Path) -> dict[str, Any]:
    """Two conversions that were interrupted."""
    begin(folder / "checkpoint-1000", folder / "one-card", "tp=1")
    begin(folder / "checkpoint-1000", folder / "two-cards", "tp=2")
    return {}


NAMES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "README.md": lambda folder: paddle_job(),
    "docs/aoa.md": of_maps,
    "docs/ema.md": of_averages,
    "docs/live.md": of_live,
    "docs/lora.md": of_adapters,
    "docs/operations.md": of_operations,
    "docs/proof.md": lambda folder: {"paddle": imported_paddle()},
}


def names_of(document: str, folder: Path) -> dict[str, Any]:
    """What the ``python`` blocks of a document find defined; and make what its commands find."""
    return NAMES[document](folder) if document in NAMES else {}
