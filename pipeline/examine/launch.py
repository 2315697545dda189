"""``launch``: how a job starts from a checkpoint: its arguments, its ranks, and what it will not find."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from paddle_reshard.pipeline.checkpoint.training_job import TrainingJob, lora_of, never_restored, precision_of
from paddle_reshard.pipeline.convert.integrity import manifest_of
from paddle_reshard.pipeline.convert.manifest import Manifest
from paddle_reshard.pipeline.core.backports import Unpack
from paddle_reshard.pipeline.core.errors import UnsupportedError, UsageError
from paddle_reshard.pipeline.core.events import Observer, ignore_events
from paddle_reshard.pipeline.core.file_names import CONFIG, MANIFEST, SCHEDULER
from paddle_reshard.pipeline.core.shown import Facts, Result, ToCopy
from paddle_reshard.pipeline.core.tensors import ACCUMULATORS, MASTER_WEIGHT, PARAM
from paddle_reshard.pipeline.core.topology import STRATEGIES, Topology
from paddle_reshard.pipeline.core.trainer_files import is_random_state
from paddle_reshard.pipeline.core.units import PathLike
from paddle_reshard.pipeline.examine.inspection import Inspection, inspect_store
from paddle_reshard.pipeline.formats.registry import FORMATS
from paddle_reshard.pipeline.formats.trainer_arguments import Arguments, trainer_arguments
from paddle_reshard.pipeline.indexing.opening import open_checkpoint
from paddle_reshard.pipeline.model.optimizers import muon_parameters
from paddle_reshard.pipeline.request.options import with_options
from paddle_reshard.pipeline.request.read_options import InspectOptions
from paddle_reshard.storage.locate import source_access

_BY_RANK = ("none", "stage1v1", "stage1v2")
"""Strategies with which ranks resume from files of their own."""
_RANKS = "$((PADDLE_RANK * PADDLE_NPROC_PER_NODE))-$(((PADDLE_RANK + 1) * PADDLE_NPROC_PER_NODE - 1))"


@dataclass(frozen=True, slots=True, repr=False)
class Launch(Result):
    """How to start a job from a checkpoint, or to serve an exported model."""

    path: str
    library: str
    """``paddleformers``, ``paddlenlp``, or ``transformers`` for an exported model."""
    ranks: int
    """Number of processes; 1 for an exported model."""
    arguments: Arguments
    """Name of an argument of the trainer, without dashes → its value; empty for an exported model."""
    commands: tuple[str, ...]
    """Shell commands that load an exported model; empty for a training checkpoint."""
    remarks: tuple[str, ...]
    """What the job does not find, or does differently from the one that saved."""
    node_command: str = ""
    """Shell command with which each node of the job first makes the files of its ranks, in a folder ``$LOCAL``; empty:
    they are laid out already, or not known."""

    def _in_short(self) -> str:
        return f"{self.path}: {self.library}, {self.ranks} ranks, {self.command_line()}"

    def facts(self) -> Facts:
        """The job, line by line."""
        facts = [("checkpoint", self.path), ("for", self.library)]
        if self.commands:
            return [*facts, *(("run", ToCopy(command)) for command in self.commands), *self._remarks()]
        facts += [("ranks", str(self.ranks)), ("arguments", ToCopy(self.command_line()))]
        if self.node_command:
            facts.append(("or first", ToCopy(self.node_command)))
        return [*facts, *self._remarks()]

    def command_line(self) -> str:
        """The arguments, quoted for a shell.

        >>> Launch("d", "paddleformers", 2, {"sharding": "", "split_param": True}, (), ()).command_line()
        "--sharding '' --split_param true"
        """
        words = []
        for name, value in self.arguments.items():
            words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
        return shlex.join(words)

    def _remarks(self) -> Facts:
        return [("note", remark) for remark in self.remarks]


@with_options(InspectOptions)
def launch(
    checkpoint: PathLike,
    *,
    to: str | Mapping[str, int] | Topology | None = None,
    observe: Observer = ignore_events,
    **options: Unpack[InspectOptions],
) -> Launch:
    """Tell how to start a job from a checkpoint. Nothing is started.

    Parameters
    ----------
    checkpoint
        Path or URL of the checkpoint.
    to
        Topology of the job, ``"tp=2,pp=2"`` or ``{"tp": 2, "pp": 2}``. Required for formats that record none, which any
        job reads; otherwise it may only add data-parallel ranks.

    Raises
    ------
    CheckpointError, PlanError
        As :func:`inspect`.
    UsageError
        If ``to`` is missing, or is not the topology of the checkpoint; or if the job would begin from wrong values.
    UnsupportedError
        For a library or a format whose trainer's arguments are not known.
    """
    manifest = _manifest(checkpoint, options)
    if manifest is not None and manifest.portion_job is not None:
        return _of_portion(os.fspath(checkpoint), manifest, manifest.portion_job, to)
    inspection = inspect_store(
        open_checkpoint(os.fspath(checkpoint), source_access(options)), observe, options
    )
    if FORMATS[inspection.format].model_only:
        return Launch(inspection.path, "transformers", 1, {}, _serving_commands(inspection.path), ())
    made_for = None if manifest is None else _parsed(manifest.topology)
    topology = _topology(inspection, None if to is None else Topology.of(to), made_for)
    if (instead := inspection.not_loaded.instead) and (why := inspection.not_loaded.by(topology)):
        raise UsageError(
            f"{inspection.path} is not for {topology}: {why}; lay it out for the ranks of the job first: "
            f"paddle-reshard convert … --format {instead} --to {topology}"
        )
    library = inspection.library or inspection.convention
    if library.startswith("an unknown") and CONFIG not in inspection.other_files:
        raise UnsupportedError(
            f"{inspection.path}: without {CONFIG} nothing says which library's arguments; give that of the model: "
            "--config FILE"
        )
    job = TrainingJob(
        library,
        inspection.format,
        topology,
        _strategy(inspection, topology, manifest if made_for == topology else None),
        inspection.comm_overlap,
        bool(inspection.sequence_parallel),
        muon=bool(muon_parameters(inspection.tensors)),
        # Only ranks that share experts out write files of their own.
        experts_over_dp=inspection.topology is not None and inspection.topology.dp > 1,
        recipe=inspection.recipe,
        switches=inspection.recipe_switches,
        precision=precision_of(_dtypes(inspection, PARAM), inspection.adapter),
        master_weights=bool(_dtypes(inspection, MASTER_WEIGHT)),
        **lora_of(inspection.adapter),
    )
    arguments = {"resume_from_checkpoint": inspection.path, **trainer_arguments(job)}
    states = {state.state for state in inspection.states}
    if SCHEDULER not in inspection.other_files and states.isdisjoint(ACCUMULATORS):
        arguments["ignore_load_lr_and_optim"] = True
    before = None if manifest is None else _parsed(manifest.source.topology)
    remarks = (
        *_remarks(inspection, job, arguments, before),
        *_about_own_files(inspection, job, made_for, arguments),
        *_about_segments(manifest),
    )
    first = "" if made_for == topology else _node_command(inspection, job, options)
    return Launch(inspection.path, inspection.convention, topology.world_size, arguments, (), remarks, first)


def _topology(inspection: Inspection, asked: Topology | None, made_for: Topology | None) -> Topology:
    """The topology of the job: that of the files; data-parallel ranks, which write none, may be added.

    ``made_for``: the topology for which files that any job can read were laid out, according to our manifest.
    """
    if inspection.topology is None:
        asked = asked or made_for
        if asked is None:
            raise UsageError(
                f"{inspection.path}: {inspection.format} can be read in any topology; "
                "give that of the job: --to tp=2,pp=2"
            )
        return asked
    if asked is None:
        return inspection.topology
    if replace(asked, dp=inspection.topology.dp) != inspection.topology:
        raise UsageError(
            f"{inspection.path} is for {inspection.topology}, not {asked}; convert it first: "
            f"paddle-reshard convert … --to {asked}, or on each node of the job its portion of it, with --ranks"
        )
    return asked


def _of_portion(
    path: str, manifest: Manifest, job: TrainingJob, to: str | Mapping[str, int] | Topology | None
) -> Launch:
    """How a node starts its ranks from the files that it made for them; only the manifest knows the other ranks."""
    if to is not None and Topology.of(to) != job.topology:
        raise UsageError(f"{path}: holds the files of some ranks of {job.topology}, not of {Topology.of(to)}")
    if job.format not in FORMATS or not all(map(str.isidentifier, job.switches)):
        raise UnsupportedError(f"{path}: {MANIFEST} names a job that this version does not know")
    arguments = {"resume_from_checkpoint": path, **trainer_arguments(job)}
    if SCHEDULER not in manifest.files and not any(name.startswith("optimizer") for name in manifest.files):
        arguments["ignore_load_lr_and_optim"] = True
    own = manifest.portion.partition(",")[0]
    before = _parsed(manifest.source.topology)
    remarks = [
        f"holds the files of {own}: every node makes those of its ranks, and resumes from its own folder"
    ]
    if before is not None:
        remarks += remarks_on_change(before, job.topology, job.library)
    return Launch(path, job.library, job.topology.world_size, arguments, (), tuple(remarks))


def _dtypes(inspection: Inspection, state: str) -> tuple[str, ...]:
    """The dtypes of the tensors of a state; empty: there are none."""
    return next((summary.dtypes for summary in inspection.states if summary.state == state), ())


def _strategy(inspection: Inspection, topology: Topology, manifest: Manifest | None) -> str:
    """The sharding strategy of the job; where the format fits all of them, that of the job for which ``manifest`` says
    that the files were laid out, or the trainer's default."""
    if inspection.sharding_strategy is not None:
        return inspection.sharding_strategy
    if manifest is not None and manifest.sharding_strategy in STRATEGIES:
        return manifest.sharding_strategy
    if topology.sharding == 1:
        return "none"
    return "stage1v2" if inspection.convention == "paddleformers" else "stage1v1"


