"""Resume the real trainer from our conversions and compare what it then holds with the truth.

``python -m tests.parity.run [row ...]``; the README beside this file says what it proves.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import paddle_reshard
from tests.conftest import case_directory
from tests.deepseek_names import named
from tests.lab.job import FILES_OF_RANKS, Job, Topology, described
from tests.lab.laboratory import Laboratory
from tests.parity.checks import check_all, run_trainer
from tests.parity.lab import PARITY, say
from tests.parity.tensors import ITEM_BYTES, Tensor, differences, read_tensors, write_tensors

TIMEOUT_SECONDS = 300
CHECKPOINT = "checkpoint-3"
EMA_STATES = (".ema_w_0", ".ema")
CORRECTION_BIAS = ".e_score_correction_bias"
STATES = (".w_0", ".moment1_0", ".moment2_0", ".beta1_pow_acc_0", ".beta2_pow_acc_0")
READ_AS_IT_IS = "do not need reshard"
EMA_IS_READ = "Load EMA checkpoint from"
NAMES_FIT = "parameters are those of this job"
STEP_IS_READ = "Continuing training from global step 3"
OWN_FILES = "resumable locally, skipping reshard"
FOLDERS = ("model_state", "master_weight", "optimizer_state")

COLD = {"ignore_load_lr_and_optim": True}
# A FlexCheckpoint has no config.json; these cases train such a model, with other sizes where the case says so.
SAME_MODEL = {"llama": "states/fp16_single", "qwen3_moe": "moe/moe_single"}
ERNIE_MOE = {"use_moe": True, "moe_group": "ep"}
MUON = {"optim": "muon"}
# The buffer size, in whole MiB for a job, that decides over how many ranks a model's matrices are spread.
MUON_ON_BOTH_RANKS = {"SHIM_MUON_BUF_MB": "0.02"}


@dataclass(frozen=True)
class Row:
    """A conversion, and the job of the trainer that resumes from it."""

    source: str
    to: str
    """Topology of the job."""
    strategy: str | None = None
    format: str = "hybrid"
    arguments: dict[str, Any] = field(default_factory=dict)
    """What the job is told beside the rest of the row."""
    ema: bool = False
    whole: bool = False
    """Convert to a FlexCheckpoint of whole tensors, which any job loads."""
    layout: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    cold: bool = False
    """Start from the source's parameters alone, which pass through a Hugging Face checkpoint."""
    masters: bool = False
    """Give a cold start master weights, made from the parameters."""
    to_library: bool = False
    """Give a recipe's model the names of the library's own, which goes on with it."""
    through: str | None = None
    """A topology into which the source is converted first."""
    fill: bool = False
    """Supply the correction biases, which sharded saving loses, from the truth."""
    nodes: int = 1
    """Convert only the files of its ranks on each of so many nodes, into a folder of the node."""
    drifted: bool = False
    """Whether copies of a tensor had drifted apart in the source; the truth has the first."""
    model: dict[str, Any] = field(default_factory=dict)
    """What the job's model config says beside that of the source."""
    qkv: tuple[int, int, int] | None = None
    """Columns of q, k and v in a rank's part of a fused projection, which the laboratory's script joins as they are."""
    names: bool = False
    """Compare the parameters of a FlexCheckpoint by rank with those of the job, as of all files that are of ranks."""
    trains_on: bool = False
    """Train a step after the comparison, and save: a job may load what it cannot train."""

    @property
    def job(self) -> Job:
        """The job that made the source."""
        return described()[self.source if "/" in self.source else f"dense/{self.source}"]

    @property
    def ranks(self) -> int:
        """Processes of the job that resumes."""
        return self._resuming.topology.ranks

    def trainer_arguments(self) -> dict[str, Any]:
        """What the trainer of the job that resumes is told."""
        return self._resuming.trainer_arguments()

    @property
    def _resuming(self) -> Job:
        of_ranks = self.format == "hybrid" and self.strategy in ("stage1v1", "stage1v2")
        return Job(
            "deepseek_v3" if self.to_library else self.job.family,
            tied=self.job.tied,
            topology=Topology.of(self.to),
            strategy=self.strategy or "unsaid",
            format="hybrid-plain" if self.format == "hybrid" and not of_ranks else self.format,
            precision=self.job.precision,
            ema=self.ema,
            arguments={
                **(FILES_OF_RANKS if of_ranks else {}),
                **(COLD if self.cold else {}),
                **self.arguments,
            },
        )

    @property
    def needs_muon(self) -> bool:
        """Whether the trainer imports a Muon that Paddle 3.3.1 does not have."""
        return self.arguments.get("optim") == "muon"

    @property
    def by_rank(self) -> bool:
        """Whether it is a FlexCheckpoint of which every rank reads its own files."""
        return self.format == "flex" and not self.whole

    @property
    def log_must_say(self) -> tuple[str, ...]:
        """What each rank reports when it took our files for its own."""
        says = [] if self.cold else [STEP_IS_READ]
        if "load_sharded_model" in self.trainer_arguments():
            says.append(READ_AS_IT_IS)
        if self.by_rank:
            folders = (*FOLDERS, "ema_state") if self.ema else FOLDERS
            says += [f"{folder}' {OWN_FILES}" for folder in folders]
        elif self.ema:
            says.append(EMA_IS_READ)
        # Parameters alone come without optimizer files, which store names.
        if (self.masters or not self.cold) and not self.whole and (not self.by_rank or self.names):
            says.append(NAMES_FIT)
        if self.trains_on:
            says.append("TRAIN_DONE")
        if answer := self.environment.get("CPU_HAS_BFLOAT16"):
            says.append(f"CPU has bfloat16: {answer}")
        return tuple(says)


