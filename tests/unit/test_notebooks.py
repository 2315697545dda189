"""The notebooks run from beginning to end and print what they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import REPO

NOTEBOOKS = sorted((REPO / "examples/notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_print_what_they_show(notebook: Path) -> None:
    shown = nbformat.read(notebook, as_version=4)
    run = nbformat.read(notebook, as_version=4)
    NotebookClient(run, timeout=120, resources={"metadata": {"path": notebook.parent}}).execute()
    assert [printed(cell) for cell in run.cells] == [printed(cell) for cell in shown.cells]


def printed(cell: Any) -> list[str]:
    """Text that a cell printed or returned; progress and logs may differ."""
    outputs = cell.get("outputs", [])
    return [
        output.get("text") or output["data"]["text/plain"]
        for output in outputs
        if output.output_type == "execute_result" or output.get("name") == "stdout"
    ]