def _manifest(checkpoint: PathLike, options: InspectOptions) -> Manifest | None:
    """Our manifest beside the checkpoint, if there is one."""
    store = open_checkpoint(os.fspath(checkpoint), source_access(options))
    return manifest_of(store) if MANIFEST in store.sizes() else None


def _parsed(topology: str | None) -> Topology | None:
    return None if topology is None else Topology.parse(topology)


def _remarks(
    inspection: Inspection, job: TrainingJob, arguments: Arguments, before: Topology | None
) -> Iterator[str]:
    if why := inspection.not_loaded.by(job.topology):
        yield f"{'starts wrongly' if why == inspection.not_loaded.alone else 'does not start'}: {why}"
    if before is not None:
        yield from remarks_on_change(before, job.topology, job.library)
    if job.topology.sharding > 1 and job.library != "paddlenlp":
        yield (
            "ranks of context parallelism are sharding ranks: the job may have any --context_parallel_size that "
            f"divides {job.topology.sharding}"
        )
    if not any(map(is_random_state, inspection.other_files)):
        yield "without random states: dropout and shuffling begin from the seed"
    if not job.precision:
        yield "parameters are float32: in a job with --bf16 or --fp16, only with --fp16_opt_level O1"
    if (adapter := inspection.adapter) is not None and adapter.alpha != (
        4 if adapter.rslora else 2 * adapter.rank
    ):
        yield (
            f"lora_alpha is {adapter.alpha:g}: paddleformers-cli takes no other than 2 × rank, or 4 with rslora; start "
            "a script of your own, or the adapter is scaled otherwise than it was trained"
        )
    if inspection.has_ema:
        yield _about_ema(arguments, job.topology)
    if inspection.adapter is not None and "load_sharded_model" in arguments:
        yield (
            "--load_sharded_model gives the adapters to the first rank alone in PaddleFormers 1.2; convert it to "
            "complete files for each rank instead (docs/lora.md)"
        )


