"""Checkpoints without bytes are what reading real files finds, so that figures of planning mean something."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.synthetic import Dims, EmptySource, catalog_of, files_of
from paddle_reshard.pipeline.core.catalog import Catalog, check_catalog
from paddle_reshard.pipeline.core.topology import Topology
from paddle_reshard.pipeline.formats.hybrid.target import HybridTarget
from paddle_reshard.pipeline.formats.sharding import ShardingOptions
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from paddle_reshard.storage.local.source import LocalSource
from tests.conftest import case_directory

DENSE = Dims(32, 48, 4, 8, 4, 96, ema=True)
EXPERTS = Dims(32, 48, 4, 8, 4, 96, experts=3)


def described(catalog: Catalog, *, with_places: bool) -> list[Any]:
    """Every fragment by names instead of numbers; where in a file it lies, if ``with_places``."""
    rows = []
    for row in catalog.fragments:
        tensor, file = catalog.tensors[row["tensor"]], catalog.files[row["file"]]
        place = int(row["byte_base"]) if with_places else None
        box = [row[column].tolist() for column in ("offset", "extents", "strides")]
        rows.append(
            (tensor.key, tensor.state, tensor.dtype.name, int(row["replica"]), file.path, place, *box)
        )
    return sorted(rows, key=repr)


def implied(catalog: Catalog) -> set[tuple[str, str, str]]:
    return {
        (catalog.tensors[tensor].key, catalog.tensors[tensor].state, catalog.tensors[source].state)
        for tensor, source in catalog.implied.items()
    }


@pytest.mark.parametrize("dims", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "target",
    [
        HybridTarget(Topology(), "none"),
        HybridTarget(Topology(tp=4, pp=2, sharding=2), "stage1v2", sharding=ShardingOptions(1 << 12)),
        HybridTarget(Topology(tp=2, sharding=3), "stage1v1"),
        HybridTarget(Topology(sharding=4), "stage3", sharding=ShardingOptions(segment_elements=512)),
    ],
    ids=lambda target: f"{target.topology},{target.strategy}",
)
def test_a_catalog_is_the_one_that_reading_the_files_gives(dims: Dims, target: HybridTarget) -> None:
    source = EmptySource(files_of(dims, target), json.dumps(dims.config).encode())
    read, made = index_checkpoint(source, shipped_tables()), catalog_of(dims, target)
    assert described(made.catalog, with_places=True) == described(read.catalog, with_places=True)
    assert implied(made.catalog) == implied(read.catalog)
    check_catalog(made.catalog)


def test_a_catalog_is_that_of_a_real_checkpoint() -> None:
    """But for the bytes between the arrays, which the trainer's pickle library chooses otherwise."""
    folder = case_directory("mp2pp2sh2_s1v2_meta_ema") / "checkpoint-3"
    config = json.loads((folder / "config.json").read_text())
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    numbers = [config[name] for name in (*names, "num_key_value_heads", "vocab_size")]
    real = index_checkpoint(LocalSource(Path(folder)), shipped_tables())
    made = catalog_of(Dims(*numbers, ema=True), HybridTarget(real.job.topology, "stage1v2"))
    assert described(made.catalog, with_places=False) == described(real.catalog, with_places=False)
    assert implied(made.catalog) == implied(real.catalog)
