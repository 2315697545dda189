"""A job of the trainer as a value: it gives the trainer's arguments, and how a conversion asks for its checkpoint."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

CASES = Path(__file__).with_name("cases.json")

SEQUENCE = 12
LIBRARY = "paddleformers 1.2.0, paddlepaddle 3.3.1"
BY_KEY, OWN, UNKNOWN = "by key", "own", "unknown"
RECIPES = ("ernie_pretrain", "deepseek_v3_pretrain")
SAVED_AS: dict[str, dict[str, Any]] = {
    "hybrid": {"save_checkpoint_format": "sharding_io"},
    "hybrid-plain": {},
    "flex": {"save_checkpoint_format": "flex_checkpoint", "load_checkpoint_format": "flex_checkpoint"},
    "unified": {
        "save_checkpoint_format": "unified_checkpoint",
        "load_checkpoint_format": "unified_checkpoint",
        "convert_from_hf": False,
    },
}
FILES_OF_RANKS = {**SAVED_AS["hybrid"], "load_checkpoint_format": "sharding_io", "load_sharded_model": True}
"""Of a job that also resumes from files with ``model_meta.json``."""
FLEX = SAVED_AS["flex"]
STRATEGIES: dict[str, dict[str, Any]] = {
    "unsaid": {},
    "none": {"sharding": ""},
    "stage1v1": {"sharding": "stage1", "split_param": False},
    "stage1v2": {"sharding": "stage1", "split_param": True},
    "stage2": {"sharding": "stage2"},
    "stage3": {"sharding": "stage3"},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float16": {"bf16": False, "fp16": True, "scale_loss": 256},
    "float32": {"bf16": False, "fp16_opt_level": "O1", "amp_master_grad": False, "max_grad_norm": 0.0},
}


@dataclass(frozen=True)
class Topology:
    """Degrees of a job; ``ep`` divides the ranks of sharding (and tp), so that it adds none."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    sharding: int = 1
    ep: int = 1
    dp: int = 1

    @classmethod
    def of(cls, degrees: str) -> "Topology":
        """``"tp=2,pp=2"``, the inverse of ``str``."""
        return cls(
            **{axis: int(degree) for axis, _, degree in (d.partition("=") for d in degrees.split(","))}
        )

    @property
    def ranks(self) -> int:
        """Processes of the job."""
        return self.tp * self.pp * self.sharding * self.dp

    def __str__(self) -> str:
        return ",".join(f"{axis}={n}" for axis, n in asdict(self).items() if n > 1) or "tp=1"