ALL_AXES = "mp2pp2sh2_s1v2_meta_ema"
ROWS = {
    "single-to-sh2-v2": Row("single", "sharding=2", "stage1v2"),
    "single-to-sh2-v2-without-bfloat16": Row(
        "single", "sharding=2", "stage1v2", environment={"CPU_HAS_BFLOAT16": "no"}
    ),
    "8ranks-to-pp2": Row(ALL_AXES, "pp=2"),
    "8ranks-to-mp2sh2-v1": Row(ALL_AXES, "tp=2,sharding=2", "stage1v1"),
    "pp4vpp2-to-single": Row("pp4vpp2", "tp=1"),
    "tied-single-to-pp2": Row("single_tied", "pp=2"),
    "tied-single-to-pp2sh2-v2": Row("single_tied", "pp=2,sharding=2", "stage1v2"),
    "tied-single-to-pp2sh2-v2-plain": Row("single_tied", "pp=2,sharding=2", "stage1v2", "hybrid-plain"),
    "tied-single-to-pp2sh2-v1": Row("single_tied", "pp=2,sharding=2", "stage1v1"),
    "ema-8ranks-to-sh2-v2": Row(ALL_AXES, "sharding=2", "stage1v2", ema=True),
    "ema-8ranks-to-pp2sh2-v1": Row(ALL_AXES, "pp=2,sharding=2", "stage1v1", ema=True),
    "single-to-8ranks-v2": Row("single", "tp=2,pp=2,sharding=2", "stage1v2"),
    "single-to-pp4vpp2": Row("single_l8", "pp=4,vpp=2"),
    "single-to-sh2-v2-plain": Row("single", "sharding=2", "stage1v2", "hybrid-plain"),
    "mp2pp2-to-sh2-v1-plain": Row("mp2pp2", "sharding=2", "stage1v1", "hybrid-plain"),
    "single-to-pp2sh2-v2-overlap": Row(
        "single",
        "pp=2,sharding=2",
        "stage1v2",
        arguments={"pp_sharding_comm_overlap": True},
        layout={"comm_overlap": True},
    ),
    "8ranks-to-sh2-stage2": Row(ALL_AXES, "sharding=2", "stage2"),
    "8ranks-to-sh2-stage3": Row(ALL_AXES, "sharding=2", "stage3"),
    # The trainer cannot set the size above which stage 3 cuts; the laboratory's variable can.
    "8ranks-to-sh2-stage3-cut": Row(
        ALL_AXES,
        "sharding=2",
        "stage3",
        layout={"stage3_segment_size": 512},
        environment={"SHIM_SEGMENT": "512"},
    ),
    "stage2-to-8ranks-v1": Row("sh2_s2", "tp=2,pp=2,sharding=2", "stage1v1"),
    "stage3-to-single": Row("sh2_s3_seg512", "tp=1"),
    "float32-sh2-v1-to-single": Row("sh2_s1v1_meta_fp32", "tp=1"),
    "cold-sh2-v2": Row("single", "sharding=2", "stage1v2", cold=True, masters=True),
    "cold-pp2sh2-v1": Row("single", "pp=2,sharding=2", "stage1v1", cold=True, masters=True),
    "cold-flex-sh2-v2": Row("single", "sharding=2", "stage1v2", "flex", whole=True, cold=True, masters=True),
    "cold-mp2pp2-plain": Row(
        "single",
        "tp=2,pp=2",
        format="hybrid-plain",
        arguments={"load_checkpoint_format": "sharding_io"},
        cold=True,
    ),
    "ranks-single-to-mp2sh2-v2": Row("single", "tp=2,sharding=2", "stage1v2", "flex", names=True),
    "ranks-8ranks-to-pp2sh2-v1": Row(ALL_AXES, "pp=2,sharding=2", "stage1v1", "flex"),
    "ranks-8ranks-to-mp2pp2": Row(ALL_AXES, "tp=2,pp=2", format="flex"),
    "ranks-tied-single-to-pp2sh2-v2": Row("single_tied", "pp=2,sharding=2", "stage1v2", "flex"),
    "ranks-ema-8ranks-to-mp2sh2-v2": Row(ALL_AXES, "tp=2,sharding=2", "stage1v2", "flex", ema=True),
    "ranks-mtp-pp2-to-ep2sh2-v2": Row(
        "states/dsv3_mtp_pp2", "ep=2,sharding=2", "stage1v2", "flex", names=True
    ),
    "ranks-mtp-single-to-pp2": Row("states/dsv3_mtp_small_single", "pp=2", format="flex"),
    "ranks-lora-mp2-to-sh2-v2": Row("states/lora_fc_mp2", "sharding=2", "stage1v2", "flex"),
    "ranks-single-to-pp4vpp2": Row("single_l8", "pp=4,vpp=2", format="flex"),
    "ranks-single-to-mp2dp2": Row("single", "tp=2,dp=2", format="flex", arguments={"sharding": ""}),
    "ranks-experts-single-to-ep2pp2sh2-v2": Row("moe/moe_single", "pp=2,ep=2,sharding=2", "stage1v2", "flex"),
    "ranks-float16-to-mp2": Row("states/fp16_single", "tp=2", format="flex"),
    "ranks-float32-to-mp2": Row("sh2_s1v1_meta_fp32", "tp=2", format="flex"),
    "ranks-8ranks-to-sh2-stage3": Row(ALL_AXES, "sharding=2", "stage3", "flex"),
    "ranks-8ranks-to-sh4-stage3-cut": Row(
        ALL_AXES,
        "sharding=4",
        "stage3",
        "flex",
        layout={"stage3_segment_size": 16},
        environment={"SHIM_SEGMENT": "16"},
    ),
    "ranks-experts-over-tp-single-to-mp2": Row(
        "moe/ernie45moe_single", "tp=2", format="flex", model={"moe_group": "mp"}
    ),
    "ranks-experts-over-tp-mp2-to-mp2sh2-v2": Row(
        "moe/ernie45moe_mpmoe_mp2", "tp=2,sharding=2", "stage1v2", "flex"
    ),
    "nodes-single-to-mp2sh2-v2": Row("single", "tp=2,sharding=2", "stage1v2", "flex", nodes=2),
    "nodes-ema-8ranks-to-pp2sh2-v1": Row(ALL_AXES, "pp=2,sharding=2", "stage1v1", "flex", ema=True, nodes=2),
    "nodes-mtp-pp2-to-ep2sh2-v2": Row("states/dsv3_mtp_pp2", "ep=2,sharding=2", "stage1v2", "flex", nodes=2),
    "nodes-single-to-mp2sh2-v2-sharded": Row("single", "tp=2,sharding=2", "stage1v2", nodes=2),
    "nodes-ema-8ranks-to-pp2sh2-v1-sharded": Row(ALL_AXES, "pp=2,sharding=2", "stage1v1", ema=True, nodes=2),
    "nodes-single-to-pp2sh2-v2-plain": Row("single", "pp=2,sharding=2", "stage1v2", "hybrid-plain", nodes=2),
    "nodes-8ranks-to-sh2-stage3": Row(ALL_AXES, "sharding=2", "stage3", nodes=2),
    # Neighbouring experts of the source are on different tp ranks.
    "experts-ep4mp2pp2sh2-to-single": Row("moe/ep4_mp2pp2sh2_s1v2_meta", "tp=1", drifted=True),
    "experts-ep4mp2pp2sh2-to-mp2": Row(
        "moe/ep4_mp2pp2sh2_s1v2_meta", "tp=2", arguments={"sequence_parallel": True}, drifted=True
    ),
    "mtp-single-to-pp2": Row("states/dsv3_mtp_small_single", "pp=2"),
    "mtp-pp2-to-sh2-v2": Row("states/dsv3_mtp_pp2", "sharding=2", "stage1v2"),
    "mtp-pp2-to-ep2sh2-v2": Row("states/dsv3_mtp_pp2", "ep=2,sharding=2", "stage1v2"),
    "mtp-ep2sh2-v2-to-pp2": Row("states/dsv3_mtp_ep2_sh2_s1v2_meta", "pp=2", fill=True),
    "mtp-ernie-ema-sh2-v2-to-sh2-v1": Row(
        "states/ernie45_mtp_sh2_s1v2_meta_ema", "sharding=2", "stage1v1", ema=True, fill=True
    ),
    "lora-pp2-to-single": Row("states/lora_pp2", "tp=1"),
    "lora-single-to-mp2pp2": Row("states/lora_single", "tp=2,pp=2"),
    # Not with load_sharded_model, under which this trainer gives the adapters to the first rank alone.
    "lora-mp2pp2-to-sh2-v2-plain": Row("states/lora_mp2pp2_sp", "sharding=2", "stage1v2", "hybrid-plain"),
    "dsv3-to-library-ep2sh2": Row(
        "recipes/dsv3_ep2_pp2sh2_s1v2_meta", "ep=2,sharding=2", "stage1v2", to_library=True
    ),
    # DeepSeek's recipe starts no job without pp and ep.
    "dsv3-pp3-to-pp2ep2sh2": Row(
        "recipes/dsv3_ep2_pp2sh2_s1v2_meta",
        "pp=2,ep=2,sharding=2",
        "stage1v2",
        through="pp=3,ep=4,sharding=4",
    ),
    "dsv3-pp2ep2-to-pp3ep2": Row("recipes/dsv3_ep2_pp2sh2_s1v2_meta", "pp=3,ep=2,sharding=2", "stage1v2"),
    "dsv3-mtp-ema-to-pp2ep4": Row(
        "recipes/dsv3_ep2_pp2sh2_s1v2_meta_mtp_ema",
        "pp=2,ep=4,sharding=4",
        "stage1v2",
        ema=True,
        arguments={"num_nextn_predict_layers": 1},
    ),
    "ranks-dsv3-pp3-to-pp2ep2sh2": Row(
        "recipes/dsv3_ep2_pp2sh2_s1v2_meta",
        "pp=2,ep=2,sharding=2",
        "stage1v2",
        "flex",
        through="pp=3,ep=4,sharding=4",
    ),
    "ernie-dense-single-to-pp2": Row("recipes/ernie_dense_single", "pp=2"),
    "ernie-dense-pp2-to-sh2": Row("recipes/ernie_dense_pp2", "sharding=2", "stage1v2"),
    "ernie-ep2-to-ep4": Row(
        "recipes/ernie_ep2_sh2_s1v2_meta", "ep=4,sharding=4", "stage1v2", arguments=ERNIE_MOE
    ),
    "ernie-pp2ep2-to-ep2": Row(
        "recipes/ernie_ep2_pp2sh2_s1v2_meta", "ep=2,sharding=2", "stage1v2", arguments=ERNIE_MOE
    ),
    "ernie-ema-ep2-to-ep4": Row(
        "recipes/ernie_ep2_sh2_s1v2_meta_ema_rms",
        "ep=4,sharding=4",
        "stage1v2",
        ema=True,
        arguments=ERNIE_MOE,
    ),
    "ernie-dense-tp2-to-pp2": Row("recipes/ernie_dense_mp2", "pp=2"),
    "ernie-dense-pp2-to-tp2": Row(
        "recipes/ernie_dense_pp2",
        "tp=2",
        arguments={"sequence_parallel": True},
        layout={"sequence_parallel": True},
        model={"fuse_linear": False},
    ),
    "ernie-biases-tp2sh2-to-pp2": Row("recipes/ernie_dense_mp2sh2_s1v2_meta_biases", "pp=2"),
    "ernie-biases-mtp-ema-pp2ep2-to-ep4": Row(
        "recipes/ernie_ep2_pp2sh2_s1v2_meta_mtp_ema_unfused_biases",
        "ep=4,sharding=4",
        "stage1v2",
        ema=True,
        arguments=ERNIE_MOE,
    ),
    "ernie-fused-experts-ep2-to-ep4": Row(
        "recipes/ernie_ep2_sh2_s1v2_meta_fusedexperts", "ep=4,sharding=4", "stage1v2", arguments=ERNIE_MOE
    ),
    "ernie-mtp-tied-ep2-to-ep4": Row(
        "recipes/ernie_ep2_sh2_s1v2_meta_mtp_tie_rms", "ep=4,sharding=4", "stage1v2", arguments=ERNIE_MOE
    ),
    "ernie-mtp-magic-ema-to-pp2ep4": Row(
        "recipes/ernie_ep2_pp2sh2_s1v2_meta_mtp_magic_rms_tail",
        "pp=2,ep=4,sharding=4",
        "stage1v2",
        ema=True,
        arguments={**ERNIE_MOE, "enable_mtp_magic_send": True},
    ),
    "muon-pp2-to-mp2": Row("states/muon_fc_pp2", "tp=2", format="flex", whole=True, arguments=MUON),
    "muon-mp2-to-sh2": Row(
        "states/muon_fc_mp2",
        "sharding=2",
        "stage1v2",
        "flex",
        whole=True,
        arguments=MUON,
        environment=MUON_ON_BOTH_RANKS,
    ),
    "muon-sh2-to-pp2": Row("states/muon_fc_sh2_split", "pp=2", format="flex", whole=True, arguments=MUON),
    "muon-experts-ep2sh4-to-ep2sh2": Row(
        "states/muon_moe_fc_ep2_sh4_ema",
        "ep=2,sharding=2",
        "stage1v2",
        "flex",
        whole=True,
        arguments=MUON,
        environment=MUON_ON_BOTH_RANKS,
    ),
    "muon-experts-ep2sh4-to-pp2": Row(
        "states/muon_moe_fc_ep2_sh4_ema", "pp=2", format="flex", whole=True, arguments=MUON
    ),
}