def _about_own_files(
    inspection: Inspection, job: TrainingJob, made_for: Topology | None, arguments: Arguments
) -> Iterator[str]:
    """Remarks on files that any job can read: from which of them ranks read."""
    if arguments.get("load_checkpoint_format") != "flex_checkpoint":
        return
    if made_for == job.topology:
        yield "every rank finds all that it asks for in its own files: nothing is resharded"
        yield "the trainer compares neither dtypes nor lengths of its own files; paddle-reshard verify finds changes"
    elif made_for is not None:
        yield f"its files are laid out for the ranks of {made_for}: the trainer reshards them for {job.topology}"
    lost = never_restored(inspection.tensors, job.strategy, inspection.adapter is not None)
    if lost is not None:
        yield lost


def _about_segments(manifest: Manifest | None) -> Iterator[str]:
    """Stage 3 with another size of segments than the trainer's, which has no argument for it."""
    if manifest is not None and manifest.stage3_segment_size is not None:
        yield (
            f"stage 3 cuts parameters above {manifest.stage3_segment_size} elements here (stage3_segment_size), and "
            "above 1048576 in the trainer, which has no argument for it and loads slices for whole parameters without "
            "a word: only a script that passes segment_size to group_sharded_parallel starts this job"
        )


def _node_command(inspection: Inspection, job: TrainingJob, options: InspectOptions) -> str:
    """The command that a node runs before the trainer if the format can be laid out by rank and is not for this job.

    The variables are those of Paddle's launcher (``distributed/launch/context/args_envs.py``); ranks of a node follow
    each other. The trainer then resumes from the node's folder.
    """
    by_rank = "to" in FORMATS[inspection.format].options and job.strategy in _BY_RANK
    if not by_rank or inspection.topology is not None or job.topology.world_size == 1:
        return ""
    words = ["paddle-reshard", "convert", inspection.path]
    words += ["--format", inspection.format, "--to", str(job.topology)]
    if job.strategy != "none":
        words += ["--sharding-strategy", job.strategy]
    files = (("--config", options.get("config")), ("--rules", options.get("rules")))
    words += [word for flag, file in files if file is not None for word in (flag, os.fspath(file))]
    local = shlex.quote(inspection.path.rstrip("/").rpartition("/")[2])
    return f'{shlex.join(words)} --ranks {_RANKS} "$LOCAL"/{local} && … --resume_from_checkpoint "$LOCAL"/{local}'


