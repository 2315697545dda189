"""The arguments that start a trainer in the topology of a checkpoint.

PaddleFormers 1.2 (``paddleformers/trainer/training_args.py``) and PaddleNLP 3 (``paddlenlp/trainer/training_args.py``)
spell the axes differently. Every real checkpoint of ``tests/corpus`` names the arguments that its trainer was given,
and the jobs of ``tests/parity`` resume with theirs; both are compared with these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paddle_reshard.pipeline.checkpoint.training_job import TrainingJob
from paddle_reshard.pipeline.core.errors import UnsupportedError
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.registry import FORMATS

Arguments = Mapping[str, str | int | bool]
"""Name of an argument of the trainer, without dashes → its value."""


def trainer_arguments(job: TrainingJob) -> Arguments:
    """The arguments that make a trainer's ranks those of a checkpoint, read its format and hold its dtypes.

    Arguments at their default are left out: a job of one rank needs only those of its format. An ``UnsupportedError``
    says of which library, format or topology they are not known.

    >>> job = TrainingJob("paddleformers", "hybrid-plain", Topology(tp=2, pp=4), "none")
    >>> trainer_arguments(job)
    {'tensor_model_parallel_size': 2, 'pipeline_model_parallel_size': 4, 'load_checkpoint_format': 'sharding_io', \
'fine_tuning': 'Full'}
    """
    if job.library not in _LIBRARIES:
        raise UnsupportedError(
            f"the arguments of {job.library} are not known, only those of {' and '.join(_LIBRARIES)}; the checkpoint "
            f"needs a job of {job.topology}"
        )
    of_format = FORMATS[job.format].loaded_with(job.library, job.strategy)
    if of_format is None:
        raise UnsupportedError(f"how {job.library} reads a checkpoint of format {job.format} is not known")
    return {**_LIBRARIES[job.library](job), **of_format, **_precision(job), **_FINE_TUNING[job.library](job)}


def _precision(job: TrainingJob) -> dict[str, str | int | bool]:
    """Both libraries' default level, O1, keeps parameters in float32 and no master weights.

    A job then starts from half-precision files without a word, and trains from other values.
    """
    if not job.precision:
        return {}
    masters = {"amp_master_grad": True} if job.master_weights else {}
    return {job.precision: True, "fp16_opt_level": "O2", **masters}


def _paddleformers_tuning(job: TrainingJob) -> dict[str, str | int | bool]:
    """The command line trains LoRA by default (1.2.0 ``cli/hparams/model_args.py``); the recipes have none."""
    if not job.lora_rank:
        return {} if job.recipe else {"fine_tuning": "Full"}
    return {"fine_tuning": "LoRA", **_lora(job)}


def _paddlenlp_tuning(job: TrainingJob) -> dict[str, str | int | bool]:
    return {"lora": True, **_lora(job)} if job.lora_rank else {}


def _lora(job: TrainingJob) -> dict[str, str | int | bool]:
    arguments: dict[str, str | int | bool] = {"lora_rank": job.lora_rank}
    if job.rslora:
        arguments["rslora"] = True
    if job.lora_plus_scale != 1:
        arguments["lora_plus_scale"] = f"{job.lora_plus_scale:g}"
    return arguments


def _paddleformers(job: TrainingJob) -> dict[str, str | int | bool]:
    arguments: dict[str, str | int | bool] = {"stage": job.recipe} if job.recipe else {}
    arguments |= _axes(job.topology, _AXES["paddleformers"]) | _sharding(job, _SHARDING["paddleformers"])
    if job.topology.ep > 1:
        arguments["use_expert_parallel"] = True
    if job.strategy == "none" and job.topology.dp > 1:
        arguments["sharding"] = ""  # by default all data-parallel ranks are a sharding group
    if job.strategy in _SPLITS:
        arguments["split_param"] = _SPLITS[job.strategy]
    if job.comm_overlap:
        arguments["pp_sharding_comm_overlap"] = True
    arguments |= _common(job) | dict.fromkeys(job.switches, True)
    return arguments | _ernie_pretrain(job) if job.recipe == "ernie_pretrain" else arguments


def _ernie_pretrain(job: TrainingJob) -> dict[str, str | int | bool]:
    """What the recipe takes beside the library's arguments (1.2.0 ``cli/train/ernie_pretrain``).

    By default its experts are distributed over data-parallel ranks, with which it does not start. Its
    ``sequence_parallel`` is a number.
    """
    arguments: dict[str, str | int | bool] = {"sequence_parallel": 1} if job.sequence_parallel else {}
    return arguments | ({"use_moe": True, "moe_group": "ep"} if job.topology.ep > 1 else {})


def _paddlenlp(job: TrainingJob) -> dict[str, str | int | bool]:
    if job.topology.ep > 1:
        raise UnsupportedError(
            f"how PaddleNLP starts a job of {job.topology} is not known: no such job was seen"
        )
    arguments = _axes(job.topology, _AXES["paddlenlp"]) | _sharding(job, _SHARDING["paddlenlp"])
    if job.experts_over_dp:
        arguments["use_expert_parallel"] = True
    if _SPLITS.get(job.strategy):
        arguments["sharding_parallel_config"] = "split_param"
    return arguments | _common(job)


def _axes(topology: Topology, names: Mapping[str, str]) -> dict[str, str | int | bool]:
    """The sizes of axes that are used; ``names``: axis → argument."""
    return {name: size for axis, name in names.items() if (size := getattr(topology, axis)) > 1}


def sizes_of_axes(topology: Topology, library: str) -> Mapping[str, int]:
    """The argument of every axis, also of those at their default.

    >>> sizes_of_axes(Topology(tp=2), "paddlenlp")
    {'tensor_parallel_degree': 2, 'pipeline_parallel_degree': 1, 'virtual_pp_degree': 1, 'sharding_parallel_degree': 1}
    """
    return {name: getattr(topology, axis) for axis, name in _of_axes(library).items()}


def arguments_of_axes() -> Mapping[str, Sequence[str]]:
    """Axis → its argument in each library that has one.

    >>> arguments_of_axes()["pp"]
    ['pipeline_model_parallel_size', 'pipeline_parallel_degree']
    """
    names: dict[str, list[str]] = {}
    for library in _AXES:
        for axis, name in _of_axes(library).items():
            names.setdefault(axis, []).append(name)
    return names


def _of_axes(library: str) -> dict[str, str]:
    return {**_AXES[library], "sharding": _SHARDING[library]}


def unprinted(arguments: Arguments) -> Mapping[str, bool]:
    """What decides how ranks read files of their own, as it is where :func:`trainer_arguments` does not give it."""
    any_job = arguments.get("load_checkpoint_format") in ("flex_checkpoint", "unified_checkpoint")
    if any_job or arguments.get("unified_checkpoint"):
        return {}
    return {"sequence_parallel": False, "load_sharded_model": False}


_AXES = {
    "paddleformers": {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "vpp": "virtual_pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
    },
    "paddlenlp": {
        "tp": "tensor_parallel_degree",
        "pp": "pipeline_parallel_degree",
        "vpp": "virtual_pp_degree",
    },
}
"""Library → axis → argument."""
_SHARDING = {"paddleformers": "sharding_parallel_size", "paddlenlp": "sharding_parallel_degree"}
_LIBRARIES = {"paddleformers": _paddleformers, "paddlenlp": _paddlenlp}
_FINE_TUNING = {"paddleformers": _paddleformers_tuning, "paddlenlp": _paddlenlp_tuning}
_SPLITS = {"stage1v1": False, "stage1v2": True}
"""Strategy → whether ranks hold slices of parameters (v2) or whole parameters (v1) of stage 1."""


def _sharding(job: TrainingJob, degree: str) -> dict[str, str | int | bool]:
    """The stage, and over how many ranks."""
    if job.strategy == "none":
        return {}
    return {"sharding": job.strategy[: len("stage1")], degree: job.topology.sharding}


def _common(job: TrainingJob) -> dict[str, str | int | bool]:
    arguments: dict[str, str | int | bool] = {}
    if job.sequence_parallel:
        arguments["sequence_parallel"] = True
    if job.muon:
        arguments["optim"] = "muon"
    return arguments
