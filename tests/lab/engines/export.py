"""Write the export of every case: ``python -m tests.lab.engines.export DIR``, with this package's environment."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.serving.cases import CASES


def main(folder: Path) -> None:
    """Write the exports to ``CASE/hf`` below a folder."""
    for case in CASES:
        target = folder / case.name.replace("/", "--") / "hf"
        target.parent.mkdir(parents=True)
        case.export(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
