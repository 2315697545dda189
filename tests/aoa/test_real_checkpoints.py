"""Real checkpoints through the programs of their models: byte for byte what the real ``save_to_hf`` wrote of them.

``tests/golden/exports`` holds the digest of every tensor of the real exports.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from paddle_reshard.pipeline.changes.aoa.apply import AoaOutcome, apply_aoa
from paddle_reshard.pipeline.changes.aoa.language import parse_aoa
from paddle_reshard.pipeline.core.catalog import Catalog, File, check_catalog
from paddle_reshard.pipeline.core.tensor_columns import Tensors
from paddle_reshard.pipeline.indexing.detect import index_checkpoint
from paddle_reshard.pipeline.model.rules.tables import shipped_tables
from paddle_reshard.storage.local.source import LocalSource
from tests.aoa.arrays import Arrays, cast, gather
from tests.conftest import CORPUS, GOLDEN, case_directory

PROGRAMS = {
    "mp2sh2_s1v2_meta_mid": "llama",  # tp 2, sharding 2; parameters are left out
    "mp2_tied": "llama_tied",
    "qwen2_single": "qwen2",
    "qwen3_single": "qwen3",
    "dsv3_single": "deepseek_v3",  # routers are cast to bfloat16
}


def checkpoint_of(case: str) -> Path:
    small = (CORPUS / "small-families" / f"{case}.tar.xz").exists()
    group = "small-families" if small else "moe" if case == "dsv3_single" else "dense"
    return case_directory(f"{group}/{case}") / "checkpoint-3"


def in_one_buffer(catalog: Catalog, folder: Path) -> tuple[Catalog, bytes]:
    """The same fragments in all files, one after the other."""
    contents = [(folder / file.path).read_bytes() for file in catalog.files]
    starts = np.cumsum([0, *map(len, contents)])
    fragments = catalog.fragments.copy()
    fragments["byte_base"] = fragments["byte_base"] + starts[fragments["file"]]
    fragments["file"] = 0
    content = b"".join(contents)
    return Catalog(catalog.tensors, (File("all", len(content)),), fragments, catalog.implied), content


def parameters(outcome: AoaOutcome, content: bytes) -> Arrays:
    """Of all names, with casts done; what is left out is the cast of its master weight."""
    catalog = outcome.catalog
    fragments = catalog.fragments.copy()
    held = [tensor for i, tensor in enumerate(catalog.tensors) if i not in catalog.implied]
    places = {tensor: number for number, tensor in enumerate(held)}
    fragments["tensor"] = [places[catalog.tensors[number]] for number in fragments["tensor"]]
    values = gather(Catalog(Tensors(held), catalog.files, fragments, {}), content)
    found: Arrays = {}
    for number, tensor in enumerate(catalog.tensors):
        if tensor.state == "param":
            feed = catalog.tensors[catalog.implied.get(number, number)]
            array, stored_as = values[feed.key, feed.state]
            for name in (tensor.key, *tensor.aliases):
                found[name, "param"] = cast(array, stored_as, tensor.dtype.name), tensor.dtype.name
    return found


@pytest.mark.parametrize("case", PROGRAMS)
def test_as_the_real_export(case: str, tmp_path: Path) -> None:
    folder = checkpoint_of(case)
    catalog, content = in_one_buffer(index_checkpoint(LocalSource(folder), shipped_tables()).catalog, folder)
    config = json.loads((Path(__file__).parent / "programs" / f"{PROGRAMS[case]}.json").read_text())[
        "inverse"
    ]
    outcome = apply_aoa(catalog, parse_aoa(json.dumps(config), "rules.json"))
    check_catalog(outcome.catalog)
    made = {
        key: (list(values.shape), hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest())
        for (key, _), (values, _) in parameters(outcome, content).items()
    }
    real = json.loads((GOLDEN / "exports" / f"{case}.json").read_text())
    assert made == {key: (shape, digest) for key, (_, shape, digest) in real.items()}
