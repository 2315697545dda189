"""Write the export of every case: ``python -m tests.lab.engines.export DIR``, with this package's environment."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.ernie_layout import write_ernie_layout
from tests.serving.cases import CASES


def main(folder: Path) -> None:
    """Write the exports to ``CASE/hf`` below a folder, and those of ERNIE in its own layout to ``CASE/ernie``."""
    for case in CASES:
        target = folder / case.name.replace("/", "--") / "hf"
        target.parent.mkdir(parents=True)
        case.export(target)
        if case.config["model_type"].startswith("ernie4_5"):
            write_ernie_layout(target, target.with_name("ernie"), {"format": "np"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
