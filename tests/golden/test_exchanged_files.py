"""Files of two ranks that have changed places: refused, or the result is the same, or nothing in the files can tell.

Nothing can tell only where each file holds exactly the same entries, names, shapes and dtypes as the one whose place it
takes, and then ``inspect`` says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.pipeline.cli.json_output import data_of
from paddle_reshard.pipeline.core.errors import CoverageError
from paddle_reshard.pipeline.report.describe import describe_plan
from tests.conftest import REPO, checkpoint_of
from tests.mutations.exchanged import CASES, COUNTS, in_words, outcomes, permuted
from tests.sampling import exhaustive

SAMPLE = (
    "dense/mp2_tied", "dense/pp2", "dense/sh2_s1v1_meta_fp32", "dense/sh2_s1v2_meta", "dense/sh2_s3_seg512",
    "moe/ep2_sh2_s1v2_meta_ema",
)  # fmt: skip


@pytest.mark.parametrize("case", [*SAMPLE, *(exhaustive(case) for case in CASES if case not in SAMPLE)])
def test_exchanged_files_are_refused_or_change_nothing_or_are_said_to_be_alike(
    case: str, tmp_path: Path
) -> None:
    assert outcomes(case, tmp_path) == json.loads(COUNTS.read_text())[case]


def test_the_document_states_what_was_found() -> None:
    counts = json.loads(COUNTS.read_text())
    assert set(counts) == set(CASES)
    document = " ".join((REPO / "tests/mutations/README.md").read_text().split())
    assert in_words(counts) in document


@pytest.mark.parametrize("kind", ["optimizer", "master_weights"])
def test_exchanged_slices_of_a_unified_checkpoint_are_refused(kind: str, tmp_path: Path) -> None:
    folder = checkpoint_of("small-unified/uc_sh2_s1v2_ignoremerge")
    first, second = (f"{kind}.shard{rank:02d}.safetensors" for rank in range(2))
    exchanged = permuted(folder, {first: second, second: first}, tmp_path / "exchanged")
    with pytest.raises(CoverageError, match="files of two ranks were exchanged"):
        paddle_reshard.inspect(exchanged)


def made(case: str, target: Path, **options: Any) -> Path:
    paddle_reshard.convert(checkpoint_of(case), target, **options)
    return target


@pytest.mark.parametrize(
    ("case", "alike"),
    [
        ("dense/mp2_tied", "4 of 4"),  # tp ranks
        ("dense/pp2", None),  # keys tell the stage of parameters, values that of master weights
        ("dense/sh2_s1v1", None),  # whoever holds whole tensors
        ("dense/sh2_s2", None),
        ("dense/sh2_s1v2_meta", None),  # lengths tell
        ("dense/sh2_s3_seg512", None),  # values tell
        ("moe/ep2_sh2_s1v2_meta_ema", None),
        ("dense/mp2pp2sh2_s1v2_meta_ema", "16 of 16"),
    ],
)
def test_files_that_nothing_tells_from_those_of_another_rank_are_counted(
    case: str, alike: str | None
) -> None:
    found = paddle_reshard.inspect(checkpoint_of(case)).alike
    assert found.startswith(f"which rank wrote {alike} files") if alike else not found


def test_stages_of_equal_layers_are_alike_where_no_file_stores_their_parameters(tmp_path: Path) -> None:
    stages = made("dense/single_l8", tmp_path / "stages", to="pp=4,sharding=2", sharding_strategy="stage1v2")
    assert paddle_reshard.inspect(stages).alike.startswith("which rank wrote 4 of 8 files")
    plain = made("dense/single_l8", tmp_path / "plain", to="pp=4", format="hybrid-plain")
    assert not paddle_reshard.inspect(plain).alike


def test_slices_of_stage_3_without_master_weights_are_alike(tmp_path: Path) -> None:
    slices = made(
        "dense/single_fp32",
        tmp_path / "slices",
        to="sharding=2",
        sharding_strategy="stage3",
        layout={"stage3_segment_size": 512},
        format="hybrid-plain",
    )
    assert paddle_reshard.inspect(slices).alike.startswith("which rank wrote 2 of 3 files")


def test_what_is_usual_stands_on_pages_and_in_json_and_not_in_summaries(tmp_path: Path) -> None:
    source = checkpoint_of("dense/mp2_tied")
    found, planned = paddle_reshard.inspect(source), paddle_reshard.plan(source, to="tp=1")
    assert "not proven" not in dict(found.facts()) | dict(planned.facts())
    assert data_of(found)["unproven"] == found.alike
    assert ("not proven", found.alike) in describe_plan(planned, None, None).facts
    assert paddle_reshard.verify(source).remarks == (f"not proven: {found.alike}",)
