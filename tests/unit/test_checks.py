"""How parameters are checks against their master weights in plans of real sizes, without a byte of them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks.synthetic import LLAMA_7B, catalog_of
from paddle_reshard.pipeline.checkpoint.checkpoint import Checkpoint
from paddle_reshard.pipeline.checkpoint.files import TargetFiles
from paddle_reshard.pipeline.core.catalog import (
    ITEMSIZES,
    Catalog,
    File,
    fragment_row,
    fragment_rows,
    volumes,
)
from paddle_reshard.pipeline.core.literals import Literals
from paddle_reshard.pipeline.core.part_limits import PartLimits
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.core.tensors import Tensor, dtype_named
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.core.units import SMALLEST_BUDGET_BYTES
from paddle_reshard.pipeline.formats.hybrid.target import HybridTarget, layout_hybrid
from paddle_reshard.pipeline.planning.checks import master_checks
from paddle_reshard.pipeline.planning.ops import HOLD, MOVE, PROBE, Ops, hull
from paddle_reshard.pipeline.planning.plan import FOOTPRINT_BYTES, Plan, plan_conversion
from paddle_reshard.pipeline.planning.settings import PlanSettings
from paddle_reshard.storage.s3 import target as s3

S3 = PartLimits(s3.SMALLEST_PART_BYTES, s3.MOST_PARTS, s3.COPIES)
SAMPLE_BYTES = 4096


def _job(topology: str, strategy: str = "none") -> HybridTarget:
    return HybridTarget(Topology.parse(topology), strategy, sharded_saving=False)


@cache
def _checkpoint(source: HybridTarget) -> Checkpoint:
    return catalog_of(LLAMA_7B, source)


def _planned(source: HybridTarget, target: HybridTarget, check: str | None, limits: PartLimits = S3) -> Plan:
    checkpoint = _checkpoint(source)
    catalog = checkpoint.catalog
    checks = None if check is None else master_checks(catalog, catalog)
    files = layout_hybrid(checkpoint, target)
    return plan_conversion(catalog, files, [], PlanSettings(SMALLEST_BUDGET_BYTES), limits, checks)


def _looked_at(ops: Ops, side: str, stored: int) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Tensor and file → bytes of it that are compared, the first of them, and the end of the last."""
    found: dict[tuple[int, int], tuple[int, int, int]] = {}
    nbytes = volumes(ops) * ITEMSIZES[stored]
    columns = (ops["tensor"], ops[f"{side}_file"], nbytes, *hull(ops, side))
    for tensor, file, size, start, stop in zip(*(column.tolist() for column in columns), strict=True):
        known = found.get((tensor, file), (0, start, stop))
        found[tensor, file] = known[0] + size, min(known[1], start), max(known[2], stop)
    return found


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (_job("tp=2,pp=4"), _job("tp=2,pp=2")),
        (_job("tp=1,sharding=4", "stage1v2"), _job("tp=1,sharding=8", "stage1v2")),
        (_job("tp=1,sharding=4", "stage3"), _job("tp=1,sharding=4", "stage1v1")),
    ],
    ids=["pp", "stage 1 v2", "stage 3"],
)
def test_of_every_copied_array_the_ends_and_some_between_are_read(
    source: HybridTarget, target: HybridTarget
) -> None:
    catalog = _checkpoint(source).catalog
    plan, alone = _planned(source, target, "sample"), _planned(source, target, None)
    assert plan.plan_id == _planned(source, target, "sample").plan_id
    assert plan.copied_bytes == alone.copied_bytes
    assert plan.read_amplification <= 1.05
    assert plan.read_bytes - alone.read_bytes < 0.005 * plan.written_bytes
    ops = plan.ops[np.isin(plan.ops["kind"], (HOLD, PROBE))]
    sampled = np.unique(ops["tensor"][ops["kind"] == PROBE])
    assert len(sampled) > LLAMA_7B.layers
    primary = catalog.fragments[catalog.fragments["replica"] == 0]
    for side, dtype in (("target", "bfloat16"), ("source", "float32")):
        itemsize = dtype_named(dtype).itemsize
        looked_at = _looked_at(ops, side, 1 if dtype == "bfloat16" else 0)
        state = "param" if dtype == "bfloat16" else "master_weight"
        keys = {t.key: number for number, t in enumerate(catalog.tensors) if t.state == "param"}
        arrays: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for row in primary:
            tensor = catalog.tensors[row["tensor"]]
            if tensor.state == state:
                elements = int(row["extents"].prod())
                arrays.setdefault((keys[tensor.key], int(row["file"])), []).append(
                    (elements * itemsize, int(row["byte_base"]), int(row["byte_base"]) + elements * itemsize)
                )
        assert arrays.keys() == looked_at.keys()
        for array, pieces in arrays.items():
            size, start, stop = looked_at[array]
            assert size >= min(SAMPLE_BYTES, sum(piece[0] for piece in pieces))
            assert (start, stop) == (min(piece[1] for piece in pieces), max(piece[2] for piece in pieces))
    # What contradicts itself throughout is refused before anything is moved.
    groups = plan.op_groups[plan.ops["kind"] == PROBE]
    assert groups.max() < plan.op_groups[plan.ops["kind"] == MOVE].max() / 4


@pytest.mark.parametrize("limits", [PartLimits(), PartLimits(s3.SMALLEST_PART_BYTES, s3.MOST_PARTS)])
def test_what_is_loaded_is_compared_in_full_and_read_once(limits: PartLimits) -> None:
    source, target = _job("tp=2,pp=2"), _job("tp=4")
    plan, alone = (_planned(source, target, check, limits) for check in ("sample", None))
    checks = plan.ops[plan.ops["kind"] == HOLD]
    assert not (plan.ops["kind"] == PROBE).any()
    assert volumes(checks).sum() == LLAMA_7B.parameters
    assert plan.read_amplification <= 1.05
    assert plan.read_bytes <= 1.01 * alone.read_bytes
    assert plan.peak_bytes <= (SMALLEST_BUDGET_BYTES - FOOTPRINT_BYTES) // 2


def test_orders_that_differ_do_not_cost_the_memory_that_moves_need() -> None:
    """A large parameter that lies column by column, its master weight row by row: together they would not fit."""
    rows, columns = 6_000, 8_000
    tensors = tuple(
        Tensor("w", state, dtype_named(dtype), (rows, columns))
        for state, dtype in (("param", "bfloat16"), ("master_weight", "float32"))
    )
    fragments = fragment_rows(
        [
            fragment_row(0, 0, tensors[0].dtype, 0, 0, (0, 0), (rows, columns), (2, 2 * rows)),
            fragment_row(1, 1, tensors[1].dtype, 0, 0, (0, 0), (rows, columns), (4 * columns, 4)),
        ]
    )
    files = tuple(File(str(number), tensor.nbytes) for number, tensor in enumerate(tensors))
    catalog = Catalog(Tensors(tensors), files, fragments, {})
    target = TargetFiles(files, Literals(), (), fragments.copy())
    checks = master_checks(catalog, catalog)
    plan = plan_conversion(catalog, target, [], PlanSettings(SMALLEST_BUDGET_BYTES), checks=checks)
    alone = plan_conversion(catalog, target, [], PlanSettings(SMALLEST_BUDGET_BYTES))
    assert plan.peak_bytes <= 1.25 * alone.peak_bytes
    assert plan.checked_parameters == (0, 1)
    assert plan.read_once_budget_bytes is None
    assert plan.read_amplification <= 1.05
    probes = plan.ops[plan.ops["kind"] == PROBE]
    assert volumes(probes).sum() * 2 >= SAMPLE_BYTES
