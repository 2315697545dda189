"""What moves the same bytes without converting them: s3fs, whole files, through a folder of this machine.

python -m benchmarks.s3_plain OPTIONS_FILE FROM TO [OVER]     either end is s3:// or a folder; OVER is between
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import s3fs


def copy(file_system: s3fs.S3FileSystem, source: str, target: str) -> None:
    """Download or upload every file of a folder."""
    if source.startswith("s3://"):
        Path(target).mkdir()
        file_system.get(f"{source}/", f"{target}/", recursive=True)
    else:
        file_system.put(f"{source}/", f"{target}/", recursive=True)


def main() -> None:
    options, *places = sys.argv[1:]
    file_system = s3fs.S3FileSystem(**json.loads(Path(options).read_text()))
    source, target, *over = places
    for start, end in itertools.pairwise([source, *over, target]):
        copy(file_system, start, end)


if __name__ == "__main__":
    main()