def main(wanted: list[str]) -> int:
    """Check the rows asked for, or all; the result is the exit status."""
    if unknown := [name for name in wanted if name not in ROWS]:
        say(f"unknown: {', '.join(unknown)}; the rows are {', '.join(ROWS)}")
        return 2
    without_muon = "MUON_OVERLAY" not in os.environ
    omitted = [name for name in wanted or ROWS if ROWS[name].needs_muon and without_muon]
    rows = [name for name in wanted or ROWS if name not in omitted]
    for name in omitted:
        say(f"omitted {name}: Paddle 3.3.1 has no Muon; MUON_OVERLAY=DIR adds it (see the README)")
    return check_all(rows, _checked) or (2 if wanted and omitted else 0)


def _checked(lab: Laboratory, name: str) -> tuple[str, list[str]]:
    row = ROWS[name]
    asked = ", ".join(filter(None, (row.to, row.strategy, row.format, "cold start" if row.cold else "")))
    compared, found = check(lab, name, row)
    return f"{row.source} -> {asked}: {compared} tensors on {row.ranks} rank(s)", found


def check(lab: Laboratory, name: str, row: Row) -> tuple[int, list[str]]:
    """Convert, resume, compare; return how many tensors were compared and what is wrong."""
    source, work = case_directory(row.source), PARITY / "work" / name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    checkpoint = source / CHECKPOINT
    if row.cold:
        checkpoint = work / "model"
        paddle_reshard.convert(source / CHECKPOINT, checkpoint, format="huggingface")
    if row.through is not None:
        paddle_reshard.convert(checkpoint, work / "between", to=row.through)
        checkpoint = work / "between"
    job = row.job
    all_of_truth = read_tensors(source / "truth.safetensors")
    if row.fill:
        biases = {key: tensor for key, tensor in all_of_truth.items() if key.endswith(CORRECTION_BIAS)}
        write_tensors(biases, work / "fill.safetensors")
    each = row.ranks // row.nodes
    of_nodes = [range(node * each, (node + 1) * each) for node in range(row.nodes)]
    made = [
        paddle_reshard.convert(
            checkpoint,
            work / f"node{node}" / CHECKPOINT,
            ranks=ranks if row.nodes > 1 else None,
            to=None if row.whole else row.to,
            sharding_strategy=None if row.whole else row.strategy,
            format=row.format,
            layout=row.layout or None,
            master_weights="from-parameters" if row.masters else "compare",
            fill=work / "fill.safetensors" if row.fill else None,
            config=None if (checkpoint / "config.json").exists() else config_like(job, work),
            convention="paddleformers" if row.to_library else None,
            replicas="report" if row.drifted else "compare",
        )
        for node, ranks in enumerate(of_nodes)
    ]
    if len({one.plan.portion and one.plan.portion.digest for one in made}) > 1:
        return 0, ["the nodes did not make portions of one whole"]
    if row.to_library:
        job, all_of_truth = in_the_library(job, source), renamed(all_of_truth)
    logs = run_trainer(
        lab,
        name,
        work / "out",
        options=["--resume", str(work / "node{node}" / CHECKPOINT), *options_of(job)],
        ranks=row.ranks,
        arguments=row.trainer_arguments(),
        model={**job.model, **row.model},
        timeout_seconds=TIMEOUT_SECONDS,
        environment={
            **row.environment,
            "RANKS_OF_A_NODE": str(each),
            **({"CHECK_NAMES": "yes"} if NAMES_FIT in row.log_must_say else {}),
            **({"TRAIN_ON": "yes"} if row.trains_on else {}),
        },
    )
    truth = {key: tensor for key, tensor in all_of_truth.items() if row.ema or not key.endswith(EMA_STATES)}
    loaded = read_tensors(work / "out" / "truth.safetensors")
    if row.qkv is not None:
        loaded = {
            key: _in_order(tensor, row.qkv) if ".qkv_proj." in key else tensor
            for key, tensor in loaded.items()
        }
    if row.cold:
        truth = at_the_start(truth, row.masters)
        found = differences({key: tensor for key, tensor in loaded.items() if key in truth}, truth)
        found += states_that_are_not_new(loaded.keys() - truth.keys(), loaded)
    else:
        found = differences(loaded, truth)
        found += differences_of_reports(
            work / "out" / "truth_report.json",
            source / "truth_report.json",
            {key: tensor.shape for key, tensor in loaded.items()} if row.format == "flex" else {},
        )
    found += [
        f"the log of rank {rank} does not say {line!r}"
        for rank, log in enumerate(logs)
        for line in row.log_must_say
        if line not in log
    ]
    return len(truth), found


