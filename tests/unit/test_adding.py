"""What the pages for contributors show works."""

from __future__ import annotations

import doctest
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import paddle_reshard
from paddle_reshard.clusters.engine import Engine
from paddle_reshard.pipeline.convert.run import run_conversion
from paddle_reshard.pipeline.core.events import ignore_events
from paddle_reshard.pipeline.examine.reading import Reader
from paddle_reshard.pipeline.examine.verify import Scope, verify_with
from paddle_reshard.storage.local.target import LocalTarget
from paddle_reshard.storage.outputs import Outputs
from tests.conftest import COMMITTED, REPO

SOURCE = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
ADDING = (REPO / "docs" / "adding.md").read_text("utf-8")


@pytest.fixture
def engine() -> Engine:
    """The engine that is shown."""
    names: dict[str, Any] = {}
    exec("".join(example.source for example in doctest.DocTestParser().get_examples(ADDING)), names)
    shown: Engine = names["OneAfterAnother"]()
    return shown


def test_the_engine_that_is_shown_converts(engine: Engine, tmp_path: Path) -> None:
    conversion = paddle_reshard.plan(SOURCE, tmp_path / "made", to="tp=1")
    report = run_conversion(conversion, Outputs([LocalTarget(tmp_path / "made")]), engine, ignore_events)
    assert report.groups == conversion.plan.groups
    paddle_reshard.convert(SOURCE, tmp_path / "T", to="tp=1")
    for file in conversion.plan.target_files:
        assert (tmp_path / "made" / file.path).read_bytes() == (tmp_path / "T" / file.path).read_bytes()


def test_the_engine_that_is_shown_verifies(engine: Engine, tmp_path: Path) -> None:
    """Equal checkpoints of two topologies, and one of which a byte of a tensor was changed."""
    one = tmp_path / "one"
    paddle_reshard.convert(SOURCE, one, to="tp=1")
    reader = replace(Reader.of({}, ignore_events), engine=engine)
    assert verify_with(str(SOURCE), str(one), Scope(), reader).differences == ()
    file = one / "optimizer.pdopt"
    content = bytearray(file.read_bytes())
    content[1562531] ^= 1  # [20, 18] of a master weight, as docs/tour.md computes it
    file.write_bytes(content)
    (difference,) = verify_with(str(SOURCE), str(one), Scope(), reader).differences
    assert "model.layers.3.self_attn.k_proj.weight" in difference.tensor


def test_every_section_is_in_the_list_and_names_its_files() -> None:
    listed = re.findall(r"^- \[(.+?)\]\(#", ADDING, re.MULTILINE)
    sections = re.split(r"^## ", ADDING, flags=re.MULTILINE)[1:]
    assert [section.splitlines()[0] for section in sections] == listed
    assert all("| file | change |" in section for section in sections)


def test_the_option_that_is_shown_is_declared_so() -> None:
    shown = re.search(r"^```python\n(allow_missing: .*?)^```", ADDING, re.DOTALL | re.MULTILINE)
    assert shown is not None
    declared = (REPO / "pipeline/request/options.py").read_text("utf-8")
    assert " ".join(shown[1].split()) in " ".join(declared.split())