def remarks_on_change(before: Topology, after: Topology, library: str) -> Iterator[str]:
    """Sentences about what a job does differently because of another topology than that of the save."""
    was, becomes = before.sharding * before.dp, after.sharding * after.dp
    if was != becomes:
        yield (
            f"data-parallel ranks (sharding × dp): {becomes}, before: {was}; to keep the batch, and with it the order "
            "of samples, keep their product with --per_device_train_batch_size and --gradient_accumulation_steps"
        )
    if library == "paddleformers" and (before.pp > 1) != (after.pp > 1):
        yield (
            "this trainer decays the weight of the last norm with pp > 1 and not with pp = 1; losses differ a little "
            "after the change, with any converter (docs/parity.md)"
        )


AVERAGE_IGNORED: Final = (
    "this trainer reads one only with load_sharded_model, or from a FlexCheckpoint, and stops with --zcc_save_ema_coef "
    "under stage 3 and in a job without tp, pp and sharding"
)


def reads_average(arguments: Mapping[str, object], topology: Topology | None) -> bool:
    """Whether a trainer that is started with these arguments reads an average, if it is told to keep one.

    Its callback wants the groups of ranks, which data-parallel ranks alone do not have (PaddleFormers 1.2
    ``trainer/trainer.py``, ``add_non_zcc_ema_callback``: ``'Trainer' object has no attribute 'hcg'``); under stage 3 it
    fails in the first step, as parameters that are cut are empty then. ``topology``: ``None`` for a job that has kept
    one.
    """
    reads = "load_sharded_model" in arguments or arguments.get("load_checkpoint_format") == "flex_checkpoint"
    in_groups = topology is None or topology.world_size > topology.dp
    return reads and in_groups and arguments.get("sharding") != "stage3"


def _about_ema(arguments: Arguments, topology: Topology) -> str:
    if reads_average(arguments, topology):
        return "the average is read with --zcc_save_ema_coef COEFFICIENT, and otherwise ignored"
    return f"the average is ignored: {AVERAGE_IGNORED}"


def _serving_commands(path: str) -> tuple[str, ...]:
    """Commands that load an exported model; which engine supports which family: docs/serving.md."""
    python = f"from transformers import AutoModel; AutoModel.from_pretrained({json.dumps(path, ensure_ascii=False)})"
    return (shlex.join(["python", "-c", python]), shlex.join(["vllm", "serve", path]))
