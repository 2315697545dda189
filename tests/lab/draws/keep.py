"""A draw that was kept becomes a case of ``tests/golden/draws``: its checkpoint, its truth, what it is converted to."""

from pathlib import Path

from tests.conftest import REPO
from tests.lab.pack import pack

CASES = REPO / "tests" / "golden" / "draws"


def keep(folder: Path, name: str) -> Path:
    """Pack what a test needs of a draw."""
    packed = CASES / f"{name}.tar.xz"
    pack(folder, packed, _wanted(folder))
    return packed


def _wanted(folder: Path) -> list[Path]:
    source = folder / "source"
    return [
        folder / "draw.json",
        *folder.glob("structure.json"),
        *source.glob("truth*.safetensors"),
        source / "config.json",
        *(
            path
            for path in source.glob("checkpoint-*/**/*")
            if path.is_file() and not path.name.startswith("rng_state")  # of no tensor, and hard to pack
        ),
    ]
