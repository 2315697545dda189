"""What the pages for contributors show works."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

import paddle_reshard
from paddle_reshard.clusters.choose import Engine
from paddle_reshard.pipeline.layouts import rules
from paddle_reshard.pipeline.planning.work import plan_work
from tests.cluster.test_exchange import Written
from tests.conftest import COMMITTED, REPO

SOURCE = COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3"
ADDING = (REPO / "docs" / "adding.md").read_text("utf-8")


def test_the_engine_that_is_shown_converts(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec("".join(example.source for example in doctest.DocTestParser().get_examples(ADDING)), names)
    engine: Engine = names["one_after_another"]
    planned = paddle_reshard.plan(SOURCE, to="tp=1").plan
    written = Written()
    store = paddle_reshard.plan(SOURCE, to="tp=1").store
    reports = list(engine(plan_work(planned), store, written))
    assert len(reports) == planned.groups
    paddle_reshard.convert(SOURCE, tmp_path / "T", to="tp=1")
    for file in planned.target_files:
        made = (tmp_path / "T" / file.path).read_bytes()
        found = {start: part for (path, start), part in written.parts.items() if path == file.path}
        assert b"".join(found[start] for start in sorted(found)) == made, file.path


def test_a_family_is_one_file(tmp_path: Path) -> None:
    """Copied from the nearest one, and given by ``--rules``."""
    table = json.loads((Path(rules.__file__).parent / "llama.paddleformers.json").read_text("utf-8"))
    own = tmp_path / "mine.json"
    own.write_text(json.dumps({**table, "family": "mine"}))
    assert paddle_reshard.inspect(SOURCE, rules=own).family == "mine"


def test_every_section_is_in_the_list_and_names_its_files() -> None:
    listed = re.findall(r"^- \[(.+?)\]\(#", ADDING, re.MULTILINE)
    sections = re.split(r"^## ", ADDING, flags=re.MULTILINE)[1:]
    assert [section.splitlines()[0] for section in sections] == listed
    assert all("| file | change |" in section for section in sections)


def test_the_option_that_is_shown_is_declared_so() -> None:
    shown = re.search(r"^```python\n(allow_reread: .*?)^```", ADDING, re.DOTALL | re.MULTILINE)
    assert shown is not None
    declared = (REPO / "pipeline/convert/options.py").read_text("utf-8")
    assert " ".join(shown[1].split()) in " ".join(declared.split())
