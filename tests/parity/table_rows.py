"""The table of losses: strategies, models, and which conversions are followed by the real trainer."""

from dataclasses import dataclass, field
from typing import Any

TP2 = {"tensor_model_parallel_size": 2}
TP4 = {"tensor_model_parallel_size": 4}
PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}
SHARDING2 = {"sharding_parallel_size": 2}
SHARDING4 = {"sharding_parallel_size": 4}
V1 = {"sharding": "stage1", "split_param": False}
V2 = {"sharding": "stage1", "split_param": True}
EP2 = {"use_expert_parallel": True, "expert_model_parallel_size": 2}
SHARDED_FILES = {
    "save_checkpoint_format": "sharding_io",
    "load_checkpoint_format": "sharding_io",
    "load_sharded_model": True,
}
FLEX_FILES = {"save_checkpoint_format": "flex_checkpoint", "load_checkpoint_format": "flex_checkpoint"}
EMA = {"zcc_save_ema_coef": 0.9}
STAGE3_SLICES_FROM = 512


@dataclass(frozen=True)
class Strategy:
    """How a job is spread over its ranks: the trainer's arguments, and the same for our command line."""

    ranks: int
    arguments: dict[str, Any]
    to: str
    kind: str | None = None
    layout: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def can_average(self) -> bool:
        """Whether the trainer keeps its average: only beside sharded files."""
        return "load_sharded_model" in self.arguments


def _stage1(kind: dict[str, Any], ranks: int, to: str, *axes: dict[str, Any]) -> Strategy:
    arguments = dict(kind) | SHARDED_FILES
    for axis in axes:
        arguments |= axis
    return Strategy(ranks, arguments, to, "stage1v1" if kind is V1 else "stage1v2")


STRATEGIES = {
    "single": Strategy(1, {}, "tp=1"),
    "dp2": Strategy(2, {"sharding": ""}, "dp=2"),
    "auto-parallel dp2": Strategy(2, {"enable_auto_parallel": True, "sharding": ""} | FLEX_FILES, "dp=2"),
    "mp2": Strategy(2, TP2, "tp=2"),
    "pp2": Strategy(2, PP2, "pp=2"),
    "mp2 pp2": Strategy(4, TP2 | PP2, "tp=2,pp=2"),
    "pp4 mp2": Strategy(8, PP4 | TP2, "tp=2,pp=4"),
    "mp4 pp2": Strategy(8, TP4 | PP2, "tp=4,pp=2"),
    "mp2 pp4 vpp2": Strategy(8, TP2 | PP4 | {"_vpp": 2}, "tp=2,pp=4,vpp=2"),
    "sharding2 v1": _stage1(V1, 2, "sharding=2", SHARDING2),
    "sharding2 v2": _stage1(V2, 2, "sharding=2", SHARDING2),
    "mp2 sharding2 v1": _stage1(V1, 4, "tp=2,sharding=2", TP2, SHARDING2),
    "mp2 sharding2 v2": _stage1(V2, 4, "tp=2,sharding=2", TP2, SHARDING2),
    "mp4 sharding2 v2": _stage1(V2, 8, "tp=4,sharding=2", TP4, SHARDING2),
    "pp2 sharding2 v1": _stage1(V1, 4, "pp=2,sharding=2", PP2, SHARDING2),
    "pp2 sharding2 v2": _stage1(V2, 4, "pp=2,sharding=2", PP2, SHARDING2),
    "pp2 sharding4 v2": _stage1(V2, 8, "pp=2,sharding=4", PP2, SHARDING4),
    "mp2 pp2 sharding2 v1": _stage1(V1, 8, "tp=2,pp=2,sharding=2", TP2, PP2, SHARDING2),
    "mp2 pp2 sharding2 v2": _stage1(V2, 8, "tp=2,pp=2,sharding=2", TP2, PP2, SHARDING2),
    "mp4 sharding2 stage 2": Strategy(
        8, TP4 | SHARDING2 | {"sharding": "stage2"}, "tp=4,sharding=2", "stage2"
    ),
    "mp2 sharding2 stage 2": Strategy(
        4, TP2 | SHARDING2 | {"sharding": "stage2"}, "tp=2,sharding=2", "stage2"
    ),
    "pp2 sharding2 stage 2": Strategy(
        4, PP2 | SHARDING2 | {"sharding": "stage2"}, "pp=2,sharding=2", "stage2"
    ),
    # The trainer cannot set the size above which stage 3 cuts; the laboratory's variable can.
    "sharding2 stage 3": Strategy(
        2,
        SHARDING2 | {"sharding": "stage3"},
        "sharding=2",
        "stage3",
        {"stage3_segment_size": STAGE3_SLICES_FROM},
        {"SHIM_SEGMENT": str(STAGE3_SLICES_FROM)},
    ),
    "ep2 sharding2 v2": _stage1(V2, 2, "ep=2,sharding=2", EP2, SHARDING2),
    "ep2 pp2 sharding2 v2": _stage1(V2, 4, "ep=2,pp=2,sharding=2", EP2, PP2, SHARDING2),
}


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
    """Train in ``before``, convert, go on in ``after``.

    ``way``: ``ours``, or a way of upstream's that does the same: ``flex`` (its FlexCheckpoint, loaded in the
    other strategy), ``sharding_io`` (its sharded files, resharded while loading).
    """

    model: str
    before: str
    after: str
    ema: bool
    way: str = "ours"

    @property
    def name(self) -> str:
        """How a row is called on the command line and in the report."""
        way = {"ours": "", "sharding_io": " (sharding_io, average)" if self.ema else " (sharding_io)"}
        return f"{self.model}: {self.before} -> {self.after}" + way.get(self.way, f" ({self.way})")