def _in_order(tensor: Tensor, widths: tuple[int, int, int]) -> Tensor:
    """``[q_0 | k_0 | v_0 | q_1 | …]`` as ``[q | k | v]``; what has no columns, as it is."""
    if tensor.shape[-1] % sum(widths):
        return tensor
    starts = [sum(widths[:part]) for part in range(3)]
    parts = range(0, tensor.shape[-1], sum(widths))
    order = [
        rank + start + column
        for start, width in zip(starts, widths, strict=True)
        for rank in parts
        for column in range(width)
    ]
    items = np.frombuffer(tensor.data, f"V{ITEM_BYTES[tensor.dtype]}").reshape(tensor.shape)
    return tensor._replace(data=items[..., order].tobytes())


def config_like(job: Job, folder: Path) -> Path:
    """``config.json`` of the model of a case."""
    like = case_directory(SAME_MODEL[job.family]) / CHECKPOINT / "config.json"
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(like.read_bytes()), **job.model}))
    return path


def in_the_library(job: Job, source: Path) -> Job:
    """A case of the library's deepseek_v3 with the sizes of the recipe's model."""
    config = json.loads((source / CHECKPOINT / "config.json").read_bytes())
    sizes = {name: value for name, value in config.items() if type(value) is int and not name.endswith("_id")}
    return replace(job, family="deepseek_v3", model=sizes)


