"""The baseline that moves the same bytes without converting them: s3fs, whole files, through a local folder.

python -m benchmarks.s3_plain OPTIONS_FILE FROM TO [VIA]     FROM and TO are s3:// URLs or folders
"""

from __future__ import annotations

import itertools
import json
import os
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
    # Ceph 16 refuses the checksums that botocore adds by itself to what it sends.
    os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    options, *locations = sys.argv[1:]
    file_system = s3fs.S3FileSystem(**json.loads(Path(options).read_text()))
    source, target, *via = locations
    for start, end in itertools.pairwise([source, *via, target]):
        copy(file_system, start, end)


if __name__ == "__main__":
    main()
