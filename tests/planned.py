"""What is planned for every real checkpoint: ``tests/golden/planned.txt``, held against every change of the code.

A row is a checkpoint, a column a target. A cell is the id of the plan and a digest of the files that it lays out, or
the kind of error that refuses the conversion. The id depends on every read and every group too; if only ids change, the
targets are as before, and only the way to them is another.

``python -m tests.planned`` writes the table. A commit that changes a cell says why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import paddle_reshard
from paddle_reshard.pipeline.core.geometry import MAX_DIMS
from paddle_reshard.pipeline.planning.ops import MOVE
from paddle_reshard.pipeline.planning.plan import Plan
from paddle_reshard.pipeline.request.options import ConversionOptions
from tests.conftest import GOLDEN, case_directory, case_names

TABLE = GOLDEN / "planned.txt"
GROUPS = (
    *("dense", "moe", "families", "small-families", "states", "small-flex", "small-unified"),
    "exports",
)
ANYWAY: ConversionOptions = {
    "replicas": "report",
    "allow_missing": ("*e_score_correction_bias",),  # lost by sharded saving, so that no file holds them
}
TARGETS: dict[str, ConversionOptions] = {
    "card": {"to": "tp=1"},
    "tensor": {"to": "tp=2"},
    "stages": {"to": "pp=2,sharding=2", "sharding_strategy": "stage1v2"},
    "flex": {"format": "flex", "max_shard_size": "20KB"},
    "unified": {"format": "unified", "drop": ("ema",)},
    "auto-parallel": {"format": "auto-parallel", "drop": ("ema",)},
    "huggingface": {"format": "huggingface", "drop": ("ema",)},
}
COLUMNS = (*TARGETS, "export")
"""The last one is the model that the library exported from the same job, if there is one, to one card."""
SINGLE = {
    "dense": "dense/single",
    "moe": "moe/moe_single",
    "states": "states/fp16_single",
}
"""Jobs on one card, whose ``config.json`` is that of most others of their group."""
OPTIONS: dict[str, ConversionOptions] = {
    "dense/single vocab_pad": {"vocab_size": 160},
    "states/noopt_single master_weights": {"master_weights": "from-parameters"},
    "families/deepseek_v3_mtp_single without_mtp": {"drop": ("mtp",)},
    "families/qwen2_single convention": {"convention": "paddlenlp"},
    "states/lora_single merge_into": {"merge_into": "base"},
}
"""Rows of what changes a checkpoint before it is laid out. A base is a folder of the case."""


def rows() -> tuple[str, ...]:
    """The names of all rows of the table."""
    return (*(case for group in GROUPS for case in case_names(group)), *OPTIONS)


def cells(row: str) -> list[str]:
    """What is planned for one row, in the order of ``COLUMNS``; ``-`` where there is no such source."""
    case = case_directory(row.partition(" ")[0])
    folders = (*case.glob("checkpoint-*"), case / "hf-export")
    checkpoint = next(folder for folder in folders if folder.exists())
    config = None if checkpoint.name == "hf-export" else _config_of(row, checkpoint)
    changed = OPTIONS.get(row, {})
    if base := changed.get("merge_into"):
        changed = {**changed, "merge_into": case / base}
    from_checkpoint = [_planned(checkpoint, {**TARGETS[name], **changed}, config) for name in TARGETS]
    export = case / "hf-export"
    if changed or checkpoint == export or not export.exists():
        return [*from_checkpoint, "-"]
    return [*from_checkpoint, _planned(export, TARGETS["card"], None)]


def layout_digest(plan: Plan) -> str:
    """A hash of what every file of the targets will hold, and where: names, literal bytes, boxes of tensors."""
    digest = hashlib.sha256(repr((plan.target_files, plan.carried)).encode())
    for file, offset, content in plan.literals:
        digest.update(b"%d %d %d " % (file, offset, len(content)) + content)
    ops = plan.ops
    moved = np.flatnonzero(ops["kind"] == MOVE)
    columns = [ops[name][moved] for name in ("target_file", "target_byte", "target_dtype", "tensor")]
    boxes = [ops.along(field, dim)[moved] for field in ("offset", "extents") for dim in range(MAX_DIMS)]
    table = np.stack([np.asarray(column, dtype=np.int64) for column in (*columns, *boxes)])
    digest.update(np.ascontiguousarray(table[:, np.lexsort((table[1], table[0]))]).tobytes())
    digest.update(repr([plan.tensors[number].label for number in sorted(set(table[3].tolist()))]).encode())
    return digest.hexdigest()[:8]


def _planned(source: Path, options: ConversionOptions, config: Path | None) -> str:
    try:
        planned = paddle_reshard.plan(source, **{**ANYWAY, **options}, config=config)
    except paddle_reshard.ReshardError as error:
        return type(error).__name__
    return f"{planned.plan.plan_id}:{layout_digest(planned.plan)}"


def _config_of(row: str, checkpoint: Path) -> Path | None:
    """FlexCheckpoints come without it; that of the same model on one card, if it is known."""
    if (checkpoint / "config.json").exists():
        return None
    if (beside := checkpoint.parent / "config.json").exists():
        return beside
    group, _, name = row.partition("/")
    same = f"{group}/{name.partition('fc_')[0]}single"
    sibling = same if same in case_names(group) else SINGLE[group]
    return case_directory(sibling) / "checkpoint-3" / "config.json"


def recorded() -> dict[str, list[str]]:
    """The rows of the table, by name."""
    lines = (line for line in TABLE.read_text().splitlines() if line and not line.startswith("#"))
    return {name.strip(): found.split() for name, _, found in (line.partition("|") for line in lines)}


def written() -> Iterator[str]:
    """The lines of the table as they must be."""
    yield "# The id of the plan of every real checkpoint for every target, and a digest of the files that it lays out;"
    yield f"# `python -m tests.planned` writes it. Columns: {', '.join(COLUMNS)}."
    for row in rows():
        yield f"{row} | {' '.join(cells(row))}"


if __name__ == "__main__":
    TABLE.write_text("\n".join(written()) + "\n")
