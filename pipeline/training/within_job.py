"""``resume`` in Python: what a running trainer goes on from, agreed on through ``paddle.distributed``.

For a job that has its own script and cannot start as ``paddle-reshard resume … -- COMMAND``. Its ranks exist already,
so they gather three times what the first process of each node says: which checkpoint it sees, which whole it would make
a portion of, and where its files are. What one of them cannot do ends all. Nothing is written beside the checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.errors import AgreementError, UsageError
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.formats.registry import FORMATS
from paddle_reshard.pipeline.formats.trainer_arguments import Arguments, arguments_of_axes, unprinted
from paddle_reshard.pipeline.request.options import with_options
from paddle_reshard.pipeline.request.read_options import ResumeOptions
from paddle_reshard.pipeline.training.launcher import Node
from paddle_reshard.pipeline.training.resume_point import CompleteCheckpoint, Say, Start, files_digest

Gather = Callable[[tuple[str, str]], Sequence[tuple[str, str]]]
"""Gathers a value of every rank, on every rank, in order."""
_COMPARED = (
    *("bf16", "fp16", "fp16_opt_level", "sequence_parallel", "use_expert_parallel", "optim"),
    *("load_checkpoint_format", "load_sharded_model", "unified_checkpoint", "ignore_load_lr_and_optim"),
)
"""Attributes on which depends what the trainer reads, or as what."""
_SAW, _PLANNED, _READY, _FAILED, _REST = "saw", "planned", "ready", "failed", ""


@with_options(ResumeOptions)
def resume(
    training_args: Any,
    run: PathLike,
    *,
    local: PathLike,
    observe: Observer = ignore_events,
    **options: Unpack[ResumeOptions],
) -> str | None:
    """Find what a job goes on from, and make the files of this node's ranks if it cannot read that as it is.

    ``trainer.train(resume_from_checkpoint=paddle_reshard.resume(training_args, run, local=…))``, on every rank. The
    first process of each node works, the others wait for it in a collective; where that has a time limit, a conversion
    has to be done by then, or the command ``paddle-reshard resume`` is the better way.

    Parameters
    ----------
    training_args
        The ``TrainingArguments`` of PaddleFormers or PaddleNLP: they give topology, sharding and the format to read.
    run
        Path or URL of the folder with the checkpoints.
    local
        Folder of this node for the files of its ranks.

    Returns
    -------
    str or None
        The folder from which the ranks of this node resume; ``None``: there is no checkpoint yet.

    Raises
    ------
    AgreementError
        If another node sees another checkpoint, or has failed.
    UsageError
        If the checkpoint needs other arguments than ``training_args``.
    """
    distributed = import_module("paddle.distributed")
    rank, size = distributed.get_rank(), distributed.get_world_size()

    def gather(value: tuple[str, str]) -> Sequence[tuple[str, str]]:
        if size == 1:
            return [value]
        gathered: list[tuple[str, str]] = []
        distributed.all_gather_object(gathered, value)
        return gathered

    cards = int(os.environ.get("PADDLE_LOCAL_SIZE") or size)
    node = Node(rank // cards, -(-size // cards), cards)
    start = Start(
        *(os.fspath(run), os.fspath(local), node, topology_of(training_args, size), None, options),
        check=lambda arguments, *_: check_arguments(training_args, arguments),
        say=_say_on(rank),
        observe=observe,
    )
    return _Ranks(gather, node, rank % cards == 0).agree(start, training_args)


def _say_on(rank: int) -> Say:
    import logging

    logger = logging.getLogger(__name__)
    return (lambda message: logger.warning("%s", message)) if rank == 0 else (lambda message: None)


class _Ranks:
    """The ranks of a job, as one of them sees them."""

    def __init__(self, gather: Gather, node: Node, works: bool) -> None:
        self.gather, self.node, self.works = gather, node, works
        self.told = False
        """Whether every rank knows that the job ends."""

    def agree(self, start: Start, args: Any) -> str | None:
        """The folder of this node; every rank takes the same steps, whatever happens on it."""
        if not self.works:
            for step in (_SAW, _PLANNED):
                self._tell(_REST, "", step)
            return self._own(self._tell(_REST, "", _READY))
        try:
            found = start.find()
            self._tell(_SAW, "" if found is None else f"{found.name} {files_digest(found)}", _SAW)
            if found is not None:
                start = replace(start, options=_reading(start.options, args, found))
            point = start.make_ready(found, lambda whole: self._tell(_PLANNED, whole, _PLANNED))
        except Exception as error:
            if not self.told:
                self.gather((_FAILED, str(error) or type(error).__name__))
            raise
        return self._own(self._tell(_READY, point.path, _READY))

    def _tell(self, kind: str, value: str, step: str) -> Sequence[tuple[str, str]]:
        """Gather what the first process of each node says at a step; refused if one failed, or they differ."""
        of_nodes = self.gather((kind, value))[:: self.node.cards or 1]
        problem = next(
            (f"node {n} has ended: {why}" for n, (what, why) in enumerate(of_nodes) if what == _FAILED), ""
        )
        if not problem and step != _READY and len({said for _, said in of_nodes}) > 1:
            each = "; ".join(f"node {n} {step} {said or 'none'}" for n, (_, said) in enumerate(of_nodes))
            problem = f"the nodes of the job do not agree: {each}"
        if problem:
            self.told = True
            raise AgreementError(problem)
        return of_nodes

    def _own(self, of_nodes: Sequence[tuple[str, str]]) -> str | None:
        return of_nodes[self.node.number][1] or None


def topology_of(args: Any, world_size: int) -> Topology:
    """The topology of a job, by the arguments of its trainer."""
    sizes = {axis: max(1, _first(args, names) or 1) for axis, names in arguments_of_axes().items()}
    if not getattr(args, "sharding", None):
        sizes["sharding"] = 1
    if not getattr(args, "use_expert_parallel", False):
        sizes["ep"] = 1
    ranks = sizes["tp"] * sizes["pp"] * sizes["sharding"]
    if world_size % ranks:
        raise UsageError(f"{world_size} ranks cannot be those of {Topology(**sizes)}")
    topology = Topology(**sizes, dp=world_size // ranks)
    if getattr(args, "use_expert_parallel", False) and not hasattr(args, "expert_model_parallel_size"):
        return replace(topology, ep=topology.dp)  # PaddleNLP shares experts out over data-parallel ranks
    return topology


def strategy_of(args: Any) -> str:
    """The sharding strategy of a job, by the arguments of its trainer."""
    stages = [str(getattr(stage, "value", stage)) for stage in getattr(args, "sharding", None) or ()]
    if isinstance(getattr(args, "sharding", None), str):
        stages = args.sharding.split()
    stage = next((stage for stage in stages if stage in ("stage1", "stage2", "stage3")), "none")
    if stage != "stage1":
        return stage
    splits = getattr(args, "split_param", None)
    if splits is None:
        splits = "split_param" in str(getattr(args, "sharding_parallel_config", "")).split()
    return "stage1v2" if splits else "stage1v1"


def _first(args: Any, names: Sequence[str]) -> int | None:
    return next((getattr(args, name) for name in names if getattr(args, name, None) is not None), None)


def _reading(options: ResumeOptions, args: Any, found: CompleteCheckpoint) -> ResumeOptions:
    """The options with the format that the trainer reads and its sharding strategy, where a checkpoint has another."""
    chosen = cast(dict[str, Any], dict(options))
    strategy = strategy_of(args)
    if found.seen.sharding_strategy not in (None, strategy):
        chosen.setdefault("sharding_strategy", strategy)
    if chosen.get("format") or _is_read(found.seen.format, found.seen.convention, strategy, args):
        return cast(ResumeOptions, chosen)
    for name in ("flex", "hybrid", "hybrid-plain"):
        if _is_read(name, found.seen.convention, strategy, args):
            chosen |= {"format": name, "sharding_strategy": strategy}
            return cast(ResumeOptions, chosen)
    raise UsageError(
        f"{found.name} is of format {found.seen.format}; no format that a job of this load_checkpoint_format "
        f"({getattr(args, 'load_checkpoint_format', None)}) reads can be made of it for its ranks"
    )


def _is_read(format: str, library: str, strategy: str, args: Any) -> bool:
    needed = FORMATS[format].loaded_with(library, strategy)
    return needed is not None and not _differing(
        args, {name: value for name, value in needed.items() if not name.startswith("save_")}
    )


def check_arguments(args: Any, arguments: Arguments) -> None:
    """Refuse arguments of a trainer with which it would read something else, or read it as something else."""
    expected: dict[str, Any] = dict(unprinted(arguments))
    expected |= {name: arguments[name] for name in _COMPARED if name in arguments}
    if not {"bf16", "fp16"} & arguments.keys() and (
        getattr(args, "bf16", False) or getattr(args, "fp16", False)
    ):
        expected["fp16_opt_level"] = "O1"
    if differing := _differing(args, expected):
        raise UsageError(f"the checkpoint needs other training_args: {'; '.join(differing)}")


def _differing(args: Any, expected: Mapping[str, Any]) -> list[str]:
    found = {name: getattr(args, name) for name in expected if hasattr(args, name)}
    return [
        f"{name} is {value!r}, not {expected[name]!r}"
        for name, value in found.items()
        if str(getattr(value, "value", value) or False) != str(expected[name] or False)
    ]
