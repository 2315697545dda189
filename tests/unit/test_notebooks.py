"""The notebooks run from beginning to end and print what they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from paddle_reshard.pipeline.core.events import Progress, StepStarted
from paddle_reshard.pipeline.core.run_state import RunState
from paddle_reshard.pipeline.request.notebook import line
from tests.conftest import COMMITTED, REPO

NOTEBOOKS = sorted((REPO / "examples/notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_print_what_they_show(notebook: Path) -> None:
    shown = nbformat.read(notebook, as_version=4)
    run = nbformat.read(notebook, as_version=4)
    NotebookClient(run, timeout=120, resources={"metadata": {"path": notebook.parent}}).execute()
    assert [printed(cell) for cell in run.cells] == [printed(cell) for cell in shown.cells]


CALL = """
import tempfile
import paddle_reshard
from paddle_reshard.pipeline.request import notebook
notebook.PATIENCE_SECONDS = 0
report = paddle_reshard.convert({source!r}, tempfile.mkdtemp() + "/made", to="tp=1"{more})
"""


@pytest.mark.parametrize(("more", "displayed"), [("", [""]), (", observe=print", [])])
def test_a_call_in_a_notebook_draws_its_progress_and_clears_it(more: str, displayed: list[str]) -> None:
    source = str(COMMITTED / "mp2pp2sh2_s1v2_meta_ema" / "checkpoint-3")
    cell = nbformat.v4.new_code_cell(CALL.format(source=source, more=more))
    run = nbformat.v4.new_notebook(cells=[cell])
    NotebookClient(run, timeout=120, resources={"metadata": {"path": REPO}}).execute()
    (ran,) = run.cells
    shown = [out["data"]["text/plain"] for out in ran.outputs if out.output_type == "display_data"]
    assert shown == displayed


def test_the_line_says_how_far_it_is() -> None:
    now = iter([0.0] * 8 + [2.0] * 8)
    state = RunState(clock=lambda: next(now, 2.0))
    state(StepStarted("move", total_bytes=4 << 20))
    state(Progress(1 << 20))
    said = line(state)
    assert said.startswith("move  ")
    assert " 25%  1.0 MiB of 4.0 MiB" in said


def printed(cell: Any) -> list[str]:
    """Text that a cell printed or returned; progress and logs may differ."""
    outputs = cell.get("outputs", [])
    return [
        output.get("text") or output["data"]["text/plain"]
        for output in outputs
        if output.output_type == "execute_result" or output.get("name") == "stdout"
    ]