@dataclass(frozen=True)
class Job:
    """One job of the trainer, from its start to the checkpoint of its last step."""

    family: str
    model: Mapping[str, Any] = field(default_factory=dict)
    """Entries of the model's config other than those of the laboratory's tiny model."""
    tied: bool = False
    topology: Topology = Topology()
    strategy: str = "none"
    format: str = "hybrid-plain"
    by_rank: bool = False
    """flex: every rank resumes from files of its own."""
    precision: str = "bfloat16"
    steps: int = 2
    batch: int = 12
    """Samples of a step: as many micro batches as any degrees up to 4 can share."""
    sequence: int = 0
    """Tokens of a sample; 0: ``SEQUENCE``, and those that multi-token prediction takes for itself."""
    start: str = BY_KEY
    """The values to begin with: a function of the key, the model's ``OWN``, those of another case on one card, or
    ``UNKNOWN``: the model's own, which were drawn without a seed."""
    head: str = ""
    """What a class has in place of a language head: ``SequenceClassification``, ``TokenClassification``, and of
    ``SentenceEmbedding`` nothing."""
    ema: bool = False
    lora: int = 0
    """Rank of the adapters; 0: the model itself is trained."""
    adapters: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of LoRA's config."""
    frozen: str = ""
    """Regular expression of the parameters that are not trained."""
    optimizer: str = ""
    """A class of paddle.optimizer in place of the trainer's own."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the trainer."""
    segment: int = 0
    """stage3: parameters of more elements than this are cut; 0: the library's own."""
    needs: tuple[str, ...] = ()
    """What of ``trainer/patches.py`` the job needs beside what its options say."""
    environment: Mapping[str, str] = field(default_factory=dict)
    export: bool = False
    """Whether the library also exports the trained model."""
    library: str = LIBRARY

    def trainer_arguments(self) -> dict[str, Any]:
        """The arguments that the trainer gets beyond those of every job of the laboratory."""
        at, given = self.topology, {**SAVED_AS[self.format], **STRATEGIES[self.strategy]}
        given |= PRECISIONS[self.precision]
        if self.by_rank:
            given["replicate_saved_into_local"] = True
        if at.tp > 1:
            given["tensor_model_parallel_size"] = at.tp
        if at.pp > 1:
            given["pipeline_model_parallel_size"] = at.pp
        if at.sharding > 1:
            given["sharding_parallel_size"] = at.sharding
            if self.precision == "float32":
                given["split_param"] = False
        if at.ep > 1:
            given |= {"use_expert_parallel": True, "expert_model_parallel_size": at.ep}
        if self.ema:
            given["zcc_save_ema_coef"] = 0.9
        if self.family in RECIPES:  # takes no empty one
            given = {name: value for name, value in given.items() if value != ""}
        else:
            given |= {"_vpp": at.vpp, "_tie": self.tied}
        return {**given, **self.arguments}

    def patches(self) -> str:
        """What of ``trainer/patches.py`` the job needs: flaws of forward passes on a CPU or in the library."""
        needed = [*self.needs, *(["fp16"] if self.precision == "float16" else [])]
        if self.model.get("num_nextn_predict_layers") and self.family not in RECIPES:
            if self.family == "ernie4_5_moe":
                needed.append("nbatch")
            elif self.topology.pp > 1:
                needed.append("dsv3_mtp_pipe")
            elif self.topology.tp > 1:
                needed.append("dsv3_mtp_sp")
        if self.arguments.get("stage1_tensor_fusion"):
            needed.append("unfuse")
        return ",".join(needed)

    def target(self) -> dict[str, Any]:
        """The options with which ``convert`` makes a checkpoint for this job."""
        options: dict[str, Any] = {"format": self.format}
        if self.format == "unified" and self.ema:
            options["drop"] = ["ema"]
        if self.format == "unified":
            # One file is for one card: it has the states of tied words under one key, which other stages lack.
            return options | ({"max_shard_size": "20KB"} if self.topology.ranks > 1 else {})
        if self.format == "flex" and not self.by_rank:
            return options
        options["to"] = str(self.topology)
        if self.topology.sharding > 1:
            options["sharding_strategy"] = self.strategy
        layout: dict[str, Any] = {}
        if self.topology.tp > 1:
            layout["sequence_parallel"] = bool(self.arguments.get("sequence_parallel"))
        if self.topology.tp > 1 and self.model.get("moe_group") == "dummy":
            layout["experts_over_tp"] = False
        if self.topology.ep > 1 and self.model.get("use_unified_moe"):
            layout["use_unified_moe"] = True
        if self.topology.pp > 1 and (pattern := self.model.get("pp_seg_method")):
            layout["segmentation"] = pattern
        if size := self.arguments.get("sharding_comm_buffer_size_MB"):
            layout["comm_buffer_size_MB"] = size
        if self.arguments.get("pp_sharding_comm_overlap") and self.strategy == "stage1v2":
            layout["comm_overlap"] = True
        if self.strategy == "stage3":
            layout["stage3_segment_size"] = self.segment or 2**20
        return options | ({"layout": layout} if layout else {})

    def as_json(self) -> dict[str, Any]:
        """A form that ``job_of`` reads again."""
        return asdict(self)

    def __str__(self) -> str:
        parts = [self.family, str(self.topology), self.strategy, self.format + " by rank" * self.by_rank]
        parts += [self.precision] * (self.precision != "bfloat16") + ["tied"] * self.tied + ["EMA"] * self.ema
        parts += [self.head] * bool(self.head)
        parts += [f"LoRA {self.lora}"] * bool(self.lora) + [f"frozen {self.frozen}"] * bool(self.frozen)
        parts += [self.optimizer] * bool(self.optimizer)
        return " ".join([*parts, *(f"{key}={value}" for key, value in self.arguments.items())])


def job_of(entries: Mapping[str, Any]) -> Job:
    """The inverse of :meth:`Job.as_json`; what is left out is as a job has it by default."""
    topology, needs = Topology(**entries.get("topology", {})), tuple(entries.get("needs", ()))
    return Job(**{**entries, "topology": topology, "needs": needs})


@cache
def described() -> Mapping[str, Job]:
    """Case of the corpus → the job that made it."""
    told = json.loads(CASES.read_text())
    return {name: job_of({**told["every"], **entries}) for name, entries in told["cases"].items()}