def _rows(model: str, *pairs: tuple[str, str], way: str = "ours") -> list[Row]:
    return [Row(model, a, b, STRATEGIES[a].can_average and STRATEGIES[b].can_average, way) for a, b in pairs]


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
SHARDING = (
    ("mp2 pp2 sharding2 v1", "mp2 pp2 sharding2 v2"),
    ("pp2 sharding2 v1", "pp2 sharding4 v2"),
    ("pp2 sharding4 v2", "pp2 sharding2 v1"),
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
    *_rows("llama", *((before, HUB) for before in ("pp4 mp2", "sharding2 stage 3")), way="ours to flex"),
    *_rows(
        "llama",
        *((HUB, after) for after in ("mp2 pp2 sharding2 v1", "pp2 sharding4 v2", "pp2", "auto-parallel dp2")),
        way="ours to flex",
    ),
)
# More pairs for the drift: strategies that differ as those of rows do which no other row resembles.
DRIFT_ROWS = (
    *_rows(
        "llama",
        ("mp2 pp2 sharding2 v1", "sharding2 stage 3"),
        ("pp2", "sharding2 stage 3"),
        ("sharding2 stage 3", "dp2"),
        ("mp4 pp2", "dp2"),
    ),
    *_rows("qwen3_moe", ("sharding2 v2", "pp2 sharding2 v2"), ("sharding2 v1", "mp2")),
    *_rows("qwen3 fused, tied", ("sharding2 v2", "mp2"), ("pp2", "mp2 pp2"), ("mp2", "sharding2 v2")),
)
UPSTREAM = (
    *_rows("llama", *((HUB, after) for after in AFTER), way="flex"),
    *_rows("llama", *((before, HUB) for before in BEFORE), way="flex"),
    *(Row("llama", before, after, ema, "sharding_io") for before, after in SHARDING for ema in (False, True)),
)
# Its harness asks for the same states of every parameter, which tied heads and routers do not have.
READ_BY_CONVERTER = tuple(("llama", strategy) for strategy in (*BEFORE, HUB, "pp2"))
