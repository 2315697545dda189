"""Pack cases into the corpus, one archive each: ``python -m tests.lab.pack GROUP FOLDER…``.

The same folder gives the same archive: entries are sorted and carry no time, owner or mode.
"""

from __future__ import annotations

import lzma
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

CORPUS = Path(__file__).parents[1] / "corpus"


def pack(folder: Path, archive: Path, chosen: Iterable[Path] | None = None) -> None:
    """Write everything below a folder, or what is chosen of it, into an archive in which it has the archive's name."""
    top = archive.name.removesuffix(".tar.xz")
    staged = archive.with_suffix(".part")
    with (
        lzma.open(staged, "wb", preset=9 | lzma.PRESET_EXTREME) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in sorted([folder, *folder.rglob("*")] if chosen is None else chosen):
            if path.is_symlink() or not (path.is_dir() or path.is_file()):
                raise SystemExit(f"{path}: a case holds files and folders only")
            entry = tarfile.TarInfo(str(Path(top) / path.relative_to(folder)))
            if path.is_dir():
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
                continue
            entry.mode, entry.size = 0o644, path.stat().st_size
            with path.open("rb") as content:
                tar.addfile(entry, content)
    staged.rename(archive)


def main() -> None:
    """Pack what the command line names."""
    group, *folders = sys.argv[1:]
    (CORPUS / group).mkdir(parents=True, exist_ok=True)
    for folder in map(Path, folders):
        archive = CORPUS / group / f"{folder.name}.tar.xz"
        pack(folder.resolve(), archive)
        sys.stdout.write(f"{archive.stat().st_size:>10,} {archive}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