def renamed(truth: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of DeepSeek's recipe under the names of the library, whose head is transposed."""
    arrays = {
        name: np.frombuffer(tensor.data, f"u{ITEM_BYTES[tensor.dtype]}").reshape(tensor.shape)
        for name, tensor in truth.items()
    }
    dtypes = {2: "BF16", 4: "F32"}
    return {
        name: Tensor(dtypes[array.itemsize], array.shape, array.tobytes())
        for name, array in named(arrays, "lm_head").items()
    }


def at_the_start(truth: dict[str, Tensor], masters: bool) -> dict[str, Tensor]:
    """The parameters among tensors, and their values as float32 where the job has them as master weights."""
    parameters = {key: tensor for key, tensor in truth.items() if not key.endswith(STATES)}
    if not masters:
        return parameters
    return parameters | {
        f"{key}.w_0": Tensor("F32", tensor.shape, _widened(tensor.data))
        for key, tensor in parameters.items()
        if tensor.dtype == "BF16"
    }


def _widened(halves: bytes) -> bytes:
    """bfloat16 as float32: the same bits, and 16 zeros below them."""
    return b"".join(b"\0\0" + halves[start : start + 2] for start in range(0, len(halves), 2))


def states_that_are_not_new(names: Iterable[str], loaded: dict[str, Tensor]) -> list[str]:
    """States of a job that starts are zero; its beta powers and what it makes of the parameters are its own."""
    moments = [name for name in sorted(names) if ".moment" in name]
    return [f"{name}: not zero in a job that starts" for name in moments if any(loaded[name].data)]


def options_of(job: Job) -> list[str]:
    """What the laboratory's script is told of a case's job: the model, its adapters, its optimizer."""
    options = ["--family", job.family]
    if job.lora:
        options += ["--lora", json.dumps({**job.adapters, "r": job.lora})]
    if "muon" in job.needs:
        options += ["--patch", "muon"]
    return options


def differences_of_reports(
    loaded: Path, saved: Path, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> list[str]:
    """Compare what is no tensor, and let replicas and padding speak up.

    Of a slice that is all padding the trainer asks a FlexCheckpoint for nothing, so that its beta powers stay those of
    a job that begins: ``shapes``, of a row with such a checkpoint, tell which slices these are.
    """
    mine, real = json.loads(loaded.read_bytes()), json.loads(saved.read_bytes())
    empty = {
        (key, piece[0])
        for key, pieces in mine.get("slices", {}).items()
        for piece in pieces
        if shapes and piece[5] >= prod(shapes[key])
    }
    found = [
        f"replicas that disagree: {mismatch}"
        for mismatch in mine["replica_mismatch"]
        if not ("_pow_acc" in mismatch[1] and (mismatch[0], mismatch[2]["rank"]) in empty)
    ]
    found += [f"padding that is not zero: {place}" for place in mine["padding_nonzero"]]
    if mine["lr"] != real["lr"]:
        found.append(f"learning rate: {mine['lr']}, not {real['lr']}")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
