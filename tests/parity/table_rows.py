"""The table of losses: strategies, models, and which conversions are followed by the real trainer."""

import re
from dataclasses import dataclass, field
from typing import Any

from tests.lab.job import FILES_OF_RANKS, Job, Topology


def _strategy(name: str, **more: Any) -> Job:
    """The job that a name of the table says: ``mp2 sharding2 v1``, ``pp2 sharding2 stage 2``."""
    degrees = {axis.replace("mp", "tp"): int(degree) for axis, degree in re.findall(r"\b([a-z]+)(\d+)", name)}
    stage = re.search(r"stage \d", name)
    version = degrees.pop("v", None)
    strategy = f"stage1v{version}" if version else stage[0].replace(" ", "") if stage else "unsaid"
    given: dict[str, Any] = {"strategy": strategy}
    if version:
        given |= {"format": "hybrid", "arguments": FILES_OF_RANKS}
    return Job("llama", topology=Topology(**degrees), **{**given, **more})


STRATEGIES = {
    "dp2": _strategy("dp2", strategy="none"),
    "auto-parallel dp2": _strategy(
        "dp2", strategy="none", format="flex", arguments={"enable_auto_parallel": True}
    ),
    # The trainer cannot set the size above which stage 3 cuts; the laboratory's variable can.
    "sharding2 stage 3": _strategy("sharding2 stage 3", segment=512, environment={"SHIM_SEGMENT": "512"}),
    **{
        name: _strategy(name)
        for name in (
            *("single", "mp2", "pp2", "mp2 pp2", "pp4 mp2", "mp4 pp2", "mp2 pp4 vpp2"),
            *("sharding2 v1", "sharding2 v2", "mp2 sharding2 v1", "mp2 sharding2 v2", "mp4 sharding2 v2"),
            *("pp2 sharding2 v1", "pp2 sharding2 v2", "pp2 sharding4 v2"),
            *("mp2 pp2 sharding2 v1", "mp2 pp2 sharding2 v2"),
            *("mp4 sharding2 stage 2", "mp2 sharding2 stage 2", "pp2 sharding2 stage 2"),
            *("ep2 sharding2 v2", "ep2 pp2 sharding2 v2"),
        )
    },
}


def keeps_average(strategy: str) -> bool:
    """Whether the trainer keeps its average in a job of this strategy: only beside sharded files."""
    return "load_sharded_model" in STRATEGIES[strategy].arguments


@dataclass(frozen=True)
class Model:
    """A model of the laboratory; the batch of a step is the same whatever the strategy."""

    family: str
    config: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    global_batch: int = 8
    replicas_drift: bool = False


MODELS = {
    "llama": Model("llama", {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "qwen3_moe": Model("qwen3_moe", {}, replicas_drift=True),
    "qwen3 fused, tied": Model("qwen3", {"num_hidden_layers": 4}, {"_tie": True}, replicas_drift=True),
}


@dataclass(frozen=True)
class Row:
    """Train in ``before``, convert, go on in ``after``."""

    model: str
    before: str
    after: str
    ema: bool
    flex: bool = False
    """Whether the conversion is a FlexCheckpoint."""

    @property
    def name(self) -> str:
        """How a row is called on the command line and in the report."""
        return f"{self.model}: {self.before} -> {self.after}{' (to flex)' * self.flex}"


def _rows(model: str, *pairs: tuple[str, str], flex: bool = False) -> list[Row]:
    return [Row(model, a, b, keeps_average(a) and keeps_average(b), flex) for a, b in pairs]


HUB = "mp2 sharding2 v2"
BEFORE = (
    "pp4 mp2",
    "mp2 pp2 sharding2 v1",
    "mp2 pp2 sharding2 v2",
    "mp4 sharding2 stage 2",
    "sharding2 stage 3",
    "mp2 pp4 vpp2",
    "dp2",
)
AFTER = (
    "mp2 pp2 sharding2 v1",
    "pp2 sharding4 v2",
    "pp2 sharding2 v1",
    "pp2 sharding2 stage 2",
    "mp2 sharding2 stage 2",
    "mp4 sharding2 v2",
    "pp4 mp2",
    "mp4 pp2",
    "mp2 pp2",
    "pp2",
)
# What changes, beside tp: every axis comes and goes, every kind of sharding is a source and a target.
DIRECT = (
    ("mp2 pp2 sharding2 v1", "pp2 sharding4 v2"),
    ("mp2 pp2 sharding2 v2", "mp4 sharding2 v2"),
    ("pp4 mp2", "pp2 sharding2 v1"),
    ("mp4 sharding2 stage 2", "mp2 pp2 sharding2 v1"),
    ("sharding2 stage 3", "pp2 sharding4 v2"),
    ("mp2 pp4 vpp2", "mp4 pp2"),
    ("dp2", "mp4 sharding2 v2"),
    ("pp2 sharding2 v1", "sharding2 stage 3"),
    ("mp2 pp2", "mp2 pp4 vpp2"),
    ("pp2 sharding4 v2", "mp2 pp2 sharding2 v1"),
    ("mp4 sharding2 v2", "dp2"),
    ("mp4 pp2", "mp4 sharding2 stage 2"),
)
MOE = (
    ("sharding2 v1", "pp2 sharding2 v2"),
    ("pp2 sharding2 v2", "sharding2 v1"),
    ("mp2 pp2 sharding2 v2", "sharding2 v2"),
    ("sharding2 v2", "mp2"),
    ("pp2", "sharding2 v2"),
)
FUSED = (
    ("mp2 pp2 sharding2 v2", "pp2 sharding2 v1"),
    ("sharding2 v2", "mp2 pp2"),
    ("pp2", "mp2 sharding2 v1"),
    ("mp2", "pp2"),
)
EXPERT_PARALLEL = (
    ("ep2 sharding2 v2", "sharding2 v1"),
    ("sharding2 v2", "ep2 sharding2 v2"),
    ("ep2 sharding2 v2", "ep2 pp2 sharding2 v2"),
)

ROWS = (
    *_rows("llama", *((before, HUB) for before in BEFORE)),
    *_rows("llama", *((HUB, after) for after in AFTER)),
    *_rows("llama", *DIRECT),
    *_rows("qwen3_moe", *MOE),
    *_rows("qwen3 fused, tied", *FUSED),
)
EXPERT_PARALLEL_ROWS = tuple(_rows("qwen3_moe", *EXPERT_PARALLEL))
FLEX_ROWS = (
    *_rows("llama", *((before, HUB) for before in ("pp4 mp2", "sharding2 stage 3")), flex=True),
    *_rows(
        "llama",
        *((HUB, after) for after in ("mp2 pp2 sharding2 v1", "pp2 sharding4 v2", "pp2", "auto-parallel dp2")),
        flex=True,
    ),
)
